"""How long blocks stay, for vLLM's KVCacheMetricsCollector: the calls that vLLM's pool makes to it, in its order."""

from collections.abc import Iterable
from typing import Any

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.observer import LedgerObserver
from kvledger.integrations.vllm.blocks import BlockViews


class Residency(LedgerObserver):
    """`evicts`: prefix caching is on, so that a block which is taken ends its stay. `views`: of the ledger's blocks."""

    def __init__(self, collector: Any, evicts: bool) -> None:
        self._collector = collector
        self._evicts = evicts
        self.views: BlockViews | None = None

    def blocks_taken(self, group_id: int, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            if self._evicts:
                self._collector.on_block_evicted(self._view(block))
            self._collector.on_block_allocated(self._view(block))

    def blocks_touched(self, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            if not block.is_null:
                self._collector.on_block_accessed(self._view(block))

    def named_for_eviction(self, blocks: Iterable[KVCacheBlock]) -> None:
        """vLLM tells of every block that evict_blocks names, cached or not."""
        for block in blocks:
            self._collector.on_block_evicted(self._view(block))

    def prefix_cache_reset(self) -> None:
        self._collector.reset()

    def _view(self, block: KVCacheBlock) -> Any:
        assert self.views is not None
        return self.views.of(block)
