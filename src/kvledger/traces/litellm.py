"""Reader of a gateway's log with prefix hashes, as LiteLLM's callbacks can write it: JSON lines, one request each.

    {"startTime": "2026-05-01T10:00:00.120+00:00", "endTime": "2026-05-01T10:00:02+00:00", "prompt_tokens": 70,
     "completion_tokens": 12, "prefix_block_hashes": ["9f2c...", "01ab..."], "session_id": "s"}

prefix_block_hashes: one text (hexadecimal or any other) for every whole block of prompt tokens, each of which names its
block and all before it; the last, partial block may have one. How many tokens a block has is in "block_size", or must
be told (--trace-block-size).
"""

from typing import Final

import msgspec

from kvledger.traces.clock import iso_seconds
from kvledger.traces.first_record import FirstRecord
from kvledger.traces.lines import TraceLines
from kvledger.traces.reader import RowReader
from kvledger.traces.trace_request import BlockTokens, OutputTokens, PromptTokens, TraceRequest


class _Record(msgspec.Struct):
    startTime: str  # noqa: N815 (the log's own name)
    prompt_tokens: PromptTokens
    completion_tokens: OutputTokens
    prefix_block_hashes: list[str | int]
    endTime: str | None = None  # noqa: N815
    session_id: str | None = None
    block_size: BlockTokens | None = None


class LiteLlmReader(RowReader):
    name = "litellm"
    mark = '"prefix_block_hashes" and "startTime"'
    takes_block_size = True
    has_sessions = True
    record = _Record
    time_field = "startTime"
    from_first = True

    def __init__(self, lines: TraceLines, block_size: int | None) -> None:
        super().__init__(lines, block_size)
        self._ends: Final[dict[int, float]] = {}

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return first.has("prefix_block_hashes")

    def request(self, record: msgspec.Struct) -> TraceRequest | None:
        assert isinstance(record, _Record)
        seconds = iso_seconds(record.startTime)
        if seconds is None:
            self.lines.bad(
                "startTime", f"expected a time like 2026-05-01T10:00:00.120+00:00, got {record.startTime[:40]}"
            )
            return None
        block_size = record.block_size or self.block_size
        if not block_size:
            self.lines.fail("block_size", "missing: say with --trace-block-size how many tokens a hash stands for")
        hashes = record.prefix_block_hashes
        if not self.ids_fit("prefix_block_hashes", len(hashes), record.prompt_tokens, block_size, whole_only=True):
            return None
        ids = [self.number(("hash", name)) for name in hashes]
        session = 0 if record.session_id is None else self.number(("session", record.session_id))
        end = self._ends.get(session)
        if session and record.endTime is not None:
            self._ends[session] = iso_seconds(record.endTime) or seconds
        think_time = 0.0 if end is None else max(0.0, seconds - end)
        num_output = max(1, record.completion_tokens)
        return TraceRequest(
            seconds, record.prompt_tokens, num_output, ids, block_size, session=session, think_time=think_time
        )
