"""Reader of agent sessions: one JSON object a line, one session each, with its requests in order.

    {"id": "trace_0001", "block_size": 64, "hash_id_scope": "local", "requests": [
        {"t": 0.0, "type": "n", "in": 71175, "out": 169, "hash_ids": [1, 2, ...], "think_time": 0.0, "api_time": 7.3},
        {"t": 40.1, "type": "subagent", "requests": [{"t": 0.0, "type": "n", "in": 11353, ...}, ...]}, ...]}

t: seconds since the session began, for a sub-agent's request since its sub-agent began. hash_ids: one for every whole
block of the prompt; the tokens behind the last whole block are this request's own. With the scope "local" ids mean
something within their session only, with "global" in the whole trace.

Types "n" (one answer) and "s" (streamed) are the same to the ledger. A sub-agent's requests are replayed in the place
of their marker, as the agent waits for its sub-agent, with priority 1: behind the requests that a person waits for.
"""

from collections.abc import Iterator

import msgspec

from kvledger.files.decoding import decode, describe
from kvledger.traces.first_record import FirstRecord
from kvledger.traces.reader import TraceReader
from kvledger.traces.trace_request import BlockTokens, OutputTokens, PromptTokens, Seconds, TraceRequest, TraceSession

_SUBAGENT_PRIORITY = 1


class _Request(msgspec.Struct):
    type: str
    t: Seconds
    num_prompt_tokens: PromptTokens | None = msgspec.field(default=None, name="in")
    num_output_tokens: OutputTokens | None = msgspec.field(default=None, name="out")
    hash_ids: list[int] = msgspec.field(default_factory=list)
    think_time: Seconds | None = None
    api_time: Seconds | None = None
    requests: list["_Request"] = msgspec.field(default_factory=list)


class _Session(msgspec.Struct):
    block_size: BlockTokens
    requests: list[_Request]
    hash_id_scope: str = "local"


class AgentSessionReader(TraceReader):
    name = "agent"
    mark = 'a JSON object with "requests"'
    block_size = 64

    has_clock = False
    has_sessions = True

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return first.has("requests")

    def sessions(self) -> Iterator[TraceSession]:
        decoder = msgspec.json.Decoder(_Session)
        num_sessions = 0
        for line in self.lines:
            try:
                session = decode(decoder, line)
            except msgspec.DecodeError as error:
                self.lines.bad(*describe(error))
                continue
            num_sessions += 1
            if self._is_sound(session):
                requests = _flatten(session, num_sessions)
                if requests:
                    yield TraceSession(num_sessions, requests)

    def _is_sound(self, session: _Session) -> bool:
        if session.hash_id_scope not in ("local", "global"):
            self.lines.bad("hash_id_scope", f'expected "local" or "global", got "{session.hash_id_scope}"')
            return False
        for index, entry in enumerate(session.requests):
            place = f"requests[{index}]"
            entries = [(place, entry)]
            if entry.type == "subagent":
                entries = [(f"{place}.requests[{inner}]", request) for inner, request in enumerate(entry.requests)]
            for where, request in entries:
                problem = _problem(request, session.block_size)
                if problem is not None:
                    self.lines.bad(f"{where}.{problem[0]}", problem[1])
                    return False
        return True


def _problem(request: _Request, block_size: int) -> tuple[str, str] | None:
    """(field, what is wrong) of a request, or None."""
    if request.type not in ("n", "s"):
        return "type", f'expected "n", "s" or "subagent", got "{request.type}"'
    if request.num_prompt_tokens is None:
        return "in", "missing; expected a value"
    if request.num_output_tokens is None:
        return "out", "missing; expected a value"
    num_whole = request.num_prompt_tokens // block_size
    if not num_whole <= len(request.hash_ids) <= -(-request.num_prompt_tokens // block_size):
        return "hash_ids", (
            f"expected {num_whole} ids for in={request.num_prompt_tokens} in blocks of {block_size} tokens, "
            f"got {len(request.hash_ids)}"
        )
    return None


def _flatten(session: _Session, number: int) -> list[TraceRequest]:
    """The session's requests in order, sub-agents in the place of their markers."""
    scope = 0 if session.hash_id_scope == "global" else number
    flat: list[TraceRequest] = []
    end: float | None = None
    for entry in session.requests:
        if entry.type == "subagent":
            timed = [(entry.t + request.t, _SUBAGENT_PRIORITY, request) for request in entry.requests]
        else:
            timed = [(entry.t, 0, entry)]
        for time, priority, request in timed:
            think_time = request.think_time
            if think_time is None:
                # Not recorded: what lies between the recorded end of the request before and this one.
                think_time = 0.0 if end is None else max(0.0, time - end)
            end = time + (request.api_time or 0.0)
            flat.append(
                TraceRequest(
                    time,
                    request.num_prompt_tokens or 0,
                    max(1, request.num_output_tokens or 0),
                    request.hash_ids,
                    session.block_size,
                    scope,
                    number,
                    priority,
                    think_time,
                )
            )
    return flat
