"""What vLLM wants to hear of a call beyond its result: KV events, block residency, block ids to zero.

All of it is off in most engines. The adapter then has no CallWatch, and nothing here costs anything.
"""

from typing import Any

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.kv_cache_blocks import KVCacheBlocks
from kvledger.core.blocks.observer import LedgerObserver
from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.integrations.vllm.events import EventLog
from kvledger.integrations.vllm.residency import Residency


class BlockZeroing(LedgerObserver):
    """Ids of blocks that the workers must zero, because nobody writes them whole: new ones of these groups."""

    def __init__(self, group_ids: list[int]) -> None:
        self._ids: dict[int, list[int]] = {group_id: [] for group_id in group_ids}
        # How many there were when the call began that is going on.
        self._num_before: dict[int, int] = {}

    def blocks_taken(self, group_id: int, blocks: list[KVCacheBlock]) -> None:
        if group_id in self._ids:
            self.add(group_id, blocks)

    def add(self, group_id: int, blocks: list[KVCacheBlock]) -> None:
        """Blocks of a group that zeroes, or of another one, which are passed over."""
        if group_id in self._ids:
            self._ids[group_id].extend([block.block_id for block in blocks])

    def begin(self) -> None:
        self._num_before = {group_id: len(ids) for group_id, ids in self._ids.items()}

    def skip_loaded(self, taken: KVCacheBlocks, skipped_groups: tuple[int, ...]) -> None:
        """At the end of a call: blocks of these groups that a load will write are not zeroed. They were taken before
        the call's result."""
        for group_id in skipped_groups:
            ids = self._ids.get(group_id)
            if ids is not None:
                del ids[self._num_before[group_id] : len(ids) - len(taken.blocks[group_id])]

    def take(self) -> list[int]:
        """All ids since the last call, group by group."""
        ids: list[int] = []
        for group_id, group_ids in self._ids.items():
            ids.extend(group_ids)
            self._ids[group_id] = []
        return ids


class CallWatch:
    """Stands around every call that can take or fill blocks. What nobody wants is None."""

    def __init__(self, events: EventLog | None, residency: Residency | None, zeroing: BlockZeroing | None) -> None:
        self.events = events
        self.zeroing = zeroing
        self._residency = residency

    def listen_to(self, ledger: KVCacheManager) -> None:
        """To be called before the ledger serves anybody."""
        for observer in (self.events, self._residency, self.zeroing):
            if observer is not None:
                ledger.observe(observer)

    def begin(self, request: Any) -> None:
        """Before allocate_slots or cache_blocks."""
        if self.events is not None:
            self.events.begin(request)
        if self.zeroing is not None:
            self.zeroing.begin()

    def end(self, taken: KVCacheBlocks | None, skips_zeroing: tuple[int, ...]) -> None:
        """After allocate_slots with that result. `skips_zeroing`: groups whose external blocks a load will write."""
        if self.zeroing is not None and taken is not None and skips_zeroing:
            self.zeroing.skip_loaded(taken, skips_zeroing)
