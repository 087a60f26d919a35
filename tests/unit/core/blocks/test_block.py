"""The queue of free blocks."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger import FreeKVCacheBlockQueue, KVCacheBlock
from kvledger.core.blocks.block import make_blocks
from kvledger.errors import BlockError, InvariantError, OutOfBlocksError


def queue(usable: int) -> tuple[FreeKVCacheBlockQueue, list[KVCacheBlock]]:
    blocks = make_blocks(usable + 1)
    return FreeKVCacheBlockQueue(blocks), blocks


def popped(free: FreeKVCacheBlockQueue, num_blocks: int) -> list[int]:
    blocks: list[KVCacheBlock] = []
    free.first_n(num_blocks, blocks)
    for block in blocks:
        free.remove(block)
    return [int(block.block_id) for block in blocks]


def test_it_starts_with_every_block_but_the_null_block_in_order() -> None:
    free, blocks = queue(4)
    assert free.block_ids() == [1, 2, 3, 4]
    assert len(free) == free.num_free_blocks == 4
    assert blocks[0].is_null
    assert not blocks[1].is_null
    free.check()


def test_the_first_n_are_told_or_none() -> None:
    free, blocks = queue(4)
    assert popped(free, 3) == [1, 2, 3]
    assert popped(free, 0) == []
    with pytest.raises(OutOfBlocksError, match="num_blocks=2: only 1 blocks are free"):
        popped(free, 2)
    assert free.block_ids() == [4]
    table = [blocks[0]]
    free.first_n(1, table)
    assert table == [blocks[0], blocks[4]]
    free.remove(blocks[4])
    assert free.block_ids() == []
    free.check()


def test_remove_takes_from_the_middle_and_both_ends() -> None:
    free, blocks = queue(5)
    for block_id, left in ((3, [1, 2, 4, 5]), (1, [2, 4, 5]), (5, [2, 4])):
        free.remove(blocks[block_id])
        assert free.block_ids() == left
        free.check()


def test_append_goes_to_the_end_and_prepend_to_the_front_in_order() -> None:
    free, blocks = queue(5)
    popped(free, 4)
    free.append_n([blocks[2], blocks[1]])
    free.prepend_n([blocks[4], blocks[3]])
    assert free.block_ids() == [4, 3, 5, 2, 1]
    free.remove(blocks[5])
    free.prepend_n([blocks[5]])
    assert free.block_ids() == [5, 4, 3, 2, 1]
    free.append_n([])
    free.prepend_n([])
    assert len(free) == 5
    free.check()


def test_a_block_out_of_the_queue_cannot_be_removed_nor_one_in_it_added() -> None:
    free, blocks = queue(3)
    popped(free, 1)
    with pytest.raises(BlockError, match="block 1 is not in the free queue"):
        free.remove(blocks[1])
    with pytest.raises(BlockError, match="block 0 is not in the free queue"):
        free.remove(blocks[0])
    for add, again in ((free.append_n, 2), (free.prepend_n, 2), (free.append_n, 0)):
        with pytest.raises(BlockError, match="in the free queue already"):
            add([blocks[again]])
    assert free.block_ids() == [2, 3]
    free.check()


def test_check_finds_broken_links_and_counts() -> None:
    free, blocks = queue(3)
    blocks[2].prev_free_id = 3
    with pytest.raises(InvariantError, match="link 1 -> 2 one-way"):
        free.check()
    free, blocks = queue(3)
    free.num_free_blocks = 2
    with pytest.raises(InvariantError, match="more blocks linked than counted"):
        free.check()
    free.num_free_blocks = 4
    with pytest.raises(InvariantError, match="3 linked, 4 counted"):
        free.check()


def test_a_block_shows_who_it_is() -> None:
    block = make_blocks(2)[1]
    assert repr(block) == "KVCacheBlock(1, ref_cnt=0)"
    block.ref_cnt = 2
    block.block_hash = b"x"
    block.num_hash_tokens = 16
    assert repr(block) == "KVCacheBlock(1, ref_cnt=2, 16 tokens cached)"


@given(st.integers(0, 6), st.lists(st.tuples(st.sampled_from("nrfe"), st.integers(0, 5)), max_size=30))
def test_it_behaves_like_a_deque(usable: int, moves: list[tuple[str, int]]) -> None:
    free, blocks = queue(usable)
    model, out = deque(range(1, usable + 1)), deque[int]()
    for move, number in moves:
        if move == "n" and number <= len(model):
            ids = [model.popleft() for _ in range(number)]
            out.extend(ids)
            assert popped(free, number) == ids
        elif move == "r" and model:
            block_id = model[number % len(model)]
            model.remove(block_id)
            out.append(block_id)
            free.remove(blocks[block_id])
        elif move in "fe":
            ids = [out.popleft() for _ in range(min(number, len(out)))]
            if move == "f":
                model.extendleft(reversed(ids))
                free.prepend_n([blocks[block_id] for block_id in ids])
            else:
                model.extend(ids)
                free.append_n([blocks[block_id] for block_id in ids])
        assert free.block_ids() == list(model)
        free.check()
