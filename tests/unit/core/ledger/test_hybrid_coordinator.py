"""Several groups: one agreed hit, one allocation, all or nothing. Blocks of 4 tokens unless said otherwise."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger import AdmissionRule, KVCacheManager, KVCacheSpec, Sha256BlockHasher
from kvledger.core.groups.policy import DraftRule
from kvledger.core.ledger.hit_search import HybridKVCacheCoordinator
from kvledger.errors import ConfigError
from tests.groups import (
    chunked,
    chunks,
    compute,
    cross,
    full,
    groups_of,
    held,
    hybrid,
    managers_of,
    mla,
    ring,
    state,
    tables,
    window,
)
from tests.helpers import admit, admitted, decode, hit, leave, other, pool_of, request, snapshot


def filled(
    usable: int, length: int, *specs: KVCacheSpec, **options: Any
) -> tuple[KVCacheManager, tuple[list[int], ...]]:
    """A ledger that has computed a prompt of that length, and the block ids that it had, whose request is gone."""
    manager = hybrid(usable, *specs, **options)
    a = request("a", length)
    chunks(manager, a)
    mine = tables(manager, a)
    leave(manager, a)
    return manager, mine


# One agreed hit


def test_the_longest_length_that_every_group_can_start_from() -> None:
    manager, (_, first, second) = filled(60, 41, full(), window(8), window(16))
    assert hit(manager, request("b", 41)) == 40
    # Without its block 9 the first window ends at 36; it reads blocks 7 and 8 then.
    manager.evict_blocks(first[9:10])
    assert hit(manager, request("b", 41)) == 36
    # The second one needs four blocks in a row before 36, and has none but those up to 24 and from 28 on.
    manager.evict_blocks(second[6:7])
    assert hit(manager, request("b", 41)) == 24
    # The first one has to be asked again: it ends at 24 only if blocks 4 and 5 are there.
    manager.evict_blocks(first[5:6])
    assert hit(manager, request("b", 41)) == 20
    manager.check()


def test_groups_push_each_other_down_until_all_agree() -> None:
    """Six groups: three windows whose gaps let each only start where another cannot."""
    manager, ids = filled(90, 41, full(), mla(), window(5), window(6, heads=2), window(7, heads=4), ring())
    manager.evict_blocks([ids[2][9], ids[3][8], ids[4][7], ids[2][6]])
    # 40, 36, 32 and 28 fail in turn: block 9 of the first, 8 of the second, 7 and (for 28) 6 of others.
    found = manager.get_computed_blocks(request("b", 41))
    assert found.num_tokens == 24
    assert found.limiting_group in (2, 3, 4)
    assert [len(blocks) for blocks in found.blocks.blocks] == [6, 6, 6, 6, 6, 0]


def test_windows_alone_agree_too() -> None:
    manager, (first, second) = filled(60, 41, window(8), window(16))
    manager.evict_blocks([first[9], second[5]])
    # The second needs four in a row or a run from the start: 36 has blocks 5 .. 8, of which 5 is gone; 20 has 1 .. 4.
    assert hit(manager, request("b", 41)) == 20


def test_full_attention_is_cut_to_what_the_others_have() -> None:
    manager, (_, windowed) = filled(40, 25, full(), window(8))
    manager.evict_blocks(windowed[5:6])
    found = manager.get_computed_blocks(request("b", 25))
    assert [len(blocks) for blocks in found.blocks.blocks] == [5, 5]


def test_the_group_that_limits_a_hit_is_named() -> None:
    manager, (wide, windowed) = filled(40, 25, full(), window(8))
    assert manager.get_computed_blocks(request("b", 25)).limiting_group == -1
    manager.evict_blocks(windowed[5:6])
    assert manager.get_computed_blocks(request("b", 25)).limiting_group == 1
    manager.evict_blocks(wide[1:2])
    assert manager.get_computed_blocks(request("b", 25)).limiting_group == 0
    single = hybrid(8, full())
    assert single.get_computed_blocks(request("b", 25)).limiting_group == 0


def test_larger_blocks_limit_a_hit_that_smaller_ones_could_go_on() -> None:
    """28 shared tokens are seven blocks of 4 but only one whole block of 16, in whatever order the groups stand."""
    fine, coarse = full(4), full(16, heads=2)
    for specs, limiting in (((fine, coarse), 1), ((coarse, fine), 0), ((fine, window(16, block_size=16)), 1)):
        manager, _ = filled(60, 60, *specs)
        found = manager.get_computed_blocks(request("b", list(range(28)) + other(32)))
        assert (found.num_tokens, found.limiting_group, found.limited_end) == (16, limiting, 28)
        # 12 shared tokens are no hit at all; and 31 tokens could not hit more than 16 whatever was cached.
        found = manager.get_computed_blocks(request("c", list(range(12)) + other(32)))
        assert (found.num_tokens, found.limiting_group, found.limited_end) == (0, limiting, 12)
        found = manager.get_computed_blocks(request("d", list(range(28)) + other(3)))
        assert (found.num_tokens, found.limiting_group, found.limited_end) == (16, -1, 0)


def test_what_a_draft_gives_up_limits_no_group() -> None:
    manager, _ = filled(60, 41, full(), full(heads=2), drafts=DraftRule(hashes_ahead=False), draft=0)
    found = manager.get_computed_blocks(request("b", 41))
    assert (found.num_tokens, found.limiting_group, found.limited_end) == (36, -1, 0)


@given(
    sizes=st.lists(st.sampled_from([4, 8, 16]), min_size=2, max_size=4),
    shared=st.integers(0, 70),
    evicted=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 17)), max_size=4),
)
def test_the_limiting_group_is_the_one_that_has_least(
    sizes: list[int], shared: int, evicted: set[tuple[int, int]]
) -> None:
    manager, mine = filled(120, 70, *[full(size, heads=number + 1) for number, size in enumerate(sizes)])
    manager.evict_blocks([mine[group][i] for group, i in evicted if group < len(sizes) and i < len(mine[group])])
    b = request("b", list(range(shared)) + other(100 - shared))
    found = manager.get_computed_blocks(b)
    ends = [_cached_end(manager, group_id, b.block_hashes) for group_id in range(len(sizes))]
    assert found.num_tokens == min(ends) // max(sizes) * max(sizes)
    if max(ends) > found.num_tokens:
        assert found.limited_end == max(ends)
        if min(ends) < max(ends):
            assert ends[found.limiting_group] == min(ends)
        else:
            assert sizes[found.limiting_group] == max(sizes)


def _cached_end(manager: KVCacheManager, group_id: int, hashes: list[bytes]) -> int:
    """Tokens from the start that the group has cached, in whole blocks of its own."""
    group = managers_of(manager)[group_id]
    end = group.block_size
    while manager.block_pool.get_cached_block(hashes[end // group.policy.hash_block_size - 1], group_id) is not None:
        end += group.block_size
    return end - group.block_size


def test_a_boundary_that_full_attention_has_and_a_window_has_not() -> None:
    manager, (_, windowed) = filled(40, 25, full(), window(8))
    manager.evict_blocks(windowed[5:6])
    found = manager.get_computed_blocks(request("b", 25))
    assert (found.num_tokens, found.shared_prefix_boundary) == (20, 24)
    assert manager.get_computed_blocks(request("c", 21)).shared_prefix_boundary == 0


def test_groups_of_one_spec_are_one_lookup() -> None:
    manager, (_, first, second) = filled(60, 25, full(), window(8), window(8))
    coordinator = manager._coordinator
    assert isinstance(coordinator, HybridKVCacheCoordinator)
    assert len(coordinator._lookup_groups) == 2
    manager.evict_blocks([first[5], second[4]])
    # 20 needs blocks 3 and 4 of both, 16 needs 2 and 3.
    assert hit(manager, request("b", 25)) == 16


# Block sizes


def test_a_larger_block_is_a_hit_only_as_a_whole() -> None:
    manager, _ = filled(60, 29, full(4), full(16))
    # 12 shared tokens are three blocks of 4 but no block of 16; with 20, hits end at 16.
    assert [hit(manager, request("b", n)) for n in (13, 16, 17, 21, 29)] == [0, 0, 16, 16, 16]
    assert hit(manager, request("c", list(range(12)) + other(20))) == 0


def test_a_block_is_named_by_its_last_unit() -> None:
    manager, (small, large) = filled(60, 33, full(4), full(16))
    blocks, hashes = pool_of(manager).blocks, request("x", 33)
    manager.get_computed_blocks(hashes)
    assert blocks[small[3]].block_hash == blocks[large[0]].block_hash == hashes.block_hashes[3]
    assert blocks[large[1]].block_hash == hashes.block_hashes[7]


def test_sizes_without_a_common_boundary_meet_at_their_multiple() -> None:
    manager, _ = filled(60, 49, full(6), window(8, 4))
    assert [hit(manager, request("b", n)) for n in (12, 13, 24, 25, 49)] == [0, 12, 12, 24, 48]


@pytest.mark.parametrize("unit", [3, 8])
def test_a_hash_unit_that_does_not_divide_the_blocks_is_refused(unit: int) -> None:
    with pytest.raises(ConfigError, match=f"hash_block_size={unit}"):
        hybrid(9, full(4), full(16), hasher=Sha256BlockHasher(unit))


def test_a_finer_hash_unit_than_needed() -> None:
    manager = hybrid(60, full(8), window(16, 8), hasher=Sha256BlockHasher(2))
    leave(manager, admitted(manager, "a", 25))
    assert hit(manager, request("b", 25)) == 24
    manager.check()


def test_encoder_groups_alone_cannot_be_cached() -> None:
    with pytest.raises(ConfigError, match="none can be cached"):
        hybrid(9, ring(), cross())


# Drafts


@pytest.mark.parametrize("num_windows", [1, 2, 4])
def test_the_last_block_is_dropped_once_on_the_agreed_length(num_windows: int) -> None:
    windows = [window(8, heads=heads) for heads in range(1, num_windows + 1)]
    manager, ids = filled(90, 41, full(), *windows, drafts=DraftRule(hashes_ahead=False))
    assert hit(manager, request("b", 41)) == 36
    manager.evict_blocks(ids[1][8:9])
    # The first window can look up to 32 at most, and gives up one block of that.
    assert hit(manager, request("b", 41)) == 28


def test_only_the_drafts_group_gives_up_a_block_where_one_is_marked() -> None:
    manager, _ = filled(90, 41, full(), window(8), full(heads=2), draft=2, drafts=DraftRule(hashes_ahead=False))
    found = manager.get_computed_blocks(request("b", 41))
    assert found.num_tokens == 36
    # All of 40 is cached everywhere: the draft's group alone looked that far.
    assert [len(blocks) for blocks in found.blocks.blocks] == [9, 9, 9]


def test_several_modules_cache_nothing_that_may_change() -> None:
    manager = hybrid(40, full(), window(8), drafts=DraftRule(num_lookahead_tokens=3, hashes_ahead=False))
    a = admitted(manager, "a", 16)
    pool = pool_of(manager)
    num_hashed = [sum(pool.blocks[i].block_hash is not None for i in table) for table in tables(manager, a)]
    # Tokens 14 and 15 are computed again, so the last block is not final.
    assert num_hashed == [3, 3]
    decode(manager, a)
    assert hit(manager, request("b", 17)) == 8
    decode(manager, a)
    assert sum(pool.blocks[i].block_hash is not None for i in tables(manager, a)[0]) == 4


# Retention


def test_an_interval_must_be_where_hits_can_end() -> None:
    for interval in (-8, 12):
        with pytest.raises(ConfigError, match=f"retention_interval={interval}: no multiple of 8"):
            hybrid(9, full(4), window(8, 8), retention_interval=interval)


@pytest.mark.parametrize(("interval", "hits"), [(None, [8, 16, 24, 32]), (16, [0, 16, 16, 32]), (0, [0, 0, 0, 32])])
def test_sparse_groups_keep_tails_by_interval(interval: int | None, hits: list[int]) -> None:
    manager, _ = filled(60, 33, full(), window(8), retention_interval=interval)
    assert [hit(manager, request("b", n)) for n in (9, 17, 25, 33)] == hits


# One allocation


def test_all_groups_or_none() -> None:
    manager = hybrid(7, full(), window(8), ring())
    before = snapshot(pool_of(manager))
    # 4 + 4 + 1 blocks do not fit in 7, though each group's would.
    assert admit(manager, request("a", 13)) is None
    assert snapshot(pool_of(manager)) == before
    assert admit(manager, a := request("b", 9), admission=AdmissionRule()) is not None
    before = snapshot(pool_of(manager))
    assert not compute(manager, a, 4)
    assert snapshot(pool_of(manager)) == before
    manager.check()


def test_what_a_window_has_left_goes_back_before_blocks_are_counted() -> None:
    manager = hybrid(6, full(), window(4))
    a = admitted(manager, "a", 12)
    # Token 12 reads 9 .. 12: two blocks of the window are left, and the step needs two.
    assert manager.num_free_blocks == 0
    assert compute(manager, a, 1)
    assert held(manager, a) == [4, 2]
    assert compute(manager, a, 3)
    # They are gone even when the step does not fit in the end: nobody reads them.
    assert not compute(manager, a, 1)
    assert (held(manager, a), manager.num_free_blocks) == ([4, 1], 1)
    manager.check()


def test_a_hit_that_fits_and_a_group_that_does_not() -> None:
    manager, _ = filled(14, 17, full(), window(16))
    other_one = admitted(manager, "o", other(9))
    b = request("b", 25)
    found = manager.get_computed_blocks(b)
    before = snapshot(pool_of(manager))
    assert admit(manager, b, found=found) is None
    assert snapshot(pool_of(manager)) == before
    leave(manager, other_one)
    assert admit(manager, b, found=manager.get_computed_blocks(b)) is not None
    manager.check()


def test_one_groups_hit_is_never_another_groups_new_block() -> None:
    """Hits of all groups leave the free queue before any group takes blocks (vllm-project/vllm#33775)."""
    manager, ids = filled(12, 17, full(), window(8))
    b = request("b", 21)
    found = manager.get_computed_blocks(b)
    assert found.num_tokens == 16
    assert admit(manager, b, found=found) is not None
    assert tables(manager, b)[1][2:4] == ids[1][2:4]
    assert len({*tables(manager, b)[0], *tables(manager, b)[1][2:]}) == 6 + 4
    manager.check()


def test_admission_counts_a_window_at_its_most() -> None:
    """The whole sequence of 40 tokens: full attention 10 blocks, a window of 8 with steps of 8 at most 5."""
    manager = hybrid(15, full(), window(8), max_in_flight_tokens=8)
    assert manager.num_blocks_for(40) == 10 + 5
    assert admit(manager, request("a", 40), 8, admission=AdmissionRule()) is not None
    other_one = hybrid(14, full(), window(8), max_in_flight_tokens=8)
    assert admit(other_one, request("a", 40), 8, admission=AdmissionRule()) is None


# External tokens


def test_external_tokens_outside_the_window_get_no_block() -> None:
    manager = hybrid(40, full(), window(8), chunked(16))
    a = request("a", 40)
    admit(manager, a, 4, num_external_computed_tokens=32)
    # Token 32 reads from 25 on in the window, from 32 on in its chunk.
    assert held(manager, a) == [9, 3, 1]
    assert [table[:9].count(0) for table in tables(manager, a)] == [0, 6, 8]
    manager.check()


def test_external_tokens_behind_a_hit() -> None:
    manager, _ = filled(60, 17, full(), window(8))
    b = request("b", list(range(16)) + other(25))
    found = manager.get_computed_blocks(b)
    assert found.num_tokens == 16
    admit(manager, b, 1, found=found, num_external_computed_tokens=16)
    # Of the window's hit nothing is read any more at 32: only tokens 25 .. 31 are delivered.
    assert [table.count(0) for table in tables(manager, b)] == [0, 6]
    manager.check()


# Context parallel


def test_sharded_and_replicated_groups_beside_each_other() -> None:
    """Full attention is spread over 2 ranks: 8 tokens a block; a state is on each of them."""
    manager = hybrid(40, full(), state(8), context_parallel_size=2)
    a = request("a", 33)
    chunks(manager, a)
    assert held(manager, a)[0] == 5
    leave(manager, a)
    assert [hit(manager, request("b", n)) for n in (9, 17, 33)] == [0, 0, 32]


# Forks


def test_a_fork_over_groups() -> None:
    manager = hybrid(40, full(), window(8), full(8), ring())
    a = admitted(manager, "a", 18)
    compute(manager, a, 1)
    b = a.twin("b")
    num_free = manager.num_free_blocks
    assert manager.num_blocks_to_fork(a) == 4
    assert manager.fork(a, b) is not None
    assert num_free - manager.num_free_blocks == 4
    b.num_computed_tokens = 19
    mine, its = tables(manager, a), tables(manager, b)
    assert [len(table) for table in its] == [5, 5, 3, 1]
    assert [sum(x == y != 0 for x, y in zip(m, i, strict=True)) for m, i in zip(mine, its, strict=True)] == [4, 2, 2, 0]
    assert [c.group_id for c in manager.take_block_copies()] == [0, 1, 2, 3]
    manager.check()
    assert compute(manager, b, 5)
    manager.check()


def test_a_fork_that_does_not_fit_one_group_changes_nothing() -> None:
    manager = hybrid(8, full(), window(8), ring())
    a = admitted(manager, "a", 9)
    before = snapshot(pool_of(manager))
    assert (manager.num_blocks_to_fork(a), manager.num_free_blocks) == (3, 1)
    assert manager.fork(a, a.twin("b")) is None
    assert snapshot(pool_of(manager)) == before


def test_caching_off_looks_up_nothing_in_any_group() -> None:
    manager = hybrid(40, full(), window(8), enable_caching=False)
    leave(manager, admitted(manager, "a", 17))
    assert hit(manager, request("b", 17)) == 0
    assert groups_of(full())[0].layer_names == ("layer.0",)
