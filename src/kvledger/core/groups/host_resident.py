"""A group whose blocks live in host memory: full attention over a pool of its own.

Its blocks never count against the device's pool. A request that the host pool cannot back is not admitted, so every
block always has a place. Prefixes survive here that the device has lost, so its hits are handed out whole.
"""

from mypy_extensions import i64, mypyc_attr

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.block_pool import BlockPool
from kvledger.core.blocks.observer import CacheObserver, LedgerObserver
from kvledger.core.groups.base import GroupBlocks, ManagerContext
from kvledger.core.groups.full_attention import FullAttentionManager
from kvledger.core.groups.policy import GroupPolicy
from kvledger.core.groups.slot_ranges import SlotRanges
from kvledger.core.groups.spec import HostResidentSpec


@mypyc_attr(allow_interpreted_subclasses=True)
class HostResidentManager(FullAttentionManager):
    def __init__(self, spec: HostResidentSpec, group_id: int, context: ManagerContext, policy: GroupPolicy) -> None:
        super().__init__(spec, group_id, context, policy)
        self.device_pool: BlockPool = context.pool
        self.pool = BlockPool(spec.num_host_blocks, len(context.pool.indexes))
        if context.observer is not None:
            self.pool.observe(CacheObserver(context.observer))
        self.pool.link_pool(context.pool)

    def observe(self, observer: LedgerObserver) -> None:
        super().observe(observer)
        self.pool.observe(CacheObserver(observer))

    def keeps_longer_hit(self) -> bool:
        return True

    def num_host_blocks_to_take(self, held: GroupBlocks, hit: list[KVCacheBlock], ranges: SlotRanges) -> i64:
        """Free blocks of the host pool that these ranges will use up."""
        return FullAttentionManager.num_blocks_to_take(self, held, hit, ranges)

    def num_blocks_to_take(self, held: GroupBlocks, hit: list[KVCacheBlock], ranges: SlotRanges) -> i64:
        """No block of the device; or more than it has, when the host pool does not suffice."""
        num_needed = self.num_host_blocks_to_take(held, hit, ranges)
        return 0 if num_needed <= self.pool.num_free_blocks else self.device_pool.num_blocks + 1

    def num_blocks_alone(self, hit: list[KVCacheBlock], ranges: SlotRanges) -> int:
        """None of the device either; or more than it has, when the whole host pool does not suffice."""
        num_needed = self.num_host_blocks_to_take(self.make_held(), hit, ranges)
        num_needed += sum([1 for block in hit if block.ref_cnt > 0])
        return self._beyond_device(num_needed)

    def num_blocks_at_peak(self, ranges: SlotRanges) -> int:
        """As above."""
        return self._beyond_device(super().num_blocks_at_peak(ranges))

    def _beyond_device(self, num_needed: int) -> int:
        return 0 if num_needed <= self.pool.num_usable_blocks else self.device_pool.num_blocks + 1

    def num_blocks_to_fork(self, held: GroupBlocks, num_tokens: int, num_forks: int) -> int:
        """As above: counted in the host pool, and more than the device has where that does not suffice."""
        num_needed = super().num_blocks_to_fork(held, num_tokens, num_forks)
        return 0 if num_needed <= self.pool.num_free_blocks else self.device_pool.num_blocks + 1
