"""DecodeSchedule: schedule() of a step in which every request that runs computes one token.

First comes what only looks: at the scheduler, at what each request is (once, until another step comes in between), and
at what each would do in this step. Then the blocks that some of them need, which are known to be there, and the
counters. restated.py says which of vLLM's code all this stands for.
"""

from typing import Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from kvledger.core.requests.request import Request
from kvledger.integrations.vllm.decoding import Decoding, Decodings


class Cohort:
    """The requests that run, in vLLM's order, with what does not change while they decode."""

    def __init__(self, decodings: list[Decoding], ours: list[Request]) -> None:
        self.requests: Final = [decoding.request for decoding in decodings]
        self.ids: Final = [decoding.request_id for decoding in decodings]
        # Of each: itself, its tokens, how many are its prompt, how many it can have, and the ledger's request.
        self.rows: Final = [
            (decoding.request, decoding.tokens, decoding.num_prompt, decoding.end, held)
            for decoding, held in zip(decodings, ours, strict=True)
        ]


class StepPlan:
    """What a step would do. `grows`: rows of it that ask the ledger. `skipped`: rows of the cohort that sit it out."""

    __slots__ = ("computed", "grows", "num_outputs", "requests", "skipped")

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.computed: list[int] = []
        self.num_outputs: list[int] = []
        self.grows: list[int] = []
        self.skipped: list[int] = []


