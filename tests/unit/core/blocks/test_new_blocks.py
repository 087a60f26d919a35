"""NewBlocks: blocks of many requests, flat."""

from kvledger import NewBlocks
from kvledger.core.blocks.block import make_blocks


def grown() -> NewBlocks:
    """Row 0 got block 1; row 2 blocks 2 and 3 in group 0 and 4 in group 1; row 3 block 5."""
    null, *blocks = make_blocks(6)
    new = NewBlocks()
    new.add(0, 0, [null, null, null, blocks[0]], 3)
    new.add(2, 0, [null] * 5 + blocks[1:3], 5)
    new.add(2, 1, blocks[3:4], 0)
    new.add(3, 0, [null, blocks[4]], 1)
    return new


def entries(new: NewBlocks) -> list[tuple[int, int, int, int]]:
    return list(zip(new.rows, new.groups, new.positions, new.block_ids, strict=True))


def test_entries_say_where_in_which_table_a_block_goes() -> None:
    assert entries(grown()) == [(0, 0, 3, 1), (2, 0, 5, 2), (2, 0, 6, 3), (2, 1, 0, 4), (3, 0, 1, 5)]
    assert len(grown()) == 5
    assert grown().ids_by_row(2) == {0: ([1], []), 2: ([2, 3], [4]), 3: ([5], [])}


def test_a_request_that_is_taken_back_leaves_no_entry_and_the_rows_behind_it_move_up() -> None:
    new = grown()
    new.remove_row(2)
    assert entries(new) == [(0, 0, 3, 1), (2, 0, 1, 5)]
    new.remove_row(1)
    assert entries(new) == [(0, 0, 3, 1), (1, 0, 1, 5)]


def test_nothing_new_is_empty() -> None:
    new = NewBlocks()
    assert (len(new), list(new.rows), new.ids_by_row(1)) == (0, [], {})
    assert memoryview(new.block_ids).tolist() == []
