"""RunningPass: gives every running request its tokens of the step, and preempts when blocks run out."""

from typing import Final

from mypy_extensions import i32

from kvledger.core.requests.request import Request, RequestStatus
from kvledger.core.scheduler.config import SchedulingPolicy
from kvledger.core.scheduler.state import SchedulerState
from kvledger.core.scheduler.step import StepBuilder
from kvledger.errors import RequestError


class RunningPass:
    """The first half of schedule(): in the order of the running list, while the budget lasts."""

    def __init__(self, state: SchedulerState) -> None:
        self._state: Final = state
        self._manager: Final = state.manager
        self._num_lookahead_tokens: Final = state.config.num_lookahead_tokens
        self._by_priority: Final = state.config.policy is SchedulingPolicy.PRIORITY
        self._victim_yields: Final = self._by_priority and state.manager.decisions.victim_yields
        # Where the request stands that others are preempted for, or would stand.
        self._place: int = 0

    def schedule(self, step: StepBuilder) -> None:
        threshold = self._state.long_prefill_threshold()
        max_model_len = self._manager.max_model_len
        clips_chunks = self._manager.clips_chunks
        max_chunk = self._state.config.max_prefill_chunk
        running = self._state.running
        table = self._state.rows.table
        index = 0
        while index < len(running) and step.token_budget > 0:
            end = int(table.quiet_until(index, min(len(running), index + step.token_budget)))
            if end > index:
                step.add_quiet(index, end)
                index = end
                continue
            request = running[index]
            request.leave()
            num_new = int(request.num_tokens_behind())
            if 0 < threshold < num_new:
                num_new = threshold
            # The sampled token needs a position too, hence the 1.
            num_new = min(min(num_new, step.token_budget), max_model_len - request.num_computed_tokens - 1)
            if num_new > 0 and clips_chunks:
                num_new = self._manager.clip_chunk(request, request.num_computed_tokens, num_new, max_chunk)
            if num_new <= 0:
                index += 1
                continue
            if not self._allocate(step, index, num_new):
                if _has_ended(request):
                    continue
                if request.draft_token_ids and self._state.pool_error(request, request.num_computed_tokens + num_new):
                    # The pool has no room for the drafts at all: go on without them.
                    request.draft_token_ids = []
                    continue
                self._place = index
                has_slots = self._allocate_by_preempting(step, request, num_new)
                index = self._place
                if not has_slots:
                    if _has_ended(request):
                        continue
                    if request.status is RequestStatus.PREEMPTED and self._victim_yields:
                        # Its blocks are free now, and those behind it are more urgent.
                        continue
                    self._state.wait_log.break_off(index)
                    break
            self._add(step, request, num_new)
            index += 1

    def _allocate(self, step: StepBuilder, place: int, num_new: int) -> bool:
        """For the request that runs at that place. False when the slots do not fit, or its hashes are wrong: then it
        has ended."""
        rows = self._state.rows
        request = rows.requests[place]
        num_lookahead = self._num_lookahead_tokens
        forked_ids = self._state.forked_ids
        output = step.output
        try:
            if len(forked_ids) > 0 and request.request_id in forked_ids:
                # The workers get all its blocks, not only the new ones.
                return self._manager.allocate_slots(request, num_new, num_lookahead_tokens=num_lookahead) is not None
            return self._manager.allocate_row(
                rows.held[place], num_new, num_lookahead, i32(step.num_rows), output.new_blocks
            )
        except RequestError as error:
            self._state.fail(request, error)
            self._state.rows.sweep()
            return False

    def _add(self, step: StepBuilder, request: Request, num_new: int) -> None:
        forked_ids = self._state.forked_ids
        if len(forked_ids) > 0 and request.request_id in forked_ids:
            forked_ids.discard(request.request_id)
            step.add_new(request, num_new, self._manager.get_blocks(request.request_id))
        else:
            step.add(request, num_new)
        step.has_running = True
        if request.is_prefill_chunk:
            step.has_prefill = True
        if len(request.draft_token_ids) > 0:
            num_drafts = num_new + request.num_computed_tokens - request.num_tokens - request.num_output_placeholders
            if num_drafts > 0:
                step.output.draft_token_ids[request.request_id] = request.draft_token_ids[:num_drafts]
            request.draft_token_ids = []

    def _allocate_by_preempting(self, step: StepBuilder, request: Request, num_new: int) -> bool:
        """Preempts others until the slots fit. False when the request itself was preempted, ended as too large, or
        waits: for blocks that a step in flight may still write; alone, for its own step in flight, which may release
        what lacks, before it gives up what it has.
        """
        fence = self._state.fence
        error = self._state.pool_error(request, request.num_computed_tokens + num_new)
        if error is not None:
            # Preempting everybody would not help, and starting over would end here again (vllm-project/vllm#39734).
            self._state.fail(request, error)
            self._state.rows.sweep()
            return False
        while True:
            victim = self._choose_victim()
            if victim is request and request.num_in_flight_tokens > 0 and len(self._state.running) == 1:
                self._state.wait_log.stop_at_fence(0, self._manager.shortage)
                return False
            if fence is not None and fence.must_wait(victim):
                # Its blocks would not be free before that step is back: it may as well go on.
                self._state.wait_log.stop_at_fence(self._state.rows.place_of(request), self._manager.shortage)
                return False
            if self._state.rows.place_of(victim) < self._place:
                self._place -= 1
            if step.remove(victim):
                # Its blocks of this step were made hits and will not be written now.
                self._manager.uncache_beyond(victim, victim.num_computed_tokens)
            self._state.preempt(victim, drop_stale_output=False)
            step.has_preempted = True
            if victim is request:
                return False
            if self._allocate(step, self._place, num_new):
                return True
            if _has_ended(request):
                return False

    def _choose_victim(self) -> Request:
        """The last one that started; under PRIORITY the least urgent, and of equals the one that runs longest."""
        running = self._state.running
        if not self._by_priority:
            return running[-1]
        victim = running[0]
        for request in running:
            if request.priority > victim.priority or (
                request.priority == victim.priority and request.arrival_time > victim.arrival_time
            ):
                victim = request
        return victim


def _has_ended(request: Request) -> bool:
    return request.is_finished
