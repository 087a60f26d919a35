"""Why requests waited, over a whole replay: request-seconds by the reason of the step that gave them nothing."""

from typing import Final

import msgspec

from kvledger.scheduler import WaitReason


class WaitTime(msgspec.Struct):
    """What one reason cost: requests times the simulated seconds of the steps that gave them nothing for it."""

    reason: str
    words: str
    request_seconds: float
    request_steps: int


class WaitMeter:
    """Sums up Scheduler.wait_counts. The driver leaves out steps in which nobody waits."""

    def __init__(self) -> None:
        self._seconds: Final[dict[WaitReason, float]] = {}
        self._steps: Final[dict[WaitReason, int]] = {}

    def add(self, counts: dict[WaitReason, int], seconds: float) -> None:
        """A step that took so long gave these requests nothing."""
        for reason, number in counts.items():
            self._seconds[reason] = self._seconds.get(reason, 0.0) + number * seconds
            self._steps[reason] = self._steps.get(reason, 0) + number

    def times(self) -> list[WaitTime]:
        """The costliest reason first; only those that occurred."""
        order = sorted(self._steps, key=lambda reason: (-self._seconds[reason], -self._steps[reason]))
        return [
            WaitTime(reason.name.lower(), reason.value, self._seconds[reason], self._steps[reason]) for reason in order
        ]
