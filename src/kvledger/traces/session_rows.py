"""Readers of Mooncake rows with sessions: AIPerf's dialect and Dynamo's. Times are milliseconds.

    {"session_id": "a", "timestamp": 0, "input_length": 655, "output_length": 52, "hash_ids": [1, 2]}
    {"session_id": "a", "delay": 2000, "input_length": 700, "output_length": 30, "hash_ids": [1, 2]}

A later turn of a session comes `delay` (or `delay_ms`) after the turn before is done, or at its timestamp. hash_ids:
one for every 512 tokens, the last block may be partial; they may be missing. A row without session_id is a session.

Both write the same fields and mean different prompts, so the format is asked for:

    mooncake-sessions   (Dynamo) a row is the whole prompt, with the turns before it
    aiperf              a row is what is new; the prompt is all turns before it, with their answers, and then the row

Only AIPerf's have texts, which a tokenizer turns into tokens: "text_input", and "messages", which are the whole prompt
unless "message_mode" is "delta".

An answer is part of AIPerf's next prompt, and is found there by an engine that has it cached. With "messages" that are
whole it is not: they hold the recorded answer, and an engine generates its own.
"""

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterator
from itertools import count
from typing import Final, Literal

import msgspec

from kvledger.core.units import cdiv
from kvledger.files.decoding import decode, describe
from kvledger.traces.first_record import FirstRecord
from kvledger.traces.lines import TraceLines
from kvledger.traces.reader import TraceReader, ids_problem
from kvledger.traces.tokenizer import Message, TokenBlocks
from kvledger.traces.trace_request import (
    MAX_TOKENS,
    Milliseconds,
    OutputTokens,
    Priority,
    PromptTokens,
    TraceRequest,
    TraceSession,
)

# Fields that only other formats have.
_OTHERS: Final = ("chat_id", "prefix_block_hashes", "format", "body")
_TEXT_BLOCK_SIZE: Final = 16


class Turn(msgspec.Struct):
    """One row, of the fields of both dialects."""

    session_id: str | int | None = None
    input_length: PromptTokens | None = None
    output_length: OutputTokens = 1
    timestamp: Milliseconds | None = None
    delay: Milliseconds | None = None
    delay_ms: Milliseconds | None = None
    hash_ids: list[int] | None = None
    priority: Priority = 0
    text_input: str | None = None
    messages: list[Message] | None = None
    message_mode: Literal["history", "delta"] = "history"

    @property
    def wait(self) -> float | None:
        """Seconds behind the turn before."""
        given = self.delay if self.delay is not None else self.delay_ms
        return None if given is None else given / 1000.0

    @property
    def is_text(self) -> bool:
        return self.text_input is not None or self.messages is not None


# Tokens, ids and block size of a turn's whole prompt, and the ids of what its answer fills.
Prompt = tuple[int, list[int], int, list[int]]


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
            key = object() if turn.session_id is None else turn.session_id
            if self._is_sound(turn, turns.get(key)):
                turns.setdefault(key, []).append(turn)
        gathered = list(turns.values())
        self.prepare(gathered)
        # Those without a start come last, at starts that are drawn.
        gathered.sort(key=_start)
        for number, session in enumerate(gathered, 1):
            yield self._session(number, session)

    def _is_sound(self, turn: Turn, before: list[Turn] | None) -> bool:
        """Reports the line if not. `before`: the turns of its session so far."""
        problem = self.problem(turn)
        if problem is None and turn.hash_ids and turn.input_length is not None:
            wrong = ids_problem(len(turn.hash_ids), turn.input_length, self.block_size, whole_only=False)
            problem = None if wrong is None else ("hash_ids", wrong)
        if problem is None and before is not None:
            if turn.wait is None and turn.timestamp is None:
                problem = "delay", "missing, and no timestamp: expected one of them in a turn behind the first"
            elif turn.is_text != before[0].is_text:
                problem = "input_length", "expected either texts or lengths in all turns of a session"
        if problem is not None:
            self.lines.bad(*problem)
        return problem is None

    def _session(self, number: int, turns: list[Turn]) -> TraceSession:
        first = turns[0].timestamp
        start = None if first is None else first / 1000.0
        time = 0.0
        requests: list[TraceRequest] = []
        for turn, (num_tokens, ids, block_size, output_ids) in zip(turns, self.prompts(turns), strict=True):
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
                    # Ids of texts are the reader's own.
                    1 if turn.is_text else 0,
                    number,
                    turn.priority,
                    think_time,
                    output_ids,
                )
            )
        return TraceSession(number, requests, start)

    def problem(self, turn: Turn) -> tuple[str, str] | None:
        """(field, what is wrong) of a row that this dialect does not have."""
        if turn.input_length is None:
            return "input_length", "missing; expected a value"
        return None

    def prepare(self, sessions: list[list[Turn]]) -> None:
        """All of them are there."""
        return

    @abstractmethod
    def prompts(self, turns: list[Turn]) -> list[Prompt]:
        """Of each turn."""


