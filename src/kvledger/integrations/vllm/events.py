"""KV cache events in vLLM's own classes, with the content and in the order in which vLLM's manager emits them.

vLLM reports every range of blocks that became full, also where it keeps none of them for others (null blocks, sparse
windows): such an event has tokens and no hashes.
"""

from typing import Any

from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.kv_cache_blocks import PrefixHit
from kvledger.core.blocks.observer import EvictionCause, GroupSizes, LedgerObserver
from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.core.requests.request import Request


class EventLog(LedgerObserver):
    """Events of that ledger since they were last taken."""

    def __init__(
        self, kv_cache_config: Any, hash_block_size: int, ledger: KVCacheManager, num_hash_lookahead: int = 0
    ) -> None:
        self._pool = ledger.block_pool
        # Tokens behind a block that its hash covers as well.
        self._num_ahead = num_hash_lookahead
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._kinds = [(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs]
        self._hash_block_size = hash_block_size
        self.pending: list[Any] = []
        # vLLM's request of the call that is going on.
        self._request: Any = None

    def take(self) -> list[Any]:
        events = self.pending
        self.pending = []
        return events

    def begin(self, request: Any) -> None:
        """A call begins that may cache blocks of this request of vLLM's."""
        self._request = request

    def report_hit(self, request: Any, hit: PrefixHit, block_sizes: list[int]) -> None:
        """For requests that ask for a full report: whole blocks that they share count as stored once more."""
        self._request = request
        for group_id, size in enumerate(block_sizes):
            end = min(len(hit.blocks.blocks[group_id]), hit.num_tokens // size) * size
            if end > 0:
                self._store(group_id, 0, end, size, list(range(size, end + 1, size)))

    # What the ledger tells

    def blocks_filled(
        self, request: Request, group_id: int, blocks: list[KVCacheBlock], start: int, end: int, sizes: GroupSizes
    ) -> None:
        self._store(group_id, start, end, sizes.block_size, [block.num_hash_tokens for block in blocks])

    def prefix_cached(
        self, request: Request, group_id: int, block: KVCacheBlock, num_tokens: int, sizes: GroupSizes
    ) -> None:
        """vLLM names the tokens of the last hash unit only."""
        unit = sizes.hash_block_size
        self._store(group_id, num_tokens - unit, num_tokens, unit, [num_tokens])

    def blocks_evicted(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> None:
        if cause is EvictionCause.RESET:
            return  # one event for all of them
        for block in blocks:
            assert block.block_hash is not None
            for block_hash in (block.block_hash, *self._pool.further_hashes(block)):
                name = maybe_convert_block_hash(block_hash)
                self.pending.append(BlockRemoved(block_hashes=[name], medium=MEDIUM_GPU, group_idx=block.group_id))

    def prefix_cache_reset(self) -> None:
        self.pending.append(AllBlocksCleared())

    def _store(self, group_id: int, start: int, end: int, block_size: int, ends: list[int]) -> None:
        """Reports tokens [start, end), of which the blocks of block_size tokens that end at `ends` are hits."""
        request = self._request
        unit = self._hash_block_size
        hashes = request.block_hashes
        extra_keys: list[Any] = []
        feature = 0
        for block_end in ends:
            keys, feature = self._extra_keys(request, block_end - block_size, block_end, feature)
            extra_keys.append(keys)
        # A field that vLLM 0.32 does not have.
        ahead: dict[str, Any] = {}
        if self._num_ahead > 0:
            tokens = request.all_token_ids
            ahead["lookahead_token_ids"] = [tokens[block_end : block_end + self._num_ahead] for block_end in ends]
        lora = request.lora_request
        kind, window = self._kinds[group_id]
        self.pending.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(hashes[block_end // unit - 1]) for block_end in ends],
                parent_block_hash=maybe_convert_block_hash(hashes[start // unit - 1]) if start > 0 else None,
                token_ids=request.all_token_ids[start:end],
                block_size=block_size,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_GPU,
                lora_name=lora.name if lora else None,
                extra_keys=to_event_extra_keys(extra_keys),
                group_idx=group_id,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
                session_id=request.session_id,
                **ahead,
            )
        )

    def _extra_keys(self, request: Any, start: int, end: int, feature: int) -> tuple[Any, int]:
        if self._num_ahead == 0:
            return generate_block_hash_extra_keys(request, start, end, feature)  # type: ignore[no-any-return]
        from vllm.v1.core.kv_cache_utils import generate_lookahead_block_hash_extra_keys

        return generate_lookahead_block_hash_extra_keys(request, start, end, end + self._num_ahead, feature)  # type: ignore[no-any-return]
