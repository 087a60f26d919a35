"""Reader of the Mooncake trace format: one JSON object a line, one request each.

    {"timestamp": 21000, "input_length": 2651, "output_length": 366, "hash_ids": [0, 1541, 1542, 1543, 1544, 1545]}

timestamp: arrival in milliseconds. hash_ids: one id for every 512 prompt tokens, the last block may be partial; equal
ids are equal blocks. An optional integer "priority" is kept for the priority policy.

vLLM's `bench serve --dataset-name timed_trace` takes the same fields in its own units: seconds, and 16 tokens an id.
Nothing in a record says which of the two it is, except how many ids it has: what does not have one for every 512 tokens
is asked for.
"""

import msgspec

from kvledger.traces.first_record import FirstRecord
from kvledger.traces.reader import RowReader
from kvledger.traces.trace_request import Milliseconds, OutputTokens, Priority, PromptTokens, Seconds, TraceRequest

# Fields that only other formats have.
OTHERS = ("chat_id", "session_id", "schema", "block_size", "prefix_block_hashes", "delay", "delay_ms")


class _Record(msgspec.Struct):
    timestamp: Milliseconds
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: list[int]
    priority: Priority = 0


class MooncakeReader(RowReader):
    name = "mooncake"
    mark = '"timestamp" in milliseconds, "input_length", "hash_ids" of 512 tokens'
    block_size = 512
    takes_block_size = True
    record: type[msgspec.Struct] = _Record

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return _is_plain(first)

    def request(self, record: msgspec.Struct) -> TraceRequest | None:
        assert isinstance(record, _Record)
        return self._made(record, record.timestamp / 1000.0)

    def _made(self, record: "_Record | _TimedRecord", seconds: float) -> TraceRequest | None:
        block_size = self.block_size
        if not self.ids_fit("hash_ids", len(record.hash_ids), record.input_length, block_size):
            return None
        num_output = max(1, record.output_length)
        return TraceRequest(
            seconds, record.input_length, num_output, record.hash_ids, block_size, priority=record.priority
        )


class _TimedRecord(msgspec.Struct):
    timestamp: Seconds
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: list[int]
    priority: Priority = 0


class TimedTraceReader(MooncakeReader):
    name = "timed-trace"
    mark = '"timestamp" in seconds, "input_length", "hash_ids" of 16 tokens'
    block_size = 16
    record = _TimedRecord

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return _is_plain(first) and not first.fits_blocks_of(MooncakeReader.block_size)

    def request(self, record: msgspec.Struct) -> TraceRequest | None:
        assert isinstance(record, _TimedRecord)
        return self._made(record, record.timestamp)


def _is_plain(first: FirstRecord) -> bool:
    return first.has_any("input_length", "hash_ids") and not first.has_any(*OTHERS)
