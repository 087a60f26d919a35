"""Counts what every request costs from the steps alone, and compares the scheduler's own accounts with that."""

from kvledger import Request, RequestStatus
from kvledger.scheduler import RequestAccount, RequestAccounting, Scheduler, SchedulerOutput


class Costs:
    """The naive account of one request. Its present life computed [start, position), and [0, before) once before."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.start = 0
        self.position = 0
        self.before = 0
        self.had_at_starts = 0
        self.computed = 0
        self.recomputed_earlier = 0
        self.waited = 0
        self.blocks = 0
        self.accepted = 0
        self.rejected = 0
        # Of the tokens that came back last: how many, and how many the request knew before.
        self.num_returned = 0
        self.num_known = 0

    @property
    def recomputed(self) -> int:
        return self.recomputed_earlier + max(0, min(self.position, self.before) - self.start)

    def begin_life(self, position: int) -> None:
        self.recomputed_earlier = self.recomputed
        self.before = max(self.before, self.position)
        self.start = self.position = position
        self.had_at_starts += position

    def trim(self) -> None:
        """The request has ended: what came back behind its stop counts as not computed."""
        self.compute(-max(0, self.num_returned - (self.request.num_tokens - self.num_known)))
        self.num_returned = 0

    def compute(self, num_tokens: int) -> None:
        self.computed += num_tokens
        self.position += num_tokens


class AccountChecker:
    """For Engine: told of every step and of what comes back."""

    def __init__(self, scheduler: Scheduler, accounting: RequestAccounting) -> None:
        self.scheduler = scheduler
        self.accounting = accounting
        self.num_steps_seen = 0
        self.costs: dict[str, Costs] = {}
        # (step, request id) -> how often it had been preempted by then.
        self.lives: dict[tuple[int, str], int] = {}

    def add(self, request: Request) -> None:
        self.costs[request.request_id] = Costs(request)

    def scheduled(self, output: SchedulerOutput) -> None:
        self.num_steps_seen += 1
        for data in output.new_requests:
            if data.request_id in self.costs:
                self.costs[data.request_id].begin_life(data.num_computed_tokens)
        for index, request_id in enumerate(output.request_ids):
            costs = self.costs.get(request_id)  # None: a fork
            if costs is not None:
                costs.compute(int(output.num_scheduled_tokens[index]))
                self.lives[output.step, request_id] = costs.request.num_preemptions
        for request in self.scheduler.waiting_requests():
            if request.request_id in self.costs:
                self.costs[request.request_id].waited += 1
        self.compare()

    def returned(self, output: SchedulerOutput, sampled: list[list[int]]) -> None:
        """Before the scheduler is told."""
        for index, request_id in enumerate(output.request_ids):
            costs = self.costs.get(request_id)
            if costs is not None and sampled[index] and not costs.request.is_finished:
                is_stale = costs.request.num_stale_tokens > 0
                costs.num_returned = 0 if is_stale else len(sampled[index])
                costs.num_known = costs.request.num_tokens
            num_drafts = len(output.draft_token_ids.get(request_id, []))
            if costs is None or not sampled[index] or num_drafts == 0 or costs.request.is_finished:
                continue
            if costs.request.num_stale_tokens > 0 and costs.request.drops_stale_output:
                continue
            num_accepted = len(sampled[index]) - 1
            costs.accepted += num_accepted
            costs.rejected += num_drafts - num_accepted
            if costs.request.num_preemptions == self.lives[output.step, request_id]:
                costs.compute(num_accepted - num_drafts)

    def compare(self) -> None:
        for request_id, costs in self.costs.items():
            if not costs.request.is_finished and request_id in self.scheduler._state.requests:
                self.compare_one(costs, self.accounting.get(request_id))

    def compare_one(self, costs: Costs, account: RequestAccount) -> None:
        account.check()
        if self.num_steps_seen < self.scheduler.num_steps:
            return  # a test that drives the scheduler itself
        request = costs.request
        if request.is_finished and self.scheduler.manager.decisions.trims_stops:
            costs.trim()
        if self.scheduler.manager.holds_blocks(request):
            held = sum(map(len, self.scheduler.manager.get_block_ids(request.request_id)))
            costs.blocks = max(costs.blocks, held)
        told = (account.num_computed_tokens, account.num_recomputed_tokens)
        assert told == (costs.computed, costs.recomputed), request.request_id
        assert (account.num_drafts_accepted, account.num_drafts_rejected) == (costs.accepted, costs.rejected)
        assert account.num_steps_waited == costs.waited
        assert account.num_blocks_peak >= costs.blocks
        if request.status is RequestStatus.RUNNING:
            assert account.num_cached_tokens + account.num_external_tokens == costs.had_at_starts
