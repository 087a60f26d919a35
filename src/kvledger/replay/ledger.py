"""What a replay reads off the ledger that it runs on. There are two kinds, and they give the same numbers:

blocks    the library's own: KVCacheManager, block by block
extents   runs of blocks counted together (core/extents), for what they can do: extent_ledger.py
"""

from abc import ABC, abstractmethod
from typing import Final, Literal

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.block_pool import PoolOccupancy
from kvledger.core.blocks.kv_cache_blocks import GroupOccupancy
from kvledger.core.blocks.observer import EvictionCause, LedgerObserver
from kvledger.core.extents.extent_misses import ExtentMisses
from kvledger.core.ledger.lookups import PrefixCacheStats
from kvledger.core.watch.miss_explainer import MissExplainer
from kvledger.replay.config import ReplayConfig
from kvledger.traces.prompts import PromptMaker

# How a ledger counts.
Counting = Literal["blocks", "extents"]


class ReplayLedger(ABC):
    """`misses`: why prompts missed, where somebody asks."""

    counting: Counting
    misses: MissExplainer | ExtentMisses | None

    @property
    @abstractmethod
    def num_usable_blocks(self) -> int:
        """Blocks that can hold tokens."""

    @property
    @abstractmethod
    def usage(self) -> float:
        """Share of them that requests hold."""

    @property
    @abstractmethod
    def num_evictions(self) -> int:
        """Cached blocks that lost their content to a new one."""

    @abstractmethod
    def num_blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a request of so many tokens holds at a time."""

    @abstractmethod
    def occupancy(self) -> PoolOccupancy:
        """Where the usable blocks are."""

    @abstractmethod
    def group_occupancies(self) -> list[GroupOccupancy]:
        """What requests hold and what is cached, for each group."""

    @abstractmethod
    def take_prefix_cache_stats(self) -> PrefixCacheStats:
        """All lookups. To be called once, at the end."""


class EvictionMeter(LedgerObserver):
    """Counts cached blocks that lost their content to a new block."""

    def __init__(self) -> None:
        self.num_evictions: int = 0

    def blocks_evicted(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> None:
        if cause is EvictionCause.REUSED:
            self.num_evictions += len(blocks)


class BlockLedger(ReplayLedger):
    """The library's. `manager`: for whoever drives it, `maker` makes requests for it."""

    counting = "blocks"

    def __init__(self, config: ReplayConfig, maker: PromptMaker) -> None:
        self.maker: Final = maker
        self._evictions: Final = EvictionMeter()
        self.manager: Final = config.make_manager(maker, self._evictions)
        explain = config.explain_misses
        self.misses = None if explain is None else MissExplainer(self.manager, explain)

    @property
    def num_usable_blocks(self) -> int:
        return self.manager.num_usable_blocks

    @property
    def usage(self) -> float:
        return self.manager.usage

    @property
    def num_evictions(self) -> int:
        return self._evictions.num_evictions

    def num_blocks_for(self, num_tokens: int) -> int:
        return self.manager.num_blocks_for(num_tokens)

    def occupancy(self) -> PoolOccupancy:
        return self.manager.occupancy()

    def group_occupancies(self) -> list[GroupOccupancy]:
        return self.manager.group_occupancies()

    def take_prefix_cache_stats(self) -> PrefixCacheStats:
        return self.manager.take_prefix_cache_stats()
