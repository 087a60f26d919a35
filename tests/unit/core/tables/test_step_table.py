"""A step's copy of a table: the rows of its requests, with null blocks where no attention of the step can read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger.core.tables import BlockTable, step_table
from kvledger.errors import ConfigError, RequestError
from tests.groups import chunked, full, state, window, window_mla
from tests.tables import Stack


def two_rows() -> BlockTable:
    """Blocks of 4 tokens. Row 0 holds blocks 9, 2, 5; row 1 holds block 7."""
    table = BlockTable(max_num_reqs=3, max_num_blocks=3, block_size=4)
    table.set_row(0, [9, 2, 5])
    table.set_row(1, [7])
    return table


def test_rows_come_in_the_order_of_the_step() -> None:
    assert step_table(two_rows(), [1, 0], [3, 11]).tolist() == [[7, 0, 0], [9, 2, 5]]


def test_it_is_padded_with_rows_of_null_blocks() -> None:
    assert step_table(two_rows(), [1], [3], num_rows=3).tolist() == [[7, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert step_table(two_rows(), [], [], num_rows=1).tolist() == [[0, 0, 0]]


def test_it_has_memory_of_its_own() -> None:
    table = two_rows()
    copy = step_table(table, [0], [11])
    table.clear_row(0)
    assert copy.tolist() == [[9, 2, 5]]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (0, [9, 2, 5]),
        (6, [9, 2, 5]),  # reads token 3, the last one of the first block
        (7, [0, 2, 5]),
        (10, [0, 2, 5]),
        (11, [0, 0, 5]),
    ],
)
def test_a_window_of_4_tokens_leaves_blocks_behind(start: int, expected: list[int]) -> None:
    assert step_table(two_rows(), [0], [start], num_readable=3).tolist() == [expected]


def test_a_window_of_one_token_reads_nothing_before_it() -> None:
    assert step_table(two_rows(), [0], [4], num_readable=0).tolist() == [[0, 2, 5]]


@given(st.data())
def test_random_tables_against_a_naive_copy(data: st.DataObject) -> None:
    block_size, width, num_rows = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4)))
    table = BlockTable(num_rows, width, block_size)
    held = data.draw(st.lists(st.lists(st.integers(1, 99), max_size=width), min_size=num_rows, max_size=num_rows))
    for row, block_ids in enumerate(held):
        table.set_row(row, block_ids)
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=6))
    starts = [data.draw(st.integers(0, block_size * width)) for _ in rows]
    num_readable = data.draw(st.integers(-1, 12))
    expected = []
    for row, start in zip(rows, starts, strict=True):
        entries = held[row] + [0] * (width - len(held[row]))
        for index in range(width):
            last_token = (index + 1) * block_size - 1
            if num_readable >= 0 and last_token < start - num_readable:
                entries[index] = 0
        expected.append(entries)
    assert step_table(table, rows, starts, num_readable).tolist() == expected


def test_what_cannot_be_is_refused() -> None:
    table = two_rows()
    with pytest.raises(RequestError, match="rows, starts: 1 and 2 values"):
        step_table(table, [0], [0, 1])
    with pytest.raises(RequestError, match="rows: none"):
        step_table(table, [], [])
    with pytest.raises(RequestError, match=r"starts\[0\]=-1"):
        step_table(table, [0], [-1])
    with pytest.raises(ConfigError, match="row=3"):
        step_table(table, [3], [0])


@pytest.mark.parametrize(("decisions", "expected"), [("0.32", [1, 2, 3, 4]), ("0.33", [0, 0, 3, 4])])
def test_each_release_has_its_own_entries_below_a_window(decisions: str, expected: list[int]) -> None:
    stack = Stack(12, window(4), decisions=decisions)
    stack.add("a", 12, max_tokens=8)
    stack.steps(2)
    output = stack.schedule()
    # Token 13 is computed, and reads tokens 10 to 12; the blocks of 0 to 7 went back to the pool.
    assert output.ranges_by_request() == {"a": (13, 14)}
    rows, starts = [stack.tables.row("a")], list(output.num_computed_tokens)
    assert stack.tables.step_table(0, rows, starts).tolist()[0][:4] == expected
    assert stack.row("a") == [1, 2, 3, 4]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_nobody_finds_a_block_of_somebody_else(steps_in_flight: int) -> None:
    """Over a pool that is reused all the time: Stack proves it after every step."""
    stack = Stack(24, full(), window(4), window_mla(6), chunked(8), state(4), steps_in_flight=steps_in_flight)
    for index in range(6):
        stack.add(str(index), [index] * (5 + 3 * index), max_tokens=20)
    for _ in range(80):
        if len(stack.in_flight) == steps_in_flight:
            stack.deliver()
        stack.schedule()
    assert stack.num_preempted > 0
