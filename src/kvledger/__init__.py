"""kvledger: the KV cache manager of a paged LLM engine, as a library.

from kvledger import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager, Request

spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128)
manager = KVCacheManager(KVCacheConfig(1000, (KVCacheGroupSpec(("layer.0",), spec),)), max_model_len=4096)
request = Request("r1", [1, 2, 3])
blocks = manager.allocate_slots(request, 3, manager.get_computed_blocks(request))
"""

from kvledger.core.blocks.block import FreeKVCacheBlockQueue, KVCacheBlock
from kvledger.core.blocks.block_pool import BlockPool, PoolOccupancy
from kvledger.core.blocks.holds import BlockCopy
from kvledger.core.blocks.kv_cache_blocks import AdmissionRule, BlockShortage, GroupOccupancy, KVCacheBlocks, PrefixHit
from kvledger.core.blocks.new_blocks import NewBlocks, RunningSlots
from kvledger.core.blocks.observer import EvictionCause, LedgerObserver, LedgerObservers
from kvledger.core.groups.policy import DraftRule
from kvledger.core.groups.registry import ManagerRegistry
from kvledger.core.groups.spec import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HostResidentSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.core.ledger.lookups import PrefixCacheStats
from kvledger.core.requests.block_hash import (
    BlockHasher,
    ChainedBlockHasher,
    GivenBlockHasher,
    Sha256BlockHasher,
    SipHashBlockHasher,
    VerifiedBlockHasher,
    make_block_hasher,
)
from kvledger.core.requests.request import Adapter, MultiModalItem, Request, RequestStatus
from kvledger.core.requests.tokens import pack_tokens, unpack_tokens
from kvledger.core.watch.block_residency import BlockResidency, BlockStay
from kvledger.core.watch.hit_curve import HitCurve
from kvledger.core.watch.miss_explainer import MissExplainer
from kvledger.core.watch.prompt_split import MissConfig, MissTotals, PromptAccount, PromptSplit

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "AdmissionRule",
    "BlockCopy",
    "BlockHasher",
    "BlockPool",
    "BlockResidency",
    "BlockShortage",
    "BlockStay",
    "ChainedBlockHasher",
    "ChunkedLocalAttentionSpec",
    "CircularBufferSpec",
    "CrossAttentionSpec",
    "DraftRule",
    "EvictionCause",
    "FreeKVCacheBlockQueue",
    "FullAttentionSpec",
    "GivenBlockHasher",
    "GroupOccupancy",
    "HitCurve",
    "HostResidentSpec",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "KVCacheSpec",
    "LedgerObserver",
    "LedgerObservers",
    "MLAAttentionSpec",
    "MambaSpec",
    "ManagerRegistry",
    "MissConfig",
    "MissExplainer",
    "MissTotals",
    "MultiModalItem",
    "NewBlocks",
    "PoolOccupancy",
    "PrefixCacheStats",
    "PrefixHit",
    "PromptAccount",
    "PromptSplit",
    "Request",
    "RequestStatus",
    "RunningSlots",
    "Sha256BlockHasher",
    "SinkFullAttentionSpec",
    "SipHashBlockHasher",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "VerifiedBlockHasher",
    "build_info",
    "make_block_hasher",
    "pack_tokens",
    "unpack_tokens",
]


def build_info() -> str:
    """One line: the version and whether the compiled or the pure build is loaded."""
    from kvledger.core.blocks import block_pool

    build = "pure Python" if (block_pool.__file__ or "").endswith(".py") else "compiled"
    return f"kvledger {__version__} ({build})"
