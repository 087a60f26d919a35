"""How everything here is measured: both sides in one process, in turns, CPU time of the thread, medians.

In turns, because the machine's speed drifts: a ratio of two medians taken minutes apart means little. A turn is a burst
of runs whose first are not counted: they find the other side's data in the CPU's caches, which costs the smaller side
most. CPU time, because other processes share the cores. The garbage collector is off while a side runs, since it would
bill one side for what the other left behind.
"""

import gc
from dataclasses import dataclass
from statistics import median, quantiles
from time import thread_time_ns

# Runs of a burst that count, and those before them that do not.
BURST = 8
WARM_UP = 2


def num_runs(repeats: int) -> int:
    """How often run() is called for that many counted repeats: benchmarks that grow need room for it."""
    return repeats + WARM_UP * -(-repeats // BURST)


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


def compare(question: str, case: str, ours: Side, theirs: Side, repeats: int, *, per: int = 1) -> Row:
    """Runs both sides in turns. `per`: operations in one run; times are per operation, in microseconds."""
    our_times: list[float] = []
    their_times: list[float] = []
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for start in range(0, repeats, BURST):
            num_counted = min(BURST, repeats - start)
            for side, times in ((ours, our_times), (theirs, their_times)):
                burst = [_time(side) for _ in range(WARM_UP + num_counted)]
                times += [nanoseconds / per / 1000 for nanoseconds in burst[WARM_UP:]]
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


def _time(side: Side) -> int:
    side.before()
    start = thread_time_ns()
    side.run()
    end = thread_time_ns()
    side.after()
    return end - start


def _spread(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = quantiles(times, n=4)
    return (high - low) / median(times)
