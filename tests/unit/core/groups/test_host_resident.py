"""A group in host memory: its own pool, its own count; blocks of 4 tokens."""

import pytest

from kvledger import AdmissionRule, BlockPool, KVCacheManager
from kvledger.errors import RequestTooLargeError
from kvledger.scheduler import Scheduler, SchedulerConfig
from tests.groups import compute, full, held, host, hybrid, managers_of, tables, window
from tests.helpers import admit, admitted, hit, leave, other, pool_of, request, snapshot


def host_pool(manager: KVCacheManager) -> BlockPool:
    return managers_of(manager)[1].pool


def test_its_blocks_come_from_its_own_pool_and_go_back_there() -> None:
    manager = hybrid(10, full(), host(9))
    a = admitted(manager, "a", 13)
    assert tables(manager, a) == ([1, 2, 3, 4], [1, 2, 3, 4])
    assert (pool_of(manager).num_free_blocks, host_pool(manager).num_free_blocks) == (6, 4)
    assert manager.num_blocks_for(13) == 4
    manager.check()
    leave(manager, a)
    assert (pool_of(manager).num_free_blocks, host_pool(manager).num_free_blocks) == (10, 8)
    manager.check()


def test_a_full_host_pool_admits_nobody_and_stops_growth() -> None:
    manager = hybrid(20, full(), host(5))
    a = admitted(manager, "a", 12)
    before = [snapshot(pool) for pool in (pool_of(manager), host_pool(manager))]
    assert admit(manager, request("b", [7] * 5)) is None
    assert admit(manager, request("c", [7] * 5), admission=AdmissionRule()) is None
    assert [snapshot(pool) for pool in (pool_of(manager), host_pool(manager))] == before
    assert compute(manager, a, 4)
    assert not compute(manager, a, 1)
    assert held(manager, a) == [4, 4]
    manager.check()


def test_a_hit_is_handed_out_whole_and_cut_to_what_is_reused() -> None:
    manager = hybrid(20, host(9), full())
    leave(manager, admitted(manager, "a", 17))
    manager.evict_blocks([3])
    b = request("b", 17)
    found = manager.get_computed_blocks(b)
    # The device lost its third block; the host has all four.
    assert found.num_tokens == 8
    assert found.blocks.get_block_ids() == ([1, 2, 3, 4], [1, 2])
    # A connector fills in 4 tokens: 12 are reused, so 3 of the host's blocks are.
    admit(manager, b, found=found, num_external_computed_tokens=4)
    mine = tables(manager, b)
    assert (mine[0][:3], mine[1][:2]) == ([1, 2, 3], [1, 2])
    assert [len(table) for table in mine] == [5, 5]
    assert mine[0][3] != 4
    manager.check()


def test_it_limits_a_hit_like_any_group() -> None:
    manager = hybrid(20, full(), host(9), window(8))
    leave(manager, admitted(manager, "a", 17))
    host_pool(manager).evict_blocks([3])
    found = manager.get_computed_blocks(request("b", 17))
    assert (found.num_tokens, found.limiting_group) == (8, 1)


def test_pools_are_reset_all_or_none() -> None:
    manager = hybrid(20, full(), host(9))
    leave(manager, admitted(manager, "a", 9))
    stray = host_pool(manager).get_new_blocks(1)
    # The device's pool is idle, the host's is not.
    assert not manager.reset_prefix_cache()
    assert hit(manager, request("b", 9)) == 8
    host_pool(manager).free_blocks(stray)
    assert manager.reset_prefix_cache()
    assert hit(manager, request("b", 9)) == 0


def test_a_fork_takes_host_blocks_for_the_host_group() -> None:
    manager = hybrid(20, full(), host(9))
    a = admitted(manager, "a", 6)
    b = a.twin("b")
    assert manager.num_blocks_to_fork(a) == 1
    # The host has 6 blocks left; a seventh fork fits nowhere: more than the device has.
    assert (manager.num_blocks_to_fork(a, 6), manager.num_blocks_to_fork(a, 7)) == (6, 7 + 22)
    assert manager.fork(a, b) is not None
    manager.check()
    assert tables(manager, b) == ([1, 3], [1, 3])
    copies = manager.take_block_copies()
    assert [(c.group_id, c.source_block_id, c.target_block_id) for c in copies] == [(0, 2, 3), (1, 2, 3)]
    leave(manager, a)
    manager.free(b)
    manager.check()
    manager.release_block_copies(copies)
    assert (pool_of(manager).num_free_blocks, host_pool(manager).num_free_blocks) == (20, 8)
    manager.check()


def test_a_fork_that_the_host_cannot_back_changes_nothing() -> None:
    manager = hybrid(20, full(), host(3))
    a = admitted(manager, "a", 6)
    before = [snapshot(pool) for pool in (pool_of(manager), host_pool(manager))]
    assert manager.fork(a, a.twin("b")) is None
    assert [snapshot(pool) for pool in (pool_of(manager), host_pool(manager))] == before


def test_a_busy_host_pool_is_waited_for_and_a_small_one_is_an_error() -> None:
    manager = hybrid(20, full(), host(3), max_model_len=64)
    scheduler = Scheduler(manager, SchedulerConfig(max_num_seqs=8))
    with pytest.raises(RequestTooLargeError, match="request 'large': 9 tokens need"):
        scheduler.add_request(request("large", 9))
    scheduler.add_request(request("a", other(7, 1), max_tokens=1))
    scheduler.add_request(request("b", other(7, 2), max_tokens=1))
    output = scheduler.schedule()
    assert (output.request_ids, output.errors) == (["a"], {})
    assert str(scheduler.explain("b")) == "'b' waits: needs more blocks for all its tokens than are free in host memory"
    scheduler.update_from_tokens(output, [1])
    assert scheduler.schedule().request_ids == ["b"]
