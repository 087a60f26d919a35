"""Reader of the Mooncake trace format: one JSON object a line, one request each.

    {"timestamp": 21000, "input_length": 2651, "output_length": 366, "hash_ids": [0, 1541, 1542, 1543, 1544, 1545]}

timestamp: arrival in milliseconds. hash_ids: one id for every 512 prompt tokens, the last block may be partial; equal
ids are equal blocks. An optional integer "priority" is kept for the priority policy.
"""

from collections.abc import Iterator

import msgspec

from kvledger.core.units import cdiv
from kvledger.files.decoding import decode, describe
from kvledger.traces.reader import TraceReader, has_key
from kvledger.traces.trace_request import Milliseconds, OutputTokens, Priority, PromptTokens, TraceRequest


class _Record(msgspec.Struct):
    timestamp: Milliseconds
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: list[int]
    priority: Priority = 0


class MooncakeReader(TraceReader):
    name = "mooncake"
    mark = 'a JSON object with "input_length" and "hash_ids"'
    block_size = 512

    @staticmethod
    def recognises(first_line: bytes) -> bool:
        return has_key(first_line, "input_length") or has_key(first_line, "timestamp")

    def requests(self) -> Iterator[TraceRequest]:
        lines = self.lines
        block_size = self.block_size
        decoder = msgspec.json.Decoder(_Record)
        latest = 0.0
        for line in lines:
            try:
                record = decode(decoder, line)
            except msgspec.DecodeError as error:
                lines.bad(*describe(error))
                continue
            num_blocks = cdiv(record.input_length, block_size)
            if len(record.hash_ids) != num_blocks:
                lines.bad(
                    "hash_ids",
                    f"expected {num_blocks} ids for input_length={record.input_length} in blocks of {block_size} "
                    f"tokens, got {len(record.hash_ids)}",
                )
                continue
            if record.timestamp < latest:
                lines.bad("timestamp", f"expected at least {latest:g}, the line before; got {record.timestamp:g}")
                continue
            latest = record.timestamp
            yield TraceRequest(
                latest / 1000.0,
                record.input_length,
                max(1, record.output_length),
                record.hash_ids,
                block_size,
                priority=record.priority,
            )
