"""Two contestants in turns over the cases of a question: medians, spreads and ratios."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any, Protocol

from benchmarks.peers.case import Case
from benchmarks.peers.operation import BURST, Operation, burst

# What --quick leaves of a case.
_QUICK_REPEATS = 2
_QUICK_BLOCKS = 10_000


class Contestant(Protocol):
    """What takes turns: a ContestantProcess, or an operation in this process."""

    def burst(self, num_counted: int) -> list[float]:
        """The values of so many runs, in nanoseconds or bytes."""


class InProcess:
    """An operation that takes its turns in this process."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def burst(self, num_counted: int) -> list[float]:
        return burst(self._operation, num_counted)


class Opponent(Contestant, Protocol):
    """A contestant with a name, which can be asked for any case: a ContestantProcess."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def open(self, case: dict[str, Any]) -> str | None:
        """Prepares the case; returns why the contestant leaves it out, or None when it is ready."""

    def close(self) -> None:
        """Drops what open() prepared."""


@dataclass(frozen=True)
class Measured:
    """Median of one contestant, in the unit of the case. `spread`: distance of the quartiles as a share of it."""

    value: float
    spread: float


@dataclass(frozen=True)
class Row:
    """One line of the report. `theirs` None: there is no peer, or it has no such thing. `remark`: what it leaves out,
    of the work that ours does.
    """

    question: str
    size: str
    unit: str
    repeats: int
    ours: Measured
    peer: str = ""
    peer_version: str = ""
    theirs: Measured | None = None
    remark: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times as much theirs takes; above 1: ours is ahead."""
        if self.theirs is None or self.ours.value == 0:
            return None
        return self.theirs.value / self.ours.value


def in_turns(contestants: Iterable[Contestant], repeats: int, scale: float) -> list[Measured]:
    """Bursts of all contestants in turns, because the machine's speed drifts. Values are multiplied by `scale`."""
    sides = list(contestants)
    values: list[list[float]] = [[] for _ in sides]
    for start in range(0, repeats, BURST):
        for side, own in zip(sides, values, strict=True):
            own += [value * scale for value in side.burst(min(BURST, repeats - start))]
    return [_summary(own) for own in values]


def _summary(values: list[float]) -> Measured:
    middle = median(values)
    if len(values) < 2 or middle == 0:
        return Measured(middle, 0.0)
    low, _, high = quantiles(values, n=4)
    return Measured(middle, (high - low) / middle)


def quick(cases: Iterable[Case]) -> list[Case]:
    """Few repeats, and no large pool or batch: shows that it runs."""
    return [
        replace(case, repeats=_QUICK_REPEATS)
        for case in cases
        if case.num_blocks <= _QUICK_BLOCKS and case.num_running <= 256
    ]


def run_case(case: Case, ours: Opponent, peers: list[Opponent], remarks: Callable[[str, Case], str]) -> Iterator[Row]:
    """A row for each peer that does the case; without peers, one of ours alone. `remarks`: what a peer leaves out."""
    scale = (1.0 if case.unit == "B" else 0.001) / case.per
    for peer in peers:
        if peer.open(case.as_dict()) is not None:
            continue
        _open_ours(ours, case)
        mine, theirs = in_turns((ours, peer), case.repeats, scale)
        yield Row(
            case.question,
            case.size,
            case.unit,
            case.repeats,
            mine,
            peer.name,
            peer.version,
            theirs,
            remarks(peer.name, case),
        )
        ours.close()
        peer.close()
    if not peers:
        _open_ours(ours, case)
        (mine,) = in_turns((ours,), case.repeats, scale)
        yield Row(case.question, case.size, case.unit, case.repeats, mine)
        ours.close()


def _open_ours(ours: Opponent, case: Case) -> None:
    left_out = ours.open(case.as_dict())
    assert left_out is None, left_out
