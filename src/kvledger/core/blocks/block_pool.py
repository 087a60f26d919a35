"""The pool: all blocks, the queue of the free ones, and the prefix index of the cached ones.

    held (ref_cnt >= 1)  --free, last reference-->  free: to the front without a hash, to the end with one
    free                 --take-->                  held, and whatever hash it carried is evicted
    free, cached         --touch (a hit)-->         held, hash kept

So the queue's order is the order of eviction: blocks that can serve nobody first, then cached ones, least recently
released first. Block 0 is the null block: it stands in block tables where there is no data, is never handed out,
counted or freed, and leaves num_blocks - 1 usable blocks.
"""

from dataclasses import dataclass
from typing import Final

from mypy_extensions import i64

from kvledger.core.blocks.block import FreeKVCacheBlockQueue, KVCacheBlock, make_blocks
from kvledger.core.blocks.observer import EvictionCause, LedgerObserver
from kvledger.core.blocks.prefix_index import PrefixIndex
from kvledger.core.record import Record
from kvledger.core.units import MAX_COUNT, require_positive
from kvledger.errors import BlockError, OutOfBlocksError, require, wrong_value


@dataclass(frozen=True, eq=False, repr=False)
class PoolOccupancy(Record):
    """Where the usable blocks are; the three sum to them. "Usage is low but hits drop" is `cached` shrinking."""

    live: int  # held by requests
    cached: int  # free, but serving hits until they are reused
    unused: int  # free and carrying nothing


