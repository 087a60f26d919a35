"""The coordinator of the ledger as vLLM's scheduler, engine core and connectors use it."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvledger.core.blocks.kv_cache_blocks import KVCacheBlocks, PrefixHit
from kvledger.core.groups.base import GroupBlocks, SingleTypeKVCacheManager
from kvledger.core.groups.slot_ranges import SlotRanges
from kvledger.core.ledger.coordinator import KVCacheCoordinator
from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.integrations.vllm.blocks import BlockView, BlockViews, Partial
from kvledger.integrations.vllm.pool import PoolView


class HeldBlocks(Partial):
    """vLLM's req_to_blocks, to look at: {request id: its blocks in one group}. Whoever holds none has an empty list."""

    def __init__(self, coordinator: KVCacheCoordinator, views: BlockViews, group_id: int) -> None:
        self._coordinator = coordinator
        self._views = views
        self._group_id = group_id

    def __len__(self) -> int:
        return self._coordinator.num_requests

    def __contains__(self, request_id: str) -> bool:
        return self._coordinator.get(request_id) is not None

    def __getitem__(self, request_id: str) -> Any:
        return self.get(request_id, [])

    def get(self, request_id: str, default: Any = None) -> Any:
        held = self._coordinator.get(request_id)
        return default if held is None else self._shown(held.groups[self._group_id])

    def _shown(self, held: GroupBlocks) -> Any:
        return [self._views.of(block) for block in held.blocks]


class NumCachedBlocks(HeldBlocks):
    """vLLM's num_cached_block, to look at: {request id: its blocks that need no more caching}."""

    def _shown(self, held: GroupBlocks) -> Any:
        return held.num_cached_blocks


class GroupView(Partial):
    """vLLM's manager of one group: what it keeps, how large its blocks are, and who holds which."""

    def __init__(
        self, manager: SingleTypeKVCacheManager, kv_cache_spec: Any, coordinator: KVCacheCoordinator, pool: PoolView
    ) -> None:
        self.req_to_blocks = HeldBlocks(coordinator, pool.blocks, manager.group_id)
        self.num_cached_block = NumCachedBlocks(coordinator, pool.blocks, manager.group_id)
        self._null_block = pool.null_block
        self.block_pool = pool
        self.kv_cache_group_id = manager.group_id
        self.kv_cache_spec = kv_cache_spec
        self.block_size = manager.block_size
        self.cache_hit_alignment_tokens = manager.policy.hit_alignment


class CoordinatorView(Partial):
    """vLLM's KVCacheCoordinator, to ask."""

    def __init__(self, ledger: KVCacheManager, kv_cache_config: Any, pool: PoolView) -> None:
        self._coordinator = ledger.coordinator
        self._demand = ledger.demand
        self.kv_cache_config = kv_cache_config
        self.block_pool = pool
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.single_type_managers = tuple(
            GroupView(manager, specs[group_id], self._coordinator, pool)
            for group_id, manager in enumerate(self._coordinator.managers)
        )
        self.scheduler_block_size = self._coordinator.managers[0].policy.base_block_size
        self.enable_partial_hash_hits = any(m.policy.hits_inside_blocks for m in self._coordinator.managers)
        # Of several groups, the first that reads every token; None as well where they are not looked up together.
        self.full_attention_group_id: int | None = None
        self._agrees = ledger.enable_caching and len(specs) > 1
        if self._agrees:
            full = [i for i, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec) and spec.prefix_cacheable]
            self.full_attention_group_id = full[0] if full else None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What isinstance() is told: connectors ask whether hits are those of several groups."""
        return HybridKVCacheCoordinator if self._agrees else CoordinatorView

    def find_longest_cache_hit_per_group(
        self, block_hashes: list[bytes], max_cache_hit_length: int
    ) -> tuple[tuple[list[BlockView], ...], tuple[int, ...]]:
        """What each group could start from alone: its blocks, and how many tokens."""
        hits = self._coordinator.find_hit_of_each_group(block_hashes, max_cache_hit_length)
        of = self.block_pool.blocks.of
        return tuple([of(block) for block in hit.blocks[0]] for hit in hits), tuple(hit.num_tokens for hit in hits)

    @property
    def retention_interval(self) -> int | None:
        """What the ledger was made with."""
        interval: int | None = self.kv_cache_config.prefix_cache_retention_interval
        return interval

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
        held = self._coordinator.get(request_id)
        return int(self._demand.num_blocks_to_take(held, PrefixHit(found, 0, -1), ranges))
