"""ExtentAdmissions: a request that starts on an ExtentPool, with all that is counted of its lookup."""

from typing import Final

from mypy_extensions import i64

from kvledger.core.extents.extent_misses import ExtentMisses
from kvledger.core.extents.extent_pool import ExtentPool
from kvledger.core.extents.holding import ExtentHit, Holding
from kvledger.core.ledger.lookups import PrefixCacheStats
from kvledger.core.units import blocks_for


class ExtentAdmissions:
    """`misses`: why prompts missed, where somebody asks. `stats`: lookups, as KVCacheManager counts them."""

    def __init__(self, pool: ExtentPool, explains: bool) -> None:
        self.pool: Final = pool
        self.misses: Final[ExtentMisses | None] = ExtentMisses(pool) if explains else None
        self.stats: Final = PrefixCacheStats()

    def find(self, holding: Holding, num_tokens: i64) -> ExtentHit:
        """The longest cached prefix that leaves the last of so many tokens to be computed."""
        return self.pool.find(holding, (num_tokens - 1) // self.pool.block_size)

    def admit(
        self, holding: Holding, num_tokens: i64, found: ExtentHit, hit: ExtentHit, end: i64, is_resumed: bool
    ) -> None:
        """A request of num_tokens tokens starts behind `hit`, which is all that was found or nothing of it, and
        computes up to token `end`. `is_resumed`: after a preemption, which is counted apart. REQUIRES free blocks."""
        pool = self.pool
        block_size = pool.block_size
        num_hit = hit.num_blocks
        self.stats.record(int(num_tokens), int(num_hit * block_size), is_resumed)
        if hit is found and num_hit < (num_tokens - 1) // block_size and not is_resumed:
            self.stats.record_limit(0, 0)
        if self.misses is not None:
            self.misses.admitted(holding, int(num_tokens), int(num_hit), int(found.num_blocks), is_resumed)
        pool.attach(holding, hit)
        pool.grow(holding, blocks_for(end, block_size), end // block_size)
