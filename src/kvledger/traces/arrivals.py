"""Arrivals: which recorded request comes next, and when, in simulated seconds.

    recorded    every request at its recorded time; sessions overlap as their starts say
    closed loop a session's next request comes think_time after its last one finished
    steps       before the scheduler's step of the number that the recorded server had then

Sessions that are recorded without a common clock have their starts drawn: exponential gaps of a given mean, from a
seed. A speed-up divides every time between arrivals: recorded times, gaps between sessions and think times.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Final

from kvledger.traces.trace_request import TraceRequest, TraceSession


class Arrivals(ABC):
    """A stream of requests in the order of arrival. `counts_steps`: it wants to be told of every step."""

    counts_steps: bool = False

    def __init__(self, speed_up: float) -> None:
        self._speed_up: Final = speed_up

    @abstractmethod
    def next_time(self) -> float:
        """When the next request arrives; infinity when none does, or none before another one has finished."""

    @abstractmethod
    def take(self) -> TraceRequest:
        """Takes the next request. REQUIRES a finite next_time()."""

    def finished(self, request: TraceRequest, now: float) -> None:
        """This request is done: finished, or refused. Recorded arrivals do not care."""
        return

    def reach(self, step: int, now: float, is_idle: bool) -> None:
        """The step of that number comes next, at that time. `is_idle`: nobody is there to be computed."""
        return


class RecordedArrivals(Arrivals):
    """Requests without sessions, at their recorded times."""

    def __init__(self, requests: Iterator[TraceRequest], speed_up: float = 1.0) -> None:
        super().__init__(speed_up)
        self._requests: Final = requests
        self._next: TraceRequest | None = next(requests, None)

    def next_time(self) -> float:
        return math.inf if self._next is None else self._next.arrival_time / self._speed_up

    def take(self) -> TraceRequest:
        taken = self._next
        assert taken is not None
        self._next = next(self._requests, None)
        return taken


class StepArrivals(Arrivals):
    """Requests at the recorded server's own steps, so that a replay of the same engine decides as it did, step by step.

    REQUIRES a recording of one server that has the steps.
    """

    counts_steps = True

    def __init__(self, requests: Iterator[TraceRequest]) -> None:
        super().__init__(1.0)
        self._requests: Final = requests
        self._next: TraceRequest | None = next(requests, None)
        self._step: int = 0
        self._now: float = 0.0
        # Steps that the server took beyond those of the replay, to say that everybody has ended.
        self._num_ahead: int = 0

    def reach(self, step: int, now: float, is_idle: bool) -> None:
        if is_idle and self._next is not None:
            self._num_ahead = self._next.step - step
        self._step, self._now = step + self._num_ahead, now

    def next_time(self) -> float:
        return math.inf if self._next is None or self._next.step > self._step else self._now

    def take(self) -> TraceRequest:
        taken = self._next
        assert taken is not None
        self._next = next(self._requests, None)
        return taken


class SessionArrivals(Arrivals):
    """Sessions that start one after another; each request at its recorded distance from its session's start.

    A session is read when it starts, so memory holds only the sessions that are under way.
    """

    def __init__(
        self, sessions: Iterator[TraceSession], mean_gap_seconds: float, seed: int, speed_up: float = 1.0
    ) -> None:
        super().__init__(speed_up)
        self._sessions: Final = sessions
        self._mean_gap: Final = mean_gap_seconds
        self._random: Final = random.Random(seed)
        self._start: float = 0.0
        self._next_session: TraceSession | None = None
        # (arrival, session, position in the session, the request)
        self._heap: list[tuple[float, int, int, TraceRequest]] = []
        self._read_session()

    def next_time(self) -> float:
        self._start_sessions()
        return self._heap[0][0] if self._heap else math.inf

    def take(self) -> TraceRequest:
        return heappop(self._heap)[3]

    def _start_sessions(self) -> None:
        """Starts every session that begins no later than the next arrival known so far."""
        while self._next_session is not None and (not self._heap or self._start <= self._heap[0][0]):
            self._begin(self._next_session, self._start)
            if self._next_session.start is None:
                gap = self._random.expovariate(1.0 / self._mean_gap) if self._mean_gap > 0 else 0.0
                self._start += gap / self._speed_up
            self._read_session()

    def _read_session(self) -> None:
        session = self._next_session = next(self._sessions, None)
        if session is not None and session.start is not None:
            self._start = session.start / self._speed_up

    def _begin(self, session: TraceSession, start: float) -> None:
        for position, request in enumerate(session.requests):
            self._push(start + request.arrival_time / self._speed_up, position, request)

    def _push(self, time: float, position: int, request: TraceRequest) -> None:
        heappush(self._heap, (time, request.session, position, request))


class ClosedLoopArrivals(SessionArrivals):
    """Sessions whose next request comes think_time after the one before is done."""

    def __init__(
        self, sessions: Iterator[TraceSession], mean_gap_seconds: float, seed: int, speed_up: float = 1.0
    ) -> None:
        self._pending: Final[dict[int, Iterator[TraceRequest]]] = {}
        super().__init__(sessions, mean_gap_seconds, seed, speed_up)

    def finished(self, request: TraceRequest, now: float) -> None:
        following = next(self._pending[request.session], None)
        if following is None:
            del self._pending[request.session]
        else:
            self._push(now + following.think_time / self._speed_up, 0, following)

    def _begin(self, session: TraceSession, start: float) -> None:
        requests = iter(session.requests)
        self._pending[session.session] = requests
        self._push(start, 0, next(requests))


class LimitedArrivals(Arrivals):
    """The first num_requests requests of other arrivals."""

    def __init__(self, arrivals: Arrivals, num_requests: int) -> None:
        super().__init__(1.0)
        self.counts_steps = arrivals.counts_steps
        self._arrivals: Final = arrivals
        self._num_left: int = num_requests

    def next_time(self) -> float:
        return self._arrivals.next_time() if self._num_left > 0 else math.inf

    def take(self) -> TraceRequest:
        self._num_left -= 1
        return self._arrivals.take()

    def finished(self, request: TraceRequest, now: float) -> None:
        self._arrivals.finished(request, now)

    def reach(self, step: int, now: float, is_idle: bool) -> None:
        self._arrivals.reach(step, now, is_idle)
