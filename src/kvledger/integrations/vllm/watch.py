"""What vLLM wants to hear of a call beyond its result: KV events, block residency, block ids to zero.

All of it is off in most engines. The adapter then has no CallWatch, and nothing here costs anything.
"""

from typing import Any

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.kv_cache_blocks import KVCacheBlocks, PrefixHit
from kvledger.core.blocks.observer import LedgerObserver, LedgerObservers
from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.integrations.vllm.blocks import BlockViews
from kvledger.integrations.vllm.events import EventLog
from kvledger.integrations.vllm.residency import Residency


class CallWatch:
    """Stands around every call that can take or fill blocks. `zeroed_groups`: whose new blocks workers must zero."""

    ledger: KVCacheManager

    def __init__(self, events: EventLog | None, residency: Residency | None, zeroed_groups: list[int]) -> None:
        self.events = events
        self.residency = residency
        self._zeroed_groups = zeroed_groups
        self._to_zero: dict[int, list[int]] = {group_id: [] for group_id in zeroed_groups}
        # Of the call that is going on.
        self._request_id = ""
        self._hit: PrefixHit | None = None
        self._skipped: list[int] = []
        self._attached: list[int] = []

    def observer(self) -> LedgerObserver | None:
        """What the ledger is to be made with."""
        observers = [observer for observer in (self.events, self.residency) if observer is not None]
        return LedgerObservers(list(observers)) if observers else None

    def bind(self, ledger: KVCacheManager, views: BlockViews) -> None:
        """To be called once there is a ledger."""
        self.ledger = ledger
        if self.events is not None:
            self.events.pool = ledger.block_pool
        if self.residency is not None:
            self.residency.views = views

    def begin(self, request: Any, hit: PrefixHit | None = None, num_external_tokens: int = 0) -> None:
        """Before allocate_slots or cache_blocks."""
        if self.events is not None:
            self.events.begin(request)
        self._request_id = request.request_id
        self._hit = hit if self.ledger.coordinator.get(self._request_id) is None else None
        if self._hit is not None:
            self._plan_attaching(request.num_computed_tokens, self._hit, num_external_tokens)

    def end(self, taken: KVCacheBlocks | None, skips_zeroing: tuple[int, ...] = ()) -> None:
        """After it. `taken`: new blocks; None: it changed nothing. `skips_zeroing`: groups that a load will write."""
        if taken is None:
            return
        external = self._external_blocks(taken)
        if self.residency is not None:
            if self._hit is not None:
                for found, skipped in zip(self._hit.blocks.blocks, self._skipped, strict=True):
                    self.residency.touched(found[skipped:])
            for blocks in (*external, *taken.blocks):
                self.residency.taken(blocks)
        for group_id in self._zeroed_groups:
            if external and group_id not in skips_zeroing:
                self.zero(group_id, external[group_id])
            self.zero(group_id, taken.blocks[group_id])

    def zero(self, group_id: int, blocks: list[KVCacheBlock]) -> None:
        if group_id in self._to_zero:
            self._to_zero[group_id].extend([block.block_id for block in blocks])

    def take_ids_to_zero(self) -> list[int]:
        ids: list[int] = []
        for group_id, group_ids in self._to_zero.items():
            ids.extend(group_ids)
            self._to_zero[group_id] = []
        return ids

    def _plan_attaching(self, num_computed_tokens: int, hit: PrefixHit, num_external_tokens: int) -> None:
        """How many blocks of each group's hit are passed over, and how many entries its table starts with."""
        managers = self.ledger.coordinator.managers
        local_end = num_computed_tokens + hit.num_tokens
        self._skipped = []
        self._attached = []
        for group_id, manager in enumerate(managers):
            found = len(hit.blocks.blocks[group_id])
            skipped = max(0, manager.num_skipped_tokens(local_end + num_external_tokens)) // manager.block_size
            ends_inside = found > skipped and local_end % manager.block_size != 0
            self._skipped.append(skipped)
            self._attached.append(local_end // manager.block_size if ends_inside else max(found, skipped))

    def _external_blocks(self, taken: KVCacheBlocks) -> list[list[KVCacheBlock]]:
        """Blocks for external tokens, which are in the request's table and in nobody's result."""
        if self._hit is None:
            return []
        held = self.ledger.coordinator.require_held(self._request_id)
        external: list[list[KVCacheBlock]] = []
        for group, start, new in zip(held.groups, self._attached, taken.blocks, strict=True):
            end = len(group.blocks) - len(new)
            external.append([block for block in group.blocks[start:end] if not block.is_null])
        return external
