"""BlockTable: rows of block ids, seen from outside without a copy, and untouched by calls that fail."""

from array import array
from collections.abc import Callable

import pytest

from kvledger.core.tables import BlockTable
from kvledger.errors import BlockError, ConfigError


def table(max_num_reqs: int = 3, max_num_blocks: int = 4, block_size: int = 16) -> BlockTable:
    return BlockTable(max_num_reqs, max_num_blocks, block_size)


def test_a_new_table_holds_null_blocks_only() -> None:
    fresh = table()
    assert fresh.view().tolist() == [[0, 0, 0, 0]] * 3
    assert [fresh.num_blocks(row) for row in range(3)] == [0, 0, 0]


def test_a_new_request_overwrites_its_row_and_a_running_one_appends() -> None:
    rows = table()
    rows.set_row(1, [7, 8])
    rows.append_row(1, [9])
    rows.append_row(1, [])
    assert rows.block_ids(1) == [7, 8, 9]
    assert rows.view().tolist() == [[0, 0, 0, 0], [7, 8, 9, 0], [0, 0, 0, 0]]
    rows.check()


def test_a_shorter_request_leaves_nothing_of_the_one_before_it() -> None:
    rows = table()
    rows.set_row(0, [7, 8, 9, 10])
    rows.set_row(0, [5])
    assert rows.block_ids(0) == [5]
    assert rows.view().tolist()[0] == [5, 0, 0, 0]
    rows.clear_row(0)
    assert rows.num_blocks(0) == 0
    assert rows.view().tolist()[0] == [0, 0, 0, 0]
    rows.check()


def test_null_blocks_in_front_count_as_entries() -> None:
    rows = table()
    rows.set_row(2, [0, 0, 6])
    assert rows.num_blocks(2) == 3
    assert rows.block_ids(2) == [0, 0, 6]


def test_the_view_is_the_table_and_not_a_copy() -> None:
    rows = table(2, 3)
    view = rows.view()
    assert (view.shape, view.format, view.itemsize, view.readonly) == ((2, 3), "i", 4, True)
    rows.set_row(1, [4, 5])
    assert view[1, 0] == 4
    assert view[1, 1] == 5
    rows.clear_row(1)
    assert view.tolist() == [[0, 0, 0], [0, 0, 0]]
    # Rows lie one behind the other, as a kernel expects them.
    rows.set_row(0, [1, 2, 3])
    rows.set_row(1, [4])
    assert array("i", view.tobytes()).tolist() == [1, 2, 3, 4, 0, 0]


def test_the_view_outlives_its_table() -> None:
    rows = table(1, 2)
    rows.set_row(0, [3, 4])
    view = rows.view()
    del rows
    assert view.tolist() == [[3, 4]]


def test_numpy_takes_the_view_as_it_is() -> None:
    numpy = pytest.importorskip("numpy")
    rows = table(2, 3)
    array_of_rows = numpy.asarray(rows.view())
    assert (array_of_rows.dtype, array_of_rows.shape) == (numpy.int32, (2, 3))
    rows.set_row(0, [9])
    assert array_of_rows[0, 0] == 9


def test_block_ids_up_to_the_largest_int32_are_kept_exactly() -> None:
    rows = table()
    rows.set_row(0, [2**31 - 1])
    assert rows.block_ids(0) == [2147483647]


@pytest.mark.parametrize(
    ("misuse", "error", "message"),
    [
        (lambda rows: rows.append_row(0, [4, 5, 6]), ConfigError, r"max_num_blocks=4: a row needs 5 blocks \(80 tok"),
        (lambda rows: rows.set_row(0, [1, 2, 3, 4, 5]), ConfigError, "give the table at least 5"),
        (lambda rows: rows.set_row(3, [1]), ConfigError, "row=3: the table has rows 0 to 2"),
        (lambda rows: rows.append_row(-1, [1]), ConfigError, "row=-1"),
        (lambda rows: rows.clear_row(3), ConfigError, "row=3"),
        (lambda rows: rows.num_blocks(3), ConfigError, "row=3"),
        (lambda rows: rows.block_ids(3), ConfigError, "row=3"),
        (lambda rows: rows.append_row(0, [4, -1]), BlockError, "-1 is no block id"),
        (lambda rows: rows.set_row(0, [4, 2**31]), BlockError, "2147483648 is no block id"),
        (lambda rows: rows.set_row(0, [4, 5, 6, -(2**31)]), BlockError, "-2147483648 is no block id"),
        (lambda rows: rows.set_row(0, [4, 5, "6"]), BlockError, "'6' is no block id"),
        (lambda rows: rows.set_row(0, [2**70]), BlockError, "1180591620717411303424 is no block id"),
    ],
)
def test_misuse_names_value_and_fix_and_changes_nothing(
    misuse: Callable[[BlockTable], object], error: type[Exception], message: str
) -> None:
    rows = table()
    rows.set_row(0, [7, 8])
    with pytest.raises(error, match=message):
        misuse(rows)
    assert rows.view().tolist() == [[7, 8, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert rows.num_blocks(0) == 2
    rows.check()


@pytest.mark.parametrize("field", ["max_num_reqs", "max_num_blocks", "block_size"])
def test_a_table_of_nothing_is_refused(field: str) -> None:
    sizes = {"max_num_reqs": 1, "max_num_blocks": 1, "block_size": 1, field: 0}
    with pytest.raises(ConfigError, match=f"{field}=0"):
        BlockTable(**sizes)
