"""SingleTypeKVCacheManager: the rules of one KV cache group, without state about requests.

What a request holds in a group is a GroupBlocks, kept by the coordinator and handed in. So a manager reads as
arithmetic on token ranges (slot_ranges.py), and a new attention type is a subclass that answers a few questions.
"""

from abc import ABC, abstractmethod
from typing import Final

from mypy_extensions import mypyc_attr

from kvledger.block import KVCacheBlock
from kvledger.block_pool import BlockPool
from kvledger.observer import LedgerObserver
from kvledger.request import Request
from kvledger.spec import KVCacheSpec
from kvledger.units import cdiv


class GroupBlocks:
    """One request's blocks in one group: blocks[i] holds tokens [i * block_size, (i + 1) * block_size).

    The first num_cached_blocks of them need no more caching: they were hits or are indexed.
    """

    def __init__(self) -> None:
        self.blocks: list[KVCacheBlock] = []
        self.num_cached_blocks: int = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class SingleTypeKVCacheManager(ABC):
    """Rules of one group. The defaults are those of attention that reads every token."""

    def __init__(
        self,
        spec: KVCacheSpec,
        group_id: int,
        pool: BlockPool,
        hash_block_size: int,
        observer: LedgerObserver | None = None,
    ) -> None:
        self.spec: Final = spec
        self.group_id: Final = group_id
        self.pool: Final = pool
        self.block_size: Final = spec.block_size
        # A block's hash is the hash of its last unit.
        self.hashes_per_block: Final = spec.block_size // hash_block_size
        self._observer: Final = observer

    @abstractmethod
    def find_longest_hit(self, block_hashes: list[bytes], max_tokens: int) -> list[KVCacheBlock]:
        """Cached blocks of the longest usable prefix of at most max_tokens tokens. Changes nothing."""

    def num_blocks_to_take(self, held: GroupBlocks, hit: list[KVCacheBlock], num_slots: int) -> int:
        """Free blocks that giving the request num_slots slots will use up.

        Hit blocks that nobody holds count as well: attaching them takes them out of the free queue.
        """
        num_missing = cdiv(num_slots, self.block_size) - len(held.blocks)
        if not hit:
            return num_missing if num_missing > 0 else 0
        num_missing -= len(hit)
        if num_missing < 0:
            num_missing = 0
        for block in hit:
            if block.ref_cnt == 0 and block.block_id != 0:
                num_missing += 1
        return num_missing

    def attach_hit(self, held: GroupBlocks, hit: list[KVCacheBlock]) -> None:
        """Makes the request a holder of its prefix hit. REQUIRES a request that holds nothing yet."""
        self.pool.touch(hit)
        held.blocks.extend(hit)
        held.num_cached_blocks = len(held.blocks)

    def take_blocks(self, held: GroupBlocks, num_slots: int) -> list[KVCacheBlock]:
        """Takes the blocks missing for num_slots slots and returns them. REQUIRES that they were counted as free."""
        num_missing = cdiv(num_slots, self.block_size) - len(held.blocks)
        if num_missing <= 0:
            return []
        taken = self.pool.get_new_blocks(num_missing)
        held.blocks.extend(taken)
        return taken

    def cache_blocks(self, held: GroupBlocks, request: Request, num_tokens: int) -> None:
        """Makes blocks that are full at num_tokens tokens hits for others. REQUIRES their hashes in the request."""
        num_full = num_tokens // self.block_size
        start = held.num_cached_blocks
        if num_full <= start:
            return
        hashes = request.block_hashes
        per_block = self.hashes_per_block
        blocks = held.blocks
        for index in range(start, num_full):
            end = index + 1
            self.pool.cache_block(blocks[index], hashes[end * per_block - 1], self.group_id, end * self.block_size)
        held.num_cached_blocks = num_full
        if self._observer is not None:
            self._observer.blocks_cached(request, self.group_id, blocks[start:num_full])

    def fork(self, held: GroupBlocks, twin: GroupBlocks, num_tokens: int) -> None:
        """Makes `twin` a second holder of the blocks full at num_tokens tokens. Copying the rest is the caller's.

        REQUIRES an empty twin.
        """
        num_full = num_tokens // self.block_size
        twin.blocks.extend(held.blocks[:num_full])
        twin.num_cached_blocks = min(held.num_cached_blocks, num_full)
        self.pool.touch(twin.blocks)

    def free(self, held: GroupBlocks) -> None:
        """Gives all blocks back, the last first, so that a cached prefix loses its tail before its head."""
        held.blocks.reverse()
        self.pool.free_blocks(held.blocks)
