"""References to blocks that no request holds.

A copy that is not made yet, a connector that reads blocks while their request may end, or an engine that gives a
request's blocks back only once the step that still writes them is done.
"""

from typing import Final

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.block_pool import BlockPool
from kvledger.errors import BlockError


class OutsideHolds:
    """Counts them for each block, so that check() can tell a pinned block from a leak. `problem`: what it means when
    more is released than was taken."""

    def __init__(self, pool: BlockPool, problem: str = "is not held outside the ledger (that often)") -> None:
        self._pool: Final = pool
        self._problem: Final = problem
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
                raise BlockError(f"{block!r} {self._problem}; nothing was changed")
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
