"""Traffic: the requests of any trace in one order, on one clock where the trace has one; and which of them to keep."""

import math
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from typing import Final

from kvledger.errors import wrong_value
from kvledger.traces.arrivals import SessionArrivals
from kvledger.traces.reader import TraceReader
from kvledger.traces.trace_request import TraceRequest, TraceSession


class Traffic:
    """(time, request) in the order of the trace. Iterated once.

    `clock` "trace": times count from the trace's start, in seconds, and do not fall. "session": they count from their
    session's start, and a session's requests stand together, as sessions have no common clock.
    """

    def __init__(self, reader: TraceReader) -> None:
        self.clock: str = "trace"
        self.has_sessions: Final = reader.has_sessions
        self.knows_answers: Final = reader.knows_answers
        # Nothing is known of times within a session.
        self.follows: Final = reader.needs_closed_loop
        self._requests: Final = self._clocked(reader) if reader.has_clock else self._of_sessions(reader.sessions())

    def __iter__(self) -> Iterator[tuple[float, TraceRequest]]:
        return self._requests

    def _clocked(self, reader: TraceReader) -> Iterator[tuple[float, TraceRequest]]:
        return ((request.arrival_time, request) for request in reader.requests())

    def _of_sessions(self, sessions: Iterator[TraceSession]) -> Iterator[tuple[float, TraceRequest]]:
        first = next(sessions, None)
        if first is None:
            return iter(())
        if first.start is None:
            self.clock = "session"
            return _one_by_one(first, sessions)
        return _by_time(first, sessions)


def _one_by_one(first: TraceSession, others: Iterator[TraceSession]) -> Iterator[tuple[float, TraceRequest]]:
    for session in _chain(first, others):
        for request in session.requests:
            yield request.arrival_time, request


def _by_time(first: TraceSession, others: Iterator[TraceSession]) -> Iterator[tuple[float, TraceRequest]]:
    arrivals = SessionArrivals(_chain(first, others), 0.0, 0)
    while (time := arrivals.next_time()) != math.inf:
        yield time, arrivals.take()


def _chain(first: TraceSession, others: Iterator[TraceSession]) -> Iterator[TraceSession]:
    yield first
    yield from others


def select(
    requests: Iterator[tuple[float, TraceRequest]],
    *,
    share: float = 1.0,
    seed: int = 0,
    num_sessions: int | None = None,
    limit: int | None = None,
) -> Iterator[tuple[float, TraceRequest]]:
    """Those of whole sessions that are drawn with the probability `share`, then of the first `num_sessions` of these,
    then the first `limit` of these. A request without a session is one of its own."""
    if not 0.0 < share <= 1.0:
        raise wrong_value("sample", share, "no share of a trace", "give a number above 0 and at most 1")
    if share < 1.0:
        requests = _drawn(requests, share, seed)
    if num_sessions is not None:
        requests = _of_first_sessions(requests, num_sessions)
    return requests if limit is None else islice(requests, limit)


def _drawn(
    requests: Iterator[tuple[float, TraceRequest]], share: float, seed: int
) -> Iterator[tuple[float, TraceRequest]]:
    limit = int(share * (1 << 64))
    for number, (time, request) in enumerate(requests):
        # A session is drawn by its number, so nothing is remembered of it.
        key = f"{seed} s{request.session}" if request.session > 0 else f"{seed} r{number}"
        if int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") < limit:
            yield time, request


def _of_first_sessions(
    requests: Iterator[tuple[float, TraceRequest]], num_sessions: int
) -> Iterator[tuple[float, TraceRequest]]:
    chosen: set[int] = set()
    num_chosen = 0
    for time, request in requests:
        if request.session not in chosen or request.session <= 0:
            if num_chosen == num_sessions:
                continue
            num_chosen += 1
            chosen.add(request.session)
        yield time, request
