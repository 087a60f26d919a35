"""Slots of a batch: block_id * block_size + offset, for all tokens of all its requests in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger.core.tables import NO_SLOT, BlockTable, slot_mapping
from kvledger.errors import ConfigError, RequestError


def two_rows() -> BlockTable:
    """Blocks of 4 tokens. Row 0 holds blocks 9, 2, 5; row 1 holds block 7."""
    table = BlockTable(max_num_reqs=2, max_num_blocks=3, block_size=4)
    table.set_row(0, [9, 2, 5])
    table.set_row(1, [7])
    return table


def test_a_prefill_runs_over_block_boundaries() -> None:
    slots = slot_mapping(two_rows(), rows=[0], starts=[2], num_tokens=[7])
    # Tokens 2, 3 | 4, 5, 6, 7 | 8 lie in blocks 9 | 2 | 5.
    assert slots.tolist() == [38, 39, 8, 9, 10, 11, 20]


def test_decodes_and_prefill_chunks_mix_in_the_order_of_the_batch() -> None:
    slots = slot_mapping(two_rows(), rows=[1, 0, 1], starts=[3, 4, 0], num_tokens=[1, 3, 2])
    assert slots.tolist() == [31, 8, 9, 10, 28, 29]


def test_a_request_without_tokens_has_no_slots() -> None:
    assert slot_mapping(two_rows(), [0, 1], [12, 0], [0, 1]).tolist() == [28]
    assert slot_mapping(two_rows(), [], [], []).tolist() == []


def test_padding_is_marked_as_no_slot() -> None:
    assert slot_mapping(two_rows(), [1], [0], [2], num_slots=5).tolist() == [28, 29, NO_SLOT, NO_SLOT, NO_SLOT]
    assert slot_mapping(two_rows(), [1], [0], [2], num_slots=1).tolist() == [28, 29]


def test_nothing_is_written_to_the_null_block() -> None:
    table = BlockTable(1, 3, block_size=2)
    table.set_row(0, [0, 0, 8])
    assert slot_mapping(table, [0], [1], [5]).tolist() == [NO_SLOT, NO_SLOT, NO_SLOT, 16, 17]


def test_slots_are_int64_and_keep_their_values_when_the_table_moves_on() -> None:
    table = two_rows()
    slots = slot_mapping(table, [1], [0], [2])
    assert (slots.format, slots.itemsize, slots.shape) == ("q", 8, (2,))
    table.set_row(1, [3])
    assert slots.tolist() == [28, 29]


def test_a_slot_beyond_32_bits_is_exact() -> None:
    table = BlockTable(1, 1, block_size=1024)
    table.set_row(0, [2**31 - 1])
    assert slot_mapping(table, [0], [1023], [1]).tolist() == [(2**31 - 1) * 1024 + 1023]


@pytest.mark.parametrize(
    ("rows", "starts", "num_tokens", "message"),
    [
        ([1], [3], [2], "row 1: tokens 3 to 5 asked for, the row's 1 blocks hold tokens 0 to 4"),
        ([0, 1], [0, 4], [1, 1], "row 1: tokens 4 to 5"),
        ([0], [-1], [1], "row 0: tokens -1 to 0"),
        ([0], [1], [-1], "row 0: tokens 1 to 0"),
        ([0], [0], [], "rows, starts, num_tokens: 1, 1 and 0 values"),
    ],
)
def test_a_token_without_an_entry_is_an_error(
    rows: list[int], starts: list[int], num_tokens: list[int], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        slot_mapping(two_rows(), rows, starts, num_tokens)


def test_a_row_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match="row=2"):
        slot_mapping(two_rows(), [2], [0], [1])


@given(
    block_size=st.integers(1, 5),
    rows=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=4),
    data=st.data(),
)
def test_every_token_gets_the_slot_of_the_formula(block_size: int, rows: list[list[int]], data: st.DataObject) -> None:
    table = BlockTable(len(rows), 6, block_size)
    for row, block_ids in enumerate(rows):
        table.set_row(row, block_ids)
    batch = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5))
    starts = [data.draw(st.integers(0, len(rows[row]) * block_size)) for row in batch]
    sizes = [
        data.draw(st.integers(0, len(rows[row]) * block_size - start)) for row, start in zip(batch, starts, strict=True)
    ]
    expected = [
        rows[row][position // block_size] * block_size + position % block_size
        for row, start, size in zip(batch, starts, sizes, strict=True)
        for position in range(start, start + size)
    ]
    assert slot_mapping(table, batch, starts, sizes).tolist() == expected
