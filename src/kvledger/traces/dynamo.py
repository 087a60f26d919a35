"""Reader of Dynamo's request traces (dynamo.request.trace.v1): JSON lines, a record of each request when it ended.

    {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 1777312801000,
     "agent_context": {"session_id": "run-42"},
     "request": {"request_id": "r", "request_received_ms": 1777312800000, "output_tokens": 16,
                 "replay": {"trace_block_size": 64, "input_length": 128, "input_sequence_hashes": [1487..., 2746...]}}}

A sink may wrap a record: {"timestamp": ..., "event": {...}}. Other types of events (tools, payloads) are passed over.
input_sequence_hashes name a block and all before it, one for each block, the last may be partial. Records come in the
order in which requests ended, so they are gathered and put into the order in which they arrived.
"""

from collections.abc import Iterator
from typing import Annotated

import msgspec

from kvledger.core.units import cdiv
from kvledger.files.decoding import decode, describe
from kvledger.traces.first_record import FirstRecord
from kvledger.traces.reader import TraceReader, sessions_of
from kvledger.traces.trace_request import BlockTokens, OutputTokens, PromptTokens, TraceRequest, TraceSession

SCHEMA = "dynamo.request.trace.v1"
_UnixMs = Annotated[float, msgspec.Meta(ge=0, le=1e14)]


class _Replay(msgspec.Struct):
    trace_block_size: BlockTokens
    input_length: PromptTokens
    input_sequence_hashes: list[int]


class _Request(msgspec.Struct):
    request_received_ms: _UnixMs
    output_tokens: OutputTokens
    replay: _Replay
    total_time_ms: Annotated[float, msgspec.Meta(ge=0, le=1e14)] | None = None


class _Agent(msgspec.Struct):
    session_id: str | None = None


class _Kind(msgspec.Struct):
    schema: str | None = None
    event_type: str | None = None
    event: msgspec.Raw = msgspec.Raw()


class _Record(msgspec.Struct):
    request: _Request
    agent_context: _Agent | None = None
    event_time_unix_ms: _UnixMs | None = None


class DynamoReader(TraceReader):
    name = "dynamo"
    mark = f'"schema": "{SCHEMA}"'
    has_sessions = True

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        event = first.record.get("event")
        return first.record.get("schema") == SCHEMA or (isinstance(event, dict) and event.get("schema") == SCHEMA)

    def requests(self) -> Iterator[TraceRequest]:
        requests: list[TraceRequest] = []
        numbers: dict[str, int] = {}
        ends: dict[int, list[tuple[float, float]]] = {}
        for record in self._records():
            request, replay = record.request, record.request.replay
            num_blocks = cdiv(replay.input_length, replay.trace_block_size)
            if len(replay.input_sequence_hashes) != num_blocks:
                self.lines.bad(
                    "request.replay.input_sequence_hashes",
                    f"expected {num_blocks} for {replay.input_length} tokens in blocks of {replay.trace_block_size}, "
                    f"got {len(replay.input_sequence_hashes)}",
                )
                continue
            name = record.agent_context.session_id if record.agent_context else None
            session = numbers.setdefault(name, len(numbers) + 1) if name else 0
            time = request.request_received_ms / 1000.0
            end = time + request.total_time_ms / 1000.0 if request.total_time_ms is not None else None
            if end is None and record.event_time_unix_ms is not None:
                end = record.event_time_unix_ms / 1000.0
            if session and end is not None:
                ends.setdefault(session, []).append((time, end))
            requests.append(
                TraceRequest(
                    time,
                    replay.input_length,
                    max(1, request.output_tokens),
                    replay.input_sequence_hashes,
                    replay.trace_block_size,
                    session=session,
                )
            )
        requests.sort(key=lambda request: request.arrival_time)
        _set_think_times(requests, ends)
        start = requests[0].arrival_time if requests else 0.0
        for request_made in requests:
            request_made.arrival_time -= start
            yield request_made

    def sessions(self) -> Iterator[TraceSession]:
        return sessions_of(self.requests())

    def _records(self) -> Iterator[_Record]:
        kinds = msgspec.json.Decoder(_Kind)
        decoder = msgspec.json.Decoder(_Record)
        for line in self.lines:
            try:
                kind, text = decode(kinds, line), line
                if kind.schema is None and bytes(kind.event):
                    text = bytes(kind.event)
                    kind = decode(kinds, text)
                if kind.schema != SCHEMA:
                    self.lines.bad("schema", f'expected "{SCHEMA}", got {kind.schema!r}')
                elif kind.event_type == "request_end":
                    yield decode(decoder, text)
            except msgspec.DecodeError as error:
                self.lines.bad(*describe(error))


def _set_think_times(requests: list[TraceRequest], ends: dict[int, list[tuple[float, float]]]) -> None:
    """What lies between the end of a session's request and the arrival of the next one."""
    last: dict[int, float] = {}
    known = {session: dict(times) for session, times in ends.items()}
    for request in requests:
        if request.session:
            if request.session in last:
                request.think_time = max(0.0, request.arrival_time - last[request.session])
            last[request.session] = known.get(request.session, {}).get(request.arrival_time, request.arrival_time)
