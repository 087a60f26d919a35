"""Reader of rows without times, as kvcache-simulator takes them: JSON lines, one request each, in order.

    {"block_size": 64, "hash_ids": [2001, 2002], "input_length": 128}

hash_ids: one for every block_size prompt tokens, the last block may be partial. An answer's length may be there
(output_length), else it is one token. All requests arrive at once, so that replays of load need another trace; one
after another (--sequential) the order is all that counts.
"""

import msgspec

from kvledger.traces.first_record import FirstRecord
from kvledger.traces.lines import TraceLines
from kvledger.traces.reader import RowReader
from kvledger.traces.trace_request import BlockTokens, OutputTokens, PromptTokens, TraceRequest


class _Record(msgspec.Struct):
    block_size: BlockTokens
    input_length: PromptTokens
    hash_ids: list[int]
    output_length: OutputTokens = 1


class UntimedReader(RowReader):
    name = "kvcache-simulator"
    mark = '"block_size", "hash_ids" and "input_length", and no time'
    record = _Record

    def __init__(self, lines: TraceLines, block_size: int | None) -> None:
        super().__init__(lines, block_size)
        self.notes.append("the trace has no times: all requests arrive at once")

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return first.has("block_size", "hash_ids", "input_length") and not first.has_any("timestamp", "format")

    def request(self, record: msgspec.Struct) -> TraceRequest | None:
        assert isinstance(record, _Record)
        if not self.ids_fit("hash_ids", len(record.hash_ids), record.input_length, record.block_size, whole_only=True):
            return None
        num_output = max(1, record.output_length)
        return TraceRequest(0.0, record.input_length, num_output, record.hash_ids, record.block_size)
