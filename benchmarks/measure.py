"""Two operations in turns in this process, as peers/ measures two contestants in theirs."""

import gc
from dataclasses import dataclass

from benchmarks.peers.contest import InProcess, in_turns
from benchmarks.peers.operation import Operation


@dataclass(frozen=True)
class Row:
    """One line of the table, in microseconds. `spread`: distance between the quartiles as a share of the median."""

    question: str
    case: str
    ours: float
    theirs: float
    ours_spread: float
    theirs_spread: float

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


def compare(question: str, case: str, ours: Operation, theirs: Operation, repeats: int, *, per: int = 1) -> Row:
    """Runs both sides in turns. `per`: operations in one run; times are per operation.

    The garbage collector is off while a side runs, since it would bill one for what the other left behind.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        mine, other = in_turns((InProcess(ours), InProcess(theirs)), repeats, 0.001 / per)
    finally:
        gc.enable()
        gc.unfreeze()
    return Row(question, case, mine.value, other.value, mine.spread, other.spread)


def print_off_and_on(rows: list[Row]) -> None:
    """A Markdown table of what something costs, where "ours" is without it and "theirs" is with it."""
    print("| case | off | on | on / off |\n|---|---:|---:|---:|")
    for row in rows:
        print(f"| {row.case} | {row.ours:.3g} us | {row.theirs:.3g} us | {row.ratio:.3f} |")
