"""KVCacheCoordinator: spreads each call over the KV cache groups, and knows what every request holds in each.

Three kinds: without prefix caching, with one group, and (not built yet) with several groups that must agree on one hit.
All groups take their blocks from one pool, all or nothing: blocks are counted over every group before any is taken.
"""

from abc import ABC, abstractmethod
from typing import Final

from kvledger.block import KVCacheBlock
from kvledger.block_pool import BlockPool
from kvledger.errors import UnknownRequestError, require, wrong_value
from kvledger.kv_cache_blocks import BlockCopy, KVCacheBlocks, PrefixHit
from kvledger.managers.base import GroupBlocks, SingleTypeKVCacheManager
from kvledger.managers.registry import make_manager
from kvledger.observer import LedgerObserver
from kvledger.request import Request
from kvledger.slot_ranges import SlotRanges
from kvledger.spec import KVCacheConfig


class RequestBlocks:
    """All that one request holds, and how far that lasts: most decode steps need nothing from the groups below."""

    def __init__(self, groups: list[GroupBlocks]) -> None:
        self.groups: Final = groups
        # Every group has a block for each of the first num_slots tokens.
        self.num_slots: int = 0
        # With this many computed tokens some group has a full block that is not cached yet.
        self.next_full: int = 0


class KVCacheCoordinator(ABC):
    """Owns the pool, one manager per group, and {request id: its blocks in each group}."""

    def __init__(self, config: KVCacheConfig, hash_block_size: int, observer: LedgerObserver | None) -> None:
        self.pool: Final = BlockPool(config.num_blocks, len(config.groups), observer)
        self.managers: Final[list[SingleTypeKVCacheManager]] = [
            make_manager(group.spec, group_id, self.pool, hash_block_size, observer)
            for group_id, group in enumerate(config.groups)
        ]
        self.num_groups: Final = len(config.groups)
        # Shared by every call that yields no blocks; never written to.
        self.no_blocks: Final = KVCacheBlocks([[] for _ in config.groups])
        self.no_hit: Final = PrefixHit(self.no_blocks, 0)
        self._held: dict[str, RequestBlocks] = {}
        self._pending_copies: list[BlockCopy] = []
        self._retained: dict[int, int] = {}

    @abstractmethod
    def find_longest_hit(self, block_hashes: list[bytes], max_tokens: int) -> PrefixHit:
        """The longest cached prefix of at most max_tokens tokens that every group can start from."""

    @abstractmethod
    def cache_blocks(self, held: RequestBlocks, request: Request, num_tokens: int) -> None:
        """Makes blocks that are full at num_tokens tokens hits for others."""

    def get(self, request_id: str) -> RequestBlocks | None:
        return self._held.get(request_id)

    def add(self, request_id: str) -> RequestBlocks:
        held = RequestBlocks([GroupBlocks() for _ in self.managers])
        self._held[request_id] = held
        return held

    def require_held(self, request_id: str) -> RequestBlocks:
        held = self._held.get(request_id)
        if held is None:
            raise UnknownRequestError(
                f"request_id={request_id!r}: holds no blocks (never admitted, or freed already); nothing was changed"
            )
        return held

    def num_blocks_to_take(self, held: RequestBlocks | None, hit: PrefixHit, num_slots: int) -> int:
        """Free blocks that giving the request num_slots slots uses up, over all groups."""
        num_blocks = 0
        hit_blocks = hit.blocks.blocks
        for group_id, manager in enumerate(self.managers):
            group = _NOTHING_HELD if held is None else held.groups[group_id]
            num_blocks += manager.num_blocks_to_take(group, hit_blocks[group_id], num_slots)
        return num_blocks

    def attach(self, held: RequestBlocks, hit: PrefixHit, ranges: SlotRanges, max_model_len: int) -> None:
        """Gives the request its hit, then blocks for external tokens.

        Every group's hit is touched before any group takes blocks: otherwise one group's new block could be another
        group's hit (vllm-project/vllm#33775).
        """
        hit_blocks = hit.blocks.blocks
        for group_id, manager in enumerate(self.managers):
            manager.attach_hit(held.groups[group_id], hit_blocks[group_id])
        if ranges.num_external > 0:
            for group_id, manager in enumerate(self.managers):
                manager.take_blocks(held.groups[group_id], min(ranges.computed_end, max_model_len))

    def take_blocks(self, held: RequestBlocks, num_slots: int) -> KVCacheBlocks:
        """Takes the missing blocks of every group and returns them."""
        taken: list[list[KVCacheBlock]] = []
        for group_id, manager in enumerate(self.managers):
            taken.append(manager.take_blocks(held.groups[group_id], num_slots))
        self.measure(held)
        return KVCacheBlocks(taken)

    def measure(self, held: RequestBlocks) -> None:
        """Brings num_slots and next_full up to date after the groups changed."""
        first = held.groups[0]
        block_size = self.managers[0].block_size
        num_slots = len(first.blocks) * block_size
        next_full = (first.num_cached_blocks + 1) * block_size
        for group_id in range(1, self.num_groups):
            group = held.groups[group_id]
            block_size = self.managers[group_id].block_size
            num_slots = min(num_slots, len(group.blocks) * block_size)
            next_full = min(next_full, (group.num_cached_blocks + 1) * block_size)
        held.num_slots = num_slots
        held.next_full = next_full

    def free(self, request_id: str) -> None:
        """Gives back all blocks of a request."""
        held = self.require_held(request_id)
        for group_id, manager in enumerate(self.managers):
            manager.free(held.groups[group_id])
        del self._held[request_id]

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> KVCacheBlocks | None:
        """Lets the child share the parent's full blocks at num_tokens tokens; the rest of the last block is copied.

        None, changing nothing, when the blocks to copy into are not free.
        """
        parent = self.require_held(parent_id)
        partial = [manager for manager in self.managers if num_tokens % manager.block_size != 0]
        if len(partial) > self.pool.num_free_blocks:
            return None
        child = self.add(child_id)
        for group_id, manager in enumerate(self.managers):
            blocks = child.groups[group_id]
            manager.fork(parent.groups[group_id], blocks, num_tokens)
            if manager in partial:
                source = parent.groups[group_id].blocks[len(blocks.blocks)]
                target = manager.take_blocks(blocks, num_tokens)[0]
                self._order_copy(BlockCopy(group_id, source, target))
        self.measure(child)
        return self.blocks_of(child)

    def blocks_of(self, held: RequestBlocks) -> KVCacheBlocks:
        return KVCacheBlocks([group.blocks for group in held.groups])

    def take_block_copies(self) -> list[BlockCopy]:
        copies = self._pending_copies
        if copies:
            self._pending_copies = []
        return copies

    def release_block_copies(self, copies: list[BlockCopy]) -> None:
        """The worker has made these copies: their blocks may be reused."""
        for copy in copies:
            for block in (copy.target, copy.source):
                block_id: int = block.block_id
                if self._retained[block_id] == 1:
                    del self._retained[block_id]
                else:
                    self._retained[block_id] -= 1
                self.pool.free_blocks([block])

    def _order_copy(self, copy: BlockCopy) -> None:
        self._pending_copies.append(copy)
        self.pool.touch([copy.source, copy.target])
        for block in (copy.source, copy.target):
            block_id: int = block.block_id
            self._retained[block_id] = self._retained.get(block_id, 0) + 1

    def check(self) -> None:
        """Proves that each block's ref_cnt is the number of its holders, and every layer below. O(blocks)."""
        self.pool.check()
        holders = dict(self._retained)
        for request_id, held in self._held.items():
            require(len(held.groups) == self.num_groups, f"request {request_id!r} misses a group")
            for group_id, group in enumerate(held.groups):
                block_size = self.managers[group_id].block_size
                require(
                    held.num_slots <= len(group.blocks) * block_size
                    and held.next_full <= (group.num_cached_blocks + 1) * block_size,
                    f"request {request_id!r}: num_slots or next_full is out of date",
                )
                require(group.num_cached_blocks <= len(group.blocks), f"request {request_id!r} caches what it lacks")
                seen: set[int] = set()
                for block in group.blocks:
                    block_id = int(block.block_id)
                    if block_id == 0:
                        continue
                    require(self.pool.blocks[block_id] is block, f"{block!r} is of another pool")
                    require(block_id not in seen, f"request {request_id!r} holds {block!r} twice")
                    seen.add(block_id)
                    holders[block_id] = holders.get(block_id, 0) + 1
        for block in self.pool.blocks[1:]:
            num_holders = holders.get(int(block.block_id), 0)
            require(block.ref_cnt == num_holders, f"{block!r} has {num_holders} holders")


