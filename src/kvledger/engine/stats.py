"""EngineStats: what the ledger did for the requests of an engine, counted step by step."""

from dataclasses import InitVar, dataclass

from kvledger.core.requests.request import Request
from kvledger.scheduler import RequestOutput, Scheduler, SchedulerOutput


@dataclass
class EngineStats:
    """All counts since the engine started. They are read from totals of the ledger and the scheduler, so whoever else
    takes statistics from these finds theirs untouched.

    Unless somebody is preempted: num_prompt_tokens == num_prompt_tokens_computed + num_hit_tokens, once all requests
    are through their prompts. A request that resumes finds some of its text in the cache (num_resumed_hit_tokens) and
    computes the rest again (num_recomputed_tokens).
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
    num_recomputed_tokens: int = 0
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    peak_running: int = 0
    peak_blocks: int = 0
    num_blocks: int = 0

    def __post_init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lookups_before = scheduler.manager.prefix_cache_totals()
        self._num_preemptions_before = scheduler.num_preemptions

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that a prefix hit saved."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def peak_usage(self) -> float:
        """Most blocks that were held at a time, as a share of the usable ones."""
        return self.peak_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafts that were right."""
        return self.num_accepted_drafts / self.num_drafts if self.num_drafts else 0.0

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
        self.num_drafts += sum(draft >= 0 for drafts in output.draft_token_ids.values() for draft in drafts)
        now, before = manager.prefix_cache_totals(), self._lookups_before
        self.num_lookups = now.requests - before.requests
        self.num_hit_tokens = now.hits - before.hits
        self.num_resumed_hit_tokens = now.preempted_hits - before.preempted_hits
        num_resumed_tokens = now.preempted_queries - before.preempted_queries
        self.num_recomputed_tokens = num_resumed_tokens - self.num_resumed_hit_tokens
        self.peak_running = max(self.peak_running, len(output.request_ids))
        self.num_blocks = manager.num_usable_blocks
        self.peak_blocks = max(self.peak_blocks, manager.num_usable_blocks - manager.num_free_blocks)

    def count_tokens(
        self, output: SchedulerOutput, sampled_token_ids: list[list[int]], gained: list[RequestOutput]
    ) -> None:
        """What came back from the worker, and what of it the requests took: nothing behind their end."""
        self.num_generated_tokens += sum(len(one.new_token_ids) for one in gained)
        if output.draft_token_ids:
            for request_id, sampled in zip(output.request_ids, sampled_token_ids, strict=True):
                if sampled and request_id in output.draft_token_ids:
                    self.num_accepted_drafts += len(sampled) - 1
