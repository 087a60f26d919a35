"""What a caller outside the ledger can hold, and what the ledger tells code that was written for another one."""

import pytest

from kvledger.errors import BlockError, UnknownRequestError
from tests.helpers import admitted, free_order, leave, ledger, ref_cnts


def test_a_pinned_block_stays_when_its_request_leaves() -> None:
    manager = ledger(usable=4)
    outside = manager.coordinator.outside
    a = admitted(manager, "a", 6)
    pinned = [manager.block_pool.blocks[1]]
    outside.add(pinned)
    leave(manager, a)
    assert ref_cnts(manager, [1, 2]) == [1, 0]
    manager.check()
    outside.release(pinned)
    assert free_order(manager) == [2, 3, 4, 1]
    manager.check()


def test_a_block_released_twice_in_one_call_needs_two_holds() -> None:
    manager = ledger(usable=4)
    outside = manager.coordinator.outside
    a, b, c = manager.block_pool.blocks[1:4]
    outside.add([a, b, c])
    with pytest.raises(BlockError, match="is not held outside"):
        outside.release([b, a, a])
    assert ref_cnts(manager, [1, 2, 3]) == [1, 1, 1]
    outside.add([a])
    outside.release([a, b, a, c])
    # Without hashes they are reused first, in the order of their last mentions.
    assert free_order(manager) == [2, 1, 3, 4]
    manager.check()


def test_blocks_of_a_detached_request_are_the_callers() -> None:
    manager = ledger(usable=4)
    a = admitted(manager, "a", 6)
    blocks = manager.detach(a)
    assert [int(block.block_id) for block in blocks] == [1, 2]
    assert not manager.holds_blocks(a)
    assert manager.num_free_blocks == 2
    manager.check()
    manager.coordinator.outside.release(blocks[::-1])
    assert free_order(manager) == [2, 3, 4, 1]
    with pytest.raises(UnknownRequestError):
        manager.detach(a)
    manager.check()


def test_the_ends_of_a_copy_can_be_handed_over() -> None:
    manager = ledger(usable=4)
    a = admitted(manager, "a", 6)
    manager.fork(a, a.twin("b"))
    copies = manager.take_block_copies()
    ends = manager.coordinator.copies.hand_over(copies, manager.coordinator.outside)
    assert [int(block.block_id) for block in ends] == [2, 3]
    manager.check()
    with pytest.raises(BlockError, match="released already"):
        manager.release_block_copies(copies)
    manager.coordinator.outside.release(ends)
    assert ref_cnts(manager, [2, 3]) == [1, 1]
    manager.check()


def test_how_much_of_a_request_a_later_one_could_hit() -> None:
    manager = ledger(usable=4)
    admitted(manager, "a", 10)
    held = manager.coordinator.require_held("a")
    assert manager.coordinator.num_reusable_tokens(held) == 8
    manager.evict_blocks([2])
    assert manager.coordinator.num_reusable_tokens(held) == 4