class MooncakeSessionReader(SessionRowReader):
    name = "mooncake-sessions"
    mark = '"session_id", "input_length", times in milliseconds; whole prompts'

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return _has_sessions(first)

    def prompts(self, turns: list[Turn]) -> list[Prompt]:
        return [(turn.input_length or 0, turn.hash_ids or [], self.block_size, []) for turn in turns]


class AiperfReader(SessionRowReader):
    name = "aiperf"
    mark = '"session_id", "input_length", times in milliseconds; what is new in each turn; or texts'
    tokenizer_use = "may"
    knows_answers = True

    def __init__(self, lines: TraceLines, block_size: int | None) -> None:
        super().__init__(lines, block_size)
        # (id, piece of its block) -> a number of its own.
        next_number = count().__next__
        self._pieces: Final[defaultdict[Hashable, int]] = defaultdict(next_number)
        self._own: Final = next_number
        # Tokens of a piece, the same in all sessions so that they share.
        self._piece: int = self.block_size
        self._blocks: Final = TokenBlocks()
        # Of tokens that no other prompt has.
        self._unique: Final = count(-1, -1).__next__

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        is_text = first.has_any("text_input", "messages") and first.has_any("session_id", "timestamp", "output_length")
        return _has_sessions(first) or (is_text and not first.has_any(*_OTHERS))

    def problem(self, turn: Turn) -> tuple[str, str] | None:
        given = [name for name in ("input_length", "text_input", "messages") if getattr(turn, name) is not None]
        if len(given) != 1:
            return "input_length", f"expected one of input_length, text_input and messages, got {len(given)} of them"
        if not turn.is_text:
            return None
        if self.tokenizer is None:
            self.lines.fail(given[0], "is a text: say with --tokenizer which tokens it has")
        num_tokens = len(self._tokens(turn))
        return (
            None if 0 < num_tokens <= MAX_TOKENS else (given[0], f"expected 1 to {MAX_TOKENS} tokens, got {num_tokens}")
        )

    def prepare(self, sessions: list[list[Turn]]) -> None:
        """A conversation is one sequence; all are cut into pieces so small that every turn ends with one."""
        for turns in sessions:
            for turn in turns[:-1]:
                self._piece = math.gcd(self._piece, turn.input_length or 0, 0 if turn.is_text else turn.output_length)

    def prompts(self, turns: list[Turn]) -> list[Prompt]:
        return self._of_texts(turns) if turns[0].is_text else self._of_lengths(turns)

    def _of_lengths(self, turns: list[Turn]) -> list[Prompt]:
        piece = self._piece
        sequence: list[int] = []
        prompts: list[Prompt] = []
        num_tokens = 0
        for turn in turns:
            num_tokens += turn.input_length or 0
            sequence += self._cut(turn, piece)
            # The last turn may end inside a piece, and nobody asks for its answer again.
            answer = [] if turn is turns[-1] else [self._own() for _ in range(turn.output_length // piece)]
            prompts.append((num_tokens, list(sequence), piece, answer))
            num_tokens += turn.output_length
            sequence += answer
        return prompts

    def _cut(self, turn: Turn, piece: int) -> list[int]:
        num_pieces = cdiv(turn.input_length or 0, piece)
        if not turn.hash_ids:
            return [self._own() for _ in range(num_pieces)]
        per_block = self.block_size // piece
        return [self._pieces[turn.hash_ids[index // per_block], index % per_block] for index in range(num_pieces)]

    def _of_texts(self, turns: list[Turn]) -> list[Prompt]:
        prompts: list[Prompt] = []
        before: list[int] = []
        for turn in turns:
            tokens = self._tokens(turn)
            if turn.messages is None or turn.message_mode == "delta":
                tokens = before + tokens
            ids = self._blocks.ids(tokens, _TEXT_BLOCK_SIZE)
            before = tokens + [self._unique() for _ in range(turn.output_length)]
            is_asked_again = turn.messages is None or turn.message_mode == "delta"
            output_ids = self._blocks.ids(before, _TEXT_BLOCK_SIZE)[len(ids) :] if is_asked_again else []
            prompts.append((len(tokens), ids, _TEXT_BLOCK_SIZE, output_ids))
        return prompts

    def _tokens(self, turn: Turn) -> list[int]:
        """Of the row's own text."""
        assert self.tokenizer is not None
        if turn.messages is None:
            return self.tokenizer.tokens(turn.text_input or "")
        tokenizer = self.tokenizer
        return [token for message in turn.messages for token in tokenizer.message(message.role, message.text)]


def _start(turns: list[Turn]) -> float:
    first = turns[0].timestamp
    return math.inf if first is None else first


def _has_sessions(first: FirstRecord) -> bool:
    return first.has("session_id", "input_length") and not first.has_any(*_OTHERS)
