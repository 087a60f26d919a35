"""BlockTable: the worker's side of one KV cache group, block ids as an int32 table [max_num_reqs, max_num_blocks].

Row r, entry i is the block that holds tokens [i * block_size, (i + 1) * block_size) of the request in row r. Entries
behind a row's blocks are 0, the null block, so that a kernel that reads a whole row finds valid ids everywhere.
"""

from typing import Final, cast

from librt.vecs import vec
from mypy_extensions import i32, i64

from kvledger.core.units import MAX_COUNT, require_positive
from kvledger.errors import BlockError, require, wrong_value

MAX_BLOCK_ID: Final = 2**31 - 1


class BlockTable:
    """Rows of block ids. Every call checks first and changes nothing when it raises. One owner thread.

    `max_num_reqs`: rows. `max_num_blocks`: entries of a row. `block_size`: tokens of one block. Memory:
    4 * max_num_reqs * max_num_blocks bytes, at one place for the whole life of the table.
    """

    def __init__(self, max_num_reqs: int, max_num_blocks: int, block_size: int) -> None:
        require_positive("max_num_reqs", max_num_reqs, MAX_COUNT)
        require_positive("max_num_blocks", max_num_blocks, MAX_COUNT)
        require_positive("block_size", block_size, MAX_COUNT)
        self.max_num_reqs: Final = max_num_reqs
        self.max_num_blocks: Final = max_num_blocks
        self.block_size: Final = block_size
        null: i32 = 0
        size: i64 = max_num_reqs * max_num_blocks
        # For slots.py, which reads them element by element; everybody else takes view() and num_blocks(). Of fixed
        # length: a vec that grows moves, and whoever looks at it from outside would not notice.
        self.entries: Final[vec[i32]] = vec[i32]([null] * size)
        rows: i64 = max_num_reqs
        self.row_lengths: Final[vec[i32]] = vec[i32]([null] * rows)
        flat = memoryview(self.entries)
        self._view: Final = flat.cast("B").cast("i", [max_num_reqs, max_num_blocks])

    # Reading

    def view(self) -> memoryview:
        """The table itself, read only, int32 [max_num_reqs, max_num_blocks]: later changes show. numpy.asarray(view)
        and torch.tensor(...).numpy()[:] = view take it without a Python loop."""
        return self._view

    def num_blocks(self, row: int) -> int:
        """Entries of the row that stand for blocks."""
        self.require_row(row)
        return int(self.row_lengths[row])

    def block_ids(self, row: int) -> list[int]:
        """Block ids of the row, in a fresh list."""
        self.require_row(row)
        start: i64 = row * self.max_num_blocks
        end: i64 = start + i64(self.row_lengths[row])
        return [int(self.entries[index]) for index in range(start, end)]

    def block_id(self, row: int, index: int) -> int:
        """Entry `index` of the row; 0, the null block, behind its blocks. IndexError outside the table."""
        self.require_row(row)
        if not 0 <= index < self.max_num_blocks:
            raise IndexError(f"index={index}: a row has entries 0 to {self.max_num_blocks - 1}")
        position: i64 = row * self.max_num_blocks + index
        return int(self.entries[position])

    # Changing

    def set_row(self, row: int, block_ids: list[int]) -> None:
        """Overwrites the row. ConfigError when the table is too small, BlockError for an id that is none."""
        self.require_row(row)
        self._require_room(len(block_ids))
        self._write(row, 0, block_ids)

    def append_row(self, row: int, block_ids: list[int]) -> None:
        """Adds blocks behind those of the row. ConfigError and BlockError as set_row."""
        self.require_row(row)
        num_before: i64 = i64(self.row_lengths[row])
        self._require_room(num_before + len(block_ids))
        self._write(row, num_before, block_ids)

    def clear_row(self, row: int) -> None:
        """Empties the row: null blocks only, so that nobody writes to blocks that belong to others by now."""
        self.require_row(row)
        self._write(row, 0, [])

    # Checking

    def require_row(self, row: int) -> None:
        """ConfigError unless the table has such a row."""
        if not 0 <= row < self.max_num_reqs:
            problem = f"the table has rows 0 to {self.max_num_reqs - 1}"
            raise wrong_value("row", row, problem, "use one of them, or give the table more max_num_reqs")

    def require_fits(self, num_before: int, block_ids: list[int]) -> None:
        """Raises what append_row would for these ids behind num_before others, and changes nothing either way."""
        self._require_room(num_before + len(block_ids))
        for block_id in block_ids:
            if not 0 <= block_id <= MAX_BLOCK_ID:
                raise _wrong_ids(block_ids)

    def check(self) -> None:
        """Proves that rows are within the table and hold the null block behind their blocks."""
        for row in range(self.max_num_reqs):
            num_blocks: i64 = i64(self.row_lengths[row])
            require(0 <= num_blocks <= self.max_num_blocks, f"row {row} claims {num_blocks} blocks")
            start: i64 = row * self.max_num_blocks
            for index in range(self.max_num_blocks):
                block_id = self.entries[start + index]
                require(block_id >= 0, f"row {row}, entry {index}: {block_id} is no block id")
                require(index < num_blocks or block_id == 0, f"row {row}, entry {index}: not cleared")

    def _require_room(self, num_blocks: i64) -> None:
        if num_blocks > self.max_num_blocks:
            problem = f"a row needs {num_blocks} blocks ({num_blocks * self.block_size} tokens)"
            fix = f"give the table at least {num_blocks}, or a max_model_len that covers them; nothing was changed"
            raise wrong_value("max_num_blocks", self.max_num_blocks, problem, fix)

    def _write(self, row: i64, num_before: i64, block_ids: list[int]) -> None:
        """Puts ids behind the first num_before and nulls what an earlier, longer row left. REQUIRES that they fit.

        The ids are checked while they are written, since a pass of its own would take as long again.
        """
        entries = self.entries
        start: i64 = row * self.max_num_blocks
        end: i64 = start + i64(self.row_lengths[row])
        position: i64 = start + num_before
        overwritten = entries[position:end]
        # Negative as soon as one id is.
        bits: i32 = 0
        block_id: i32
        try:
            for block_id in block_ids:
                bits |= block_id
                entries[position] = block_id
                position += 1
        except (OverflowError, TypeError, ValueError):  # no int32; the two builds differ in what they raise
            bits = -1
        if bits < 0:
            self._restore(start + num_before, position, overwritten)
            raise _wrong_ids(block_ids)
        self.row_lengths[row] = i32(position - start)
        while position < end:
            entries[position] = 0
            position += 1

    def _restore(self, first: i64, written_end: i64, overwritten: vec[i32]) -> None:
        for position in range(first, written_end):
            self.entries[position] = 0
        for index in range(len(overwritten)):
            self.entries[first + index] = overwritten[index]


def _wrong_ids(block_ids: list[int]) -> BlockError:
    """The error that names the first of these that is no block id."""
    for block_id in cast("list[object]", block_ids):
        if not isinstance(block_id, int) or not 0 <= block_id <= MAX_BLOCK_ID:
            return BlockError(
                f"block_ids: {block_id!r} is no block id; ids are int, 0 (the null block) to {MAX_BLOCK_ID}; nothing "
                "was changed"
            )
    raise AssertionError("all of them are block ids")
