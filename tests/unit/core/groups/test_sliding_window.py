"""Sliding windows: what is held, what is given back, and which blocks make a hit. Blocks of 4 tokens."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from kvledger import KVCacheManager, KVCacheSpec, MLAAttentionSpec, Request
from kvledger.core.groups.policy import DraftRule
from kvledger.core.groups.registry import ManagerRegistry
from kvledger.core.groups.sliding_window import SlidingWindowManager
from kvledger.core.units import cdiv
from kvledger.errors import ConfigError
from tests.groups import chunks, compute, full, held, hybrid, managers_of, tables, window, window_mla
from tests.helpers import admit, admitted, hit, leave, request


@pytest.mark.parametrize("spec", [window(8), window_mla(8)])
def test_blocks_that_the_window_has_left_become_null(spec: KVCacheSpec) -> None:
    manager = hybrid(20, spec)
    a = admitted(manager, "a", 16)
    assert tables(manager, a) == ([1, 2, 3, 4],)
    # Token 16 reads 9 .. 16: blocks 0 and 1 (tokens 0 .. 7) are read no more.
    compute(manager, a, 1)
    assert tables(manager, a) == ([0, 0, 3, 4, 5],)
    compute(manager, a, 2)
    assert tables(manager, a) == ([0, 0, 3, 4, 5],)
    # Token 19 reads 12 .. 19.
    compute(manager, a, 1)
    assert tables(manager, a) == ([0, 0, 0, 4, 5],)


def test_extra_tokens_behind_the_window_are_kept() -> None:
    manager = hybrid(20, window(8, extra=2))
    a = admitted(manager, "a", 16)
    compute(manager, a, 1)
    assert tables(manager, a) == ([0, 2, 3, 4, 5],)


def test_tokens_in_flight_keep_their_window() -> None:
    manager = hybrid(20, window(4))
    a = admitted(manager, "a", 16)
    a.num_in_flight_tokens = 8
    compute(manager, a, 1)
    # Processed are 8 tokens: token 8 reads 5 .. 8, so only block 0 goes.
    assert tables(manager, a)[0].count(0) == 1


def test_a_hit_needs_the_blocks_of_its_window_only() -> None:
    manager = hybrid(20, window(8))
    leave(manager, admitted(manager, "a", 25))
    manager.evict_blocks([1, 2, 3])
    found = manager.get_computed_blocks(request("b", 25))
    # Tokens 17 .. 23 are needed for token 24: blocks 4 and 5 (ids 5 and 6).
    assert found.num_tokens == 24
    assert found.blocks.get_block_ids() == ([0, 0, 0, 0, 5, 6],)
    manager.evict_blocks([5])
    # No run of two blocks is left; the one at the start is gone too.
    assert hit(manager, request("b", 25)) == 0


def test_a_run_at_the_start_may_be_shorter_than_the_window() -> None:
    manager = hybrid(20, window(16))
    leave(manager, admitted(manager, "a", 25))
    manager.evict_blocks([3])
    # Blocks 0 and 1 are all that token 8 can read.
    assert manager.get_computed_blocks(request("b", 25)).blocks.get_block_ids() == ([1, 2],)


def test_a_window_of_one_token_needs_no_block_behind_it() -> None:
    manager = hybrid(20, window(1))
    leave(manager, admitted(manager, "a", 9))
    assert managers_of(manager)[0].spec.max_admission_blocks(64, 1) == 2
    assert manager.get_computed_blocks(request("b", 9)).blocks.get_block_ids() == ([0, 0],)


def test_a_window_of_one_token_does_not_stand_in_the_way_of_others() -> None:
    manager = hybrid(20, full(8), window(1))
    leave(manager, admitted(manager, "a", 17))
    assert hit(manager, request("b", 17)) == 16
    assert hit(manager, request("c", [7] * 17)) == 0


def test_a_draft_needs_one_block_more_and_gives_it_up() -> None:
    manager = hybrid(20, window(8), drafts=DraftRule(hashes_ahead=False))
    leave(manager, admitted(manager, "a", 25))
    found = manager.get_computed_blocks(request("b", 25))
    assert found.num_tokens == 20
    assert found.blocks.get_block_ids() == ([0, 0, 0, 4, 5],)


def test_hits_end_at_the_common_block_size() -> None:
    manager = hybrid(30, full(12), window(8))
    leave(manager, admitted(manager, "a", 31))
    assert hit(manager, request("b", 31)) == 24
    # The window's run must end at 12 or 24: without its blocks 4 and 5 it ends at 12.
    assert [hit(manager, request("b", n)) for n in (24, 25, 13, 12)] == [12, 24, 12, 0]


class Windowless(MLAAttentionSpec):
    """A spec of one's own that forgets its window."""


def windowless_registry() -> ManagerRegistry:
    registry = ManagerRegistry()
    registry.register(
        Windowless, lambda spec, group_id, *rest: SlidingWindowManager(spec, group_id, *rest, sliding_window=0)
    )
    return registry


def test_a_window_below_one_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="sliding_window=0"):
        hybrid(4, Windowless(4, 8), registry=windowless_registry())


# Brute force


