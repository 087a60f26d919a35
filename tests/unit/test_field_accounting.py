"""Reports from the field, section B and the ones of D and G about one group: leaks, double frees, counters."""

from collections.abc import Callable

import pytest

from kvledger import BlockPool, PoolOccupancy
from kvledger.errors import BlockError
from kvledger.scheduler import ExternalHit
from tests.engine import Engine
from tests.helpers import (
    admit,
    admitted,
    cached_ids,
    draft,
    free_order,
    hit,
    ids,
    leave,
    ledger,
    other,
    pool_of,
    ref_cnts,
    request,
    snapshot,
)


def test_b14_an_aborted_load_that_never_reports_is_reclaimed_after_its_lease() -> None:
    engine = Engine(8, external_lease_steps=3)
    engine.source.offers["lost"] = ExternalHit(16, asynchronous=True)
    engine.add("lost", 17)
    engine.step()
    engine.scheduler.abort("lost")
    engine.add("next", other(24), max_tokens=1)
    for _ in range(2):
        assert engine.step().request_ids == []
        assert engine.scheduler.num_blocks_held_by_orphans == 4
    assert engine.step().request_ids == ["next"]
    assert engine.scheduler.num_blocks_held_by_orphans == 0
    assert engine.finished == {"next": "FINISHED_LENGTH"}


def test_b16_used_is_what_is_not_free_at_all_times() -> None:
    engine = Engine(4)
    for number in range(10):
        engine.add(str(number), other(6, number), max_tokens=2)
    while engine.scheduler.has_unfinished_requests:
        engine.step()
        occupancy = engine.manager.occupancy()
        assert occupancy.live == 4 - engine.manager.num_free_blocks
        assert engine.manager.usage == occupancy.live / 4 <= 1
    assert engine.manager.usage == 0.0


@pytest.mark.parametrize(("usable", "cached"), [(16, 16), (40, 24)])
def test_b17_live_cached_and_unused_are_told_apart(usable: int, cached: int) -> None:
    engine = Engine(usable, max_num_seqs=4)
    for number in range(24):
        engine.add(str(number), other(4, number), max_tokens=1)
    engine.run()
    assert engine.manager.occupancy() == PoolOccupancy(live=0, cached=cached, unused=usable - cached)


def test_b18_every_wrong_free_is_loud_and_harmless() -> None:
    pool = BlockPool(5)
    b1, b2 = pool.get_new_blocks(2)
    pool.touch([b2])

    def refuses(free: Callable[[], object], match: str) -> None:
        before = snapshot(pool)
        with pytest.raises(BlockError, match=match):
            free()
        assert snapshot(pool) == before
        pool.check()

    refuses(lambda: pool.free_blocks([b1, b1]), "block 1 is listed twice")
    refuses(lambda: pool.free_blocks([b2, b2]), "block 2 is listed twice")
    refuses(lambda: pool.free_blocks([pool.blocks[4]]), "block 4 is free already")
    pool.free_blocks([pool.null_block])
    assert (pool.null_block.ref_cnt, pool.free_queue.block_ids()) == (0, [3, 4])


@pytest.mark.parametrize("first", ["parent", "child"])
def test_b19_a_fork_of_three_shared_blocks_is_freed_once(first: str) -> None:
    manager = ledger(usable=4)
    parent = admitted(manager, "parent", 12)
    child = parent.twin("child")
    manager.fork(parent, child)
    assert ids(manager, parent) == ids(manager, child) == [1, 2, 3]
    for leaving in (parent, child) if first == "parent" else (child, parent):
        manager.free(leaving)
        manager.check()
    assert manager.num_free_blocks == 4