class BlockPool:
    """Owns num_blocks blocks for num_groups KV cache groups. One owner thread."""

    def __init__(
        self,
        num_blocks: int,
        num_groups: int = 1,
        observer: LedgerObserver | None = None,
    ) -> None:
        require_positive("num_blocks", num_blocks, MAX_COUNT)
        if num_blocks < 2:
            raise wrong_value(
                "num_blocks", num_blocks, "block 0 is the null block, so nothing is left", "give 2 or more"
            )
        self.num_blocks: Final = num_blocks
        self.blocks: Final = make_blocks(num_blocks)
        self.null_block: Final = self.blocks[0]
        self.free_queue: Final = FreeKVCacheBlockQueue(self.blocks)
        self.indexes: Final = [PrefixIndex() for _ in range(num_groups)]
        self._observer: LedgerObserver | None = observer
        self._other_pools: list[BlockPool] = []
        # Hashes beyond block.block_hash of the few blocks that answer for more than one prefix of theirs.
        self._more_hashes: dict[int, list[bytes]] = {}
        self._num_free_cached: int = 0
        # How often a block has lost its hashes so far: a hit that was found at the same number is still one.
        self.num_losses: i64 = 0
        # Blocks that lost their hashes so far, by cause.
        self._num_reused: int = 0
        self._num_evicted: int = 0
        self._num_reset: int = 0
        self._num_promoted: int = 0
        self._free_call: int = 0

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can hold tokens: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return self.free_queue.num_free_blocks

    def get_usage(self) -> float:
        """Share of the usable blocks that requests hold, 0.0 to 1.0. Cached free blocks count as free."""
        return 1.0 - self.free_queue.num_free_blocks / self.num_usable_blocks

    def occupancy(self) -> PoolOccupancy:
        num_free = self.free_queue.num_free_blocks
        return PoolOccupancy(self.num_usable_blocks - num_free, self._num_free_cached, num_free - self._num_free_cached)

    def eviction_counts(self) -> dict[EvictionCause, int]:
        """Blocks that lost their hashes so far, by cause."""
        return {
            EvictionCause.REUSED: self._num_reused,
            EvictionCause.EVICTED: self._num_evicted,
            EvictionCause.RESET: self._num_reset,
            EvictionCause.PROMOTED: self._num_promoted,
        }

    def link_pool(self, other: "BlockPool") -> None:
        """Lets free_blocks of either pool take blocks of the other (a host-resident group has a pool of its own)."""
        self._other_pools.append(other)
        other._other_pools.append(self)

    def observe(self, observer: LedgerObserver) -> None:
        """From now on this one is told, in the place of any other."""
        self._observer = observer

    def get_new_blocks(self, num_blocks: int, group_id: int = 0) -> list[KVCacheBlock]:
        """Takes blocks from the front of the queue, each with ref_cnt 1 and without the hash it may have carried.
        `group_id`: for whom.

        OutOfBlocksError, changing nothing, when fewer are free.
        """
        taken: list[KVCacheBlock] = []
        self.take(num_blocks, group_id, taken)
        return taken

    def take(self, num_blocks: i64, group_id: int, into: list[KVCacheBlock]) -> None:
        """get_new_blocks, added to the end of a list: a request's table grows by one block in so many tokens."""
        if num_blocks > self.free_queue.num_free_blocks:
            raise OutOfBlocksError(
                f"num_blocks={num_blocks}: {self.free_queue.num_free_blocks} of {self.num_usable_blocks} are free; "
                "count before you take, as allocate_slots does"
            )
        start: i64 = len(into)
        # The list first: only that can run out of memory.
        self.free_queue.first_n(num_blocks, into)
        if self._observer is not None:
            self._announce_eviction(into[start:], EvictionCause.REUSED)
        index = start
        while index < start + num_blocks:
            block = into[index]
            self._hold(block)
            if block.block_hash is not None:
                self._num_reused += 1
                self._unindex(block)
            index += 1
        if self._observer is not None and num_blocks > 0:
            self._observer.blocks_taken(group_id, into[start:])

    def touch(self, blocks: list[KVCacheBlock]) -> None:
        """Adds a reference to each block; free ones leave the queue, hash kept. Null blocks are passed over."""
        for block in blocks:
            if block.block_id == 0:
                continue
            if block.ref_cnt == 0:
                self._hold(block)
            else:
                block.ref_cnt += 1
        if self._observer is not None and blocks:
            self._observer.blocks_touched(blocks)

    def retain(self, block: KVCacheBlock) -> None:
        """Adds a reference to a block that somebody holds, so that it stays until a copy is made. Nobody is told: its
        content finds no new reader."""
        block.ref_cnt += 1

    def free_blocks(self, blocks: list[KVCacheBlock]) -> None:
        """Drops one reference to each block, in the order in which they should be reused (callers: last block first).

        Blocks without references join the queue: unhashed ones at the front, in order, hashed ones at the end. Null
        blocks are passed over; blocks of a linked pool go back to that pool. BlockError, changing nothing, when a block
        is free already, stands twice in the list, or belongs to no pool known here.
        """
        self._free_call = (self._free_call + 1) & 0x3FFFFFFF
        call = self._free_call
        own = self.blocks
        num_own = self.num_blocks
        unhashed: list[KVCacheBlock] = []
        hashed: list[KVCacheBlock] = []
        foreign: list[KVCacheBlock] = []
        for position, block in enumerate(blocks):
            block_id: int = block.block_id
            if block_id == 0:
                continue
            if block_id >= num_own or own[block_id] is not block:
                foreign.append(block)
                continue
            if block.ref_cnt == 0 or block.free_call == call:
                problem = "is free already" if block.ref_cnt == 0 and block.free_call != call else "is listed twice"
                self._take_back(blocks[:position], call)
                raise BlockError(f"block {block_id} {problem}; free_blocks has changed nothing")
            block.free_call = call
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (unhashed if block.block_hash is None else hashed).append(block)
        if foreign:
            try:
                self._free_foreign(foreign)
            except BlockError:
                self._take_back(blocks, call)
                raise
        self._let_go(unhashed, hashed)

    def cache_block(self, block: KVCacheBlock, block_hash: bytes, group_id: int, num_hash_tokens: int) -> None:
        """Makes a held block that is full answer lookups of that hash in that group.

        Hashes of shorter prefixes that end inside the block are dropped. BlockError when the block is free, or full and
        cached already.
        """
        if block.ref_cnt == 0 or (block.block_hash is not None and block.num_hash_tokens >= num_hash_tokens):
            raise BlockError(f"{block!r} cannot be cached: it is free or carries a hash already")
        if block.block_hash is not None:
            self._promote(block)
        block.block_hash = block_hash
        block.group_id = group_id
        block.num_hash_tokens = num_hash_tokens
        self.indexes[group_id].insert(block_hash, block)

    def cache_partial_block(self, block: KVCacheBlock, block_hash: bytes, group_id: int, num_hash_tokens: int) -> bool:
        """Makes a held block answer for a prefix that ends inside it, beside the longer one it may answer for already.

        A shorter prefix that it answered for is dropped. False when it answered for this one already.
        """
        if block.ref_cnt == 0:
            raise BlockError(f"{block!r} cannot be cached: it is free")
        more = self._more_hashes.get(block.block_id)
        if block.block_hash == block_hash or (more is not None and block_hash in more):
            return False
        if block.block_hash is not None and block.num_hash_tokens < num_hash_tokens:
            self._promote(block)
        if block.block_hash is None:
            block.block_hash = block_hash
            block.group_id = group_id
            block.num_hash_tokens = num_hash_tokens
        else:
            self._more_hashes.setdefault(block.block_id, []).append(block_hash)
        self.indexes[group_id].insert(block_hash, block)
        return True

    def move_hashes(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        """Lets `target`, held and without a hash, answer for everything that `source` answered for."""
        if target.block_hash is not None or target.ref_cnt == 0:
            raise BlockError(f"{target!r} cannot take over hashes: it is free or carries one already")
        block_hash = source.block_hash
        if block_hash is None:
            return
        num_tokens: int = source.num_hash_tokens
        group_id: int = source.group_id
        more = self._more_hashes.get(source.block_id, [])
        self._unindex(source)
        self.cache_partial_block(target, block_hash, group_id, num_tokens)
        for other in more:
            self.cache_partial_block(target, other, group_id, 0)
        if self._observer is not None:
            self._observer.hashes_moved(source, target)

    def get_cached_block(self, block_hash: bytes, group_id: int) -> KVCacheBlock | None:
        """The first block that carries that hash in that group, held or free, or None."""
        return self.indexes[group_id].get(block_hash)

    def answers_for(self, block: KVCacheBlock, block_hash: bytes, group_id: int) -> bool:
        """Whether a block is this pool's and carries that hash in that group, be it as a further one."""
        if not self.owns(block) or block.block_hash is None or block.group_id != group_id:
            return False
        return block.block_hash == block_hash or block_hash in self._more_hashes.get(block.block_id, [])

    def further_hashes(self, block: KVCacheBlock) -> list[bytes]:
        """What a block answers for beyond block_hash: shorter prefixes that end inside it. Mostly nothing."""
        return self._more_hashes.get(block.block_id, []).copy()

    def require_ids(self, block_ids: list[int]) -> None:
        """BlockError for an id that no block of tokens has."""
        for block_id in block_ids:
            if not 0 < block_id < self.num_blocks:
                raise BlockError(f"block_ids: {block_id} is not from 1 to {self.num_blocks - 1}; nothing was evicted")

    def evict_blocks(self, block_ids: list[int]) -> None:
        """Takes the hashes of these blocks, held or free; their place in the queue stays. BlockError on a wrong id."""
        self.require_ids(block_ids)
        blocks = [self.blocks[block_id] for block_id in dict.fromkeys(block_ids)]
        self._announce_eviction(blocks, EvictionCause.EVICTED)
        for block in blocks:
            if block.block_hash is not None:
                self._num_evicted += 1
                self._unindex(block)

    def reset_prefix_cache(self) -> bool:
        """Takes every hash. False, with a warning to the observer, while requests hold blocks. O(blocks)."""
        num_held = self.num_usable_blocks - self.free_queue.num_free_blocks
        if num_held > 0:
            if self._observer is not None:
                self._observer.prefix_cache_reset_refused(num_held)
            return False
        if self._observer is not None:
            self._announce_eviction(self._cached_blocks(), EvictionCause.RESET)
        self._num_reset += self._num_free_cached
        self._num_free_cached = 0
        self.num_losses += 1
        self._more_hashes.clear()
        # Block by block and index by index, not by hash: a look-up for each would cost twenty times as much.
        for block in self.blocks:
            if block.block_hash is not None:
                block.block_hash = None
                block.num_hash_tokens = 0
        for index in self.indexes:
            index.clear()
        if self._observer is not None:
            self._observer.prefix_cache_reset()
        return True

    def check(self) -> None:
        """Proves the invariants of this module's docstring. O(blocks)."""
        self.free_queue.check()
        free_ids = set(self.free_queue.block_ids())
        carriers: dict[int, int] = {}
        num_free_cached = 0
        for block in self.blocks[1:]:
            block_id = int(block.block_id)
            require(block.ref_cnt >= 0, f"{block!r}: negative ref_cnt")
            require((block.ref_cnt == 0) == (block_id in free_ids), f"{block!r}: free and in the queue must agree")
            if block.block_hash is not None:
                carriers[block_id] = int(block.group_id)
                num_free_cached += 1 if block.ref_cnt == 0 else 0
        require(self.null_block.ref_cnt == 0 and self.null_block.block_hash is None, "the null block is held or cached")
        indexed: dict[int, int] = {}
        num_entries = 0
        for group_id, index in enumerate(self.indexes):
            index.check()
            for block_hash, blocks in index.blocks().items():
                require(len({int(block.block_id) for block in blocks}) == len(blocks), "a block is listed twice")
                for block in blocks:
                    more = self._more_hashes.get(block.block_id, [])
                    require(
                        block.block_hash == block_hash or block_hash in more,
                        f"{block!r} is listed under a strange hash",
                    )
                    indexed[int(block.block_id)] = group_id
                    num_entries += 1
        require(carriers == indexed, "the blocks that carry a hash and the blocks in the prefix indexes differ")
        num_more = sum([len(hashes) for hashes in self._more_hashes.values()])
        require(num_entries == len(carriers) + num_more, "a hash of a block is missing in the prefix index")
        require(num_free_cached == self._num_free_cached, "the count of free cached blocks is wrong")

    def _cached_blocks(self) -> list[KVCacheBlock]:
        """All that carry a hash, in the order in which each group cached them."""
        cached: list[KVCacheBlock] = []
        for index in self.indexes:
            for block_hash, blocks in index.blocks().items():
                # Not again under a further hash of theirs.
                cached.extend([block for block in blocks if block.block_hash == block_hash])
        return cached

    def _announce_eviction(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> None:
        """Tells the observer which of these blocks are about to lose their hashes."""
        if self._observer is not None:
            cached = [block for block in blocks if block.block_hash is not None]
            if cached:
                self._observer.blocks_evicted(cached, cause)

    def _promote(self, block: KVCacheBlock) -> None:
        """Takes the hash of a block that is about to answer for a longer prefix."""
        self._announce_eviction([block], EvictionCause.PROMOTED)
        self._num_promoted += 1
        self._unindex(block)

    # The only ways between held, free with a hash and free without one (but for reset_prefix_cache, which takes all)

    def _hold(self, block: KVCacheBlock) -> None:
        """free, with a hash or without -> held: by the caller, once."""
        self.free_queue.remove(block)
        block.ref_cnt = 1
        if block.block_hash is not None:
            self._num_free_cached -= 1

    def _let_go(self, unhashed: list[KVCacheBlock], hashed: list[KVCacheBlock]) -> None:
        """held -> free: blocks whose last reference was dropped."""
        self.free_queue.prepend_n(unhashed)
        self.free_queue.append_n(hashed)
        self._num_free_cached += len(hashed)

    def _unindex(self, block: KVCacheBlock) -> None:
        """Takes the hashes of a block, held or free; it stays where it is."""
        block_hash = block.block_hash
        assert block_hash is not None
        if block.ref_cnt == 0:
            self._num_free_cached -= 1
        index = self.indexes[block.group_id]
        index.remove(block_hash, block)
        self.num_losses += 1
        block.block_hash = None
        block.num_hash_tokens = 0
        if self._more_hashes:
            more = self._more_hashes.pop(block.block_id, None)
            if more is not None:
                for other in more:
                    index.remove(other, block)

    def _take_back(self, blocks: list[KVCacheBlock], call: int) -> None:
        """Undoes the dropped references of a free_blocks call that fails before it touched the queue."""
        for block in blocks:
            if block.free_call == call and block.block_id < self.num_blocks and self.blocks[block.block_id] is block:
                block.ref_cnt += 1
                block.free_call = 0

    def _free_foreign(self, blocks: list[KVCacheBlock]) -> None:
        """Gives blocks of linked pools back to them. BlockError before any is freed."""
        num_found = 0
        for pool in self._other_pools:
            theirs = [block for block in blocks if pool.owns(block)]
            num_found += len(theirs)
            if any(block.ref_cnt == 0 for block in theirs) or len({int(b.block_id) for b in theirs}) < len(theirs):
                raise BlockError("a block of a linked pool is free already or listed twice; nothing was changed")
        if num_found < len(blocks):
            strangers = [b for b in blocks if not any(pool.owns(b) for pool in self._other_pools)]
            raise BlockError(f"block {strangers[0].block_id} belongs to no pool known here; nothing was changed")
        for pool in self._other_pools:
            pool.free_blocks([block for block in blocks if pool.owns(block)])

    def owns(self, block: KVCacheBlock) -> bool:
        return block.block_id < self.num_blocks and self.blocks[block.block_id] is block
