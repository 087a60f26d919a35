"""External KV values: synchronous and asynchronous loads, failures, leases."""

import pytest

from kvledger import RequestStatus
from kvledger.errors import RequestError
from kvledger.scheduler import ExternalHit
from tests.engine import Engine
from tests.helpers import cached_ids, other


def waiting_for_load(engine: Engine, name: str, prompt: int | list[int], num_external: int, **options: int) -> None:
    engine.source.offers[name] = ExternalHit(num_external, asynchronous=True)
    engine.add(name, prompt, **options)


def test_a_synchronous_hit_is_loaded_within_the_step() -> None:
    engine = Engine(8)
    engine.source.offers["a"] = ExternalHit(8)
    engine.add("a", 10)
    output = engine.step()
    assert [*output.ranges_by_request().values()] == [(8, 10)]
    assert engine.source.block_ids["a"] == [1, 2, 3]
    assert cached_ids(engine.manager) == [1, 2]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_offer_of_the_whole_prompt_leaves_one_token_to_compute(asynchronous: bool) -> None:
    engine = Engine(8)
    engine.source.offers["a"] = ExternalHit(100, asynchronous)
    engine.add("a", 8, max_tokens=2)
    output = engine.step()
    if asynchronous:
        assert output.request_ids == []
        engine.load("a")
        output = engine.step()
    assert [*output.ranges_by_request().values()] == [(7, 8)]
    engine.run()
    assert len(engine.tokens["a"]) == 2


def test_an_offer_is_asked_for_beyond_the_local_hit() -> None:
    engine = Engine(12)
    engine.add("a", 9, max_tokens=1)
    engine.run()
    engine.source.offers["b"] = ExternalHit(4)
    engine.add("b", 15)
    output = engine.step()
    assert [*output.ranges_by_request().values()] == [(12, 15)]


def test_an_asynchronous_load_holds_blocks_and_computes_nothing_until_it_arrives() -> None:
    engine = Engine(8)
    waiting_for_load(engine, "a", 10, 8)
    for _ in range(3):
        assert engine.step().request_ids == []
    a = engine.scheduler.get_request("a")
    assert a.status is RequestStatus.WAITING_FOR_EXTERNAL_KV
    assert engine.ids("a") == [1, 2]
    assert cached_ids(engine.manager) == []
    engine.load("a")
    output = engine.step()
    assert [*output.ranges_by_request().values()] == [(8, 10)]
    assert output.new_requests[0].block_ids == ([1, 2, 3],)
    assert cached_ids(engine.manager) == [1, 2]
    assert engine.source.lookups == ["a"]
    assert engine.source.taken == {}  # it was told of the load, and is not told again


def test_others_run_while_a_load_is_under_way() -> None:
    engine = Engine(8)
    waiting_for_load(engine, "a", 10, 8)
    engine.add("b", other(4), max_tokens=2)
    assert engine.step().request_ids == ["b"]
    engine.step()
    assert engine.finished == {"b": "FINISHED_LENGTH"}


def test_a_source_that_does_not_know_yet_is_asked_again_and_blocks_nobody() -> None:
    engine = Engine(8)
    engine.source.offers["a"] = None
    engine.add("a", 6)
    engine.add("b", other(4), max_tokens=1)
    assert engine.step().request_ids == ["b"]
    engine.source.offers["a"] = ExternalHit(0)
    assert engine.step().request_ids == ["a"]
    assert engine.source.lookups == ["a", "b", "a"]


def test_a_failed_load_starts_over() -> None:
    engine = Engine(8)
    waiting_for_load(engine, "a", 10, 8)
    engine.step()
    engine.source.offers["a"] = ExternalHit(0)
    engine.load("a", 0)
    output = engine.step()
    assert [*output.ranges_by_request().values()] == [(0, 10)]
    engine.run()
    assert engine.finished == {"a": "FINISHED_LENGTH"}


