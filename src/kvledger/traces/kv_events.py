"""Reader of recorded KV events (a .jsonl file of kvledger.events.FileSink, whoever published them): prompts from what
became cached.

    {"seq": 0, "ts": 1.5, "events": [{"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": null, ...}]}

A prompt is the chain of blocks that an event ends, with all its parents. An event of one block behind the end of a
prompt of the last minute is that request's answer going on. What is not in the events is not here: prompts that were
cached as a whole, and tokens beyond whole blocks.
"""

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from kvledger.files.decoding import decode, describe
from kvledger.traces.first_record import FirstRecord
from kvledger.traces.lines import TraceLines
from kvledger.traces.reader import TraceReader
from kvledger.traces.trace_request import MAX_SECONDS, MAX_TOKENS, BlockTokens, TraceRequest

_Stamp = Annotated[float, msgspec.Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)]
# An answer goes on so often at least.
_ANSWER_GAP_S: Final = 60.0


class _Event(msgspec.Struct):
    type: str
    block_hashes: list[int | str] = []
    parent_block_hash: int | str | None = None
    block_size: BlockTokens = 1
    group_idx: int | None = None


class _Batch(msgspec.Struct):
    ts: _Stamp
    events: list[_Event]


class _Block(msgspec.Struct):
    """One announced block: its number, how many blocks lead to it, the block before, and the request that it ends."""

    number: int
    depth: int
    parent: "_Block | None"
    request: TraceRequest | None = None
    stored: float = 0.0


class KvEventReader(TraceReader):
    name = "kv-events"
    mark = '"seq", "ts" and "events"'

    def __init__(self, lines: TraceLines, block_size: int | None) -> None:
        super().__init__(lines, block_size)
        self.notes.append(
            "made from events of what became cached: prompts that were hits as a whole are not among them, and lengths "
            "are of whole blocks"
        )
        self._blocks: Final[dict[int | str, _Block]] = {}

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return first.has("seq", "ts", "events")

    def requests(self) -> Iterator[TraceRequest]:
        requests: list[TraceRequest] = []
        decoder = msgspec.json.Decoder(_Batch)
        group: int | None = None
        start: float | None = None
        for line in self.lines:
            try:
                batch = decode(decoder, line)
            except msgspec.DecodeError as error:
                self.lines.bad(*describe(error))
                continue
            start = batch.ts if start is None else start
            for event in batch.events:
                if event.type != "BlockStored" or not event.block_hashes:
                    continue
                # Groups keep the same prompts: the first one that is seen tells of them.
                group = event.group_idx or 0 if group is None else group
                if (event.group_idx or 0) == group:
                    self._store(event, batch.ts - start, requests)
        latest = 0.0
        for request in requests:
            # A publisher's clock may step back.
            request.arrival_time = latest = max(latest, request.arrival_time)
            yield request

    def _store(self, event: _Event, time: float, requests: list[TraceRequest]) -> None:
        parent = None if event.parent_block_hash is None else self._blocks.get(event.parent_block_hash)
        answered = parent.request if parent is not None else None
        last = parent
        for name in event.block_hashes:
            last = _Block(len(self._blocks) + 1, 1 if last is None else last.depth + 1, last)
            last.number = self._blocks.setdefault(name, last).number
            self._blocks[name] = last
        assert last is not None
        last.stored = time
        is_next = len(event.block_hashes) == 1 and parent is not None and time - parent.stored <= _ANSWER_GAP_S
        if answered is not None and parent is not None and is_next:
            answered.num_output_tokens = min(MAX_TOKENS, answered.num_output_tokens + event.block_size)
            last.request, parent.request = answered, None
            return
        num_tokens = last.depth * event.block_size + 1
        if num_tokens <= MAX_TOKENS:
            last.request = TraceRequest(time, num_tokens, 1, _path(last), event.block_size)
            requests.append(last.request)


def _path(block: _Block | None) -> list[int]:
    """Numbers of the blocks from the start to this one."""
    numbers: list[int] = []
    while block is not None:
        numbers.append(block.number)
        block = block.parent
    return numbers[::-1]
