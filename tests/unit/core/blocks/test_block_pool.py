"""The block pool: taking, sharing, freeing, caching, evicting, and errors that change nothing."""

from collections.abc import Callable
from functools import partial

import pytest

from kvledger import BlockPool, EvictionCause, KVCacheBlock, LedgerObservers, PoolOccupancy
from kvledger.errors import BlockError, ConfigError, InvariantError, OutOfBlocksError
from tests.helpers import Journal, snapshot


def take(pool: BlockPool, num_blocks: int, *hashes: bytes) -> list[KVCacheBlock]:
    """Takes blocks and caches the first ones under these hashes."""
    blocks = pool.get_new_blocks(num_blocks)
    for position, block_hash in enumerate(hashes):
        pool.cache_block(blocks[position], block_hash, 0, 16 * (position + 1))
    return blocks


def block_ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [int(block.block_id) for block in blocks]


def refuses(pool: BlockPool, match: str, misuse: Callable[[], object], *others: BlockPool) -> None:
    """The misuse raises a BlockError, and every pool is as it was."""
    before = [snapshot(each) for each in (pool, *others)]
    with pytest.raises(BlockError, match=match):
        misuse()
    assert [snapshot(each) for each in (pool, *others)] == before
    for each in (pool, *others):
        each.check()


def test_a_pool_needs_a_block_beside_the_null_block() -> None:
    with pytest.raises(ConfigError, match="num_blocks=1: block 0 is the null block"):
        BlockPool(1)
    assert BlockPool(2).num_usable_blocks == 1


def test_new_blocks_come_from_the_front_with_one_reference() -> None:
    pool = BlockPool(6)
    blocks = take(pool, 3)
    assert block_ids(blocks) == [1, 2, 3]
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    assert pool.get_new_blocks(0) == []
    assert (pool.num_free_blocks, pool.num_usable_blocks) == (2, 5)
    pool.check()


def test_more_than_free_is_an_error_and_takes_none() -> None:
    pool = BlockPool(4)
    before = snapshot(pool)
    with pytest.raises(OutOfBlocksError, match="num_blocks=4: 3 of 3 are free"):
        pool.get_new_blocks(4)
    assert snapshot(pool) == before


def test_freed_blocks_without_a_hash_go_to_the_front_and_cached_ones_to_the_end() -> None:
    pool = BlockPool(6)
    a, b, c = take(pool, 3, b"a", b"b")
    pool.free_blocks([c, b, a])
    assert pool.free_queue.block_ids() == [3, 4, 5, 2, 1]
    assert pool.occupancy() == PoolOccupancy(live=0, cached=2, unused=3)
    pool.check()


def test_several_unhashed_blocks_keep_their_order_at_the_front() -> None:
    pool = BlockPool(6)
    a, b, c = take(pool, 3)
    pool.free_blocks([c, b, a])
    assert pool.free_queue.block_ids() == [3, 2, 1, 4, 5]


def test_touch_adds_a_reference_and_takes_a_free_block_out_of_the_queue() -> None:
    pool = BlockPool(4)
    a, b = take(pool, 2, b"a", b"b")
    pool.free_blocks([b])
    pool.touch([a, b, pool.null_block])
    assert (a.ref_cnt, b.ref_cnt, pool.null_block.ref_cnt) == (2, 1, 0)
    assert pool.free_queue.block_ids() == [3]
    assert b.block_hash == b"b"
    assert pool.occupancy() == PoolOccupancy(live=2, cached=0, unused=1)
    pool.check()


def test_a_free_block_without_a_hash_can_be_touched_too() -> None:
    pool = BlockPool(3)
    pool.touch([pool.blocks[2]])
    assert pool.free_queue.block_ids() == [1]
    pool.check()


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(3)
    (a,) = take(pool, 1, b"a")
    pool.touch([a])
    pool.free_blocks([a])
    assert pool.free_queue.block_ids() == [2]
    pool.free_blocks([a])
    assert pool.free_queue.block_ids() == [2, 1]


