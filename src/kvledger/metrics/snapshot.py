"""Snapshot: everything that the gauges and counters show, read at one moment by the thread that owns the scheduler.

A scrape comes from another thread, in the middle of a step. It shows the last snapshot, so its numbers belong together:
live, cached and unused blocks always sum to the pool.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvledger.core.blocks.block_pool import PoolOccupancy
from kvledger.core.blocks.kv_cache_blocks import GroupOccupancy
from kvledger.core.blocks.observer import EvictionCause
from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.core.ledger.lookups import PrefixCacheStats
from kvledger.scheduler import WaitReason


class WatchedScheduler(Protocol):
    """What metrics look at: a Scheduler, or another one over a ledger of ours."""

    @property
    def manager(self) -> KVCacheManager: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_blocks_held_by_waiting(self) -> int: ...
    @property
    def num_blocks_held_by_orphans(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    def wait_counts(self) -> dict[WaitReason, int]: ...


@dataclass(frozen=True)
class Snapshot:
    """Counts since the beginning are totals; all others are of the moment."""

    num_running: int
    num_waiting: int
    waits: dict[WaitReason, int]
    usage: float
    occupancy: PoolOccupancy
    groups: list[GroupOccupancy]
    num_blocks_held_by_waiting: int
    num_blocks_held_by_orphans: int
    num_preemptions: int
    prefix_cache: PrefixCacheStats
    evictions: dict[EvictionCause, int]
    misses: Mapping[str, int]
    num_steps: int
    num_scheduled_tokens: int

    @classmethod
    def of(cls, scheduler: WatchedScheduler, num_scheduled_tokens: int, misses: Mapping[str, int]) -> "Snapshot":
        """O(blocks held), for the groups."""
        manager = scheduler.manager
        return cls(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            waits=scheduler.wait_counts(),
            usage=manager.usage,
            occupancy=manager.occupancy(),
            groups=manager.group_occupancies(),
            num_blocks_held_by_waiting=scheduler.num_blocks_held_by_waiting,
            num_blocks_held_by_orphans=scheduler.num_blocks_held_by_orphans,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache=manager.prefix_cache_totals(),
            evictions=manager.eviction_counts(),
            misses=dict(misses),
            num_steps=scheduler.num_steps,
            num_scheduled_tokens=num_scheduled_tokens,
        )
