"""ReplayLog: an engine's periodic log line, on the clock of the replay."""

from collections.abc import Callable
from typing import Final

from kvledger.metrics import IntervalLog
from kvledger.replay.flights import FlightBook
from kvledger.scheduler import Scheduler


class ReplayLog:
    """Hands every line that is due to `write`. `interval`: simulated seconds."""

    def __init__(self, interval: float, write: Callable[[str], None]) -> None:
        self._interval: Final = interval
        self._write: Final = write
        self._clock: Callable[[], float]
        self._line: IntervalLog

    def open(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        """The replay begins."""
        self._clock = clock
        self._line = IntervalLog(scheduler, self._interval, clock)

    def step(self, book: FlightBook, num_held_back: int) -> None:
        """The book's step has ended, and its tokens are on their way back."""
        num_generated = sum(token >= 0 for token in book.sampled)
        line = self._line.step(book.num_prefill_tokens, num_generated, num_held_back)
        self._tell(line)

    def close(self) -> None:
        """The replay is over: what the last interval has so far."""
        self._tell(self._line.flush())

    def _tell(self, line: str | None) -> None:
        if line is not None:
            self._write(f"{self._clock():9.1f} s  {line}")
