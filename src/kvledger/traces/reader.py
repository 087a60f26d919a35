"""TraceReader: what every trace format has in common. A reader makes requests, or sessions of them, out of lines."""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterator
from itertools import count
from typing import Final

import msgspec

from kvledger.core.units import cdiv
from kvledger.files.decoding import decode, describe
from kvledger.traces.first_record import FirstRecord
from kvledger.traces.lines import TraceLines
from kvledger.traces.tokenizer import Tokenizer
from kvledger.traces.trace_request import MAX_SECONDS, TraceRequest, TraceSession


class TraceReader(ABC):
    """Reads one format. `block_size`: tokens that a hash id stands for; 0 for a format without ids.

    A format has a clock (requests() gives all of them in the order of arrival), sessions, or both.
    """

    name: str
    # What recognises the format in its first record, for error messages.
    mark: str
    block_size: int = 0
    # Whether --trace-block-size can say another one.
    takes_block_size: bool = False
    has_clock: bool = True
    has_sessions: bool = False
    has_steps: bool = False
    # Whether nothing is known of the times within a session.
    needs_closed_loop: bool = False
    # Whether it may know what the answers fill.
    knows_answers: bool = False
    # Whether its texts need a tokenizer ("must"), may need one ("may"), or there are none ("none").
    tokenizer_use: str = "none"

    def __init__(self, lines: TraceLines, block_size: int | None) -> None:
        self.lines: Final = lines
        # What the user should know of this trace.
        self.notes: list[str] = []
        # Given by whoever opens the trace.
        self.tokenizer: Tokenizer | None = None
        if block_size is not None:
            self.block_size = block_size

    def close(self) -> None:
        """Closes the file."""
        self.lines.close()

    @property
    def num_bad(self) -> int:
        """Broken lines so far."""
        return self.lines.num_bad

    @property
    def num_bytes(self) -> int:
        """Of the file; 0 for what has no size."""
        return self.lines.num_bytes

    @property
    def num_bytes_read(self) -> int:
        return self.lines.num_bytes_read

    @staticmethod
    @abstractmethod
    def recognises(first: FirstRecord) -> bool:
        """Whether this first record can be one of this format. Where another format says so too, the user is asked."""

    def requests(self) -> Iterator[TraceRequest]:
        """All requests in the order of arrival. For formats with a clock."""
        raise NotImplementedError

    def sessions(self) -> Iterator[TraceSession]:
        """All sessions, those that start first before. For formats with sessions."""
        raise NotImplementedError


class RowReader(TraceReader):
    """One JSON record a line, one request each, in the order of arrival.

    `from_first`: stamps are of a clock on the wall, so the first one is the start.
    """

    record: type[msgspec.Struct]
    time_field: str = "timestamp"
    from_first: bool = False

    def __init__(self, lines: TraceLines, block_size: int | None) -> None:
        super().__init__(lines, block_size)
        self._numbers: Final[defaultdict[Hashable, int]] = defaultdict(count(1).__next__)

    @abstractmethod
    def request(self, record: msgspec.Struct) -> TraceRequest | None:
        """The request of a record, at its time in seconds. None when it is none, or broken (then self.lines knows)."""

    def requests(self) -> Iterator[TraceRequest]:
        return on_one_clock(self._parsed(), self.lines, self.time_field, None if self.from_first else 0.0)

    def _parsed(self) -> Iterator[TraceRequest | None]:
        decoder: msgspec.json.Decoder[msgspec.Struct] = msgspec.json.Decoder(self.record)
        for line in self.lines:
            try:
                record = decode(decoder, line)
            except msgspec.DecodeError as error:
                self.lines.bad(*describe(error))
                continue
            yield self.request(record)

    def sessions(self) -> Iterator[TraceSession]:
        return sessions_of(self.requests())

    def number(self, key: Hashable) -> int:
        """A number for each key, from 1 on, in the order in which they come."""
        return self._numbers[key]

    def ids_fit(self, field: str, num_ids: int, num_tokens: int, block_size: int, *, whole_only: bool = False) -> bool:
        """Whether there is an id for every block of the prompt; reports the line if not. `whole_only`: the last,
        partial block may go without."""
        problem = ids_problem(num_ids, num_tokens, block_size, whole_only=whole_only)
        if problem is not None:
            self.lines.bad(field, problem)
        return problem is None


def ids_problem(num_ids: int, num_tokens: int, block_size: int, *, whole_only: bool) -> str | None:
    """What is wrong with so many ids for so many tokens."""
    most = cdiv(num_tokens, block_size)
    if (num_tokens // block_size if whole_only else most) <= num_ids <= most:
        return None
    expected = f"{num_tokens // block_size} or {most}" if whole_only and num_tokens % block_size else f"{most}"
    return f"expected {expected} ids for {num_tokens} tokens in blocks of {block_size} tokens, got {num_ids}"


def sessions_of(requests: Iterator[TraceRequest]) -> Iterator[TraceSession]:
    """The sessions of requests with a clock, in memory. A request of session 0 is a session of its own.

    What lies between two arrivals of a session counts as think time, unless the request says what it was (above 0).
    """
    sessions: dict[int, TraceSession] = {}
    for request in requests:
        session = sessions.get(request.session) if request.session else None
        if session is None:
            number = request.session or -1 - len(sessions)
            session = sessions[number] = TraceSession(number, [], request.arrival_time)
        assert session.start is not None
        request.session = session.session
        request.arrival_time -= session.start
        if session.requests and request.think_time == 0.0:
            request.think_time = request.arrival_time - session.requests[-1].arrival_time
        session.requests.append(request)
    yield from sessions.values()


def on_one_clock(
    requests: Iterator[TraceRequest | None], lines: TraceLines, field: str, start: float | None
) -> Iterator[TraceRequest]:
    """Requests, each of the line just read, at their times from `start` on; None: from the first one on. One that is
    before the one above it is a bad line, by that field. What is None is passed over."""
    latest = -math.inf
    for request in requests:
        if request is None:
            continue
        if start is None:
            start = request.arrival_time
        time = request.arrival_time - start
        if time < latest:
            lines.bad(field, falls(latest - time))
            continue
        latest = time
        request.arrival_time = time
        yield request


def falls(seconds: float) -> str:
    """What is wrong with a time that is so far before the one above it."""
    return f"{seconds:g} s before the line above; expected times that do not fall"


def is_time(seconds: float) -> bool:
    """Whether it is within what a trace can have. Not a number is not."""
    return -MAX_SECONDS <= seconds <= MAX_SECONDS
