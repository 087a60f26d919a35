"""The ledger of a replay in runs of blocks, and what it cannot do."""

from typing import Final

from kvledger.core.blocks.block_pool import PoolOccupancy
from kvledger.core.blocks.kv_cache_blocks import GroupOccupancy
from kvledger.core.extents.admissions import ExtentAdmissions
from kvledger.core.extents.extent_pool import ExtentPool
from kvledger.core.extents.holding import Holding
from kvledger.core.groups.spec import FullAttentionSpec, MLAAttentionSpec
from kvledger.core.ledger.lookups import PrefixCacheStats
from kvledger.core.units import cdiv
from kvledger.replay.config import ReplayConfig
from kvledger.replay.ledger import ReplayLedger
from kvledger.traces.trace_request import TraceRequest

# Of how many evictions it is known what went, where nobody asks why prompts missed.
_NOBODY_ASKS: Final = 0


def why_by_blocks(config: ReplayConfig) -> str:
    """Why an engine must be replayed block by block; nothing for one that need not."""
    layout = config.layout
    if config.check:
        return "--check proves the ledger itself"
    if config.events is not None:
        return "events name blocks"
    if not config.enable_caching:
        return "nothing is cached"
    if len(layout.groups) > 1:
        return "several groups"
    if layout.drafts or config.scheduler.num_lookahead_tokens:
        return "drafts"
    if type(layout.groups[0].spec) not in (FullAttentionSpec, MLAAttentionSpec):
        return "the layers do not keep every token in the pool"
    return ""


class ExtentLedger(ReplayLedger):
    """`pool`: for whoever drives it. REQUIRES a config that need not be replayed by blocks."""

    counting = "extents"

    def __init__(self, config: ReplayConfig) -> None:
        explain = config.explain_misses
        max_evicted = _NOBODY_ASKS if explain is None else explain.max_evicted_blocks
        self.block_size: Final = config.smallest_block_size
        self._longest: Final = config.longest
        self.pool: Final = ExtentPool(config.num_blocks, self.block_size, max_evicted)
        self.admissions: Final = ExtentAdmissions(self.pool, explain is not None)
        self.misses = self.admissions.misses

    @property
    def num_usable_blocks(self) -> int:
        return int(self.pool.num_usable)

    @property
    def usage(self) -> float:
        return self.pool.usage

    @property
    def num_evictions(self) -> int:
        return int(self.pool.num_evictions)

    def num_blocks_for(self, num_tokens: int) -> int:
        return cdiv(min(num_tokens, self._longest), self.block_size)

    def occupancy(self) -> PoolOccupancy:
        return self.pool.occupancy()

    def group_occupancies(self) -> list[GroupOccupancy]:
        return [GroupOccupancy(self.occupancy().live, 0, int(self.pool.num_distinct))]

    def take_prefix_cache_stats(self) -> PrefixCacheStats:
        return self.admissions.stats

    def enter(self, recorded: TraceRequest) -> Holding:
        """The recorded request, as the pool knows it."""
        ids, num_tokens = recorded.hash_ids, recorded.num_prompt_tokens
        if recorded.output_ids:
            ids, num_tokens = ids + recorded.output_ids, num_tokens + recorded.num_output_tokens
        return self.pool.enter(ids, recorded.block_size, recorded.scope, num_tokens)

    def prefill(self, holding: Holding, num_tokens: int) -> int:
        """Looks a prompt up and gives it its blocks. Returns the tokens that were hit."""
        hit = self.admissions.find(holding, num_tokens)
        self.admissions.admit(holding, num_tokens, hit, hit, num_tokens, is_resumed=False)
        return int(hit.num_blocks) * self.block_size
