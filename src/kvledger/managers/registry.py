"""Which manager serves which spec."""

from kvledger.block_pool import BlockPool
from kvledger.errors import wrong_value
from kvledger.managers.base import SingleTypeKVCacheManager
from kvledger.managers.full_attention import FullAttentionManager
from kvledger.observer import LedgerObserver
from kvledger.spec import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec


def make_manager(
    spec: KVCacheSpec, group_id: int, pool: BlockPool, hash_block_size: int, observer: LedgerObserver | None
) -> SingleTypeKVCacheManager:
    """The manager for a group of that spec. ConfigError for a spec that none serves."""
    if isinstance(spec, (FullAttentionSpec, MLAAttentionSpec)):
        return FullAttentionManager(spec, group_id, pool, hash_block_size, observer)
    raise wrong_value("spec", spec, "no manager serves this kind of KV cache", "use a spec from kvledger.spec")
