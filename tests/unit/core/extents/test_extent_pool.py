"""A pool in runs of blocks: hits, evictions from the end, splits, copies, and what is remembered of evictions."""

import pytest

from kvledger.core.blocks.block_pool import PoolOccupancy
from kvledger.core.extents.extent_pool import ExtentPool
from kvledger.core.extents.holding import Holding
from kvledger.errors import ConfigError, OutOfBlocksError

# Tokens of a block, and of an id: four blocks.
BLOCK = 4
ID = 16


def pool(num_blocks: int, max_evicted: int = 1000) -> ExtentPool:
    return ExtentPool(num_blocks, BLOCK, max_evicted)


def start(pool: ExtentPool, num_tokens: int, *ids: int) -> tuple[Holding, int]:
    """A prompt with its blocks, and how many of them were hit."""
    holding = pool.enter(list(ids), ID, 0, num_tokens)
    hit = pool.find(holding, (num_tokens - 1) // BLOCK)
    num_hit = int(hit.num_blocks)
    pool.attach(holding, hit)
    pool.grow(holding, -(-num_tokens // BLOCK), num_tokens // BLOCK)
    return holding, num_hit


def serve(pool: ExtentPool, num_tokens: int, *ids: int) -> int:
    """The same, and it gives them back. Returns the blocks that were hit."""
    holding, num_hit = start(pool, num_tokens, *ids)
    pool.check([holding])
    pool.release(holding)
    pool.check([])
    return num_hit


def queue(pool: ExtentPool) -> list[tuple[int, int]]:
    """Depths of the free extents, those that go first in front."""
    return [(int(extent.lo), int(extent.hi)) for extent in pool._queue.extents()]


def test_a_prompt_leaves_its_full_blocks_cached_and_a_longer_one_hits_them() -> None:
    cache = pool(101)
    assert serve(cache, 37, 1, 2, 3) == 0
    # 9 full blocks: four of each of the first two ids and one of the third; the tenth was partial.
    assert cache.occupancy() == PoolOccupancy(live=0, cached=9, unused=91)
    assert serve(cache, 48, 1, 2, 3) == 9
    assert cache.num_distinct == 12


def test_what_a_shorter_prompt_does_not_use_keeps_its_place_in_the_queue() -> None:
    cache = pool(101)
    serve(cache, 33, 1, 2)
    assert queue(cache) == [(4, 8), (0, 4)]
    serve(cache, 22, 1, 2)
    # Of id 2 only one block was used again: the other three are older now than all before them.
    assert queue(cache) == [(5, 8), (4, 5), (0, 4)]


def test_eviction_takes_the_end_of_the_oldest_extent() -> None:
    cache = pool(9)
    serve(cache, 17, 1, 9)
    # Five more: four that are unused, and the last one of id 1.
    serve(cache, 17, 2, 9)
    assert (cache.num_evictions, queue(cache)) == (1, [(0, 3), (0, 4)])
    # Three more: the one that was partial, and two of id 1.
    assert serve(cache, 9, 3) == 0
    assert (cache.num_evictions, queue(cache)) == (3, [(0, 1), (0, 4), (0, 2)])
    assert serve(cache, 17, 1, 9) == 1


def test_the_last_block_of_a_prompt_that_is_cached_whole_has_two_copies() -> None:
    cache = pool(101)
    assert [serve(cache, 16, 1), serve(cache, 16, 1), serve(cache, 16, 1)] == [0, 3, 3]
    # Three copies of the block at depth 3, one of those before it.
    assert (cache.num_distinct, cache.num_free_cached) == (4, 6)
    # The oldest copy is hit, and goes to the end of the queue: the two younger ones are evicted before it.
    assert serve(cache, 17, 1, 2) == 4
    assert queue(cache) == [(3, 4), (3, 4), (3, 4), (0, 3)]


def test_requests_that_run_share_blocks_and_the_last_one_gives_them_back() -> None:
    cache = pool(101)
    one, _ = start(cache, 33, 1, 2)
    other, num_hit = start(cache, 25, 1, 2)
    assert num_hit == 6
    cache.check([one, other])
    cache.release(one)
    # The other still holds six of eight.
    assert (cache.num_free_cached, queue(cache)) == (2, [(6, 8)])
    cache.release(other)
    assert queue(cache) == [(6, 8), (4, 6), (0, 4)]
    cache.check([])


def test_evictions_are_numbered_from_the_end_and_forgotten_when_the_content_is_cached_again() -> None:
    cache = pool(10)
    serve(cache, 17, 1, 9)
    serve(cache, 33, 2, 3)
    holding, num_hit = start(cache, 17, 1, 9)
    assert (cache.num_evictions, num_hit) == (4 + 4, 0)
    first = holding.path[0]
    assert first.ghost is None
    gone = cache.enter([2, 3], ID, 0, 33).path[1].ghost
    assert gone is not None
    # Blocks at depths 7, 6, 5, 4 went as evictions 4, 5, 6, 7.
    assert (gone.lo, gone.hi, gone.number) == (4, 8, 4 + 7)


def test_ids_of_another_scope_or_size_are_other_content() -> None:
    cache = pool(101)
    serve(cache, 17, 1, 2)
    for scope, id_tokens in ((1, ID), (0, 8)):
        stranger = cache.enter([1, 1, 1], id_tokens, scope, 17)
        assert cache.find(stranger, 4).num_blocks == 0
    assert cache.find(cache.enter([1, 2], ID, 0, 17), 4).num_blocks == 4


def test_ids_of_any_size_are_told_apart() -> None:
    cache = pool(101)
    for chunk_id in (-1, 1 << 29, 1 << 30, (1 << 30) + 1, 1 << 90):
        assert serve(cache, 17, chunk_id, 5) == 0
        assert serve(cache, 17, chunk_id, 5) == 4


def test_more_than_is_free_is_refused_and_changes_nothing() -> None:
    cache = pool(5)
    with pytest.raises(OutOfBlocksError, match="num_blocks=5: 4 of 4 are free"):
        cache.take(5)
    assert cache.num_free == 4
    with pytest.raises(ConfigError, match="num_blocks=1"):
        pool(1)
