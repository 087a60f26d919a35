"""NewBlocks: the blocks that running requests got, flat, so that a worker writes them into its tables in one go.

    entry k:  tables[groups[k]][row of request rows[k]][positions[k]] = block_ids[k]

Most decode steps bring a block to one request in sixteen, so nothing here is per request. The four fields are int32
arrays; numpy sees them without a copy: numpy.asarray(new_blocks.block_ids). Read only, and only once they are complete.
"""

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i32, mypyc_attr

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.record import Record


@mypyc_attr(acyclic=True)
class NewBlocks(Record):
    """Entries in the order of `rows` (indexes into the requests that they were asked for), then groups, positions."""

    def __init__(self) -> None:
        self.rows: vec[i32] = vec[i32]()
        self.groups: vec[i32] = vec[i32]()
        # Where in the request's table; always behind all that it had before.
        self.positions: vec[i32] = vec[i32]()
        self.block_ids: vec[i32] = vec[i32]()

    def __len__(self) -> int:
        return len(self.block_ids)

    def __reduce__(self) -> tuple[object, ...]:
        return _make_new_blocks, (list(self.rows), list(self.groups), list(self.positions), list(self.block_ids))

    def __repr__(self) -> str:
        entries = zip(self.rows, self.groups, self.positions, self.block_ids, strict=True)
        texts = [f"row {row} group {group} [{position}] = {block}" for row, group, position, block in entries]
        return f"NewBlocks({'; '.join(texts)})"

    def add(self, row: i32, group_id: i32, blocks: list[KVCacheBlock], start: i32) -> None:
        """Adds what that request got in that group: its blocks there from `start` on."""
        end: i32 = len(blocks)
        position: i32 = start
        while position < end:
            self.rows = append(self.rows, row)
            self.groups = append(self.groups, group_id)
            self.positions = append(self.positions, position)
            self.block_ids = append(self.block_ids, blocks[position].block_id)
            position += 1

    def remove_row(self, row: i32) -> None:
        """Takes back what that request got; the requests behind it move up by one. O(entries)."""
        kept = NewBlocks()
        for index in range(len(self.rows)):
            if self.rows[index] != row:
                kept.rows = append(kept.rows, self.rows[index] - (1 if self.rows[index] > row else 0))
                kept.groups = append(kept.groups, self.groups[index])
                kept.positions = append(kept.positions, self.positions[index])
                kept.block_ids = append(kept.block_ids, self.block_ids[index])
        self.rows, self.groups = kept.rows, kept.groups
        self.positions, self.block_ids = kept.positions, kept.block_ids

    def ids_by_row(self, num_groups: int) -> dict[int, tuple[list[int], ...]]:
        """{row: new block ids per group}, only rows that got any. For tests and tools."""
        ids: dict[int, tuple[list[int], ...]] = {}
        for index in range(len(self.rows)):
            row = int(self.rows[index])
            if row not in ids:
                ids[row] = tuple([[] for _ in range(num_groups)])
            ids[row][self.groups[index]].append(int(self.block_ids[index]))
        return ids


@mypyc_attr(acyclic=True)
class RunningSlots(Record):
    """What allocate_running did: the first num_allocated requests have their slots, and new_blocks is what that brought
    (its rows are indexes into the requests). The next one, if any, did not fit."""

    __match_args__ = ("num_allocated", "new_blocks")

    def __init__(self, num_allocated: int, new_blocks: NewBlocks) -> None:
        self.num_allocated: Final = num_allocated
        self.new_blocks: Final = new_blocks


def _make_new_blocks(rows: list[i32], groups: list[i32], positions: list[i32], block_ids: list[i32]) -> NewBlocks:
    new_blocks = NewBlocks()
    new_blocks.rows = vec[i32](rows)
    new_blocks.groups = vec[i32](groups)
    new_blocks.positions = vec[i32](positions)
    new_blocks.block_ids = vec[i32](block_ids)
    return new_blocks
