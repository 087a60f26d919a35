"""KVCacheBlock and the queue of free ones.

Every block but the null block is in exactly one of two states: held (ref_cnt >= 1, outside the queue) or free
(ref_cnt 0, in the queue exactly once). A free block may still carry a hash: then it is cached, and whoever hits it
takes it out of the middle of the queue.

The queue is a circle of block ids that runs through the blocks themselves, with block 0 as its seam:
0 -> first to be reused -> ... -> last -> 0. Block 0 is the null block and never free, so no end needs a special case.
Ids instead of references keep the blocks acyclic: the garbage collector never walks a million of them (vLLM links
objects), and dropping a pool frees them at once.
"""

from typing import Final

from mypy_extensions import i32, i64, mypyc_attr

from kvledger.core.record import refuse_copy
from kvledger.errors import BlockError, OutOfBlocksError, require

# Link value of a block that is not in the queue.
UNLINKED: Final = -1


@mypyc_attr(acyclic=True)
class KVCacheBlock:
    """One block: who it is, how many hold it, and what it caches. 64 bytes when compiled."""

    def __init__(self, block_id: i32, prev_free_id: i32, next_free_id: i32) -> None:
        self.block_id: i32 = block_id
        self.ref_cnt: i32 = 0
        # Hash of the content up to this block's end and the group that it was computed for; None: not cached.
        self.block_hash: bytes | None = None
        self.group_id: i32 = 0
        # Tokens from the sequence's start that block_hash covers.
        self.num_hash_tokens: i32 = 0
        # Neighbours in the free queue; only the queue writes them.
        self.prev_free_id: i32 = prev_free_id
        self.next_free_id: i32 = next_free_id
        # The pool's number of the call that last dropped a reference, to notice a block twice in one call.
        self.free_call: i32 = 0
        # The ghost index's number of the call that cached this content: blocks of one call stand in one sequence.
        self.cached_call: i32 = 0

    def __reduce__(self) -> tuple[object, ...]:
        raise refuse_copy(self, "send block_id")

    @property
    def is_null(self) -> bool:
        return self.block_id == 0

    def __repr__(self) -> str:
        cached = "" if self.block_hash is None else f", {self.num_hash_tokens} tokens cached"
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}{cached})"


def make_blocks(num_blocks: int) -> list[KVCacheBlock]:
    """Blocks 0 .. num_blocks - 1, created already linked in the order of their ids."""
    blocks: list[KVCacheBlock] = []
    last: i32 = num_blocks - 1
    block_id: i32 = 0
    while block_id <= last:
        blocks.append(
            KVCacheBlock(block_id, last if block_id == 0 else block_id - 1, 0 if block_id == last else block_id + 1)
        )
        block_id += 1
    return blocks


class FreeKVCacheBlockQueue:
    """Free blocks in the order of their reuse. Every operation is O(1) a block, also from the middle."""

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        """`blocks`: of make_blocks, whose element 0 becomes the seam. All others are free."""
        self._blocks: Final = blocks
        self._seam: Final = blocks[0]
        self.num_free_blocks: int = len(blocks) - 1

    def __len__(self) -> int:
        return self.num_free_blocks

    def first_n(self, num_blocks: i64, into: list[KVCacheBlock]) -> None:
        """Adds the first num_blocks blocks, in order, to the end of a list; they stay in the queue. OutOfBlocksError,
        adding none, when fewer are free."""
        if num_blocks > self.num_free_blocks:
            raise OutOfBlocksError(f"num_blocks={num_blocks}: only {self.num_free_blocks} blocks are free")
        start: i64 = len(into)
        blocks = self._blocks
        next_id: i32 = self._seam.next_free_id
        index: i64 = 0
        try:
            while index < num_blocks:
                block = blocks[next_id]
                into.append(block)
                next_id = block.next_free_id
                index += 1
        except MemoryError:
            del into[start:]
            raise

    def remove(self, block: KVCacheBlock) -> None:
        """Takes that block, wherever it stands. BlockError when it is not in the queue."""
        if block.next_free_id == UNLINKED or block.block_id == 0:
            raise BlockError(f"block {block.block_id} is not in the free queue")
        self._unlink(block)

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Adds blocks at the end, the last of them reused last."""
        seam = self._seam
        last = self._blocks[seam.prev_free_id]
        for block in blocks:
            if block.next_free_id != UNLINKED:
                raise BlockError(f"block {block.block_id} is in the free queue already")
            block.prev_free_id = last.block_id
            block.next_free_id = 0
            last.next_free_id = block.block_id
            seam.prev_free_id = block.block_id
            self.num_free_blocks += 1
            last = block

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Adds blocks at the front, the first of them reused first."""
        prev_id: i32 = 0
        for block in blocks:
            self._link(block, prev_id, self._blocks[prev_id].next_free_id)
            prev_id = block.block_id

    def block_ids(self) -> list[int]:
        """Ids in the order of reuse. O(free blocks): for tests and tools."""
        ids: list[int] = []
        next_id: i32 = self._seam.next_free_id
        while next_id != 0:
            ids.append(int(next_id))
            next_id = self._blocks[next_id].next_free_id
        return ids

    def check(self) -> None:
        """Proves that the links form one circle over exactly num_free_blocks blocks. O(blocks)."""
        num_seen = 0
        prev = self._seam
        while True:
            block = self._blocks[prev.next_free_id]
            require(
                block.prev_free_id == prev.block_id, f"free queue: link {prev.block_id} -> {block.block_id} one-way"
            )
            if block is self._seam:
                break
            num_seen += 1
            require(num_seen <= self.num_free_blocks, "free queue: more blocks linked than counted, or a cycle")
            prev = block
        require(num_seen == self.num_free_blocks, f"free queue: {num_seen} linked, {self.num_free_blocks} counted")

    def _unlink(self, block: KVCacheBlock) -> None:
        blocks = self._blocks
        blocks[block.prev_free_id].next_free_id = block.next_free_id
        blocks[block.next_free_id].prev_free_id = block.prev_free_id
        block.prev_free_id = UNLINKED
        block.next_free_id = UNLINKED
        self.num_free_blocks -= 1

    def _link(self, block: KVCacheBlock, prev_id: i32, next_id: i32) -> None:
        if block.next_free_id != UNLINKED:
            raise BlockError(f"block {block.block_id} is in the free queue already")
        blocks = self._blocks
        block.prev_free_id = prev_id
        block.next_free_id = next_id
        blocks[prev_id].next_free_id = block.block_id
        blocks[next_id].prev_free_id = block.block_id
        self.num_free_blocks += 1