# Stands in for a request that holds nothing yet; never written to.
_NOTHING_HELD: Final = GroupBlocks()


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Any number of groups; nothing is hashed, looked up or cached."""

    def find_longest_hit(self, block_hashes: list[bytes], max_tokens: int) -> PrefixHit:
        return self.no_hit

    def cache_blocks(self, held: RequestBlocks, request: Request, num_tokens: int) -> None:
        return


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group with prefix caching: its manager's hit is the hit."""

    def find_longest_hit(self, block_hashes: list[bytes], max_tokens: int) -> PrefixHit:
        manager = self.managers[0]
        hit = manager.find_longest_hit(block_hashes, max_tokens)
        if not hit:
            return self.no_hit
        return PrefixHit(KVCacheBlocks([hit]), len(hit) * manager.block_size)

    def cache_blocks(self, held: RequestBlocks, request: Request, num_tokens: int) -> None:
        self.managers[0].cache_blocks(held.groups[0], request, num_tokens)
        self.measure(held)


def make_coordinator(
    config: KVCacheConfig, enable_caching: bool, hash_block_size: int, observer: LedgerObserver | None
) -> KVCacheCoordinator:
    """The coordinator for that configuration."""
    if not enable_caching:
        return KVCacheCoordinatorNoPrefixCache(config, hash_block_size, observer)
    for group in config.groups:
        if group.spec.block_size % hash_block_size != 0:
            raise wrong_value(
                "hash_block_size",
                hash_block_size,
                f"does not divide the block size {group.spec.block_size} of a group",
                "give a common divisor of all block sizes",
            )
    if len(config.groups) == 1:
        return UnitaryKVCacheCoordinator(config, hash_block_size, observer)
    raise wrong_value(
        "groups",
        len(config.groups),
        "prefix caching over several groups is not built yet",
        "give one group, or enable_caching=False",
    )