class DecodeSchedule:
    """Of one scheduler."""

    def __init__(self, scheduler: Any, decodings: Decodings) -> None:
        self._decodings: Final = decodings
        self._scheduler: Final = scheduler
        self._manager: Final = scheduler.kv_cache_manager
        self._max_model_len: Final[int] = scheduler.max_model_len
        # More requests than this get no token each.
        self._most_rows: Final[int] = min(
            scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.max_num_batched_tokens
        )
        self._is_async: Final = isinstance(scheduler, AsyncScheduler)
        self._counts_executed: Final = hasattr(scheduler, "num_executed_steps")
        self._cohort: Cohort | None = None
        # Whether the last step here had the whole cohort, so that vLLM's set of the ids of the last step is right.
        self._was_whole: bool = False

    def forget(self) -> None:
        """A step of vLLM's own comes: requests may have other blocks behind it."""
        self._cohort = None
        self._was_whole = False

    def let_go(self) -> None:
        """A step came back: whoever ended with it is not kept alive here."""
        if self._cohort is not None and len(self._cohort.requests) != len(self._scheduler.running):
            self.forget()

    def step(self) -> Any:
        """The step's SchedulerOutput; None, with nothing changed, if it is not one of decodes alone."""
        if not self._is_quiet():
            return None
        cohort = self._current_cohort()
        if cohort is None:
            return None
        plan = self._plan(cohort)
        if plan is None or not plan.requests:
            return None
        manager = self._manager
        # One token needs one block a group at most.
        if plan.grows and len(plan.grows) * manager.num_kv_cache_groups > manager.ledger.num_free_blocks:
            return None
        return self._take(cohort, plan)

    def _is_quiet(self) -> bool:
        """Whether nobody comes, goes on with a prompt, or waits for something in the scheduler."""
        scheduler = self._scheduler
        if scheduler._pause_state is not PauseState.UNPAUSED or scheduler._inflight_prefills:
            return False
        num_running = len(scheduler.running)
        if not 0 < num_running <= self._most_rows:
            return False
        if scheduler.waiting or scheduler.kv_holding_waiting:
            # vLLM looks at the first that waits only if there is a place for it.
            is_full: bool = num_running + scheduler.num_waiting_for_streaming_input >= scheduler.max_num_active_reqs
            return is_full
        return True

    def _current_cohort(self) -> Cohort | None:
        """The requests that run; None if one of them does more than decode."""
        running: list[Any] = self._scheduler.running
        cohort = self._cohort
        if cohort is not None and cohort.requests == running:
            return cohort
        self.forget()
        known, decodings_of = self._manager.ours, self._decodings.of
        decodings: list[Decoding] = []
        ours: list[Request] = []
        for request in running:
            request_id = request.request_id
            held = known.get(request_id)
            decoding = decodings_of(request_id, request)
            if held is None or decoding is None:
                return None
            decodings.append(decoding)
            ours.append(held)
        self._cohort = Cohort(decodings, ours)
        return self._cohort

    def _plan(self, cohort: Cohort) -> StepPlan | None:
        """What each request would do; None if one would do something else than computing one token or waiting."""
        plan = StepPlan()
        requests, computed, num_outputs = plan.requests, plan.computed, plan.num_outputs
        last_start = self._max_model_len - 2
        row = 0
        for request, tokens, num_prompt, end, ours in cohort.rows:
            num_computed: int = request.num_computed_tokens
            num_awaited: int = request.num_output_placeholders
            num_tokens = len(tokens)
            num_new = num_tokens + num_awaited - num_computed
            if num_new != 1 or num_computed > last_start or num_awaited > 0:
                # All tokens that it can have are computed or on their way: it sits this step out.
                is_ending = num_awaited > 0 and num_computed + 2 - num_awaited >= end
                if num_new == 0 or num_computed > last_start or is_ending:
                    plan.skipped.append(row + len(plan.skipped))
                    continue
                if num_new != 1:
                    return None
            if num_computed >= ours.quiet_end:
                plan.grows.append(row)
            requests.append(request)
            computed.append(num_computed)
            num_outputs.append(num_tokens - num_prompt + num_awaited)
            row += 1
        return plan

    def _take(self, cohort: Cohort, plan: StepPlan) -> Any:
        """Takes the blocks, counts the tokens and says so: the rest of vLLM's schedule()."""
        scheduler, manager = self._scheduler, self._manager
        scheduler.current_step += 1
        manager.new_step_starts()
        requests = plan.requests
        new_block_ids: list[Any] = [None] * len(requests)
        for row in plan.grows:
            blocks = manager.allocate_slots(requests[row], 1, num_lookahead_tokens=0)
            if blocks is None:
                raise RuntimeError(f"{requests[row].request_id}: no block, though there were {plan.grows} growing rows")
            new_block_ids[row] = blocks.get_block_ids(allow_none=True)
        scheduler.prefill_capacity_bound = scheduler.get_request_counts()[1] > len(scheduler.deferred_waiting)
        if self._counts_executed:
            scheduler.num_executed_steps += 1
        ids = cohort.ids.copy()
        for row in reversed(plan.skipped):
            del ids[row]
        cached = CachedRequestData(
            req_ids=ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids=self._tokens_of_others(ids, plan),
            new_block_ids=new_block_ids,
            num_computed_tokens=plan.computed,
            num_output_tokens=plan.num_outputs,
        )
        output = self._output(cached)
        self._advance(requests)
        # Not cleared: the step's output has them.
        scheduler.finished_req_ids = set()
        scheduler.reset_preempted_req_ids = set()
        return output

    def _tokens_of_others(self, ids: list[str], plan: StepPlan) -> dict[str, list[int]]:
        """All tokens of those that the last step did not have, for vLLM's first model runner; remembers this step."""
        scheduler = self._scheduler
        if scheduler.use_v2_model_runner:
            return {}
        is_whole = not plan.skipped
        if is_whole and self._was_whole:
            return {}
        last: set[str] = scheduler.prev_step_scheduled_req_ids
        others = {
            request_id: request.all_token_ids.copy()
            for request_id, request in zip(ids, plan.requests, strict=True)
            if request_id not in last
        }
        last.clear()
        last.update(ids)
        self._was_whole = is_whole
        return others

    def _output(self, cached: Any) -> Any:
        scheduler, manager = self._scheduler, self._manager
        # Of decodes there are none, but nothing that is left there may pile up.
        manager.take_boundary_state_offloads()
        copies, ends = manager.take_kv_cache_block_copies()
        if copies:
            scheduler._free_cow_retained_blocks(ends, scheduler.sched_step_seq + 1)
        encoder_cache = scheduler.encoder_cache_manager
        num_rows = len(cached.req_ids)
        return SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict.fromkeys(cached.req_ids, 1),
            total_num_scheduled_tokens=num_rows,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=scheduler.reset_preempted_req_ids,
            finished_req_ids=scheduler.finished_req_ids,
            free_encoder_mm_hashes=encoder_cache.get_freed_mm_hashes(),
            new_block_ids_to_zero=scheduler._get_new_block_ids_to_zero(),
            kv_cache_block_copies=copies or None,
            ec_manager_metadata=encoder_cache.get_manager_metadata(),
        )

    def _advance(self, requests: list[Any]) -> None:
        """vLLM's _update_after_schedule. Nobody was in the middle of a prompt, so that is_prefill_chunk stays."""
        for request in requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
        if not self._is_async:
            return
        for request in requests:
            request.num_output_placeholders += 1
        if self._scheduler.use_v2_model_runner:
            next_step = self._scheduler.current_step + self._scheduler.decode_stagger
            for request in requests:
                request.next_decode_eligible_step = next_step
