"""Scheduler: one token budget a step, no phases.

Every request has tokens it knows and tokens it has computed; a step hands out budget so that computed catches up with
known (plus drafts). A decode is a request one token behind, a prefill one that is many behind, and both mix freely.

    schedule():  running requests first, in order; when blocks run out, preempt from the tail (under PRIORITY: the
                 lowest priority) -> then, if nothing was preempted, waiting requests while budget, seats, blocks last
    update_from_output(): tokens come back; drafts are accepted or taken back; who is done frees its blocks
                 (update_from_tokens(): the same where each request samples one token, flat)

A preempted request loses its blocks, keeps its tokens, and starts over at the front of the queue; what is still cached
of it is a prefix hit then. Decisions are vLLM's, step for step; docs/differences.md lists where they are not.
"""

from typing import Final, SupportsIndex

from kvledger.core.change import ADDING, ENDING, FAILING, FORKING, LOADING, RESETTING, SCHEDULING
from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.core.requests.request import Request, RequestStatus
from kvledger.core.scheduler.accounting import RequestAccounting
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.core.scheduler.explain import Explainer
from kvledger.core.scheduler.external import ExternalKVSource
from kvledger.core.scheduler.failed_loads import require_loaded, restart_failed_loads
from kvledger.core.scheduler.output import RequestOutput, SchedulerOutput, StepEnd
from kvledger.core.scheduler.returning_pass import ReturningPass
from kvledger.core.scheduler.running_pass import RunningPass
from kvledger.core.scheduler.state import SchedulerState
from kvledger.core.scheduler.step import StepBuilder
from kvledger.core.scheduler.wait_reason import WaitExplanation, WaitReason
from kvledger.core.scheduler.waiting_pass import WaitingPass
from kvledger.core.units import whole_number
from kvledger.errors import RequestError, RequestTooLargeError, UnknownRequestError, wrong_value


