"""WaitLog: what the last step decided about everybody whom it gave nothing. Written by the passes, read by explain().

Writing is a few list appends a step, for requests that a pass looked at and left; everybody behind the end of a pass
shares the one reason why it ended. So nothing is decided again when somebody asks why, and nothing grows.
"""

from typing import Final

from kvledger.core.blocks.kv_cache_blocks import BlockShortage
from kvledger.core.requests.request import Request
from kvledger.core.scheduler.output import SchedulerOutput
from kvledger.core.scheduler.step import StepBuilder
from kvledger.core.scheduler.wait_reason import WaitReason


class Preemption:
    """A request that was preempted in the step, and the shortage, of itself or another, that made it necessary."""

    def __init__(self, request: Request, shortage: BlockShortage) -> None:
        self.request: Final = request
        self.shortage: Final = shortage


class WaitLog:
    """Of one step; start() begins the next."""

    def __init__(self) -> None:
        self.step: int = 0
        # The step that decides about a request which comes to wait now: the one being put together, or the next.
        self.next_step: int = 1
        self.output: SchedulerOutput = SchedulerOutput(0, 1)
        # Running requests that the running pass did not reach -> the first of the steps in a row that did not.
        self.unreached: dict[str, int] = {}
        # Running requests in their prompt whose chunk was clipped to nothing, likewise.
        self.clipped: dict[str, int] = {}
        # Place in the running list of a request that ended the running pass, because it had to preempt itself or waits
        # for blocks that a step in flight may still write; or -1.
        self.broke_off_at: int = -1
        # The shortage of the latter; None when it preempted itself.
        self.fence_shortage: BlockShortage | None = None
        self.preemptions: list[Preemption] = []
        # Waiting requests that were looked at and passed over, each with its reason.
        self.passed_over: list[Request] = []
        self.passed_over_reasons: list[WaitReason] = []
        # The one that did not fit and ended the pass.
        self.blocker: Request | None = None
        self.blocker_reason: WaitReason = WaitReason.BLOCKS
        self.shortage: BlockShortage | None = None
        self.num_tokens_wanted: int = 0
        self.token_budget_left: int = 0
        # Why nobody else was looked at.
        self.ended_by: WaitReason = WaitReason.TOKEN_BUDGET
        self.num_waiting: int = 0

    def start(self, step: int) -> None:
        """That step begins."""
        self.step = step
        self.next_step = step
        if self.preemptions:
            self.preemptions = []
        if self.passed_over:
            self.passed_over = []
            self.passed_over_reasons = []
        self.broke_off_at = -1
        self.fence_shortage = None
        self.blocker = None
        self.shortage = None
        self.num_tokens_wanted = 0
        self.token_budget_left = 0

    def close(self, output: SchedulerOutput, num_waiting: int) -> None:
        """The step is put together. Who comes to wait from now on has not been looked at."""
        self.output = output
        self.num_waiting = num_waiting
        self.next_step = self.step + 1

    def preempt(self, request: Request, shortage: BlockShortage | None) -> None:
        """A running request loses its blocks, within the step or between two. `shortage`: the one that the ledger
        reported last.
        """
        request.waiting_since_step = self.next_step
        if self.next_step > self.step:
            return
        assert shortage is not None
        self.preemptions.append(Preemption(request, shortage))

    def break_off(self, place: int) -> None:
        """The running pass ends with the request that stood at that place, which had to preempt itself."""
        self.broke_off_at = place

    def stop_at_fence(self, place: int, shortage: BlockShortage | None) -> None:
        """The running request at that place gets no blocks before a step in flight is back."""
        self.broke_off_at = place
        self.fence_shortage = shortage

    def pass_over(self, request: Request, reason: WaitReason) -> None:
        """The waiting pass leaves that request and goes on with the next."""
        self.passed_over.append(request)
        self.passed_over_reasons.append(reason)

    def block(self, request: Request, reason: WaitReason) -> None:
        """The waiting pass ends with that request."""
        self.blocker = request
        self.blocker_reason = reason
        if reason is not WaitReason.BLOCKS:
            self.shortage = None
        self.ended_by = WaitReason.BEHIND

    def note_running(self, running: list[Request], step: StepBuilder, clips: bool) -> None:
        """The running pass is over. Who is in the step stands there in the order of `running`, of which some may be
        missing. Costs nothing when all of them were scheduled.
        """
        unreached: list[Request] = []
        if self.broke_off_at >= 0:
            unreached = running[self.broke_off_at :]
        elif step.token_budget == 0:
            unreached = _behind_last(running, step.requests())
        missing: list[Request] = []
        if clips:
            num_reached = len(running) - len(unreached)
            if step.num_rows < num_reached:
                missing = _missing_in_prompt(running[:num_reached], step.requests())
        if unreached or missing or self.unreached or self.clipped:
            # The reason may change from step to step; they wait all the same.
            before = {**self.unreached, **self.clipped}
            self.unreached = self._went_on(before, unreached)
            self.clipped = self._went_on(before, missing)

    def _went_on(self, before: dict[str, int], requests: list[Request]) -> dict[str, int]:
        return {request.request_id: before.get(request.request_id, self.step) for request in requests}


def _behind_last(running: list[Request], scheduled: list[Request]) -> list[Request]:
    """Those behind the last one that was scheduled. O(their number)."""
    if not scheduled:
        return running.copy()
    last = scheduled[-1]
    start = len(running)
    while start > 0 and running[start - 1] is not last:
        start -= 1
    return running[start:]


def _missing_in_prompt(running: list[Request], scheduled: list[Request]) -> list[Request]:
    """Those in their prompt that were not scheduled."""
    missing: list[Request] = []
    index = 0
    for request in running:
        if index < len(scheduled) and scheduled[index] is request:
            index += 1
        elif request.is_prefill_chunk:
            missing.append(request)
    return missing
