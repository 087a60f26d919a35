"""How events name what a KV cache group keeps: vLLM's names of the kinds, so that consumers can tell groups apart."""

from dataclasses import dataclass
from typing import Final

from kvledger.core.groups.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HostResidentSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvledger.events.event_types import MEDIUM_CPU, MEDIUM_GPU

# The first that fits counts, so special ones come before their bases.
_KINDS: Final[tuple[tuple[type[KVCacheSpec], str], ...]] = (
    (SlidingWindowMLASpec, "sliding_window_mla"),
    (MLAAttentionSpec, "mla_attention"),
    (SinkFullAttentionSpec, "sink_full_attention"),
    (FullAttentionSpec, "full_attention"),
    (ChunkedLocalAttentionSpec, "chunked_local_attention"),
    (SlidingWindowSpec, "sliding_window"),
    (MambaSpec, "mamba"),
    (CrossAttentionSpec, "cross_attention"),
)


@dataclass(frozen=True)
class GroupLabel:
    """kv_cache_spec_kind, kv_cache_spec_sliding_window and medium of a group's events."""

    kind: str
    sliding_window: int | None
    medium: str


def group_labels(config: KVCacheConfig) -> list[GroupLabel]:
    """The labels of all groups, by group id."""
    return [_label(group.spec) for group in config.groups]


def _label(spec: KVCacheSpec) -> GroupLabel:
    kind = next((name for spec_class, name in _KINDS if isinstance(spec, spec_class)), "unknown")
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec | SlidingWindowMLASpec) else None
    return GroupLabel(kind, window, MEDIUM_CPU if isinstance(spec, HostResidentSpec) else MEDIUM_GPU)
