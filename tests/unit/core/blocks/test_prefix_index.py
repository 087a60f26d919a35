"""The prefix index: several blocks may carry one hash, and the first stays first."""

import pytest

from kvledger.core.blocks.block import KVCacheBlock, make_blocks
from kvledger.core.blocks.prefix_index import PrefixIndex
from kvledger.errors import BlockError, InvariantError

H, OTHER = b"hash", b"other"


def index_of(*blocks: KVCacheBlock) -> PrefixIndex:
    index = PrefixIndex()
    for block in blocks:
        block.block_hash = H
        index.insert(H, block)
    return index


def test_lookup_answers_the_only_block() -> None:
    _, a, _ = make_blocks(3)
    index = index_of(a)
    assert index.get(H) is a
    assert index.get(OTHER) is None
    assert len(index) == 1
    index.check()


def test_the_first_block_answers_until_it_goes_then_the_next_in_order() -> None:
    _, a, b, c = make_blocks(4)
    index = index_of(b, a, c)
    assert index.blocks() == {H: [b, a, c]}
    assert len(index) == 1
    for block, heir in ((b, a), (a, c), (c, None)):
        index.remove(H, block)
        assert index.get(H) is heir
        index.check()
    assert len(index) == 0


def test_a_later_block_can_go_first() -> None:
    _, a, b, c = make_blocks(4)
    index = index_of(a, b, c)
    index.remove(H, b)
    assert index.blocks() == {H: [a, c]}
    index.remove(H, c)
    index.remove(H, a)
    assert index.blocks() == {}


def test_removing_what_is_not_there_is_an_error() -> None:
    _, a, b, c = make_blocks(4)
    index = index_of(a, b)
    for block, block_hash in ((c, H), (a, OTHER)):
        with pytest.raises(BlockError, match=f"block {block.block_id} is not in the prefix index"):
            index.remove(block_hash, block)
    index.remove(H, b)
    index.remove(H, a)
    with pytest.raises(BlockError, match="block 1 is not"):
        index.remove(H, a)
    assert index.blocks() == {}


def test_clear_forgets_everything() -> None:
    _, a, b = make_blocks(3)
    index = index_of(a, b)
    index.clear()
    assert index.blocks() == {}
    assert index.get(H) is None


def test_check_finds_later_blocks_without_a_first() -> None:
    _, a, b = make_blocks(3)
    index = index_of(a, b)
    index.check()
    index._first.clear()
    with pytest.raises(InvariantError, match="later blocks without a first one"):
        index.check()