def test_a_reused_block_loses_its_old_hash() -> None:
    journal = Journal()
    pool = BlockPool(3, observer=journal)
    a, b = take(pool, 2, b"a", b"b")
    pool.free_blocks([b, a])
    assert pool.get_cached_block(b"b", 0) is b
    assert block_ids(take(pool, 1)) == [2]
    assert pool.get_cached_block(b"b", 0) is None
    assert pool.get_cached_block(b"a", 0) is a
    assert journal.evicted == [(2, EvictionCause.REUSED)]
    assert (b.block_hash, b.num_hash_tokens) == (None, 0)
    pool.check()


def test_a_cached_block_tells_its_hash_group_and_length() -> None:
    pool = BlockPool(4, num_groups=2)
    a, b = pool.get_new_blocks(2)
    pool.cache_block(a, b"same", 0, 16)
    pool.cache_block(b, b"same", 1, 32)
    assert pool.get_cached_block(b"same", 0) is a
    assert pool.get_cached_block(b"same", 1) is b
    assert (b.block_hash, b.group_id, b.num_hash_tokens) == (b"same", 1, 32)
    pool.check()


def test_only_a_held_block_without_a_hash_can_be_cached() -> None:
    pool = BlockPool(4)
    (a,) = take(pool, 1, b"a")
    for block in (a, pool.blocks[2], pool.null_block):
        refuses(pool, "cannot be cached", partial(pool.cache_block, block, b"x", 0, 16))


def test_a_full_block_drops_the_shorter_prefixes_it_answered_for() -> None:
    journal = Journal()
    pool = BlockPool(4, observer=journal)
    (a,) = take(pool, 1)
    pool.cache_partial_block(a, b"4 tokens", 0, 4)
    pool.cache_partial_block(a, b"4 tokens", 0, 4)
    assert pool.get_cached_block(b"4 tokens", 0) is a
    pool.cache_partial_block(a, b"8 tokens", 0, 8)
    assert pool.get_cached_block(b"4 tokens", 0) is None
    pool.cache_block(a, b"full", 0, 16)
    assert pool.get_cached_block(b"8 tokens", 0) is None
    assert (a.block_hash, a.num_hash_tokens) == (b"full", 16)
    assert journal.evicted == [(1, EvictionCause.PROMOTED)] * 2
    pool.check()


def test_a_full_block_may_answer_for_a_shorter_prefix_too_and_loses_both_at_once() -> None:
    pool = BlockPool(4)
    (a,) = take(pool, 1, b"full")
    pool.cache_partial_block(a, b"12 tokens", 0, 12)
    assert pool.get_cached_block(b"full", 0) is pool.get_cached_block(b"12 tokens", 0) is a
    assert pool.further_hashes(a) == [b"12 tokens"]
    pool.check()
    pool.evict_blocks([1])
    assert pool.get_cached_block(b"full", 0) is pool.get_cached_block(b"12 tokens", 0) is None
    pool.check()
    refuses(pool, "cannot be cached: it is free", lambda: pool.cache_partial_block(pool.blocks[3], b"x", 0, 4))


def test_reset_takes_every_hash_of_a_block() -> None:
    pool = BlockPool(4)
    (a,) = take(pool, 1, b"full")
    pool.cache_partial_block(a, b"12 tokens", 0, 12)
    pool.free_blocks([a])
    assert pool.reset_prefix_cache()
    assert len(pool.indexes[0]) == 0
    pool.check()


def test_hashes_move_together_to_a_block_without_any() -> None:
    pool = BlockPool(5)
    a, b, c = take(pool, 3, b"full")
    pool.cache_partial_block(a, b"12 tokens", 0, 12)
    pool.move_hashes(a, b)
    assert pool.get_cached_block(b"full", 0) is pool.get_cached_block(b"12 tokens", 0) is b
    assert (a.block_hash, b.num_hash_tokens) == (None, 16)
    pool.move_hashes(a, c)
    assert c.block_hash is None
    pool.check()
    for target in (b, pool.blocks[4]):
        refuses(pool, "cannot take over hashes", partial(pool.move_hashes, c, target))


def test_freeing_twice_is_an_error_that_changes_nothing() -> None:
    pool = BlockPool(5)
    a, b, c = take(pool, 3, b"a")
    pool.free_blocks([b])
    refuses(pool, "block 2 is free already; free_blocks has changed nothing", lambda: pool.free_blocks([b]))
    refuses(pool, "block 2 is free already", lambda: pool.free_blocks([c, a, b]))
    refuses(pool, "block 4 is free already", lambda: pool.free_blocks([pool.blocks[4]]))


