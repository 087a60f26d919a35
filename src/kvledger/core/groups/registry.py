"""Which manager serves which spec.

A new kind of KV cache needs a spec (a frozen dataclass on KVCacheSpec), a manager (a SingleTypeKVCacheManager), and

    registry = ManagerRegistry()
    registry.register(MySpec, MyManager)
    KVCacheManager(config, max_model_len, registry=registry)
"""

from collections.abc import Callable

from kvledger.core.groups.aligned_mamba import AlignedMambaManager
from kvledger.core.groups.base import ManagerContext, SingleTypeKVCacheManager
from kvledger.core.groups.chunked_local import ChunkedLocalAttentionManager
from kvledger.core.groups.full_attention import FullAttentionManager
from kvledger.core.groups.host_resident import HostResidentManager
from kvledger.core.groups.mamba import MambaManager
from kvledger.core.groups.policy import GroupPolicy
from kvledger.core.groups.sliding_window import SlidingWindowManager
from kvledger.core.groups.spec import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HostResidentSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvledger.core.groups.unshared import CircularBufferManager, CrossAttentionManager
from kvledger.errors import wrong_value

ManagerFactory = Callable[[KVCacheSpec, int, ManagerContext, GroupPolicy], SingleTypeKVCacheManager]


class ManagerRegistry:
    """Spec class -> what makes its manager. A spec without an entry of its own is served like its base class."""

    def __init__(self) -> None:
        self._added: dict[type[KVCacheSpec], ManagerFactory] = {}

    def register(self, spec_class: type[KVCacheSpec], make: ManagerFactory) -> None:
        """`make(spec, group_id, context, policy)`, usually the manager class itself. Replaces what was there."""
        self._added[spec_class] = make

    def make(
        self, spec: KVCacheSpec, group_id: int, context: ManagerContext, policy: GroupPolicy
    ) -> SingleTypeKVCacheManager:
        """The manager for a group of that spec. ConfigError for a spec that none serves."""
        for spec_class in type(spec).__mro__:
            make = self._added.get(spec_class)
            if make is not None:
                return make(spec, group_id, context, policy)
        return make_manager(spec, group_id, context, policy)


def make_manager(
    spec: KVCacheSpec, group_id: int, context: ManagerContext, policy: GroupPolicy
) -> SingleTypeKVCacheManager:
    """The library's own manager for that spec; the one place that asks for its type."""
    if isinstance(spec, HostResidentSpec):
        return HostResidentManager(spec, group_id, context, policy)
    if isinstance(spec, (SlidingWindowSpec, SlidingWindowMLASpec)):
        return SlidingWindowManager(spec, group_id, context, policy, spec.sliding_window, spec.extra_retained_tokens)
    if isinstance(spec, (FullAttentionSpec, MLAAttentionSpec)):
        return FullAttentionManager(spec, group_id, context, policy)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return ChunkedLocalAttentionManager(spec, group_id, context, policy)
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode == "align":
            return AlignedMambaManager(spec, group_id, context, policy)
        return MambaManager(spec, group_id, context, policy)
    if isinstance(spec, CrossAttentionSpec):
        return CrossAttentionManager(spec, group_id, context, policy)
    if isinstance(spec, CircularBufferSpec):
        return CircularBufferManager(spec, group_id, context, policy)
    raise wrong_value(
        "spec", spec, "no manager serves this kind of KV cache", "register one (kvledger.core.groups.registry)"
    )
