"""Chunked local attention: token t reads from t // chunk * chunk on. Blocks of 4 tokens."""

import pytest

from kvledger.core.groups.policy import DraftRule
from kvledger.errors import ConfigError
from tests.groups import chunked, compute, full, hybrid, tables
from tests.helpers import admitted, hit, leave, request
from tests.unit.core.groups.test_sliding_window import walk


def test_a_chunk_goes_when_the_next_begins() -> None:
    manager = hybrid(20, chunked(8))
    a = admitted(manager, "a", 8)
    assert tables(manager, a) == ([1, 2],)
    compute(manager, a, 1)
    assert tables(manager, a) == ([0, 0, 3],)
    compute(manager, a, 7)
    assert tables(manager, a) == ([0, 0, 3, 4],)


def test_a_hit_skips_chunks_that_are_over() -> None:
    manager = hybrid(20, full(), chunked(8))
    leave(manager, admitted(manager, "a", 21))
    found = manager.get_computed_blocks(request("b", 21))
    assert found.num_tokens == 20
    # Token 20 is in the chunk that began at 16, in block 4.
    assert [block_id == 0 for block_id in found.blocks.get_block_ids()[1]] == [True] * 4 + [False]
    # Token 16 begins a chunk: nothing of what is before is read.
    assert manager.get_computed_blocks(request("c", 17)).blocks.get_block_ids()[1] == [0] * 4


def test_a_hit_in_the_middle_of_a_chunk_ends_at_the_first_missing_block() -> None:
    manager = hybrid(20, chunked(16))
    leave(manager, admitted(manager, "a", 29))
    # Even the first request starts with the chunk of its last token: nothing before it is ever read.
    assert manager.get_computed_blocks(request("b", 29)).blocks.get_block_ids() == ([0, 0, 0, 0, 1, 2, 3],)
    manager.evict_blocks([2])
    assert manager.get_computed_blocks(request("b", 29)).blocks.get_block_ids() == ([0, 0, 0, 0, 1],)


def test_a_chunk_that_ends_inside_a_block_takes_its_start_along() -> None:
    """Chunks of 6: at 8 tokens the chunk from 6 on is under way, and its first tokens lie in block 1."""
    manager = hybrid(20, full(), chunked(6))
    leave(manager, admitted(manager, "a", 13))
    found = manager.get_computed_blocks(request("b", 13))
    # Of the chunked group's blocks 5, 6, 7 and 8: token 12 begins a chunk, token 8 reads from 6 on.
    assert (found.num_tokens, found.blocks.get_block_ids()[1]) == (12, [0, 0, 0])
    assert manager.get_computed_blocks(request("b", 12)).blocks.get_block_ids()[1] == [0, 6]
    manager.evict_blocks([6])
    # Token 4 is still in the chunk from 0 on, so a hit of 4 tokens needs block 0.
    assert manager.get_computed_blocks(request("b", 12)).blocks.get_block_ids()[1] == [5]
    manager.evict_blocks([5])
    assert hit(manager, request("b", 12)) == 0


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("in_flight", [0, 1, 5])
def test_every_token_that_is_read_is_held_and_little_more(block_size: int, in_flight: int) -> None:
    for tokens in range(block_size, 13, block_size):
        for steps in ([1], [2], [3], [7], [5, 1], [1, 4, 2]):
            spec = chunked(tokens, block_size)

            def first_read(token: int, size: int = tokens) -> int:
                return token // size * size

            walk(spec, first_read, 25, steps, in_flight, 64)


def test_it_stands_beside_groups_of_its_own_block_size_and_without_a_draft() -> None:
    with pytest.raises(ConfigError, match=r"block_size=4: a chunked-local group beside groups whose hits end at .* 8"):
        hybrid(20, full(8), chunked(8))
    with pytest.raises(ConfigError, match="a chunked-local group cannot be the draft's"):
        hybrid(20, full(), chunked(8), drafts=DraftRule(hashes_ahead=False))