def walk(
    spec: KVCacheSpec,
    first_read: Callable[[int], int],
    length: int,
    steps: list[int],
    in_flight: int,
    max_model_len: int,
    **options: Any,
) -> None:
    """Computes `length` tokens in those steps, `in_flight` tokens of the past ones not settled, and checks the table.

    Held is every block of a token that a later token reads, whatever is rejected; nothing lies behind the first of
    them but what it needs for being a whole block.
    """
    manager: KVCacheManager = hybrid(
        40,
        spec,
        max_model_len=max_model_len,
        max_in_flight_tokens=max(steps) + in_flight,
        enable_caching=False,
        **options,
    )
    most = spec.max_admission_blocks(max_model_len, max(steps) + in_flight)
    a: Request = request("a", length)
    position = 0
    for size in itertools.cycle(steps):
        size = min(size, length - position)
        if size == 0:
            break
        a.num_in_flight_tokens = min(position, in_flight)
        ok = admit(manager, a, size) is not None if position == 0 else compute(manager, a, size)
        assert ok
        processed = position - a.num_in_flight_tokens
        position += size
        table = tables(manager, a)[0]
        first_needed = first_read(processed) // spec.block_size
        assert all(table[index] != 0 for index in range(first_needed, cdiv(position, spec.block_size)))
        assert all(block_id == 0 for block_id in table[:first_needed])
        assert held(manager, a)[0] <= most
    manager.free(a)
    manager.check()


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("in_flight", [0, 1, 5])
def test_every_token_that_is_read_is_held_and_little_more(block_size: int, in_flight: int) -> None:
    for tokens in range(1, 10):
        for extra in (0, 2):
            for steps in ([1], [2], [3], [7], [5, 1], [1, 4, 2]):
                spec = window(tokens, block_size, extra=extra)

                def first_read(token: int, behind: int = tokens - 1 + extra) -> int:
                    return max(0, token - behind)

                walk(spec, first_read, 19, steps, in_flight, 64)


def test_the_cap_is_reached() -> None:
    """So sizing reserves no block too many: window of 5, blocks of 4, steps of 3: tokens 3 .. 9 lie in 3 blocks."""
    spec = window(5)
    assert spec.max_admission_blocks(64, 3) == cdiv(4 + 3, 4) + 1 == 3
    manager = hybrid(20, spec, max_model_len=64, max_in_flight_tokens=3)
    a = admitted(manager, "a", 7)
    compute(manager, a, 3)
    assert tables(manager, a)[0] == [1, 2, 3]


@pytest.mark.parametrize("length", range(1, 30))
def test_every_hit_holds_its_window(length: int) -> None:
    """For every length and window: the blocks of a hit are null exactly where the next token reads nothing."""
    for tokens in range(2, 14):
        manager = hybrid(20, window(tokens))
        leave(manager, admitted(manager, "a", 29))
        found = manager.get_computed_blocks(request("b", length))
        assert found.num_tokens == (length - 1) // 4 * 4
        first = max(0, found.num_tokens - tokens + 1) // 4
        ids = found.blocks.get_block_ids()[0]
        assert [block_id != 0 for block_id in ids] == [index >= first for index in range(len(ids))]


# What is cached: only what a hit at an aligned length can use


def cached_blocks(retention: int | None, length: int = 64, drafts: DraftRule | None = None) -> list[int]:
    """Indexes of the blocks of a prompt that are cached in a window group of 8 tokens beside full blocks of 4."""
    manager = hybrid(60, full(), window(8), retention_interval=retention, drafts=drafts)
    a = admitted(manager, "a", length)
    pool = manager._pool
    return [i for i, block_id in enumerate(tables(manager, a)[1]) if pool.blocks[block_id].block_hash is not None]


def test_retention_keeps_tails_of_the_window() -> None:
    assert cached_blocks(None) == list(range(16))
    # Where the same prompt again (60, a hit) can resume, and nothing else: its 2 last blocks.
    assert cached_blocks(0) == [13, 14]
    # Once in 16 tokens: the last 2 of each 4 blocks, and those of the prompt's end.
    assert cached_blocks(16) == [2, 3, 6, 7, 10, 11, 13, 14, 15]


def test_retention_with_a_draft_keeps_one_more_a_block_later() -> None:
    # Replay ends: 60 - 4 and 64 - 4, looked up one block further; 3 blocks each.
    assert cached_blocks(0, drafts=DraftRule(hashes_ahead=False)) == [12, 13, 14, 15]
    assert cached_blocks(16, drafts=DraftRule(hashes_ahead=False))[:6] == [2, 3, 4, 6, 7, 8]


def test_what_is_retained_is_what_is_looked_up() -> None:
    """Writer and reader agree, with drafts and without, for every length."""
    for drafts in (None, DraftRule(hashes_ahead=False)):
        for length in range(1, 40):
            dense, sparse = (hybrid(60, full(), window(8), retention_interval=n, drafts=drafts) for n in (None, 0))
            for manager in (dense, sparse):
                leave(manager, admitted(manager, "a", length))
            again = request("b", length)
            assert hit(dense, again) == hit(sparse, again)


def test_a_shared_prefix_is_retained_too() -> None:
    manager = hybrid(60, full(), window(8), retention_interval=0)
    leave(manager, admitted(manager, "a", 41))
    # b shares 20 tokens; full attention has them all, the window only the tail at 40.
    b = request("b", list(range(20)) + [5] * 20)
    found = manager.get_computed_blocks(b)
    assert (found.num_tokens, found.shared_prefix_boundary) == (0, 20)
    b.shared_prefix_boundary = found.shared_prefix_boundary
    admit(manager, b, found=found)
    leave(manager, b)
    assert hit(manager, request("c", list(range(20)) + [6] * 20)) == 20


def test_windows_alone_are_looked_up_as_far_as_names_are_known() -> None:
    """A name covers three tokens behind its block of 4: a prompt of 22 tokens has four names, one of 23 has five."""
    manager = hybrid(40, window(8), window(12), drafts=DraftRule(3, hashes_ahead=True))
    a = request("a", 24)
    chunks(manager, a)
    leave(manager, a)
    assert [hit(manager, request("b", num_tokens)) for num_tokens in (20, 22, 23, 24)] == [16, 16, 20, 20]
