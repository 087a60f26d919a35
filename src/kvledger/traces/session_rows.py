"""Readers of Mooncake rows with sessions: AIPerf's dialect and Dynamo's. Times are milliseconds.

    {"session_id": "a", "timestamp": 0, "input_length": 655, "output_length": 52, "hash_ids": [1, 2]}
    {"session_id": "a", "delay": 2000, "input_length": 700, "output_length": 30, "hash_ids": [1, 2]}

A later turn of a session comes `delay` (or `delay_ms`) after the turn before is done, or at its timestamp. hash_ids:
one for every 512 tokens, the last block may be partial; they may be missing.

Both write the same fields and mean different prompts, so the format is asked for:

    mooncake-sessions   (Dynamo) a row is the whole prompt, with the turns before it
    aiperf              a row is what is new; the prompt is all turns before it, with their answers, and then the row

Of an answer in an AIPerf prompt no engine has the same tokens cached here, because the replay makes up its own; so hits
end where the first answer begins.
"""

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterator
from itertools import count
from typing import Final

import msgspec

from kvledger.core.units import cdiv
from kvledger.files.decoding import decode, describe
from kvledger.traces.first_record import FirstRecord
from kvledger.traces.lines import TraceLines
from kvledger.traces.reader import TraceReader
from kvledger.traces.trace_request import (
    MAX_TOKENS,
    Milliseconds,
    OutputTokens,
    Priority,
    PromptTokens,
    TraceRequest,
    TraceSession,
)


class Turn(msgspec.Struct):
    session_id: str | int
    input_length: PromptTokens
    output_length: OutputTokens = 1
    timestamp: Milliseconds | None = None
    delay: Milliseconds | None = None
    delay_ms: Milliseconds | None = None
    hash_ids: list[int] | None = None
    priority: Priority = 0

    @property
    def wait(self) -> float | None:
        """Seconds behind the turn before."""
        given = self.delay if self.delay is not None else self.delay_ms
        return None if given is None else given / 1000.0


class SessionRowReader(TraceReader):
    """Sessions are gathered in memory. Without a closed loop a turn comes at its timestamp, or its delay behind the
    arrival of the turn before."""

    block_size = 512
    takes_block_size = True
    has_clock = False
    has_sessions = True

    def sessions(self) -> Iterator[TraceSession]:
        turns: dict[Hashable, list[Turn]] = {}
        decoder = msgspec.json.Decoder(Turn)
        for line in self.lines:
            try:
                turn = decode(decoder, line)
            except msgspec.DecodeError as error:
                self.lines.bad(*describe(error))
                continue
            num_blocks = cdiv(turn.input_length, self.block_size)
            if turn.hash_ids and len(turn.hash_ids) != num_blocks:
                self.lines.bad(
                    "hash_ids",
                    f"expected {num_blocks} ids in blocks of {self.block_size} tokens, got {len(turn.hash_ids)}",
                )
                continue
            before = turns.setdefault(turn.session_id, [])
            if before and turn.wait is None and turn.timestamp is None:
                self.lines.bad("delay", "missing, and no timestamp: expected one of them in a turn behind the first")
                continue
            before.append(turn)
        sessions = [self._session(number, given) for number, given in enumerate(turns.values(), 1)]
        # Those without a start come last, at starts that are drawn.
        yield from sorted(sessions, key=lambda session: math.inf if session.start is None else session.start)

    def _session(self, number: int, turns: list[Turn]) -> TraceSession:
        first = turns[0].timestamp
        start = None if first is None else first / 1000.0
        time = 0.0
        requests: list[TraceRequest] = []
        prompts = self.prompts(turns)
        for turn, (num_tokens, ids, block_size) in zip(turns, prompts, strict=True):
            wait = turn.wait if requests else 0.0
            before = time
            if turn.timestamp is not None and start is not None:
                time = max(time, turn.timestamp / 1000.0 - start)
            else:
                time += wait or 0.0
            think_time = wait if wait is not None else time - before
            if num_tokens > MAX_TOKENS:
                break
            requests.append(
                TraceRequest(
                    time,
                    num_tokens,
                    max(1, turn.output_length),
                    ids,
                    block_size,
                    self.scope(number, turn),
                    number,
                    turn.priority,
                    think_time,
                )
            )
        return TraceSession(number, requests, start)

    @abstractmethod
    def prompts(self, turns: list[Turn]) -> list[tuple[int, list[int], int]]:
        """Tokens, ids and block size of each turn's whole prompt."""

    def scope(self, number: int, turn: Turn) -> int:
        """Ids are of the whole trace."""
        return 0


class MooncakeSessionReader(SessionRowReader):
    name = "mooncake-sessions"
    mark = '"session_id", "input_length", times in milliseconds; whole prompts'

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return _has_sessions(first)

    def prompts(self, turns: list[Turn]) -> list[tuple[int, list[int], int]]:
        return [(turn.input_length, turn.hash_ids or [], self.block_size) for turn in turns]


class AiperfReader(SessionRowReader):
    name = "aiperf"
    mark = '"session_id", "input_length", times in milliseconds; what is new in each turn'

    def __init__(self, lines: TraceLines, block_size: int | None) -> None:
        super().__init__(lines, block_size)
        # (id, piece of its block) -> a number of its own; text that nobody else has: a number of its own each.
        self._pieces: Final[defaultdict[Hashable, int]] = defaultdict(count().__next__)

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return _has_sessions(first)

    def prompts(self, turns: list[Turn]) -> list[tuple[int, list[int], int]]:
        """The conversation is one sequence; it is cut into pieces so small that every turn ends with one."""
        piece = self.block_size
        for turn in turns[:-1]:
            piece = math.gcd(piece, turn.input_length, turn.output_length)
        sequence: list[int] = []
        prompts: list[tuple[int, list[int], int]] = []
        num_tokens = 0
        for turn in turns:
            num_tokens += turn.input_length
            sequence += self._cut(turn, piece)
            prompts.append((num_tokens, list(sequence), piece))
            num_tokens += turn.output_length
            sequence += [self._own() for _ in range(turn.output_length // piece)]
        return prompts

    def _cut(self, turn: Turn, piece: int) -> list[int]:
        num_pieces = cdiv(turn.input_length, piece)
        if not turn.hash_ids:
            return [self._own() for _ in range(num_pieces)]
        per_block = self.block_size // piece
        return [self._pieces[turn.hash_ids[index // per_block], index % per_block] for index in range(num_pieces)]

    def _own(self) -> int:
        return self._pieces[object()]


def _has_sessions(first: FirstRecord) -> bool:
    return first.has("session_id", "input_length") and not first.has_any("chat_id", "prefix_block_hashes", "format")