@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize("accepted", range(4))
def test_b21_rejected_drafts_leak_no_block(offset: int, accepted: int) -> None:
    manager = ledger(usable=16)
    a = admitted(manager, "a", 5 + offset)
    for _ in range(8):
        draft(manager, a, num_drafts=3, num_accepted=accepted)
        # The step had 4 slots from where it began; whatever was not accepted is used by the next one.
        begun_at = a.num_computed_tokens - 1 - accepted
        assert len(ids(manager, a)) == -(-(begun_at + 4) // 4)
        manager.check()
    leave(manager, a)
    assert manager.num_free_blocks == 16


def test_b23_pressure_never_takes_a_block_that_another_reads() -> None:
    manager = ledger(usable=4)
    x, y = request("x", 5), request("y", 5)
    admit(manager, x)
    admit(manager, y)
    assert (ids(manager, x), ids(manager, y)) == ([1, 2], [1, 3])
    leave(manager, x)
    assert admit(manager, request("pressure", other(12))) is None
    assert admit(manager, request("pressure", other(8))) is not None
    assert ids(manager, request("pressure", 1)) == [2, 4]
    assert ref_cnts(manager, [1]) == [1]


def test_b23_a_match_whose_suffix_does_not_fit_leaves_references_as_they_were() -> None:
    manager = ledger(usable=4)
    admit(manager, request("x", 9))
    before = snapshot(pool_of(manager))
    assert admit(manager, request("y", 17)) is None
    assert snapshot(pool_of(manager)) == before
    assert ref_cnts(manager, [1, 2]) == [1, 1]


def test_b26_blocks_given_back_before_they_are_cached_are_no_hits() -> None:
    manager = ledger(usable=8)
    a = request("a", 9)
    admit(manager, a, 0, num_external_computed_tokens=8, delay_cache_blocks=True)
    leave(manager, a)
    assert hit(manager, request("b", 9)) == 0
    assert cached_ids(manager) == []


def test_b26_an_abort_during_a_load_publishes_nothing() -> None:
    engine = Engine(8)
    engine.source.offers["a"] = ExternalHit(8, asynchronous=True)
    engine.add("a", 9)
    engine.step()
    engine.scheduler.abort("a")
    engine.scheduler.external_load_finished("a", 8)
    engine.add("b", 9)
    assert engine.step().ranges_by_request() == {"b": (0, 9)}


def test_b28_an_offer_that_is_not_needed_pins_nothing() -> None:
    engine = Engine(8)
    engine.add("a", 17, max_tokens=1)
    engine.run()
    # Four blocks are here and the source has the same four: nothing is left to load.
    engine.source.offers["b"] = ExternalHit(0)
    engine.add("b", 17, max_tokens=1)
    output = engine.step()
    assert [*output.ranges_by_request().values()] == [(16, 17)]
    assert engine.finished["b"] == "FINISHED_LENGTH"
    engine.add("c", other(32), max_tokens=1)
    engine.run()
    assert len(cached_ids(engine.manager)) == 8
    assert hit(engine.manager, request("again", 17)) == 0


def test_b28_a_source_hears_zero_when_a_load_is_not_needed() -> None:
    engine = Engine(8)
    engine.add("a", 17)
    engine.schedule()
    assert engine.source.block_ids["a"] == [1, 2, 3, 4, 5]
    assert engine.source.taken.get("a", 0) == 0


def test_b29_ten_thousand_requests_leave_nothing_behind() -> None:
    engine = Engine(8)
    scheduler, state = engine.scheduler, engine.scheduler._state
    coordinator = engine.manager._coordinator
    for number in range(10_000):
        scheduler.add_request(request(str(number), [number], max_tokens=1))
        if number % 8 == 7:
            output = scheduler.schedule()
            scheduler.update_from_output(output, [[1]] * len(output.request_ids))
            assert len(state.finished_ids) <= 8
    scheduler.schedule()
    assert sum(map(len, (state.requests, state.running, state.finished_ids, state.preempted_ids))) == 0
    assert sum(map(len, (state.forked_ids, state.loads.loading, state.loads.orphans))) == 0
    assert len(coordinator._held) + len(coordinator.copies.holders(coordinator.pool)) == 0
    assert len(pool_of(engine.manager).indexes[0]) <= 8


def test_b47_a_request_does_not_evict_what_it_hits() -> None:
    manager = ledger(usable=6)
    p = admitted(manager, "p", 16)
    leave(manager, p)
    # The cached blocks are at the end of the queue; spend the two in front so that they come first.
    admit(manager, request("q", other(8)))
    leave(manager, request("q", 1))
    assert free_order(manager) == [4, 3, 2, 1, 6, 5]
    longer = request("longer", list(range(16)) + other(8))
    blocks = admit(manager, longer)
    assert blocks is not None
    assert blocks.get_block_ids() == ([6, 5],)
    assert ids(manager, longer) == [1, 2, 3, 4, 6, 5]


def test_b50_blocks_that_serve_nobody_are_reused_first() -> None:
    manager = ledger(usable=4)
    a, b = request("a", 8), request("b", other(6))
    admit(manager, a)
    leave(manager, a)
    admit(manager, b)
    assert ids(manager, b) == [3, 4]
    leave(manager, b)
    c = admitted(manager, "c", other(1, 3))
    assert ids(manager, c) == [4]
    assert hit(manager, request("again", 9)) == 8


def test_b67_recomputed_tokens_are_no_hits() -> None:
    engine = Engine(8, max_num_seqs=6)
    for number in range(12):
        engine.add(str(number), other(7, number), max_tokens=10)
    engine.run()
    stats = engine.manager.take_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (12, 12 * 7, 0)
    assert stats.preempted_requests == engine.scheduler.num_preemptions > 0
    assert stats.preempted_hits > 0
