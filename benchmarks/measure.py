"""How everything here is measured: both sides in one process, by turns, CPU time of the thread, medians.

By turns, because the machine's speed drifts: a ratio of two medians taken minutes apart means little. CPU time, because
other processes share the cores. The garbage collector is off while a side runs, since it would bill one side for what
the other left behind.
"""

import gc
from dataclasses import dataclass
from statistics import median, quantiles
from time import thread_time_ns


class Side:
    """One of the two contestants: an operation that can be repeated. Only run() is timed."""

    def before(self) -> None:
        """Puts things in place for the next run."""

    def run(self) -> None:
        raise NotImplementedError

    def after(self) -> None:
        """Clears up after a run, so that the next one starts from the same state."""


@dataclass(frozen=True)
class Row:
    """One line of the table. `spread`: distance between the quartiles as a share of the median."""

    question: str
    case: str
    unit: str
    ours: float
    theirs: float
    ours_spread: float
    theirs_spread: float
    repeats: int

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


def compare(question: str, case: str, ours: Side, theirs: Side, repeats: int, *, per: int = 1, warm_up: int = 3) -> Row:
    """Runs both sides by turns. `per`: operations in one run; times are per operation, in microseconds."""
    our_times: list[float] = []
    their_times: list[float] = []
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for number in range(warm_up + repeats):
            for side, times in ((ours, our_times), (theirs, their_times)):
                side.before()
                start = thread_time_ns()
                side.run()
                end = thread_time_ns()
                side.after()
                if number >= warm_up:
                    times.append((end - start) / per / 1000)
    finally:
        gc.enable()
        gc.unfreeze()
    return Row(
        question,
        case,
        "us",
        median(our_times),
        median(their_times),
        _spread(our_times),
        _spread(their_times),
        repeats,
    )


def _spread(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = quantiles(times, n=4)
    return (high - low) / median(times)
