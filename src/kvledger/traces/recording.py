"""The format of kvledger's own traces, version 1: JSON lines, a header and then one request each. docs/traces.md is its
specification.

    {"format": "kvledger.trace", "version": 1, "block_size": 16}
    {"t": 0.25, "in": 70, "out": 12, "ids": [1, 2, 3, 4], "session": 1, "think": 2.5}

A file may end anywhere, as it does when its writer is killed: what is whole is read. A header may come again, where
files were put one behind the other; a directory of files is merged by time (recordings.py).
"""

import math
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Annotated, Final, Literal

import msgspec

from kvledger.files.decoding import decode, describe
from kvledger.traces.first_record import FirstRecord
from kvledger.traces.lines import TraceLines
from kvledger.traces.reader import TraceReader, falls, ids_problem, sessions_of
from kvledger.traces.trace_request import (
    BlockTokens,
    OutputTokens,
    Priority,
    PromptTokens,
    Seconds,
    TraceRequest,
    TraceSession,
)

FORMAT: Final = "kvledger.trace"
VERSION: Final = 1
# Numbers of scopes and sessions of files behind the first one that number for themselves.
FIRST_OF_OTHERS: Final = 1 << 62
_Number = Annotated[int, msgspec.Meta(ge=0, lt=FIRST_OF_OTHERS)]
_HEADER_START: Final = b'{"format"'
_MARK_START: Final = b'{"done"'
_TIMED_START: Final = b'{"timed"'


class Header(msgspec.Struct, omit_defaults=True):
    """The first line. `start`: of the trace's clock, in seconds since the epoch. `ids`: who numbered: files of one name
    mean the same by equal ids, scopes and sessions. `order`: of the rows; see Mark. `steps`: whether every row has its
    step. `source`: where it is from.

    `clock` "session": times count from each session's start, and a session's rows stand together. `turns` "follow":
    nothing is known of times within a session, whose next turn follows the answer.
    """

    format: str
    version: int
    block_size: BlockTokens
    start: Seconds | None = None
    ids: str = ""
    order: Literal["arrival", "finish"] = "arrival"
    clock: Literal["trace", "session"] = "trace"
    turns: Literal["recorded", "follow"] = "recorded"
    steps: bool = False
    source: str | None = None


class Row(msgspec.Struct, omit_defaults=True):
    """One request. Times are seconds of the trace's clock; what is None is not known.

    `ids`: one for every whole block of prompt tokens, or one for the partial block at the end as well. `out_ids`: one
    for every whole block that the answer filled, behind whole blocks of the prompt. `block`: this row's own block size.
    `think`: between the session's answer before and this request. Of the server it was recorded on: `first` and `end`,
    when its first and last token were there; `hit`, prompt tokens found cached at its first admission; `preempted`, how
    often; `step`, the number of the first step that could schedule it; `finish`, why it ended.
    """

    t: Seconds
    num_prompt_tokens: PromptTokens = msgspec.field(name="in")
    num_output_tokens: OutputTokens = msgspec.field(name="out")
    ids: list[int] = msgspec.field(default_factory=list)
    out_ids: list[int] = msgspec.field(default_factory=list)
    scope: _Number = 0
    session: _Number = 0
    priority: Priority = 0
    think: Seconds | None = None
    block: BlockTokens | None = None
    first: Seconds | None = None
    end: Seconds | None = None
    hit: OutputTokens | None = None
    preempted: _Number = 0
    step: _Number | None = None
    finish: str = ""


class Mark(msgspec.Struct):
    """Between rows in the order of their ends: every request that arrived before `done` has its row above."""

    done: Seconds


class TimedStep(msgspec.Struct):
    """A step that was measured: a chunk of prefill_tokens tokens of one prompt after prefill_computed ones, beside
    decode_requests requests that have decode_context tokens in all."""

    prefill_tokens: int
    prefill_computed: int
    decode_requests: int
    decode_context: int
    seconds: Seconds


class Timed(msgspec.Struct):
    """Between rows, where the server measured its steps."""

    timed: TimedStep


