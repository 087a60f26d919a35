"""The coordinator of the ledger as vLLM's scheduler, engine core and connectors use it."""

from collections.abc import Sequence
from typing import Any

from kvledger.core.blocks.kv_cache_blocks import KVCacheBlocks, PrefixHit
from kvledger.core.groups.slot_ranges import SlotRanges
from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.integrations.vllm.blocks import BlockView, Partial
from kvledger.integrations.vllm.pool import PoolView


class GroupView(Partial):
    """vLLM's manager of one group: what it keeps and how large its blocks are."""

    def __init__(self, group_id: int, kv_cache_spec: Any, block_size: int) -> None:
        self.kv_cache_group_id = group_id
        self.kv_cache_spec = kv_cache_spec
        self.block_size = block_size


class CoordinatorView(Partial):
    """vLLM's KVCacheCoordinator, to ask."""

    def __init__(self, ledger: KVCacheManager, kv_cache_config: Any, pool: PoolView) -> None:
        self._coordinator = ledger.coordinator
        self.kv_cache_config = kv_cache_config
        self.block_pool = pool
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.single_type_managers = tuple(
            GroupView(group_id, specs[group_id], manager.block_size)
            for group_id, manager in enumerate(self._coordinator.managers)
        )
        self.enable_partial_hash_hits = any(m.policy.hits_inside_blocks for m in self._coordinator.managers)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: tuple[Sequence[BlockView], ...],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Free blocks that the request would use up to have slots for num_tokens tokens."""
        ranges = SlotRanges(
            num_local_computed_tokens,
            total_computed_tokens,
            num_tokens_main_model,
            num_tokens,
            num_encoder_tokens,
            prefill_end,
            is_gate=apply_admission_cap,
        )
        found = KVCacheBlocks([[block.ours for block in group] for group in new_computed_blocks])
        return self._coordinator.num_blocks_to_take(self._coordinator.get(request_id), PrefixHit(found, 0, -1), ranges)