def test_a_block_twice_in_one_call_is_an_error_whatever_its_count() -> None:
    pool = BlockPool(5)
    a, b = take(pool, 2, b"a")
    refuses(pool, "block 1 is listed twice", lambda: pool.free_blocks([b, a, a]))
    pool.touch([a])
    refuses(pool, "block 1 is listed twice", lambda: pool.free_blocks([a, b, a]))
    pool.free_blocks([a])
    pool.free_blocks([a, b])
    assert pool.num_free_blocks == 4
    pool.check()


def test_an_error_does_not_hide_a_later_rightful_free() -> None:
    pool = BlockPool(4)
    a, b = take(pool, 2)
    refuses(pool, "listed twice", lambda: pool.free_blocks([a, b, b]))
    pool.free_blocks([a, b])
    assert pool.free_queue.block_ids() == [1, 2, 3]
    pool.check()


def test_null_blocks_are_passed_over() -> None:
    pool = BlockPool(3)
    (a,) = take(pool, 1)
    null = pool.null_block
    pool.free_blocks([null, a, null])
    assert pool.free_queue.block_ids() == [1, 2]
    assert null.ref_cnt == 0
    pool.check()


def test_a_foreign_block_goes_back_to_its_linked_pool() -> None:
    pool, host = BlockPool(4), BlockPool(9)
    pool.link_pool(host)
    ours, theirs, high = take(pool, 1)[0], *take(host, 8)[::7]
    pool.free_blocks([theirs, ours, high])
    assert pool.num_free_blocks == 3
    assert host.free_queue.block_ids() == [1, 8]
    (ours,) = take(pool, 1)
    host.free_blocks([ours, host.null_block, pool.null_block])
    assert pool.num_free_blocks == 3
    pool.check()
    host.check()


def test_a_block_of_no_known_pool_is_an_error_that_changes_nothing() -> None:
    pool, stranger = BlockPool(4), BlockPool(9)
    a, b = take(pool, 2)
    first, *_, last = take(stranger, 8)
    refuses(pool, "block 1 belongs to no pool known here", lambda: pool.free_blocks([a, first, b]), stranger)
    refuses(pool, "block 8 belongs to no pool known here", lambda: pool.free_blocks([last, a]), stranger)


def test_an_error_in_a_linked_pool_changes_nothing_here() -> None:
    pool, host = BlockPool(4), BlockPool(4)
    pool.link_pool(host)
    (a,) = take(pool, 1)
    (theirs,) = take(host, 1)
    refuses(pool, "free already or listed twice", lambda: pool.free_blocks([a, theirs, theirs]), host)
    refuses(pool, "free already or listed twice", lambda: pool.free_blocks([a, host.blocks[3]]), host)


def test_a_stranger_beside_a_linked_block_changes_neither_pool() -> None:
    pool, host, stranger = BlockPool(4), BlockPool(4), BlockPool(4)
    pool.link_pool(host)
    (a,), (theirs,), (unknown,) = take(pool, 1), take(host, 1), take(stranger, 1)
    refuses(pool, "belongs to no pool", lambda: pool.free_blocks([a, theirs, unknown]), host, stranger)


def test_evicting_takes_hashes_and_leaves_blocks_where_they_are() -> None:
    journal = Journal()
    pool = BlockPool(5, observer=journal)
    a, b, c = take(pool, 3, b"a", b"b")
    pool.free_blocks([b])
    pool.evict_blocks([1, 2, 3, 2])
    assert pool.free_queue.block_ids() == [4, 2]
    assert (a.ref_cnt, c.ref_cnt) == (1, 1)
    assert pool.get_cached_block(b"a", 0) is None
    assert journal.evicted == [(1, EvictionCause.EVICTED), (2, EvictionCause.EVICTED)]
    assert pool.occupancy() == PoolOccupancy(live=2, cached=0, unused=2)
    pool.check()


