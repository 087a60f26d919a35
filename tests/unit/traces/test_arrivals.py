"""When requests arrive: recorded, in sessions, in a closed loop, sped up, limited."""

from collections.abc import Iterator
from math import inf

from kvledger.traces.arrivals import Arrivals, ClosedLoopArrivals, LimitedArrivals, RecordedArrivals, SessionArrivals
from kvledger.traces.trace_request import TraceRequest, TraceSession


def request(time: float, session: int = 0, think: float = 0.0) -> TraceRequest:
    return TraceRequest(time, 10, 1, [], 0, session=session, think_time=think)


def sessions(*times: list[float]) -> Iterator[TraceSession]:
    """Sessions 1, 2, ... with requests at these times, 5 s of thinking before each."""
    for number, one in enumerate(times, 1):
        yield TraceSession(number, [request(time, number, 5.0) for time in one])


def drain(arrivals: Arrivals) -> list[tuple[float, int]]:
    """(time, session) of everything that comes without anything finishing."""
    taken: list[tuple[float, int]] = []
    while (time := arrivals.next_time()) < inf:
        taken.append((time, arrivals.take().session))
    return taken


def test_recorded_times_are_divided_by_the_speed_up() -> None:
    arrivals = RecordedArrivals(iter([request(0.0), request(3.0)]), speed_up=2.0)
    assert [time for time, _ in drain(arrivals)] == [0.0, 1.5]


def test_sessions_without_gaps_are_merged_in_time() -> None:
    arrivals = SessionArrivals(sessions([0.0, 10.0], [0.0, 4.0, 20.0]), mean_gap_seconds=0.0, seed=0)
    assert drain(arrivals) == [(0.0, 1), (0.0, 2), (4.0, 2), (10.0, 1), (20.0, 2)]


def test_gaps_between_sessions_come_from_the_seed() -> None:
    def starts(seed: int) -> list[float]:
        return [time for time, _ in drain(SessionArrivals(sessions([0.0], [0.0], [0.0]), 30.0, seed))]

    assert starts(1) == starts(1) != starts(2)
    assert starts(1)[0] == 0.0
    assert starts(1) == sorted(starts(1))


def test_a_session_is_not_read_before_it_starts() -> None:
    read: list[int] = []

    def stream() -> Iterator[TraceSession]:
        for session in sessions([0.0, 1000.0], [0.0], [0.0], [0.0]):
            read.append(session.session)
            yield session

    arrivals = SessionArrivals(stream(), mean_gap_seconds=500.0, seed=3)
    arrivals.next_time()
    # The first, and the one after it, whose start is not known to be first otherwise.
    assert read == [1, 2]


def test_in_a_closed_loop_the_next_request_waits_for_the_answer_and_the_thought() -> None:
    arrivals = ClosedLoopArrivals(sessions([0.0, 1.0]), mean_gap_seconds=0.0, seed=0)
    first = arrivals.take() if arrivals.next_time() == 0.0 else None
    assert first is not None
    assert arrivals.next_time() == inf
    arrivals.finished(first, now=7.0)
    assert arrivals.next_time() == 12.0
    arrivals.finished(arrivals.take(), now=13.0)
    assert arrivals.next_time() == inf


def test_a_limit_ends_the_stream() -> None:
    arrivals = LimitedArrivals(RecordedArrivals(iter([request(0.0), request(3.0), request(4.0)])), 2)
    assert [time for time, _ in drain(arrivals)] == [0.0, 3.0]
