"""vLLM's KV cache groups as ours. Each kind is converted by its exact class: a subclass may mean other rules.

Only what decides about blocks is carried over. Bytes do not matter here: vLLM has sized the pool already.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from vllm.v1 import kv_cache_interface as vllm_specs
from vllm.v1.core import single_type_kv_cache_manager as vllm_managers
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvledger.core.groups import spec as ours
from kvledger.core.groups.spec import MAMBA_CACHE_MODES, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from kvledger.core.units import DTYPE_BYTES, MAX_COUNT
from kvledger.errors import KVLedgerError
from kvledger.integrations.vllm.served import NotServedError, as_not_served

# An encoder's length is not in vLLM's spec; it asks for the slots of each request, and so this bound never matters.
_ANY_ENCODER_LENGTH: Final = MAX_COUNT
# What vLLM keeps less of when a retention interval is set.
_SPARSE: Final = (vllm_specs.SlidingWindowSpec, vllm_specs.MambaSpec)
_DTYPE_OF_SIZE: Final = {1: "uint8", 2: "float16", 4: "float32"}


def our_config(theirs: Any, context_parallel_size: int) -> KVCacheConfig:
    """vLLM's KVCacheConfig as ours. NotServedError for a group that the ledger does not serve as vLLM would."""
    if not theirs.kv_cache_groups:
        raise NotServedError("no layer keeps a KV cache")
    groups = tuple(our_group(group) for group in theirs.kv_cache_groups)
    their_specs = [group.kv_cache_spec for group in theirs.kv_cache_groups]
    if theirs.prefix_cache_retention_interval and not any(isinstance(spec, _SPARSE) for spec in their_specs):
        raise NotServedError("a prefix_cache_retention_interval that no group heeds, which vLLM refuses")
    _require_equal_alike(their_specs, [group.spec for group in groups])
    for group, spec in zip(groups, their_specs, strict=True):
        if context_parallel_size > 1 and spec.dcp_sharded != group.spec.shards_over_context:
            raise NotServedError(f"{type(spec).__name__} over decode-context-parallel ranks")
    try:
        return KVCacheConfig(theirs.num_blocks, groups)
    except KVLedgerError as error:
        raise as_not_served(error)


def our_group(theirs: Any) -> KVCacheGroupSpec:
    """One of vLLM's groups as ours."""
    if theirs.host_resident or theirs.role is not vllm_specs.KVCacheGroupRole.DEFAULT:
        raise NotServedError(f"a group with the role {theirs.role.value!r} or in host memory")
    spec = theirs.kv_cache_spec
    manager = KVCacheSpecRegistry.get_manager_class(spec, theirs.role)
    if manager is None or manager.__module__ != vllm_managers.__name__:
        raise NotServedError(f"{type(spec).__name__} with a manager of its own")
    return KVCacheGroupSpec(tuple(theirs.layer_names), our_spec(spec), is_draft=theirs.is_eagle_group)


def our_spec(theirs: Any) -> KVCacheSpec:
    """One of vLLM's specs as ours. NotServedError for a kind that the ledger does not know."""
    convert = _CONVERSIONS.get(type(theirs))
    if convert is None:
        raise NotServedError(f"{type(theirs).__name__}, a kind of KV cache that it does not know")
    try:
        return convert(theirs)
    except KVLedgerError as error:
        raise as_not_served(error)
    except (TypeError, ValueError, AttributeError) as error:
        # A field that does not hold what vLLM's own model code puts there.
        raise NotServedError(f"this {type(theirs).__name__} ({error})") from error


def _require_equal_alike(theirs: Sequence[Any], converted: Sequence[KVCacheSpec]) -> None:
    """Groups of equal specs are looked up together, so ours must be equal exactly where vLLM's are."""
    for i, spec in enumerate(theirs):
        for j in range(i):
            if (spec == theirs[j]) != (converted[i] == converted[j]):
                raise NotServedError(f"groups {j} and {i} differ only in what it does not look at")


def _dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if name in DTYPE_BYTES else _DTYPE_OF_SIZE.get(dtype.itemsize, name)


def _heads(spec: Any) -> dict[str, Any]:
    return {
        "block_size": spec.block_size,
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "head_size_v": spec.head_size_v,
        "dtype": _dtype(spec.dtype),
    }


def _latent(spec: Any) -> dict[str, Any]:
    return {"block_size": spec.block_size, "head_size": spec.head_size, "dtype": _dtype(spec.dtype)}


def _full(spec: Any) -> KVCacheSpec:
    window, chunk = spec.sliding_window or 0, spec.attention_chunk_size or 0
    return ours.FullAttentionSpec(**_heads(spec), sliding_window=window, attention_chunk_size=chunk)


def _window(spec: Any) -> KVCacheSpec:
    extra = spec.extra_retained_tokens
    return ours.SlidingWindowSpec(**_heads(spec), sliding_window=spec.sliding_window, extra_retained_tokens=extra)


def _window_latent(spec: Any) -> KVCacheSpec:
    if spec.bounded_replay:
        raise NotServedError("a window whose tokens are computed again after each hit")
    extra = spec.extra_retained_tokens
    return ours.SlidingWindowMLASpec(**_latent(spec), sliding_window=spec.sliding_window, extra_retained_tokens=extra)


def _state(spec: Any) -> KVCacheSpec:
    if spec.mamba_cache_mode not in MAMBA_CACHE_MODES:
        raise NotServedError(f"recurrent states cached in the mode {spec.mamba_cache_mode!r}")
    return ours.MambaSpec(
        spec.block_size,
        tuple(tuple(shape) for shape in spec.shapes),
        tuple(_dtype(dtype) for dtype in spec.dtypes),
        mamba_cache_mode=spec.mamba_cache_mode,
        num_speculative_blocks=spec.num_speculative_blocks,
        num_prefill_checkpoint_blocks=spec.num_prefill_checkpoint_blocks,
        prefill_checkpoint_alignment=spec.prefill_checkpoint_alignment or 0,
    )


def _chunked(spec: Any) -> KVCacheSpec:
    return ours.ChunkedLocalAttentionSpec(**_heads(spec), attention_chunk_size=spec.attention_chunk_size)


def _cross(spec: Any) -> KVCacheSpec:
    return ours.CrossAttentionSpec(**_heads(spec), max_encoder_tokens=_ANY_ENCODER_LENGTH)


# Attention behind sinks is missing on purpose: vLLM 0.32 cannot build a manager for it, so nothing is known to compare.
_CONVERSIONS: Final[dict[type, Callable[[Any], KVCacheSpec]]] = {
    vllm_specs.FullAttentionSpec: _full,
    vllm_specs.MLAAttentionSpec: lambda spec: ours.MLAAttentionSpec(**_latent(spec)),
    vllm_specs.SlidingWindowSpec: _window,
    vllm_specs.SlidingWindowMLASpec: _window_latent,
    vllm_specs.ChunkedLocalAttentionSpec: _chunked,
    vllm_specs.CrossAttentionSpec: _cross,
    vllm_specs.CircularBufferSpec: lambda spec: ours.CircularBufferSpec(**_heads(spec)),
    vllm_specs.MambaSpec: _state,
}
