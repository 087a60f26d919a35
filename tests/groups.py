"""More words, for ledgers of several groups and for the workers behind them.

full(), window(8), chunked(16), state(), ...      specs of blocks of 4 tokens
manager = hybrid(20, full(), window(8))           a KVCacheManager with 20 usable blocks and those groups
tables(manager, a)                                block ids of request a per group, 0 for null
held(manager, a)                                  how many blocks it holds per group
"""

from typing import Any

from kvledger import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager, KVCacheSpec, Request
from kvledger.core.groups.base import GroupBlocks, SingleTypeKVCacheManager
from kvledger.core.groups.spec import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    HostResidentSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)


def full(block_size: int = 4, heads: int = 1) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, heads, 8)


def sink(sink_len: int = 4, block_size: int = 4) -> SinkFullAttentionSpec:
    return SinkFullAttentionSpec(block_size, 1, 8, sink_len=sink_len)


def mla(block_size: int = 4) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size, 8)


def window(tokens: int, block_size: int = 4, heads: int = 1, extra: int = 0) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size, heads, 8, sliding_window=tokens, extra_retained_tokens=extra)


def window_mla(tokens: int, block_size: int = 4) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(block_size, 8, sliding_window=tokens)


def chunked(tokens: int, block_size: int = 4) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(block_size, 1, 8, attention_chunk_size=tokens)


def cross(tokens: int = 16, block_size: int = 4) -> CrossAttentionSpec:
    return CrossAttentionSpec(block_size, 1, 8, max_encoder_tokens=tokens)


def ring(block_size: int = 4) -> CircularBufferSpec:
    return CircularBufferSpec(block_size, 1, 8)


def host(num_host_blocks: int, block_size: int = 4) -> HostResidentSpec:
    return HostResidentSpec(block_size, 1, 8, num_host_blocks=num_host_blocks)


def state(block_size: int = 4, mode: str = "align", drafts: int = 0, checkpoint: int = 0, heads: int = 1) -> MambaSpec:
    """A recurrent state; `checkpoint`: the alignment of states that a prefill writes on its way, 0: it writes none."""
    return MambaSpec(
        block_size,
        ((heads, 8),),
        ("float32",),
        mamba_cache_mode=mode,
        num_speculative_blocks=drafts,
        num_prefill_checkpoint_blocks=1 if checkpoint else 0,
        prefill_checkpoint_alignment=checkpoint,
    )


def groups_of(*specs: KVCacheSpec, draft: int = -1) -> tuple[KVCacheGroupSpec, ...]:
    """A group of one layer for each spec; number `draft` is marked as the draft model's."""
    return tuple(KVCacheGroupSpec((f"layer.{i}",), spec, is_draft=i == draft) for i, spec in enumerate(specs))


def hybrid(
    usable: int, *specs: KVCacheSpec, draft: int = -1, max_model_len: int = 4096, **options: Any
) -> KVCacheManager:
    return KVCacheManager(KVCacheConfig(usable + 1, groups_of(*specs, draft=draft)), max_model_len, **options)


def managers_of(manager: KVCacheManager) -> list[SingleTypeKVCacheManager]:
    return manager._coordinator.managers


def record_of(manager: KVCacheManager, req: Request, group_id: int = 0) -> GroupBlocks:
    return manager._coordinator.require_held(req.request_id).groups[group_id]


def tables(manager: KVCacheManager, req: Request) -> tuple[list[int], ...]:
    return manager.get_block_ids(req.request_id)


def held(manager: KVCacheManager, req: Request) -> list[int]:
    return [sum(block_id != 0 for block_id in table) for table in tables(manager, req)]


def compute(manager: KVCacheManager, req: Request, num_new: int, **options: Any) -> bool:
    """A step over num_new tokens that are known already, or are made up now. False when it does not fit."""
    while req.num_tokens < req.num_computed_tokens + num_new:
        req.append_token(900_000 + req.num_tokens)
    if manager.allocate_slots(req, num_new, **options) is None:
        return False
    req.num_computed_tokens += num_new
    return True


def chunks(manager: KVCacheManager, req: Request, max_chunk: int = 64) -> list[int]:
    """Looks a new request up and computes all its tokens in steps that end where groups want them to: their sizes."""
    found = manager.get_computed_blocks(req)
    req.shared_prefix_boundary = found.shared_prefix_boundary
    start = found.num_tokens
    sizes: list[int] = []
    while start < req.num_tokens:
        manager.start_step()
        num_new = manager.clip_chunk(req, start, min(max_chunk, req.num_tokens - start), max_chunk)
        assert num_new > 0
        assert manager.allocate_slots(req, num_new, None if sizes else found) is not None, "the pool is full"
        sizes.append(num_new)
        start += num_new
        req.num_computed_tokens = start
        manager.check()
    manager.start_step()
    return sizes