class RecordingReader(TraceReader):
    name = "kvledger"
    mark = f'"format": "{FORMAT}"'
    has_sessions = True
    knows_answers = True

    def __init__(self, lines: TraceLines, block_size: int | None) -> None:
        super().__init__(lines, block_size)
        lines.allow_cut()
        self.header: Final = self._header(lines.take_first())
        self.block_size = self.header.block_size
        self.has_clock = self.header.clock == "trace" and self.header.turns == "recorded"
        self.needs_closed_loop = self.header.turns == "follow"
        self.has_steps = self.header.steps
        # The part that is read, and where its clock and its numbers lie in the trace's.
        self._part: Header = self.header
        self._offset: float = 0.0
        # (who numbered, number) -> a number of the whole trace.
        self._numbers: Final[dict[tuple[str, int], int]] = {}
        # Rows that may have others before them: (time, row's number, row).
        self._held: Final[list[tuple[float, int, Row]]] = []
        self._num_rows: int = 0
        self._ends: Final[dict[int, float]] = {}

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return first.record.get("format") == FORMAT

    def requests(self) -> Iterator[TraceRequest]:
        for row in self.rows():
            yield self._request(row)
        if self.lines.is_cut:
            self.notes.append("the recording is cut at its end, as by a writer that was killed; what is whole is read")

    def sessions(self) -> Iterator[TraceSession]:
        return sessions_of(self.requests()) if self.header.clock == "trace" else self._runs()

    def _runs(self) -> Iterator[TraceSession]:
        """Sessions without a common clock, whose rows stand together. A row of session 0 is one of its own."""
        run: list[TraceRequest] = []
        number = 0
        for request in self.requests():
            if run and not (request.session and request.session == run[0].session):
                yield TraceSession(number, run)
                run = []
            if not run:
                number += 1
            run.append(request)
        if run:
            yield TraceSession(number, run)

    def rows(self) -> Iterator[Row]:
        """Whole rows in the order of arrival, with times and numbers of the whole trace."""
        follows_clock = self.header.clock == "trace"
        session = 0
        decoder = msgspec.json.Decoder(Row)
        marks = msgspec.json.Decoder(Mark)
        latest = 0.0
        for line in self.lines:
            try:
                if line.startswith(_HEADER_START):
                    yield from self._release(math.inf)
                    self._begin_part(self._header(line))
                    continue
                if line.startswith(_TIMED_START):
                    continue
                if line.startswith(_MARK_START):
                    latest = max(latest, decode(marks, line).done + self._offset)
                    yield from self._release(latest)
                    continue
                row = decode(decoder, line)
            except msgspec.DecodeError as error:
                self.lines.bad(*describe(error))
                continue
            problem = ids_problem(len(row.ids), row.num_prompt_tokens, self._block_size(row), whole_only=True)
            if row.ids and problem is not None:
                self.lines.bad("ids", problem)
                continue
            if row.out_ids and (problem := self._out_ids_problem(row)) is not None:
                self.lines.bad("out_ids", problem)
                continue
            self._place(row)
            if not follows_clock and (row.session != session or row.session == 0):
                session, latest = row.session, 0.0
            if row.t < latest:
                self.lines.bad("t", falls(latest - row.t))
            elif self._part.order == "arrival":
                latest = row.t
                yield row
            else:
                self._num_rows += 1
                heappush(self._held, (row.t, self._num_rows, row))
        yield from self._release(math.inf)

    def timed_steps(self) -> Iterator[TimedStep]:
        """Steps that the server measured. Instead of rows(): both read the file to its end."""
        decoder = msgspec.json.Decoder(Timed)
        for line in self.lines:
            if line.startswith(_TIMED_START):
                try:
                    yield decode(decoder, line).timed
                except msgspec.DecodeError as error:
                    self.lines.bad(*describe(error))

    def _header(self, line: bytes) -> Header:
        try:
            header = decode(msgspec.json.Decoder(Header), line)
        except msgspec.DecodeError as error:
            self.lines.fail(*describe(error))
        if header.format != FORMAT or header.version != VERSION:
            self.lines.fail("version", f"expected {VERSION}, got {header.version}; a newer kvledger may read it")
        if header.clock == "session" and header.order == "finish":
            self.lines.fail("order", "expected arrival where the clock is a session's, got finish")
        return header

    def _begin_part(self, header: Header) -> None:
        if header.start is None or self.header.start is None:
            self.lines.fail("start", "missing: of files one behind the other each says when its clock started")
        if (header.clock, header.turns) != (self.header.clock, self.header.turns):
            self.lines.fail("clock", "expected what the first header says; files of one kind can be put together")
        self._offset = 0.0 if header.clock == "session" else max(0.0, header.start - self.header.start)
        self._part = header

    def _release(self, before: float) -> Iterator[Row]:
        held = self._held
        while held and held[0][0] < before:
            yield heappop(held)[2]

    def _block_size(self, row: Row) -> int:
        return row.block or self._part.block_size

    def _out_ids_problem(self, row: Row) -> str | None:
        block_size = self._block_size(row)
        num_prompt = row.num_prompt_tokens // block_size
        if len(row.ids) != num_prompt:
            return f"expected {num_prompt} ids before them, one for every whole block of the prompt, got {len(row.ids)}"
        most = (row.num_prompt_tokens + row.num_output_tokens) // block_size - num_prompt
        if len(row.out_ids) > most:
            return (
                f"expected {most} at the most, one for every whole block that the answer fills, got {len(row.out_ids)}"
            )
        return None

    def _place(self, row: Row) -> None:
        """Puts a row of a part into the whole trace."""
        row.block = self._block_size(row)
        offset = self._offset
        row.t += offset
        row.first = None if row.first is None else row.first + offset
        row.end = None if row.end is None else row.end + offset
        if self._part is self.header or (self._part.ids and self._part.ids == self.header.ids):
            return
        # Ids mean something within their scope only.
        who = self._part.ids or f"{self._part.start}"
        row.scope = self._number(f"scope {who}", row.scope)
        row.session = self._number(f"session {who}", row.session) if row.session else 0

    def _number(self, who: str, number: int) -> int:
        return self._numbers.setdefault((who, number), FIRST_OF_OTHERS + len(self._numbers))

    def _request(self, row: Row) -> TraceRequest:
        session = row.session
        think = row.think
        if session:
            if think is None and session in self._ends:
                think = max(0.0, row.t - self._ends[session])
            if row.end is not None:
                self._ends[session] = row.end
        return TraceRequest(
            row.t,
            row.num_prompt_tokens,
            max(1, row.num_output_tokens),
            row.ids,
            self._block_size(row),
            row.scope,
            session,
            row.priority,
            think or 0.0,
            row.out_ids,
            row.step or 0,
        )
