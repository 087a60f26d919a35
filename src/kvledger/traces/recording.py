"""The format of kvledger's own traces, version 1: JSON lines, a header and then one request each.

    {"format": "kvledger.trace", "version": 1, "block_size": 16}
    {"t": 0.25, "in": 70, "out": 12, "ids": [1, 2, 3, 4], "session": 1, "think": 2.5}

t: arrival, seconds since the trace began; rows are in this order. in, out: tokens. ids: one for every whole block of
block_size prompt tokens, or one for the partial block at the end as well; equal ids of one scope are equal blocks with
all before them. What is left out is 0: scope (0 is the whole trace), session (0: none), priority, think (seconds
between the session's answer before and this request). "block" is a row's own block size. Fields that are not known here
are passed over, and so are headers' ("source" says where the trace is from).

A file may end anywhere, as it does when its writer is killed: what is whole is read.
"""

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from kvledger.files.decoding import decode, describe
from kvledger.traces.first_record import FirstRecord
from kvledger.traces.lines import TraceLines
from kvledger.traces.reader import RowReader
from kvledger.traces.trace_request import BlockTokens, OutputTokens, Priority, PromptTokens, Seconds, TraceRequest

FORMAT: Final = "kvledger.trace"
VERSION: Final = 1
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]


class Header(msgspec.Struct):
    """The first line."""

    format: str
    version: int
    block_size: BlockTokens
    source: str | None = None


class Row(msgspec.Struct, omit_defaults=True):
    """One request."""

    t: Seconds
    num_prompt_tokens: PromptTokens = msgspec.field(name="in")
    num_output_tokens: OutputTokens = msgspec.field(name="out")
    ids: list[int] = msgspec.field(default_factory=list)
    scope: _Number = 0
    session: _Number = 0
    priority: Priority = 0
    think: Seconds = 0.0
    block: BlockTokens | None = None


class RecordingReader(RowReader):
    name = "kvledger"
    mark = f'"format": "{FORMAT}"'
    has_sessions = True
    record = Row
    time_field = "t"

    def __init__(self, lines: TraceLines, block_size: int | None) -> None:
        super().__init__(lines, block_size)
        lines.allow_cut()
        try:
            header = decode(msgspec.json.Decoder(Header), lines.take_first())
        except msgspec.DecodeError as error:
            lines.fail(*describe(error))
        if header.format != FORMAT or header.version != VERSION:
            lines.fail("version", f"expected {VERSION}, got {header.version}; a newer kvledger may read it")
        self.block_size = header.block_size

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return first.record.get("format") == FORMAT

    def requests(self) -> Iterator[TraceRequest]:
        yield from super().requests()
        if self.lines.is_cut:
            self.notes.append("the recording is cut at its end, as by a writer that was killed; what is whole is read")

    def request(self, record: msgspec.Struct) -> TraceRequest | None:
        assert isinstance(record, Row)
        block_size = record.block or self.block_size
        if record.ids and not self.ids_fit(
            "ids", len(record.ids), record.num_prompt_tokens, block_size, whole_only=True
        ):
            return None
        return TraceRequest(
            record.t,
            record.num_prompt_tokens,
            max(1, record.num_output_tokens),
            record.ids,
            block_size,
            record.scope,
            record.session,
            record.priority,
            record.think,
        )
