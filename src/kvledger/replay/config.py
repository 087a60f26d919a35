"""ReplayConfig: the engine that the traffic is replayed on."""

from dataclasses import dataclass, field

from kvledger.errors import wrong_value
from kvledger.kv_cache_manager import KVCacheManager
from kvledger.observer import LedgerObserver
from kvledger.replay.prompts import PromptMaker
from kvledger.replay.step_time import ModelShape
from kvledger.scheduler import SchedulerConfig
from kvledger.spec import KVCacheConfig, KVCacheGroupSpec
from kvledger.units import require_positive

# Longer than any request: the pool alone limits them.
_NO_LIMIT = 1 << 40


@dataclass(frozen=True)
class ReplayConfig:
    """`num_blocks` counts the null block, as KVCacheConfig does. `max_model_len` None: no limit but the pool.

    `check` proves the invariants of every layer after each step.
    """

    num_blocks: int
    block_size: int = 16
    max_model_len: int | None = None
    enable_caching: bool = True
    watermark: float = 0.0
    check: bool = False
    shape: ModelShape = field(default_factory=ModelShape)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        require_positive("block_size", self.block_size)
        if self.max_model_len is not None and self.max_model_len < 2:
            raise wrong_value("max_model_len", self.max_model_len, "no room for a prompt and a token", "give 2 or more")

    def make_manager(self, maker: PromptMaker, observer: LedgerObserver) -> KVCacheManager:
        """A fresh ledger with one group over all layers."""
        layers = tuple(f"layer.{index}" for index in range(self.shape.num_layers))
        group = KVCacheGroupSpec(layers, self.shape.spec(self.block_size))
        return KVCacheManager(
            KVCacheConfig(self.num_blocks, (group,)),
            _NO_LIMIT if self.max_model_len is None else self.max_model_len,
            enable_caching=self.enable_caching,
            hasher=maker.hasher,
            watermark=self.watermark,
            observer=observer,
        )


def num_blocks_in(memory_bytes: int, block_size: int, kv_bytes_per_token: int) -> int:
    """Blocks of a pool of that many bytes. ConfigError when not even one usable block fits."""
    num_blocks = memory_bytes // (block_size * kv_bytes_per_token)
    if num_blocks < 2:
        raise wrong_value(
            "memory",
            memory_bytes,
            f"holds {max(0, num_blocks)} blocks of {block_size * kv_bytes_per_token} bytes, and 2 are the least",
            "give more memory or fewer bytes per token",
        )
    return num_blocks