class Scheduler:
    """Drives one KVCacheManager. One owner thread. `accounting`: what each request costs, where somebody asks."""

    def __init__(
        self,
        manager: KVCacheManager,
        config: SchedulerConfig,
        external_source: ExternalKVSource | None = None,
        accounting: RequestAccounting | None = None,
    ) -> None:
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < manager.max_model_len:
            raise wrong_value(
                "max_num_batched_tokens",
                config.max_num_batched_tokens,
                f"a prompt of up to max_model_len={manager.max_model_len} must fit one step without chunked prefill",
                "raise it, lower max_model_len, or enable_chunked_prefill=True",
            )
        if accounting is not None and accounting.manager is not manager:
            problem = "it counts the blocks of another manager"
            raise wrong_value("accounting", accounting, problem, "make it with the manager of this scheduler")
        manager.demand.expect_steps(
            config.max_num_batched_tokens, config.max_steps_in_flight, config.num_lookahead_tokens
        )
        self.manager: Final = manager
        self.config: Final = config
        self._state: Final = SchedulerState(manager, config, accounting, external_source is not None)
        self.accounting: Final = accounting
        self._running_pass: Final = RunningPass(self._state)
        self._waiting_pass: Final = WaitingPass(self._state, external_source)
        self._returning_pass: Final = ReturningPass(self._state)
        self._explainer: Final = Explainer(self._state)
        self._step: int = 0

    # What is there

    @property
    def num_running(self) -> int:
        return len(self._state.running)

    @property
    def num_waiting(self) -> int:
        return self._state.num_waiting

    @property
    def num_steps(self) -> int:
        """Steps scheduled so far."""
        return self._step

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        return self._state.num_preemptions

    @property
    def has_unfinished_requests(self) -> bool:
        return len(self._state.requests) > 0

    @property
    def num_blocks_held_by_orphans(self) -> int:
        """Blocks of aborted requests whose external load never reported."""
        return self._state.num_blocks_held_by_orphans()

    @property
    def num_blocks_held_by_waiting(self) -> int:
        """Blocks of requests that wait, for a load or to go on after one. Preempting cannot get them back."""
        return self._state.num_blocks_held_by_waiting()

    @property
    def steps_in_flight(self) -> list[SchedulerOutput]:
        """Steps that wait for their update, the oldest first, in a fresh list."""
        return self._state.in_flight.copy()

    def get_request(self, request_id: str) -> Request:
        """UnknownRequestError when it is not here (any more)."""
        request = self._state.requests.get(request_id)
        if request is None:
            raise UnknownRequestError(f"request_id={request_id!r}: not here, or finished already; nothing was changed")
        return request

    def running_requests(self) -> list[Request]:
        """Everything that runs, in the order of scheduling, in a fresh list."""
        return self._state.running.copy()

    def waiting_requests(self) -> list[Request]:
        """Everything that waits, in the order of admission, in a fresh list."""
        return self._state.waiting_requests()

    # Why does it wait

    def explain(self, request_id: str) -> WaitExplanation | None:
        """Why the last schedule() gave that request no tokens; None when it gave it some.

        Also for a request that it ended as too large. UnknownRequestError for any other that is not here (any more).
        """
        return self._explainer.explain(request_id)

    def explain_all(self) -> list[WaitExplanation]:
        """Why, for every request that got no tokens in the last schedule(). O(requests): for reports."""
        return self._explainer.explain_all()

    def wait_counts(self, num_more: int = 0) -> dict[WaitReason, int]:
        """How many requests the last schedule() gave nothing, by reason. O(requests that it looked at).

        `num_more`: requests that the caller holds back, as if they stood at the end of the queue.
        """
        return self._explainer.counts(num_more)

    # Requests come and go

    def add_request(self, request: Request) -> None:
        """Queues a request.

        RequestTooLargeError when its prompt can never fit (the pool, or max_model_len with one token to generate): it
        would wait for ever, and everything behind it (vllm-project/vllm#39734). RequestError for an id in use.
        """
        self._state.change.require_at_rest()
        self._require_unused(request.request_id)
        if request.status is not RequestStatus.WAITING or self.manager.holds_blocks(request):
            raise RequestError(
                f"request {request.request_id!r} is {request.status.value}; only a fresh request can be added"
            )
        max_model_len = self.manager.max_model_len
        if request.num_tokens >= max_model_len:
            raise RequestTooLargeError(
                f"request {request.request_id!r}: {request.num_tokens} prompt tokens leave no room to generate within "
                f"max_model_len={max_model_len}; shorten the prompt or raise max_model_len"
            )
        error = self._state.pool_error(request, request.num_tokens)
        if error is not None:
            raise error
        self._state.begin(ADDING)
        self._state.add(request)
        self._state.end()

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is. UnknownRequestError when it is not here (any more)."""
        self._state.change.require_at_rest()
        request = self.get_request(request_id)
        self._state.begin(ENDING)
        is_orphan = self._state.loads.orphan(request, self._step)
        self._state.finish(request, RequestStatus.FINISHED_ABORTED, keep_blocks=is_orphan)
        self._state.rows.sweep()
        self._state.end()

    def fork(self, request_id: str, child_ids: list[str]) -> bool:
        """Splits a running request into itself and children with the same tokens; they share its full blocks.

        The children run from the next step on, where they come as new requests and the copies of the partial tail with
        them. False, changing nothing, when seats (max_num_seqs) or blocks do not suffice.
        """
        self._state.change.require_at_rest()
        parent = self.get_request(request_id)
        if parent.status is not RequestStatus.RUNNING:
            raise RequestError(f"request {request_id!r} is {parent.status.value}; only a running one can be forked")
        if parent.num_processed_tokens == 0:
            raise RequestError(f"request {request_id!r}: nothing of it is back yet; fork it after its first update")
        for index, child_id in enumerate(child_ids):
            self._require_unused(child_id)
            if child_id in child_ids[:index]:
                raise RequestError(f"child_ids: {child_id!r} is listed twice; ids must be unique")
        if self.num_running + len(child_ids) > self.config.max_num_seqs:
            return False
        if self.manager.num_blocks_to_fork(parent, len(child_ids)) > self.manager.num_free_blocks:
            return False
        children = [parent.twin(child_id) for child_id in child_ids]
        self._state.begin(FORKING)
        for child in children:
            self.manager.fork(parent, child)
            self._state.start_fork(child, parent.num_processed_tokens)
        self._state.end()
        return True

    def update_draft_tokens(self, request_id: str, draft_token_ids: list[int]) -> None:
        """Drafts that the next step shall verify. Ignored for requests that are gone or still in their prompt."""
        self._state.change.require_at_rest()
        request = self._state.requests.get(request_id)
        if request is not None:
            request.leave()
            request.draft_token_ids = [] if request.is_prefill_chunk else draft_token_ids

    def external_load_finished(self, request_id: str, num_valid_tokens: SupportsIndex) -> bool:
        """An asynchronous load is done: the request's first num_valid_tokens tokens have values (0: it failed).

        False when nobody waits for it: its lease was over, or it was reported before.
        """
        self._state.change.require_at_rest()
        loads = self._state.loads
        num_valid = whole_number("num_valid_tokens", num_valid_tokens)
        if not loads.is_awaited(request_id):
            return False
        self._state.begin(LOADING)
        orphan = loads.finish(request_id, num_valid)
        if orphan is not None:
            self._state.give_back(orphan)
        self._state.end()
        return True

    def fail_loads(self, output: SchedulerOutput, num_valid_tokens: dict[str, int]) -> list[str]:
        """Synchronous loads of the oldest step in flight failed: of these requests, which started in it, only the first
        num_valid_tokens[request id] tokens have values (0: none).

        To be called before the step's update, which then drops what they sampled. They start over, and so does whoever
        hit what they were to fill; their ids are returned. RequestError, changing nothing, for a request that did not
        start in that step.
        """
        self._returning_pass.require_oldest(output)
        self._state.change.require_at_rest()
        failed = require_loaded(output, num_valid_tokens)
        self._state.begin(FAILING)
        restarted = restart_failed_loads(self._state, failed)
        self._state.end()
        return restarted

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forgets all cached content; False while requests hold blocks, or steps in flight may write some that an
        external source could be given next.

        `preempt_running` preempts the running ones first. Their steps in flight compute on old values, so the output of
        those steps is dropped.
        """
        self._state.begin(RESETTING)
        is_reset = self._reset(preempt_running)
        self._state.end()
        return is_reset

    def _reset(self, preempt_running: bool) -> bool:
        if preempt_running:
            while self._state.running:
                self._state.preempt(self._state.running[-1], drop_stale_output=True)
        return self.manager.reset_prefix_cache()

    # One step

    def schedule(self) -> SchedulerOutput:
        """Puts the next step together. RequestError when max_steps_in_flight steps are out already.

        What an observer, the external source or on_finish of the accounting raise surfaces here once the step is
        complete: then it is the last of steps_in_flight. A request whose own hashes are wrong ends, in output.errors.
        """
        self._state.change.require_at_rest()
        if len(self._state.in_flight) >= self.config.max_steps_in_flight:
            raise RequestError(f"{len(self._state.in_flight)} steps are in flight; call update_from_output first")
        state = self._state
        state.begin(SCHEDULING)
        output = self._put_together()
        state.end()
        return output

    def _put_together(self) -> SchedulerOutput:
        state = self._state
        self._step += 1
        self.manager.start_step()
        for orphan in state.loads.take_expired(self._step):
            self.manager.free(orphan)
        step = StepBuilder(self._step, len(self.manager.config.groups), self.config, state.rows)
        output = step.output
        log = state.wait_log
        log.start(self._step)
        if self.accounting is not None:
            self.accounting.start_step(self._step)
        self._running_pass.schedule(step)
        log.note_running(state.running, step, self.manager.clips_chunks)
        if step.has_preempted:
            log.ended_by = WaitReason.STEP_PREEMPTED
        else:
            self._waiting_pass.schedule(step)
        log.close(output, state.num_waiting)
        output.total_num_scheduled_tokens = self.config.max_num_batched_tokens - step.token_budget
        output.preempted_request_ids = state.preempted_ids
        output.finished_request_ids = state.finished_ids
        state.preempted_ids = []
        state.finished_ids = []
        if state.errors:
            output.errors = state.errors
            state.errors = {}
        output.block_copies = self.manager.take_block_copies()
        step.fill_rows()
        if state.fence is not None and output.total_num_scheduled_tokens > 0:
            state.fence.sent(self._step)
        if self.accounting is not None:
            self.accounting.close_step(output)
        self._state.in_flight.append(output)
        return output

    def update_from_output(self, output: SchedulerOutput, sampled_token_ids: list[list[int]]) -> list[RequestOutput]:
        """Closes the oldest step in flight. sampled_token_ids[i] belongs to output.request_ids[i]: the sampled tokens,
        accepted drafts first; empty for a prompt that is not through. Returns what requests gained, in that order.

        RequestError for a row that cannot be right: nothing is changed, and the step is still in flight. What an
        observer or on_finish of the accounting raise surfaces once the update is complete; the tokens are in the
        requests then.
        """
        self._state.change.require_at_rest()
        gained = self._returning_pass.take(output, sampled_token_ids)
        self._state.end()
        return gained

    def update_from_tokens(self, output: SchedulerOutput, token_ids: list[int]) -> StepEnd:
        """update_from_output for a step in which each request samples one token, without an object per request.

        token_ids[i] belongs to output.request_ids[i]; -1 for a prompt that is not through.
        """
        self._state.change.require_at_rest()
        end = self._returning_pass.take_one_a_row(output, token_ids)
        self._state.end()
        return end

    def fail_step(self, output: SchedulerOutput) -> list[str]:
        """Closes the oldest step in flight, which the workers did not compute. Returns who ended by that.

        Its requests end (FINISHED_ERROR): one of them may be what broke it, and would break the next step. So do loads
        that it began, which may stand on hits of this step. Nothing that is cached is trusted any more, because blocks
        are cached when they are scheduled; so all others that run start over. The next step repeats what this one said
        of rows to drop. A step scheduled on top of it has failed too.
        """
        state = self._state
        state.change.require_at_rest()
        self._returning_pass.require_oldest(output)
        failed = [request for request in output.requests if request.status is RequestStatus.RUNNING]
        self._returning_pass.drop(output)
        state.change.under_way = FAILING
        failed += [
            request
            for request in state.waiting_holders.requests()
            if state.loads.started_at(request.request_id) >= output.step
        ]
        for request in failed:
            is_orphan = state.loads.orphan(request, self._step)
            state.finish(request, RequestStatus.FINISHED_ERROR, keep_blocks=is_orphan)
        state.rows.sweep()
        state.preempted_ids = output.preempted_request_ids + state.preempted_ids
        state.finished_ids = output.finished_request_ids + state.finished_ids
        if not self._reset(preempt_running=True):
            self.manager.start_epoch()
        state.end()
        return [request.request_id for request in failed]

    def check(self) -> None:
        """Proves that every request is where its status says, and every layer below. For tests and replay --check."""
        self._state.check()

    def _require_unused(self, request_id: str) -> None:
        if request_id in self._state.requests or request_id in self._state.loads.orphans:
            raise RequestError(f"request_id={request_id!r}: in use; ids must be unique while a request lives")
