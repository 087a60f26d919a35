"""Traffic recorded in a real engine and replayed with the same pool: the same steps, hits and preemptions, exactly."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from kvledger.integrations.vllm.plugin import register
from kvledger.integrations.vllm.recorder import TrafficRecorder, install_recorder
from kvledger.replay import replay
from kvledger.replay.records import ReplayListener, RequestRecord
from kvledger.replay.step_table import read_step_table
from tests.plugin.engine_run import EngineRun, engine_run
from tests.plugin.models import REFERENCE, smollm2

# 23 blocks of 32 tokens, which eight requests outgrow together, and steps that prompts do not fit.
LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 128}
NUM_BLOCKS = 24


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "traffic.jsonl.gz"
    monkeypatch.setenv("KVLEDGER_RECORD", str(path))
    monkeypatch.setenv("KVLEDGER_RECORD_STEPS", "1")
    monkeypatch.setattr(Scheduler, "__init__", Scheduler.__init__)
    install_recorder()
    return path


class Records(ReplayListener):
    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def ended(self, record: RequestRecord) -> None:
        self.records.append(record)


def rows_of(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    return sorted((line for line in lines if "in" in line), key=lambda row: row["t"])


def busy_day(run: EngineRun) -> None:
    run.generate(8, 60)
    run.start(6, max_tokens=50)
    run.step(7)
    run.start(5, max_tokens=30)
    run.step(300)
    # A chat: the second prompt goes on where the first answer ended, and finds its blocks.
    prompt = run.prompt()
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for _ in range(2):
        done = run.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        prompt = prompt + list(done.outputs[0].token_ids) + [5, 6, 7]


@pytest.mark.skipif(not (REFERENCE / "smollm2").exists(), reason="no model: scripts/make_reference.sh --model")
@pytest.mark.parametrize("with_ledger", [True, False])
def test_a_recording_replays_as_it_was(recording: Path, with_ledger: bool) -> None:
    with engine_run(with_ledger, **smollm2(), num_gpu_blocks_override=NUM_BLOCKS, **LIMITS) as run:
        busy_day(run)
        num_steps = len([step for step in run.steps if step["tokens"]])
    rows = rows_of(recording)
    assert len(rows) == 8 + 11 + 2
    assert sum(row["hit"] for row in rows) > 0
    assert sum(row.get("preempted", 0) for row in rows) > 0
    assert rows[-1]["hit"] > rows[-2]["in"]

    # Steps with one prompt's chunk, and some of the others, for a clock as slow as this engine.
    steps = read_step_table(str(recording))
    assert {step.prefill_tokens > 0 for step in steps} == {True, False}
    assert all(0 < step.seconds < 30 for step in steps)
    assert all(step.prefill_tokens + step.decode_requests <= LIMITS["max_num_batched_tokens"] for step in steps)
    assert all(step.decode_context >= step.decode_requests for step in steps)

    ways: list[dict[str, Any]] = [{}, *({"block_by_block": True, "hash": name} for name in ("none", "sha256"))]
    for way in ways:
        heard = Records()
        result = replay(
            recording, listeners=[heard], by_steps=True, num_blocks=NUM_BLOCKS, block_size=32, **LIMITS, **way
        )
        assert result.counting == ("blocks" if way else "extents")
        assert result.num_steps == num_steps
        replayed = sorted(heard.records, key=lambda record: record.number)
        assert [(r.num_prompt_tokens, r.num_output_tokens, r.num_hit_tokens, len(r.away)) for r in replayed] == [
            (row["in"], row["out"], row["hit"], row.get("preempted", 0)) for row in rows
        ]


Config = SimpleNamespace(
    parallel_config=SimpleNamespace(data_parallel_rank=1, data_parallel_size=2),
    model_config=SimpleNamespace(served_model_name="smol", model="/models/smol"),
)


class Broken:
    """A scheduler of a vLLM that looks otherwise."""

    hash_block_size = 16

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.num_calls = 0

    def add_request(self, request: Any) -> str:
        self.num_calls += 1
        return "added"

    schedule = update_from_output = _free_request = shutdown = add_request


def test_nothing_disturbs_the_engine(recording: Path, log: list[str]) -> None:
    scheduler = Broken()
    recorder = TrafficRecorder(scheduler, Config)
    recorder.attach()
    for _ in range(3):
        assert scheduler.add_request(object()) == "added"
        assert scheduler.schedule(object()) == "added"
        assert scheduler.update_from_output(object()) == "added"
        assert scheduler._free_request(object()) == "added"
    assert scheduler.shutdown(object()) == "added"
    assert scheduler.num_calls == 13
    assert [line for line in log if "missed" in line] == [
        "KVLEDGER_RECORD: something is missed; the next time nothing is said"
    ]
    # A file for each data-parallel rank; nothing ended, so there is none yet.
    assert recorder.log.file == ""


def test_each_data_parallel_rank_has_its_file(recording: Path) -> None:
    recorder = TrafficRecorder(Broken(), Config)
    assert recorder.log._path == str(recording.with_name("traffic.dp1.jsonl.gz"))
    recorder.close()


@pytest.mark.parametrize("word", ["", "0", "off", "No", "FALSE"])
def test_words_that_mean_off_record_nothing(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("KVLEDGER_RECORD", word)
    monkeypatch.setenv("KVLEDGER_VLLM", "0")
    make = Scheduler.__init__
    register()
    assert Scheduler.__init__ is make