@pytest.mark.parametrize("wrong_id", [0, -1, 5, 2**40])
def test_evicting_a_wrong_id_is_an_error_that_evicts_nothing(wrong_id: int) -> None:
    pool = BlockPool(5)
    take(pool, 1, b"a")
    refuses(pool, f"{wrong_id} is not from 1 to 4; nothing was evicted", lambda: pool.evict_blocks([1, wrong_id]))


def test_reset_forgets_all_content_when_nothing_is_held() -> None:
    journal = Journal()
    pool = BlockPool(5, observer=journal)
    blocks = take(pool, 3, b"a", b"b")
    pool.free_blocks(blocks[::-1])
    order = pool.free_queue.block_ids()
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(b"a", 0) is None
    assert pool.free_queue.block_ids() == order
    assert sorted(journal.evicted, key=lambda e: e[0]) == [(1, EvictionCause.RESET), (2, EvictionCause.RESET)]
    assert (journal.num_resets, journal.refused) == (1, [])
    assert pool.occupancy() == PoolOccupancy(live=0, cached=0, unused=4)
    pool.check()


def test_reset_with_a_block_in_use_is_refused_with_a_warning() -> None:
    journal = Journal()
    pool = BlockPool(5, observer=journal)
    _, b = take(pool, 2, b"a", b"b")
    pool.free_blocks([b])
    before = snapshot(pool)
    assert not pool.reset_prefix_cache()
    assert (journal.num_resets, journal.refused) == (0, [1])
    assert snapshot(pool) == before
    quiet = BlockPool(3)
    take(quiet, 1)
    assert not quiet.reset_prefix_cache()


def test_reset_takes_duplicates_too() -> None:
    pool = BlockPool(4)
    blocks = take(pool, 2, b"same", b"same")
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert [block.block_hash for block in blocks] == [None, None]
    pool.check()


def test_usage_is_the_share_of_usable_blocks_that_are_held() -> None:
    pool = BlockPool(5)
    assert pool.get_usage() == 0.0
    blocks = take(pool, 3, b"a")
    assert pool.get_usage() == 0.75
    pool.free_blocks(blocks)
    assert pool.get_usage() == 0.0
    take(pool, 4)
    assert pool.get_usage() == 1.0


def test_check_finds_what_does_not_agree() -> None:
    def broken(breaks: Callable[[BlockPool], object], match: str) -> None:
        pool = BlockPool(4)
        take(pool, 2, b"a")
        pool.check()
        breaks(pool)
        with pytest.raises(InvariantError, match=match):
            pool.check()

    def set_ref_cnt(block_id: int, ref_cnt: int) -> Callable[[BlockPool], None]:
        def breaks(pool: BlockPool) -> None:
            pool.blocks[block_id].ref_cnt = ref_cnt

        return breaks

    broken(set_ref_cnt(1, -1), "negative ref_cnt")
    broken(set_ref_cnt(1, 0), "free and in the queue must agree")
    broken(set_ref_cnt(3, 1), "free and in the queue must agree")
    broken(set_ref_cnt(0, 1), "the null block is held or cached")
    broken(lambda pool: setattr(pool.blocks[1], "block_hash", b"x"), "listed under a strange hash")
    broken(lambda pool: pool.indexes[0].insert(b"a", pool.blocks[2]), "listed under a strange hash")
    broken(lambda pool: pool.indexes[0].clear(), "carry a hash and the blocks in the prefix indexes differ")
    broken(lambda pool: setattr(pool, "_num_free_cached", 1), "count of free cached blocks is wrong")


def test_an_eviction_is_announced_once_a_batch_before_any_hash_is_gone() -> None:
    first, second = Journal(), Journal()
    pool = BlockPool(6, observer=LedgerObservers([first, second]))
    blocks = take(pool, 3, b"a", b"b", b"c")
    pool.evict_blocks([2, 1, 2])
    assert first.evicted == [(2, EvictionCause.EVICTED), (1, EvictionCause.EVICTED)]
    pool.free_blocks([blocks[2]])
    pool.get_new_blocks(3)
    assert first.evicted[2:] == [(3, EvictionCause.REUSED)]
    assert (second.evicted, second.refused) == (first.evicted, first.refused)
    pool.check()
