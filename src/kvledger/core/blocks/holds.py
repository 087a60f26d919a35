"""References to blocks that no request holds: the ledger holds them for others.

A connector that reads blocks while their request may end; an engine that gives a request's blocks back only once the
step that still writes them is done; a copy that the workers have not made yet. A block whose content is shared up to
some token inside it is copied before somebody writes behind that token, and both ends of a copy are held until it is
done, so that neither can be handed out meanwhile.
"""

from typing import Final

from mypy_extensions import mypyc_attr

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.block_pool import BlockPool
from kvledger.core.record import Record
from kvledger.errors import BlockError


class OutsideHolds:
    """Counts them for each block, so that check() can tell a pinned block from a leak."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool: Final = pool
        self._num_held: dict[KVCacheBlock, int] = {}

    def add(self, blocks: list[KVCacheBlock]) -> None:
        """Takes a reference to each block. Null blocks are passed over."""
        self._pool.touch(blocks)
        self.adopt(blocks)

    def adopt(self, blocks: list[KVCacheBlock]) -> None:
        """Counts references as held outside that were the ledger's until now."""
        for block in blocks:
            if block.block_id != 0:
                self._num_held[block] = self._num_held.get(block, 0) + 1

    def require_held(self, blocks: list[KVCacheBlock]) -> None:
        """BlockError for one that is not held outside as often as it is mentioned."""
        self._left_after(blocks)

    def release(self, blocks: list[KVCacheBlock]) -> None:
        """Drops a reference for each mention of a block, which is reused in the order of last mentions.

        BlockError, changing nothing, for one that is not held outside. Null blocks are passed over.
        """
        left = self._left_after(blocks)
        seen: set[KVCacheBlock] = set()
        for block in blocks:
            # Other mentions than the last drop references that are not the last ones.
            if block.block_id != 0 and block in seen:
                self._pool.free_blocks([block])
            seen.add(block)
        self._pool.free_blocks(list(left))
        self._keep(left)

    def hand_over(self, blocks: list[KVCacheBlock], receiver: "OutsideHolds") -> None:
        """Makes a reference for each mention of a block the receiver's. BlockError as in release()."""
        self._keep(self._left_after(blocks))
        receiver.adopt(blocks)

    def _left_after(self, blocks: list[KVCacheBlock]) -> dict[KVCacheBlock, int]:
        """References that stay when each mention drops one, by block in the order of last mentions."""
        left: dict[KVCacheBlock, int] = {}
        for block in blocks:
            if block.block_id == 0:
                continue
            num_left = left.pop(block, self._num_held.get(block, 0)) - 1
            if num_left < 0:
                raise BlockError(f"{block!r} is not held outside the ledger (that often); nothing was changed")
            left[block] = num_left
        return left

    def _keep(self, left: dict[KVCacheBlock, int]) -> None:
        for block, num_left in left.items():
            if num_left > 0:
                self._num_held[block] = num_left
            else:
                del self._num_held[block]

    def holders(self, pool: BlockPool) -> dict[int, int]:
        """{block id: references held outside} in that pool, for check()."""
        return {int(block.block_id): num for block, num in self._num_held.items() if pool.owns(block)}


@mypyc_attr(acyclic=True)
class BlockCopy(Record):
    """Order to the worker: copy one block's content to another block of that group, before the step computes."""

    __match_args__ = ("group_id", "source_block_id", "target_block_id")

    def __init__(self, group_id: int, source_block_id: int, target_block_id: int) -> None:
        self.group_id: Final = group_id
        self.source_block_id: Final = source_block_id
        self.target_block_id: Final = target_block_id


class BlockCopies:
    """Orders not yet sent, and references held for all that are not yet done."""

    def __init__(self, pool: BlockPool) -> None:
        self._pending: list[BlockCopy] = []
        # The ends of each copy that is not done. No two are equal: a target gets its content once.
        self._ends: Final[dict[BlockCopy, tuple[KVCacheBlock, KVCacheBlock]]] = {}
        self._held: Final = OutsideHolds(pool)

    def order(self, group_id: int, source: KVCacheBlock, target: KVCacheBlock) -> None:
        """Orders a copy. Each end comes with a reference that now belongs to the copy (the caller touched it)."""
        copy = BlockCopy(group_id, source.block_id, target.block_id)
        self._pending.append(copy)
        self._ends[copy] = (source, target)
        self._held.adopt([source, target])

    def is_under_way(self, group_id: int, source: KVCacheBlock, target: KVCacheBlock) -> bool:
        """Whether that copy was ordered, and is not known to be done."""
        return BlockCopy(group_id, source.block_id, target.block_id) in self._ends

    def take(self) -> list[BlockCopy]:
        """Orders since the last call, for the step about to be sent, in a list that later orders do not join.

        Group by group, as vLLM drains them: released in this order, their ends join the free queue as in vLLM.
        """
        copies = self._pending
        self._pending = []
        if len(copies) > 1:
            copies.sort(key=_group_of)
        return copies

    def require_held(self, copies: list[BlockCopy]) -> None:
        """BlockError for one that was released before."""
        self._held.require_held(self._ends_of(copies))

    def release(self, copies: list[BlockCopy]) -> None:
        """The workers have made these copies. BlockError, changing nothing, for one that was released before."""
        self._held.release(self._ends_of(copies))
        self._forget(copies)

    def hand_over(self, copies: list[BlockCopy], receiver: OutsideHolds) -> list[KVCacheBlock]:
        """Both ends of each copy. Their references are the receiver's from now on: release() must not be called."""
        ends = self._ends_of(copies)
        self._held.hand_over(ends, receiver)
        self._forget(copies)
        return ends

    def holders(self, pool: BlockPool) -> dict[int, int]:
        """{block id: references held for copies} in that pool, for check()."""
        return self._held.holders(pool)

    def _ends_of(self, copies: list[BlockCopy]) -> list[KVCacheBlock]:
        ends: list[KVCacheBlock] = []
        seen: set[BlockCopy] = set()
        for copy in copies:
            pair = self._ends.get(copy)
            if pair is None or copy in seen:
                raise BlockError(f"{copy!r} is no copy under way: it was released already; nothing was changed")
            seen.add(copy)
            ends.extend(pair)
        return ends

    def _forget(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            del self._ends[copy]


def _group_of(copy: BlockCopy) -> int:
    return copy.group_id
