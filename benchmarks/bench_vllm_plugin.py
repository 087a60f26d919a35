"""What does a step of vLLM's own scheduler cost with kvledger inside? Without and with, in turns.

    scripts/reference_python.sh compiled -m benchmarks.bench_vllm_plugin
    KVLEDGER_VLLM_STEP=0 scripts/reference_python.sh compiled -m benchmarks.bench_vllm_plugin      the ledger alone

Both sides are vLLM's scheduler in steps in which every request decodes, at all phases of their blocks: schedule() and
update_from_output(). One of them has the plugin: the adapter in the place of its KVCacheManager, and unless the switch
leaves that out such steps in one pass. Ahead: as with async scheduling, where a step is scheduled before the one before
it is back.
"""

import random
from tempfile import mkdtemp
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput

from benchmarks.measure import Row, compare
from benchmarks.peers.operation import Operation, num_runs
from kvledger import build_info
from kvledger.integrations.vllm.manager import VllmKVCacheManager
from kvledger.integrations.vllm.schedulers import take_decode_steps
from tests.side_by_side import reference
from tests.side_by_side.layouts import Group, Layout

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1 << 16
SHORTEST_PROMPT = 256
ONE_GROUP = Layout("1 group", (Group("full", BLOCK_SIZE),))
# Gemma 3's shape: one group of full attention, five of windows that the prompts have outgrown.
SIX_GROUPS = Layout("6 groups", (Group("full", BLOCK_SIZE), *[Group("window", BLOCK_SIZE, window=128)] * 5))


class Step(Operation):
    def __init__(
        self, layout: Layout, num_running: int, num_steps: int, *, with_plugin: bool, ahead: bool = False
    ) -> None:
        longest = SHORTEST_PROMPT + BLOCK_SIZE + num_steps
        num_blocks = num_running * (longest // BLOCK_SIZE + 1) * len(layout.groups) + 1
        self.scheduler = reference.make_scheduler(
            mkdtemp(),
            layout=layout,
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=num_running,
            max_num_batched_tokens=num_running * longest,
            async_scheduling=ahead,
        )
        if with_plugin:
            arguments = reference.manager_arguments(layout, num_blocks, MAX_MODEL_LEN)
            self.scheduler.kv_cache_manager = VllmKVCacheManager(**arguments)
            take_decode_steps(self.scheduler)
        rng = random.Random(num_running)
        factory = reference.RequestFactory(layout)
        self.ids = [f"r{index}" for index in range(num_running)]
        self.index_of = {request_id: index for index, request_id in enumerate(self.ids)}
        for index, request_id in enumerate(self.ids):
            prompt = [rng.randrange(100_000) for _ in range(SHORTEST_PROMPT + index % BLOCK_SIZE)]
            self.scheduler.add_request(factory.make(request_id, prompt, max_tokens=10_000))
        self.in_flight: list[Any] = []
        # The prefills, all in one step, of which only the first tokens come back.
        self.in_flight.append(self.scheduler.schedule())
        if not ahead:
            self.before()
            self.scheduler.update_from_output(self.in_flight.pop(), self.sampled)
        self.before()
        self.run()
        if len(self.scheduler.running) != num_running:
            raise RuntimeError("not everything runs")

    def before(self) -> None:
        self.sampled = ModelRunnerOutput(
            req_ids=self.ids, req_id_to_index=self.index_of, sampled_token_ids=[[7] for _ in self.ids]
        )

    def run(self) -> None:
        self.in_flight.append(self.scheduler.schedule())
        self.scheduler.update_from_output(self.in_flight.pop(0), self.sampled)


def run() -> list[Row]:
    rows: list[Row] = []
    for ahead in (False, True):
        for layout in (ONE_GROUP, SIX_GROUPS):
            for num_running in (64, 256, 1024):
                repeats = BLOCK_SIZE * (4 if num_running == 1024 else 8)
                num_steps = num_runs(repeats) + 3
                ours, theirs = (
                    Step(layout, num_running, num_steps, with_plugin=on, ahead=ahead) for on in (True, False)
                )
                case = f"{num_running} running, {layout.name}{', ahead' if ahead else ''}"
                rows.append(compare("a step", case, ours, theirs, repeats))
    return rows


def main() -> None:
    print(build_info())
    print("| a step of decodes | with kvledger | vLLM | ratio | spread |\n|---|---:|---:|---:|---:|")
    for row in run():
        spread = f"{row.ours_spread:.0%} / {row.theirs_spread:.0%}"
        print(f"| {row.case} | {row.ours:.4g} us | {row.theirs:.4g} us | {row.ratio:.1f}x | {spread} |", flush=True)


if __name__ == "__main__":
    main()
