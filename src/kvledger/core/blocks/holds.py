"""Copies of block contents that workers must make before a step computes.

A block whose content is shared up to some token inside it is copied before somebody writes behind that token. Both ends
of a copy are held until it is done, so that neither can be handed out meanwhile.
"""

from typing import Final

from mypy_extensions import mypyc_attr

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.block_pool import BlockPool
from kvledger.errors import BlockError


@mypyc_attr(acyclic=True)
class BlockCopy:
    """Order to the worker: copy block source to block target in that group, before the step computes."""

    def __init__(self, group_id: int, source: KVCacheBlock, target: KVCacheBlock) -> None:
        self.group_id: Final = group_id
        self.source: Final = source
        self.target: Final = target

    @property
    def source_block_id(self) -> int:
        return self.source.block_id

    @property
    def target_block_id(self) -> int:
        return self.target.block_id


class BlockCopies:
    """Orders not yet sent, and references held for all that are not yet done."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool: Final = pool
        self._pending: list[BlockCopy] = []
        self._num_held: dict[KVCacheBlock, int] = {}

    def order(self, group_id: int, source: KVCacheBlock, target: KVCacheBlock) -> None:
        """Orders a copy. Each end comes with a reference that now belongs to the copy (the caller touched it)."""
        self._pending.append(BlockCopy(group_id, source, target))
        for block in (source, target):
            self._num_held[block] = self._num_held.get(block, 0) + 1

    def take(self) -> list[BlockCopy]:
        """Orders since the last call, for the step about to be sent, in a list that later orders do not join."""
        copies = self._pending
        self._pending = []
        return copies

    def release(self, copies: list[BlockCopy]) -> None:
        """The workers have made these copies. BlockError, changing nothing, for one that was released before."""
        ends = [block for copy in copies for block in (copy.source, copy.target)]
        self._num_held = self._held_without(ends)
        # A block that is an end of several copies is given back once a call.
        batch: list[KVCacheBlock] = []
        seen: set[KVCacheBlock] = set()
        for block in ends:
            if block in seen:
                self._pool.free_blocks(batch)
                batch = []
                seen.clear()
            batch.append(block)
            seen.add(block)
        self._pool.free_blocks(batch)

    def hand_over(self, copies: list[BlockCopy]) -> list[KVCacheBlock]:
        """Both ends of each copy. Their references are the caller's from now on, so release() must not be called."""
        ends = [block for copy in copies for block in (copy.source, copy.target)]
        self._num_held = self._held_without(ends)
        return ends

    def _held_without(self, ends: list[KVCacheBlock]) -> dict[KVCacheBlock, int]:
        """What is held once each of these blocks loses a reference."""
        num_held = self._num_held.copy()
        for block in ends:
            left = num_held.get(block, 0) - 1
            if left < 0:
                raise BlockError(f"the copy of block {block.block_id} was released already; nothing was changed")
            num_held[block] = left
        return {block: left for block, left in num_held.items() if left > 0}

    def holders(self, pool: BlockPool) -> dict[int, int]:
        """{block id: references held for copies} in that pool, for check()."""
        return {int(block.block_id): num for block, num in self._num_held.items() if pool.owns(block)}
