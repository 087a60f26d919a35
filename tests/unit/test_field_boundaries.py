"""Reports from the field, section E: fully cached prompts, drafts in a full pool, blocks taken while decoding."""

import pytest

from kvledger.scheduler import ExternalHit
from tests.engine import Engine
from tests.helpers import admitted, cached_ids, draft, ids, ledger


@pytest.mark.parametrize(("num_tokens", "expected"), [(11, 8), (12, 8), (13, 12)])
def test_b57_a_fully_cached_prompt_computes_at_least_its_last_token(num_tokens: int, expected: int) -> None:
    engine = Engine(16)
    engine.add("a", 16, max_tokens=1)
    engine.run()
    engine.add("b", num_tokens, max_tokens=2)
    output = engine.step()
    assert output.ranges_by_request() == {"b": (expected, num_tokens)}
    engine.run()
    assert len(engine.tokens["b"]) == 2


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("num_tokens", [11, 12, 13])
@pytest.mark.parametrize("num_local", [0, 4, 8])
def test_b57_local_and_external_tokens_leave_one_to_compute(
    num_local: int, num_tokens: int, asynchronous: bool
) -> None:
    engine = Engine(16)
    if num_local:
        engine.add("a", num_local, max_tokens=1)
        engine.run()
    engine.source.offers["b"] = ExternalHit(num_tokens - num_local, asynchronous)
    engine.add("b", num_tokens, max_tokens=2)
    output = engine.step()
    if asynchronous:
        engine.load("b")
        output = engine.step()
    assert output.ranges_by_request() == {"b": (num_tokens - 1, num_tokens)}
    engine.run()
    assert len(engine.tokens["b"]) == 2


def test_b59_rejected_drafts_in_a_full_pool_are_never_cached() -> None:
    manager = ledger(usable=4)
    a = admitted(manager, "a", 8)
    for _ in range(7):
        assert draft(manager, a, num_drafts=7, num_accepted=0) is not None or manager.num_free_blocks == 0
        manager.check()
        if len(ids(manager, a)) == 4:
            break
    # 9 tokens are known, 16 slots are taken, and only the 2 blocks of the prompt are cached.
    assert (a.num_tokens, manager.num_free_blocks, cached_ids(manager)) == (9, 0, [1, 2])
    assert draft(manager, a, num_drafts=7, num_accepted=0) is None
    assert manager.allocate_slots(a, 2) is not None


def test_b59_a_full_pool_with_drafts_goes_on_by_preemption() -> None:
    engine = Engine(8)
    for family, name in enumerate("ab"):
        engine.add(name, [family * 100 + position for position in range(10)], max_tokens=12)
    for _ in range(80):
        for running in engine.scheduler.running_requests():
            num_drafts = min(7, 12 - running.num_output_tokens - 1)
            engine.scheduler.update_draft_tokens(running.request_id, [5] * num_drafts)
        engine.step()
    assert engine.finished == {"a": "FINISHED_LENGTH", "b": "FINISHED_LENGTH"}
    assert engine.scheduler.num_preemptions > 0


def test_b61_every_block_taken_while_decoding_is_reported_once() -> None:
    engine = Engine(8)
    engine.add("a", 5, max_tokens=13)
    reported = list(engine.step().new_requests[0].block_ids[0])
    assert reported == [1, 2]
    while engine.scheduler.has_unfinished_requests:
        table = engine.ids("a")
        assert reported == table
        for new_ids in engine.step().new_block_ids_by_request().values():
            reported += new_ids[0]
    # 5 + 13 - 1 computed tokens end in block 5: three boundaries were crossed.
    assert reported == [1, 2, 3, 4, 5]
