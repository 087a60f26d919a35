"""EngineStats: what the ledger did for the requests of an engine, counted step by step."""

from dataclasses import InitVar, dataclass, fields
from typing import Final

from kvledger.core.requests.request import Request
from kvledger.scheduler import AccountTotals, RequestOutput, Scheduler, SchedulerOutput


@dataclass
class EngineStats:
    """All counts since the engine started. They are read from totals of the ledger, the scheduler and its accounts, so
    whoever else takes statistics from these finds theirs untouched.

    Unless somebody is preempted: num_prompt_tokens == num_prompt_tokens_computed + num_hit_tokens, once all requests
    are through their prompts. Of what a preempted request has lost it finds some in the cache again
    (num_resumed_hit_tokens) and computes the rest again (num_recomputed_tokens).

    What only accounts know is None without them: `Scheduler(..., accounting=RequestAccounting(manager))`.
    """

    scheduler: InitVar[Scheduler]
    num_requests: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_prompt_tokens_computed: int = 0
    num_lookups: int = 0
    num_hit_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_resumed_hit_tokens: int = 0
    peak_running: int = 0
    peak_blocks: int = 0
    num_blocks: int = 0

    def __post_init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lookups_before = scheduler.manager.prefix_cache_totals()
        self._num_preemptions_before = scheduler.num_preemptions
        self._accounts_before = _totals(scheduler)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that a prefix hit saved."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def peak_usage(self) -> float:
        """Most blocks that were held at a time, as a share of the usable ones."""
        return self.peak_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def num_lost_tokens(self) -> int | None:
        """Tokens that preemptions took from requests."""
        return self._accounted("num_lost_tokens")

    @property
    def num_recomputed_tokens(self) -> int | None:
        """Of these, computed again."""
        return self._accounted("num_recomputed_tokens")

    @property
    def num_drafts(self) -> int | None:
        """Drafts that were verified."""
        rejected = self._accounted("num_drafts_rejected")
        accepted = self.num_accepted_drafts
        return None if accepted is None or rejected is None else accepted + rejected

    @property
    def num_accepted_drafts(self) -> int | None:
        """Drafts that were right."""
        return self._accounted("num_drafts_accepted")

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the drafts that were right."""
        drafts, accepted = self.num_drafts, self.num_accepted_drafts
        if drafts is None or accepted is None:
            return None
        return accepted / drafts if drafts else 0.0

    def as_dict(self) -> dict[str, int | float | None]:
        """Every count and share under its name."""
        counts: dict[str, int | float | None] = {field.name: getattr(self, field.name) for field in fields(self)}
        return counts | {name: getattr(self, name) for name in _READ}

    def _accounted(self, name: str) -> int | None:
        """Read when asked for: live requests are asked for theirs."""
        now = _totals(self._scheduler)
        if now is None or self._accounts_before is None:
            return None
        count: int = getattr(now, name) - getattr(self._accounts_before, name)
        return count

    def count_request(self, request: Request) -> None:
        self.num_requests += 1
        self.num_prompt_tokens += request.num_prompt_tokens

    def count_step(self, output: SchedulerOutput) -> None:
        """A step as it was scheduled, before the worker has it."""
        manager = self._scheduler.manager
        if output.request_ids:
            self.num_steps += 1
        self.num_prompt_tokens_computed += output.count_prompt_tokens()
        self.num_preemptions = self._scheduler.num_preemptions - self._num_preemptions_before
        now, before = manager.prefix_cache_totals(), self._lookups_before
        self.num_lookups = now.requests - before.requests
        self.num_hit_tokens = now.hits - before.hits
        self.num_resumed_hit_tokens = now.preempted_hits - before.preempted_hits
        self.peak_running = max(self.peak_running, len(output.request_ids))
        self.num_blocks = manager.num_usable_blocks
        self.peak_blocks = max(self.peak_blocks, manager.num_usable_blocks - manager.num_free_blocks)

    def count_tokens(self, gained: list[RequestOutput]) -> None:
        """What the requests took of what came back from the worker: nothing behind their end."""
        self.num_generated_tokens += sum(len(one.new_token_ids) for one in gained)


# What is no field of EngineStats.
_READ: Final = (
    *("num_lost_tokens", "num_recomputed_tokens", "num_drafts", "num_accepted_drafts"),
    *("hit_rate", "peak_usage", "acceptance_rate"),
)


def _totals(scheduler: Scheduler) -> AccountTotals | None:
    return None if scheduler.accounting is None else scheduler.accounting.totals()
