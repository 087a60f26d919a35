"""Copies of block contents that workers must make before a step computes.

A block whose content is shared up to some token inside it is copied before somebody writes behind that token. Both ends
of a copy are held until it is done, so that neither can be handed out meanwhile.
"""

from typing import Final

from mypy_extensions import mypyc_attr

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.block_pool import BlockPool
from kvledger.core.blocks.outside_holds import OutsideHolds


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
        self._pending: list[BlockCopy] = []
        self._held: Final = OutsideHolds(pool, "is an end of no copy: it was released already")

    def order(self, group_id: int, source: KVCacheBlock, target: KVCacheBlock) -> None:
        """Orders a copy. Each end comes with a reference that now belongs to the copy (the caller touched it)."""
        self._pending.append(BlockCopy(group_id, source, target))
        self._held.adopt([source, target])

    def take(self) -> list[BlockCopy]:
        """Orders since the last call, for the step about to be sent, in a list that later orders do not join.

        Group by group, as vLLM drains them: released in this order, their ends join the free queue as in vLLM.
        """
        copies = self._pending
        self._pending = []
        if len(copies) > 1:
            copies.sort(key=_group_of)
        return copies

    def release(self, copies: list[BlockCopy]) -> None:
        """The workers have made these copies. BlockError, changing nothing, for one that was released before."""
        self._held.release(_ends(copies))

    def hand_over(self, copies: list[BlockCopy], receiver: OutsideHolds) -> list[KVCacheBlock]:
        """Both ends of each copy. Their references are the receiver's from now on: release() must not be called."""
        ends = _ends(copies)
        self._held.hand_over(ends, receiver)
        return ends

    def holders(self, pool: BlockPool) -> dict[int, int]:
        """{block id: references held for copies} in that pool, for check()."""
        return self._held.holders(pool)


def _group_of(copy: BlockCopy) -> int:
    return copy.group_id


def _ends(copies: list[BlockCopy]) -> list[KVCacheBlock]:
    return [block for copy in copies for block in (copy.source, copy.target)]
