"""Readers of conversations as text, which a tokenizer turns into tokens: ShareGPT, WildChat, and OpenAI batch bodies.

    sharegpt      {"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    wildchat      {"conversation": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    openai-batch  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
                   "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}}

A request is made for every answer: its prompt is all messages before it, its output as long as the answer. A message is
rendered as its role, a line end, its text and a line end, whatever the model's own template would make of it. Blocks
are equal where all tokens up to their ends are; the tokens behind the last whole block are the request's own.

A conversation has no times between its turns, so its next turn follows the answer (--closed-loop). The answer is part
of the next prompt, and is found there by an engine that has it cached.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Final

import msgspec

from kvledger.files.decoding import decode, describe
from kvledger.traces.clock import iso_seconds
from kvledger.traces.first_record import FirstRecord
from kvledger.traces.lines import TraceLines
from kvledger.traces.reader import TraceReader
from kvledger.traces.tokenizer import Message, TokenBlocks
from kvledger.traces.trace_request import MAX_TOKENS, TraceRequest, TraceSession

_BLOCK_SIZE: Final = 16
# (role, text) of each message.
Messages = list[tuple[str, str]]


class TextReader(TraceReader):
    """What the three have in common."""

    block_size = _BLOCK_SIZE
    takes_block_size = True
    has_clock = False
    has_sessions = True
    needs_closed_loop = True
    tokenizer_use = "must"
    knows_answers = True
    record: type[msgspec.Struct]

    def __init__(self, lines: TraceLines, block_size: int | None) -> None:
        super().__init__(lines, block_size)
        self._blocks: Final = TokenBlocks()

    def sessions(self) -> Iterator[TraceSession]:
        decoder: msgspec.json.Decoder[msgspec.Struct] = msgspec.json.Decoder(self.record)
        number = 0
        for line in self.lines:
            try:
                record = decode(decoder, line)
            except msgspec.DecodeError as error:
                self.lines.bad(*describe(error))
                continue
            number += 1
            requests = self.turns(record, number)
            if requests:
                yield TraceSession(number, requests, self.start(record))

    @abstractmethod
    def turns(self, record: msgspec.Struct, number: int) -> list[TraceRequest]:
        """The requests of a record."""

    def start(self, record: msgspec.Struct) -> float | None:
        """When the conversation began, in seconds, where it is known."""
        return None

    def conversation(self, messages: Messages, number: int) -> list[TraceRequest]:
        """A request for every answer."""
        requests: list[TraceRequest] = []
        tokens: list[int] = []
        for role, text in messages:
            rendered = self._rendered(role, text)
            if role == "assistant" and tokens and len(tokens) <= MAX_TOKENS:
                requests.append(self.prompt(tokens, len(rendered), number, rendered))
            tokens += rendered
        return requests

    def prompt(self, tokens: list[int], num_output: int, number: int, answer: list[int] | None = None) -> TraceRequest:
        """One request with that prompt; `answer`: the tokens that it generates, where they are known."""
        size = self.block_size
        ids = self._blocks.ids(tokens, size)
        output_ids = self._blocks.ids(tokens + answer, size)[len(ids) :] if answer else []
        num_output = min(max(1, num_output), MAX_TOKENS)
        return TraceRequest(0.0, len(tokens), num_output, ids, size, session=number, output_ids=output_ids)

    def _rendered(self, role: str, text: str) -> list[int]:
        assert self.tokenizer is not None
        return self.tokenizer.message(role, text)


class _ShareGptTurn(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _ShareGptRecord(msgspec.Struct):
    conversations: list[_ShareGptTurn]


class ShareGptReader(TextReader):
    name = "sharegpt"
    mark = '"conversations" of "from" and "value"'
    record = _ShareGptRecord
    _ROLES: Final = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return isinstance(first.record.get("conversations"), list)

    def turns(self, record: msgspec.Struct, number: int) -> list[TraceRequest]:
        assert isinstance(record, _ShareGptRecord)
        messages = [(self._ROLES.get(turn.speaker, turn.speaker), turn.value) for turn in record.conversations]
        return self.conversation(messages, number)


class _WildChatRecord(msgspec.Struct):
    conversation: list[Message]
    timestamp: str | None = None


class WildChatReader(TextReader):
    name = "wildchat"
    mark = '"conversation" of "role" and "content"'
    record = _WildChatRecord

    def __init__(self, lines: TraceLines, block_size: int | None) -> None:
        super().__init__(lines, block_size)
        self._first: float | None = None
        self._latest: float = 0.0

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return isinstance(first.record.get("conversation"), list)

    def turns(self, record: msgspec.Struct, number: int) -> list[TraceRequest]:
        assert isinstance(record, _WildChatRecord)
        return self.conversation([(message.role, message.text) for message in record.conversation], number)

    def start(self, record: msgspec.Struct) -> float | None:
        assert isinstance(record, _WildChatRecord)
        seconds = None if record.timestamp is None else iso_seconds(record.timestamp)
        if seconds is None:
            return None
        if self._first is None:
            self._first = seconds
        # A file that is not in the order of time is played in its own order.
        self._latest = max(self._latest, seconds - self._first)
        return self._latest


class _Body(msgspec.Struct):
    messages: list[Message] | None = None
    prompt: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class _BatchRecord(msgspec.Struct):
    body: _Body


class OpenAiBatchReader(TextReader):
    """Rows are requests of their own, and all of them are there at once."""

    name = "openai-batch"
    needs_closed_loop = False
    mark = '"body" with "messages" or "prompt"'
    record = _BatchRecord

    def __init__(self, lines: TraceLines, block_size: int | None) -> None:
        super().__init__(lines, block_size)
        self.notes.append("a batch has no times: all requests arrive at once, and answers are max_tokens long")

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        body = first.record.get("body")
        return isinstance(body, dict) and ("messages" in body or "prompt" in body)

    def turns(self, record: msgspec.Struct, number: int) -> list[TraceRequest]:
        assert isinstance(record, _BatchRecord)
        body = record.body
        if body.messages is not None:
            tokens = [token for message in body.messages for token in self._rendered(message.role, message.text)]
        else:
            assert self.tokenizer is not None
            tokens = self.tokenizer.tokens(body.prompt or "")
        if not 0 < len(tokens) <= MAX_TOKENS:
            self.lines.bad("body", f"expected 1 to {MAX_TOKENS} tokens, got {len(tokens)}")
            return []
        return [self.prompt(tokens, body.max_completion_tokens or body.max_tokens or 1, number)]

    def start(self, record: msgspec.Struct) -> float | None:
        return 0.0
