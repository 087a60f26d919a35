"""Explainer: reads the log of the last step and says why a request got no tokens in it. It decides nothing again."""

from typing import Final

from kvledger.core.requests.request import Request, RequestStatus
from kvledger.core.scheduler.state import SchedulerState
from kvledger.core.scheduler.wait_log import Preemption, WaitLog
from kvledger.core.scheduler.wait_reason import WaitExplanation, WaitReason
from kvledger.errors import UnknownRequestError


class _Decided:
    """What the last step decided about requests one by one; built once, to be asked about all of them."""

    def __init__(self, log: WaitLog) -> None:
        # By request and not by its id, which somebody else may have by now.
        self.scheduled: Final[set[Request]] = set(log.output.requests)
        self.preemptions: Final[dict[Request, Preemption]] = {each.request: each for each in log.preemptions}
        self.passed_over: Final[dict[Request, WaitReason]] = {}
        for index, request in enumerate(log.passed_over):
            self.passed_over[request] = log.passed_over_reasons[index]


class Explainer:
    """Answers on demand; holds nothing of its own."""

    def __init__(self, state: SchedulerState) -> None:
        self._state: Final = state

    def explain(self, request_id: str) -> WaitExplanation | None:
        """Why the last step gave it no tokens; None when it did.

        UnknownRequestError when it is not here (any more), unless the last step ended it as too large.
        """
        request = self._state.requests.get(request_id)
        if request is None:
            log = self._state.wait_log
            error = log.output.errors.get(request_id)
            if error is None:
                raise UnknownRequestError(f"request_id={request_id!r}: not here, or finished already")
            return WaitExplanation(request_id, WaitReason.NEVER_FITS, log.step, log.step, error=str(error))
        decided = _Decided(self._state.wait_log)
        if request.status is RequestStatus.RUNNING:
            return None if request in decided.scheduled else self._explain_running(request)
        return self._explain_waiting(request, self._state.waiting_requests().index(request), decided)

    def explain_all(self) -> list[WaitExplanation]:
        """All of them, running ones first, each in the order of scheduling. O(requests)."""
        state = self._state
        decided = _Decided(state.wait_log)
        idle = [request for request in state.running if request not in decided.scheduled]
        explanations = [self._explain_running(request) for request in idle]
        for place, request in enumerate(state.waiting_requests()):
            explanations.append(self._explain_waiting(request, place, decided))
        return explanations

    def counts(self, num_more: int) -> dict[WaitReason, int]:
        """Requests that the last step gave nothing, by reason; not running ones whose last token is on its way."""
        log = self._state.wait_log
        counts: dict[WaitReason, int] = {}

        def add(reason: WaitReason, number: int) -> None:
            if number > 0:
                counts[reason] = counts.get(reason, 0) + number

        if log.fence_shortage is None:
            add(self._unreached_reason(), len(log.unreached))
        else:
            add(WaitReason.BLOCKS_IN_FLIGHT, 1)
            add(WaitReason.BEHIND, len(log.unreached) - 1)
        add(WaitReason.CHUNK_CLIPPED, len(log.clipped))
        add(WaitReason.PREEMPTED, len(log.preemptions))
        for reason in log.passed_over_reasons:
            add(reason, 1)
        num_looked_at = len(log.preemptions) + len(log.passed_over)
        if log.blocker is not None:
            add(log.blocker_reason, 1)
            num_looked_at += 1
        add(log.ended_by, log.num_waiting - num_looked_at + num_more)
        return counts

    def _explain_running(self, request: Request) -> WaitExplanation:
        """Of a running request that the step did not schedule."""
        log = self._state.wait_log
        request_id = request.request_id
        if request_id in self._state.forked_ids:
            return WaitExplanation(request_id, WaitReason.NOT_CONSIDERED, log.step, log.next_step)
        if request_id in log.clipped:
            return WaitExplanation(request_id, WaitReason.CHUNK_CLIPPED, log.step, log.clipped[request_id])
        if request_id not in log.unreached:
            # Scheduled in the step before, or it would have had tokens now.
            return WaitExplanation(request_id, WaitReason.OUTPUT_IN_FLIGHT, log.step, log.step)
        since = log.unreached[request_id]
        shortage = log.fence_shortage
        if shortage is not None:
            place = self._state.running.index(request)
            reason = WaitReason.BLOCKS_IN_FLIGHT
            if shortage.request_id == request_id:
                return WaitExplanation(request_id, reason, log.step, since, place, shortage=shortage)
            return WaitExplanation(
                request_id, WaitReason.BEHIND, log.step, since, place, shortage.request_id, reason, shortage
            )
        reason = self._unreached_reason()
        if reason is WaitReason.TOKEN_BUDGET:
            budget = self._state.config.max_num_batched_tokens
            return WaitExplanation(request_id, reason, log.step, since, limit=budget)
        return WaitExplanation(request_id, reason, log.step, since, other_id=log.preemptions[-1].request.request_id)

    def _unreached_reason(self) -> WaitReason:
        """Why the running pass did not come to its end."""
        return WaitReason.STEP_PREEMPTED if self._state.wait_log.broke_off_at >= 0 else WaitReason.TOKEN_BUDGET

    def _explain_waiting(self, request: Request, place: int, decided: _Decided) -> WaitExplanation:
        log = self._state.wait_log
        request_id = request.request_id
        since = request.waiting_since_step
        if since > log.step:
            return WaitExplanation(request_id, WaitReason.NOT_CONSIDERED, log.step, since, place)
        preemption = decided.preemptions.get(request)
        if preemption is not None:
            shortage = preemption.shortage
            return WaitExplanation(
                request_id, WaitReason.PREEMPTED, log.step, since, place, shortage.request_id, shortage=shortage
            )
        if request is log.blocker:
            return self._explain_blocker(request, place)
        reason = decided.passed_over.get(request)
        if reason is not None:
            return self._explain_passed_over(request, place, reason)
        return self._explain_behind(request, place)

    def _explain_blocker(self, request: Request, place: int) -> WaitExplanation:
        log = self._state.wait_log
        request_id = request.request_id
        since = request.waiting_since_step
        reason = log.blocker_reason
        if reason is WaitReason.BLOCKS:
            return WaitExplanation(
                request_id,
                reason,
                log.step,
                since,
                place,
                shortage=log.shortage,
                num_blocks_orphaned=self._state.num_blocks_held_by_orphans(),
                lease_ends_step=self._state.loads.lease_ends(),
            )
        if reason is WaitReason.HIT_IN_WRITING:
            return WaitExplanation(request_id, reason, log.step, since, place)
        num_wanted = log.num_tokens_wanted
        left = log.token_budget_left
        return WaitExplanation(request_id, reason, log.step, since, place, num_tokens=num_wanted, limit=left)

    def _explain_passed_over(self, request: Request, place: int, reason: WaitReason) -> WaitExplanation:
        log = self._state.wait_log
        request_id = request.request_id
        since = request.waiting_since_step
        if reason is not WaitReason.EXTERNAL_LOAD:
            return WaitExplanation(request_id, reason, log.step, since, place)
        started_at = self._state.loads.started_at(request_id)
        num_tokens = request.num_computed_tokens
        return WaitExplanation(
            request_id, reason, log.step, since, place, num_tokens=num_tokens, load_since_step=started_at
        )

    def _explain_behind(self, request: Request, place: int) -> WaitExplanation:
        """Of a request that the waiting pass did not come to."""
        log = self._state.wait_log
        request_id = request.request_id
        since = request.waiting_since_step
        reason = log.ended_by
        if reason is WaitReason.BEHIND:
            blocker = log.blocker
            assert blocker is not None
            return WaitExplanation(
                request_id, reason, log.step, since, place, blocker.request_id, log.blocker_reason, log.shortage
            )
        if reason is WaitReason.STEP_PREEMPTED:
            other_id = log.preemptions[-1].request.request_id
            return WaitExplanation(request_id, reason, log.step, since, place, other_id)
        config = self._state.config
        limit = config.max_num_seqs if reason is WaitReason.MAX_NUM_SEQS else config.max_num_batched_tokens
        started_at = self._state.loads.started_at(request_id)
        return WaitExplanation(request_id, reason, log.step, since, place, limit=limit, load_since_step=started_at)
