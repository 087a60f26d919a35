"""A step's copy of a block table: the rows of its requests, in its order, for kernels that read whole rows."""

from librt.vecs import vec
from mypy_extensions import i32, i64

from kvledger.core.tables.block_table import BlockTable
from kvledger.errors import RequestError


def step_table(
    table: BlockTable, rows: list[int], starts: list[int], num_readable: int = -1, num_rows: int = 0
) -> memoryview:
    """The entries of these rows, read-only int32 of shape [max(len(rows), num_rows), max_num_blocks], in memory of its
    own, so that a step in flight keeps its table. Rows that `num_rows` adds hold null blocks.

    `starts[i]`: the first token that the step computes of the request in rows[i]. `num_readable`: how many tokens
    before it can still be read; entries wholly below those are null blocks, because a kernel that loads a tile across
    the window's start must not find there what others write by now, NaN perhaps (vLLM from 0.33 on). Negative: all of
    them. RequestError for lists of different lengths, none at all, or a negative start; ConfigError for a row that is
    not in the table.
    """
    if len(rows) != len(starts):
        raise RequestError(f"rows, starts: {len(rows)} and {len(starts)} values; give one of each for every request")
    length: i64 = max(len(rows), num_rows)
    if length == 0:
        raise RequestError("rows: none, and num_rows is 0; a table has at least one row")
    width: i64 = table.max_num_blocks
    block_size: i64 = table.block_size
    readable: i64 = num_readable
    copy = vec[i32]([0] * (length * width))
    entries, lengths = table.entries, table.row_lengths
    for index in range(len(rows)):
        row: i64 = rows[index]
        table.require_row(row)
        start: i64 = starts[index]
        if start < 0:
            raise RequestError(f"starts[{index}]={start}: no token; give the step's first token, 0 or more")
        entry: i64 = 0
        if 0 <= readable < start:
            entry = (start - readable) // block_size
        source: i64 = row * width
        target: i64 = index * width
        end: i64 = i64(lengths[row])
        while entry < end:
            copy[target + entry] = entries[source + entry]
            entry += 1
    return memoryview(copy).cast("B").cast("i", [length, width])
