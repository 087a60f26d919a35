"""Dynamo's mocker: a simulator of vLLM's scheduler and KV cache in Rust, which replays traffic in this process."""

from importlib.metadata import version as package_version
from time import thread_time_ns
from typing import Any, Final

from dynamo._core import run_mocker_synthetic_trace_replay, run_mocker_trace_replay

from benchmarks.peers.case import WHOLE, WHOLE_BY_BLOCKS
from benchmarks.peers.operation import Operation
from benchmarks.peers.workload import BLOCK_SIZE, TOKEN_BUDGET, blocks_for_decoding

PROMPT_TOKENS: Final = 256
# Output lengths of the shorter and the longer run; between them lie decode steps alone.
SHORT: Final = 64
LONG: Final = 192


def version() -> str:
    return f"Dynamo mocker {package_version('ai-dynamo-runtime')}"


def prepare(case: dict[str, Any]) -> Operation | str:
    if case["question"] == "scheduler_step" and case["num_groups"] == 1 and case["variant"] == "":
        return SchedulerStep(case)
    if case["question"] == "replay" and case["variant"] in (WHOLE, WHOLE_BY_BLOCKS):
        return Replay(case)
    return "the mocker offers whole replays with arrivals only, with one group"


def engine(num_blocks: int, max_num_seqs: int, token_budget: int) -> dict[str, Any]:
    return {
        "engine": {
            "backend": "vllm",
            "num_gpu_blocks": num_blocks,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": token_budget,
        }
    }


class SchedulerStep(Operation):
    """Two replays of the same requests. What the longer one takes more is its additional decode steps."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._num_running: Final[int] = case["num_running"]
        num_blocks = blocks_for_decoding(case) + self._num_running * LONG // BLOCK_SIZE
        self._engine: Final = engine(num_blocks, self._num_running, TOKEN_BUDGET)
        self._step_ns = 0.0

    def run(self) -> None:
        self._step_ns = (self._replay_ns(LONG) - self._replay_ns(SHORT)) / (LONG - SHORT)

    def _replay_ns(self, num_output: int) -> int:
        start = thread_time_ns()
        result = run_mocker_synthetic_trace_replay(
            PROMPT_TOKENS,
            num_output,
            self._num_running,
            extra_engine_args=self._engine,
            replay_concurrency=self._num_running,
            capture_planner_details=False,
        )
        elapsed = thread_time_ns() - start
        summary = result.summary
        if summary["completed_requests"] != self._num_running:
            raise RuntimeError("not every request was completed")
        return elapsed

    def measured(self, elapsed_ns: int) -> float:
        return self._step_ns


class Replay(Operation):
    """The whole trace, on the same engine as ours."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._path: Final[str] = case["trace"]
        self._num_requests: Final[int] = case["num_requests"]

    def run(self) -> None:
        result = run_mocker_trace_replay(
            [self._path],
            extra_engine_args=engine(50_000, 256, 8192),
            trace_block_size=512,
            capture_planner_details=False,
        )
        if result.summary["completed_requests"] != self._num_requests:
            raise RuntimeError("not every request was completed")
