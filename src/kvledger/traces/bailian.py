"""Reader of the Qwen-Bailian usage traces (alibaba-edu): one JSON object a line, one turn of a chat each.

    {"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "input_length": 521, "output_length": 132,
     "type": "text", "turn": 2, "hash_ids": [1089, 1090, ...]}

timestamp: seconds since the trace began. hash_ids: one for every 16 prompt tokens, the last block may be partial; they
may be missing. A turn's prompt is whole: it holds the turns before it. parent_chat_id: of the turn before, -1 for none;
turns that follow each other are a session.
"""

from typing import Final

import msgspec

from kvledger.traces.first_record import FirstRecord
from kvledger.traces.lines import TraceLines
from kvledger.traces.reader import RowReader
from kvledger.traces.trace_request import OutputTokens, PromptTokens, Seconds, TraceRequest


class _Record(msgspec.Struct):
    chat_id: int
    timestamp: Seconds
    input_length: PromptTokens
    output_length: OutputTokens
    parent_chat_id: int = -1
    hash_ids: list[int] | None = None


class BailianReader(RowReader):
    name = "bailian"
    mark = '"chat_id", "timestamp" in seconds, "hash_ids" of 16 tokens'
    block_size = 16
    takes_block_size = True
    has_sessions = True
    record = _Record

    def __init__(self, lines: TraceLines, block_size: int | None) -> None:
        super().__init__(lines, block_size)
        # Chat -> the session that it goes on with.
        self._sessions: Final[dict[int, int]] = {}

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return first.has("chat_id", "input_length")

    def request(self, record: msgspec.Struct) -> TraceRequest | None:
        assert isinstance(record, _Record)
        ids = record.hash_ids or []
        if ids and not self.ids_fit("hash_ids", len(ids), record.input_length, self.block_size):
            return None
        session = self._sessions.get(record.parent_chat_id) or self.number(record.chat_id)
        self._sessions[record.chat_id] = session
        num_output = max(1, record.output_length)
        return TraceRequest(record.timestamp, record.input_length, num_output, ids, self.block_size, session=session)
