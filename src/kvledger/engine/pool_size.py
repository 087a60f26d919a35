"""PoolSize: the measured memory of all workers -> the blocks that every one of them can hold.

All workers get the smallest count, because one block id stands for the same tokens on each of them.
"""

from dataclasses import dataclass, replace

from kvledger.core.groups.spec import KVCacheGroupSpec
from kvledger.core.units import require_positive
from kvledger.engine.profile import MemoryProfile
from kvledger.errors import ConfigError, wrong_value
from kvledger.plan.pool import (
    RequestLimits,
    WorkerPool,
    blocks_per_request,
    capacity_lines,
    longest_that_fits,
    no_memory_message,
    too_long_message,
)


@dataclass(frozen=True)
class PoolSize:
    """`num_blocks` counts the null block, as KVCacheConfig does. `blocks_per_request`: for max_model_len tokens."""

    num_blocks: int
    bytes_per_block: int
    blocks_per_request: int
    max_model_len: int

    @property
    def max_concurrency(self) -> float:
        """Requests of max_model_len that fit at a time, by the field's figure, which counts the null block."""
        return self.num_blocks / self.blocks_per_request

    @property
    def num_tokens(self) -> int:
        return int(self.max_concurrency * self.max_model_len)

    def lines(self) -> list[str]:
        """What an engine prints at start."""
        return list(capacity_lines(self.num_tokens, self.max_model_len, self.max_concurrency))


def pool_size(
    profiles: list[MemoryProfile], groups: tuple[KVCacheGroupSpec, ...], bytes_per_block: int, limits: RequestLimits
) -> PoolSize:
    """The pool of an engine with these workers. `bytes_per_block`: of one block on one worker, over all its layers.

    ConfigError when no memory is left on one of them, or a single request of max_model_len does not fit.
    """
    require_positive("bytes_per_block", bytes_per_block)
    if not profiles:
        raise wrong_value("profiles", profiles, "an engine needs a worker", "measure at least one")
    pools = [
        WorkerPool(
            0, len(groups), bytes_per_block, each.available_bytes, max(each.available_bytes, 0) // bytes_per_block
        )
        for each in profiles
    ]
    poorest = min(pools, key=lambda pool: pool.available_bytes)
    # The null block alone serves nobody.
    if poorest.available_bytes <= bytes_per_block:
        raise ConfigError(no_memory_message(poorest.available_bytes))
    needed = blocks_per_request(groups, limits)
    if not poorest.fits(needed):

        def fits(length: int) -> bool:
            return poorest.fits(blocks_per_request(groups, replace(limits, max_model_len=length)))

        estimated = longest_that_fits(limits.max_model_len, fits)
        raise ConfigError(too_long_message(poorest, needed, limits.max_model_len, estimated))
    return PoolSize(poorest.num_blocks, bytes_per_block, needed, limits.max_model_len)
