"""Slots of a whole batch: where in the KV tensors of a group each scheduled token goes.

slot = block_id * block_size + offset: tensors of [num_blocks, block_size, ...], seen as [num_blocks * block_size, ...],
are indexed by it.
"""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from kvledger.core.tables.block_table import BlockTable
from kvledger.errors import RequestError

# No slot: the entry is padding, or the token's block is the null block. Nothing may be written for it.
NO_SLOT: Final = -1


def slot_mapping(
    table: BlockTable, rows: list[int], starts: list[int], num_tokens: list[int], num_slots: int = 0
) -> memoryview:
    """Slots of tokens [starts[i], starts[i] + num_tokens[i]) of the request in rows[i], all in that order.

    A read-only int64 view of shape [max(sum(num_tokens), num_slots)], in memory of its own, so that a step in flight
    keeps its slots: `num_slots` pads a batch of fixed length with NO_SLOT. RequestError when a token has no entry in
    its row, ConfigError for a row that is not in the table.
    """
    total = _require_sound_batch(table, rows, starts, num_tokens)
    no_slot: i64 = NO_SLOT
    length: i64 = max(total, num_slots)
    slots = vec[i64]([no_slot] * length)
    entries = table.entries
    block_size: i64 = table.block_size
    row_length: i64 = table.max_num_blocks
    filled: i64 = 0
    for index in range(len(rows)):
        position: i64 = starts[index]
        left: i64 = num_tokens[index]
        num_before: i64 = position // block_size
        offset: i64 = position - num_before * block_size
        row: i64 = rows[index]
        entry: i64 = row * row_length + num_before
        while left > 0:
            # One block's share of the tokens.
            num_here: i64 = block_size - offset
            if num_here > left:
                num_here = left
            block_id: i64 = i64(entries[entry])
            if block_id != 0:
                slot: i64 = block_id * block_size + offset
                for step in range(num_here):
                    slots[filled + step] = slot + step
            filled += num_here
            left -= num_here
            entry += 1
            offset = 0
    return memoryview(slots)


def _require_sound_batch(table: BlockTable, rows: list[int], starts: list[int], num_tokens: list[int]) -> i64:
    """How many tokens there are. Raises unless each of them has an entry."""
    if not len(rows) == len(starts) == len(num_tokens):
        raise RequestError(
            f"rows, starts, num_tokens: {len(rows)}, {len(starts)} and {len(num_tokens)} values; give one of each for "
            "every request of the batch"
        )
    total: i64 = 0
    lengths = table.row_lengths
    num_rows: i64 = table.max_num_reqs
    block_size: i64 = table.block_size
    for index in range(len(rows)):
        row: i64 = rows[index]
        if row < 0 or row >= num_rows:
            table.require_row(row)
        num_held: i64 = i64(lengths[row])
        start: i64 = starts[index]
        num_new: i64 = num_tokens[index]
        if start < 0 or num_new < 0 or start + num_new > num_held * block_size:
            raise RequestError(
                f"row {row}: tokens {start} to {start + num_new} asked for, the row's {num_held} blocks hold tokens 0 "
                f"to {num_held * block_size}; apply the step's block ids first"
            )
        total += num_new
    return total