def test_a_failed_load_that_does_not_fit_any_more_waits_with_the_others() -> None:
    engine = Engine(8)
    engine.add("b", other(13), max_tokens=6)
    engine.step()
    waiting_for_load(engine, "a", 16, 8, max_tokens=2)
    engine.step()
    engine.source.offers["a"] = ExternalHit(0)
    engine.steps(2)
    # b holds 5 blocks by now, so the whole prompt of a does not fit when its 2 blocks are given back.
    engine.load("a", 0)
    assert engine.step().request_ids == ["b"]
    assert not engine.manager.holds_blocks(engine.scheduler.get_request("a"))
    engine.run()
    assert set(engine.finished) == {"a", "b"}


def test_a_load_that_arrives_in_part_is_used_in_part() -> None:
    engine = Engine(8)
    waiting_for_load(engine, "a", 10, 8)
    engine.step()
    engine.load("a", 6)
    output = engine.step()
    assert [*output.ranges_by_request().values()] == [(6, 10)]


def test_a_load_that_claims_more_than_asked_counts_as_what_was_asked() -> None:
    engine = Engine(8)
    waiting_for_load(engine, "a", 10, 8)
    engine.step()
    engine.load("a")
    engine.scheduler.abort("a")
    waiting_for_load(engine, "b", 10, 8)
    engine.step()
    b = engine.scheduler.get_request("b")
    engine._write(b, engine.ids("b"), 8, 8)
    engine.scheduler.external_load_finished("b", 1000)
    assert engine.step().ranges_by_request() == {"b": (8, 10)}


def test_a_load_nobody_waits_for_changes_nothing() -> None:
    engine = Engine(8)
    engine.add("a", 6)
    for name in ("a", "stranger"):
        assert not engine.scheduler.external_load_finished(name, 4)
    engine.check()


def test_aborting_a_load_that_has_arrived_frees_at_once() -> None:
    engine = Engine(8)
    waiting_for_load(engine, "a", 10, 8)
    engine.step()
    engine.load("a")
    engine.scheduler.abort("a")
    assert engine.manager.num_free_blocks == 8
    assert engine.scheduler.num_blocks_held_by_orphans == 0
    engine.check()


def test_blocks_of_an_aborted_load_stay_until_the_load_reports() -> None:
    engine = Engine(8)
    waiting_for_load(engine, "a", 10, 8)
    engine.step()
    engine.scheduler.abort("a")
    assert not engine.scheduler.has_unfinished_requests
    assert engine.scheduler.num_blocks_held_by_orphans == 2
    with pytest.raises(RequestError, match="'a': in use"):
        engine.add("a", 4)
    engine.scheduler.external_load_finished("a", 8)
    assert engine.manager.num_free_blocks == 8
    engine.add("a", 4)


def test_a_load_reporting_after_its_lease_harms_nobody() -> None:
    engine = Engine(8, external_lease_steps=2)
    waiting_for_load(engine, "a", 10, 8)
    engine.step()
    engine.scheduler.abort("a")
    engine.steps(3)
    assert engine.manager.num_free_blocks == 8
    assert not engine.scheduler.external_load_finished("a", 8)
    engine.check()


def test_loads_leave_room_for_the_lookahead_of_those_that_wait_with_them() -> None:
    engine = Engine(8, num_lookahead_tokens=4)
    for family, name in enumerate("ab"):
        waiting_for_load(engine, name, other(16, family), 16, max_tokens=2)
    for _ in range(40):
        engine.step()
        for name in list(engine.scheduler._state.loads.loading):
            if name in engine.source.taken:
                engine.load(name)
    assert set(engine.finished) == {"a", "b"}


def test_a_load_leaves_free_what_prompts_in_flight_still_need() -> None:
    engine = Engine(8, max_num_batched_tokens=8, reserve_full_sequence=False)
    engine.add("a", 24, max_tokens=1)
    engine.step()
    waiting_for_load(engine, "b", other(16), 16, max_tokens=1)
    assert engine.step().num_tokens_by_request() == {"a": 8}
    # a holds 4 blocks and needs 2 more: 4 are free, 2 of them spoken for.
    assert not engine.manager.holds_blocks(engine.scheduler.get_request("b"))
    engine.step()
    engine.step()
    assert engine.manager.holds_blocks(engine.scheduler.get_request("b"))
