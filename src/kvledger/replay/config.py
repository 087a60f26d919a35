"""ReplayConfig: the engine that the traffic is replayed on."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from kvledger.core.blocks.observer import LedgerObserver, LedgerObservers
from kvledger.core.groups.decisions import LATEST_RELEASE
from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.core.ledger.ledger_rules import LedgerRules
from kvledger.core.watch.prompt_split import MissConfig
from kvledger.errors import wrong_value
from kvledger.replay.layout import NO_LIMIT, KVLayout
from kvledger.replay.slo import Slo
from kvledger.scheduler import SchedulerConfig
from kvledger.traces.prompts import PromptMaker

if TYPE_CHECKING:
    from kvledger.events import LedgerEvents


@dataclass(frozen=True)
class ReplayConfig:
    """`num_blocks` counts the null block, as KVCacheConfig does. `max_model_len` None: no limit but the pool.

    `check` proves the invariants of every layer after each step. `events`: told of what happens to the cache, and of
    the end of each step. `explain_misses`: what may be remembered to say why prompts missed; None: nothing.
    `slo`: latencies that are promised.
    """

    num_blocks: int
    layout: KVLayout
    max_model_len: int | None = None
    enable_caching: bool = True
    watermark: float = 0.0
    check: bool = False
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    events: "LedgerEvents | None" = None
    explain_misses: MissConfig | None = None
    decisions: str = LATEST_RELEASE
    slo: Slo | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.watermark < 1.0:
            raise wrong_value("watermark", self.watermark, "not a share of the pool", "give 0.0 up to below 1.0")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise wrong_value("max_model_len", self.max_model_len, "no room for a prompt and a token", "give 2 or more")

    @cached_property
    def group_block_sizes(self) -> list[int]:
        """Tokens in a block of each group, over all context-parallel ranks."""
        return [self._rules.block_size(group.spec) for group in self.layout.groups]

    @cached_property
    def hash_block_size(self) -> int:
        """Tokens under one block hash: a common divisor of the block sizes of all groups."""
        return self._rules.resolved_hash_block_size(self.layout.config(self.num_blocks))

    @cached_property
    def hit_step(self) -> int:
        """Prefix hits end at multiples of so many tokens."""
        policies = self._rules.policies(self.layout.config(self.num_blocks))
        return max(policy.hit_alignment for policy in policies)

    @property
    def smallest_block_size(self) -> int:
        """The unit in which blocks of a prompt are counted."""
        return min(self.group_block_sizes)

    def make_manager(self, maker: PromptMaker, observer: LedgerObserver) -> KVCacheManager:
        """A fresh ledger over the layout's groups."""
        layout = self.layout
        if self.events is not None:
            observer = LedgerObservers([observer, self.events.observer])
        return KVCacheManager(
            layout.config(self.num_blocks),
            self.longest,
            enable_caching=self.enable_caching,
            hasher=maker.hasher,
            watermark=self.watermark,
            max_in_flight_tokens=self._max_in_flight_tokens,
            drafts=layout.draft_rule,
            retention_interval=layout.retention_interval,
            context_parallel_size=layout.context_parallel_size,
            decisions=self.decisions,
            observer=observer,
        )

    @property
    def longest(self) -> int:
        """max_model_len, or what no request reaches."""
        return NO_LIMIT if self.max_model_len is None else self.max_model_len

    @property
    def _max_in_flight_tokens(self) -> int:
        """At least a step: the replay has one in flight at a time."""
        return max(self.layout.max_in_flight_tokens, self.scheduler.max_num_batched_tokens)

    @property
    def _rules(self) -> LedgerRules:
        """What the manager makes of the layout."""
        return self.layout.rules(self.enable_caching, self.longest, self._max_in_flight_tokens)
