"""StallDetector: work exists, and step after step nothing of it gets done.

    detector = StallDetector(scheduler, max_steps=1000)
    output = scheduler.schedule()
    detector.watch(output)               # once a step; StallError, or your on_stall, when it has gone on for too long

Progress is a token that its request computes for the first time (what it lost by a preemption does not count again, so
that requests which keep preempting each other are found too) or a request that ends.
"""

from collections.abc import Callable
from typing import Final

from kvledger.core.blocks.block_pool import PoolOccupancy
from kvledger.core.record import Record
from kvledger.core.scheduler.output import SchedulerOutput
from kvledger.core.scheduler.scheduler import Scheduler
from kvledger.core.scheduler.wait_reason import WaitExplanation, WaitReason
from kvledger.core.units import require_not_negative, require_positive
from kvledger.errors import StallError


class StallReport(Record):
    """No progress in the num_steps steps up to `step`; why, request by request, and where the blocks are."""

    __match_args__ = ("step", "num_steps", "waiting", "occupancy", "num_orphaned")

    def __init__(
        self, step: int, num_steps: int, waiting: list[WaitExplanation], occupancy: PoolOccupancy, num_orphaned: int
    ) -> None:
        self.step: Final = step
        self.num_steps: Final = num_steps
        self.waiting: Final = waiting
        self.occupancy: Final = occupancy
        self.num_orphaned: Final = num_orphaned

    def __str__(self) -> str:
        pool = self.occupancy
        orphaned = f" ({self.num_orphaned} of them for orphaned loads)" if self.num_orphaned > 0 else ""
        lines = [
            f"no progress in {self.num_steps} steps up to step {self.step}; "
            f"{pool.live} blocks held{orphaned}, {pool.cached} free and cached, {pool.unused} unused"
        ]
        lines.extend([f"  {explanation}" for explanation in self.waiting])
        return "\n".join(lines)


class StallDetector:
    """Watches one scheduler. Costs a comparison or two in a step that makes progress.

    `max_steps`: so many steps without progress are a stall. `max_outside_steps`: the same while a load is under way,
    the external source does not know yet, or an orphan's load has not reported: then somebody outside is slow, and the
    steps only poll (0: no limit). `on_stall` is told once per stall; without it, StallError is raised in every further
    step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        max_steps: int,
        max_outside_steps: int = 0,
        on_stall: Callable[[StallReport], None] | None = None,
    ) -> None:
        require_positive("max_steps", max_steps)
        require_not_negative("max_outside_steps", max_outside_steps)
        self._scheduler: Final = scheduler
        self._max_steps: Final = max_steps
        self._max_outside_steps: Final = max_outside_steps
        self._on_stall: Final = on_stall
        # Without progress, up to now; and those of them that did not wait for somebody outside.
        self.num_steps: int = 0
        self._num_own_steps: int = 0
        self._is_reported: bool = False

    def watch(self, output: SchedulerOutput) -> None:
        """Looks at the step that schedule() just put together."""
        if not self._scheduler.has_unfinished_requests or _is_progress(output):
            self.num_steps = 0
            self._num_own_steps = 0
            self._is_reported = False
            return
        self.num_steps += 1
        if self._waits_for_outside():
            is_stall = 0 < self._max_outside_steps <= self.num_steps
        else:
            self._num_own_steps += 1
            is_stall = self._num_own_steps >= self._max_steps
        if is_stall and not self._is_reported:
            self._tell(self.report())

    def report(self) -> StallReport:
        """Who waits now, and why."""
        scheduler = self._scheduler
        return StallReport(
            scheduler.num_steps,
            self.num_steps,
            scheduler.explain_all(),
            scheduler.manager.occupancy(),
            scheduler.num_blocks_held_by_orphans,
        )

    def _tell(self, report: StallReport) -> None:
        if self._on_stall is None:
            raise StallError(str(report))
        self._is_reported = True
        self._on_stall(report)

    def _waits_for_outside(self) -> bool:
        counts = self._scheduler.wait_counts()
        return (
            WaitReason.EXTERNAL_LOAD in counts
            or WaitReason.EXTERNAL_LOOKUP in counts
            or self._scheduler.num_blocks_held_by_orphans > 0
        )


def _is_progress(output: SchedulerOutput) -> bool:
    """Whether the step computes a token for the first time, or tells of a request that ended."""
    if output.finished_request_ids or output.errors:
        return True
    for index, request in enumerate(output.requests):
        end = output.num_computed_tokens[index] + output.num_scheduled_tokens[index]
        if end > request.num_computed_before:
            return True
    return False
