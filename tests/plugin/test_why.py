"""Why requests wait in vLLM's scheduler, as metrics and log say it; no model runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import ModelRunnerOutput

from kvledger.integrations.vllm.manager import VllmKVCacheManager
from kvledger.integrations.vllm.plugin import WHY
from kvledger.integrations.vllm.why import WhyLog, tell_why
from kvledger.scheduler import WaitReason
from tests.side_by_side import reference
from tests.side_by_side.layouts import Group, Layout

FULL = Layout("full", (Group("full", 4),))
CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(data_parallel_rank=0),
    model_config=SimpleNamespace(served_model_name="smol", model="smol"),
)


class Server:
    """vLLM's scheduler over the ledger, 8 usable blocks of 4 tokens."""

    def __init__(self, directory: Path, max_num_seqs: int = 4, budget: int = 64) -> None:
        self.scheduler = reference.make_scheduler(
            str(directory),
            layout=FULL,
            num_blocks=9,
            max_model_len=64,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
        )
        self.scheduler.kv_cache_manager = VllmKVCacheManager(**reference.manager_arguments(FULL, 9, 64))
        why = tell_why(self.scheduler, CONFIG)
        assert why is not None
        self.why, self.engine = why, why.engine
        self.factory = reference.RequestFactory(FULL)

    def add(self, name: str, prompt: list[int], max_tokens: int = 4) -> None:
        self.scheduler.add_request(self.factory.make(name, prompt, max_tokens=max_tokens))

    def step(self) -> Any:
        output = self.scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        tokens = [[] if self.scheduler.requests[each].is_prefill_chunk else [7] for each in ids]
        rows = {each: row for row, each in enumerate(ids)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(ids, rows, tokens))
        return output


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No port: the address is none."""
    monkeypatch.setenv(WHY, "nowhere:none")


@pytest.mark.usefixtures("silent")
def test_one_waits_for_blocks_and_the_others_for_it(tmp_path: Path) -> None:
    server = Server(tmp_path)
    for index in range(4):
        server.add(str(index), [index] * 20)
    server.step()
    # 20 tokens are 5 blocks: the second prompt finds 3.
    assert server.engine.wait_counts() == {WaitReason.BLOCKS: 1, WaitReason.BEHIND: 2}
    assert (server.engine.num_running, server.engine.num_waiting) == (1, 3)


@pytest.mark.usefixtures("silent")
def test_all_seats_are_taken(tmp_path: Path) -> None:
    server = Server(tmp_path, max_num_seqs=1)
    server.add("a", [1] * 5)
    server.add("b", [2] * 5)
    server.step()
    assert server.engine.wait_counts() == {WaitReason.MAX_NUM_SEQS: 1}


@pytest.mark.usefixtures("silent")
def test_the_steps_budget_is_spent(tmp_path: Path) -> None:
    server = Server(tmp_path, budget=8)
    server.add("a", [1] * 8)
    server.add("b", [2] * 5)
    server.step()
    assert server.engine.wait_counts() == {WaitReason.TOKEN_BUDGET: 1}


@pytest.mark.usefixtures("silent")
def test_who_is_preempted_is_counted_and_looked_up_apart(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.add("a", [1] * 14, max_tokens=12)
    server.add("b", [2] * 14, max_tokens=12)
    while server.engine.num_preemptions == 0:
        server.step()
    assert server.engine.wait_counts() == {WaitReason.STEP_PREEMPTED: 1}
    while server.scheduler.has_unfinished_requests():
        server.step()
    totals = server.engine.manager.prefix_cache_totals()
    assert (totals.requests, totals.queries) == (2, 28)
    assert totals.preempted_requests == server.engine.num_preemptions
    # The last snapshot is of an idle server.
    assert server.why.metrics._snapshot.occupancy.live == 0


@pytest.mark.usefixtures("silent")
def test_the_line_says_what_changed_since_the_last(tmp_path: Path) -> None:
    server = Server(tmp_path)
    now = 0.0
    log = WhyLog(server.engine, server.why.misses, 10.0, lambda: now)
    assert log.line_if_due() is None
    for name in ("a", "b"):
        server.add(name, [1] * 9, max_tokens=1)
        server.step()
    now = 10.0
    assert log.line_if_due() == (
        "KV blocks: 0 live, 2 cached, 6 unused; 18 prompt tokens: hit 44.4%, never seen 44.4%, shorter than block 11.1%"
    )
    now = 20.0
    assert log.line_if_due() is None
    server.add("c", [3] * 20)
    server.add("d", [4] * 20)
    server.step()
    now = 30.0
    assert log.line_if_due() == (
        "KV blocks: 5 live, 2 cached, 1 unused; 20 prompt tokens: never seen 80.0%, last token rule 20.0%; "
        "waiting: 1 blocks (needs 5 blocks for all its tokens, 3 free)"
    )


def test_without_the_ledger_it_says_so(tmp_path: Path, log: list[str]) -> None:
    scheduler = reference.make_scheduler(
        str(tmp_path), layout=FULL, num_blocks=9, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64
    )
    schedule = scheduler.schedule
    assert tell_why(scheduler, CONFIG) is None
    assert scheduler.schedule == schedule
    assert log == ["KVLEDGER_WHY: vLLM's own KVCacheManager cannot say why; KVLEDGER_VLLM=1 puts the ledger there"]


@pytest.mark.usefixtures("silent")
def test_nothing_disturbs_the_engine(tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path)

    def broken(output: Any) -> None:
        raise AttributeError("a vLLM that looks otherwise")

    monkeypatch.setattr(server.engine, "note_step", broken)
    server.add("a", [1] * 5)
    while server.scheduler.has_unfinished_requests():
        server.step()
    assert len([line for line in log if "something is missed" in line]) == 1


@pytest.mark.parametrize(("address", "warns"), [("127.0.0.1:0", False), ("0.0.0.0:0", True)])
def test_a_public_address_is_warned_of(
    tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch, address: str, warns: bool
) -> None:
    monkeypatch.setenv(WHY, address)
    Server(tmp_path)
    assert any("every host that reaches this address" in line for line in log) == warns
