"""From what the ledger noted down to the events that are published, and to a snapshot of all of them.

Two styles:

EventStyle.DISTINCT   (the default) what consumers can rely on:
    - a hash is stored once and removed once, however many blocks carry it: the consumer's set of (group, hash) is the
      prefix index, whether or not it counts
    - the tokens of a BlockStored are those of its blocks, block_size tokens each: a run that null blocks interrupt
      becomes two events, each with the parent that its first block really has
    - a prefix that ends inside a block is one entry of all its tokens in that block, with the block before as parent
    - hashes that go together are removed by one event
EventStyle.VLLM       event for event what vLLM emits: once per block, token_ids with the tokens of null blocks
                      among them, hashes without tokens of their own when nothing of a span is cached, prefixes inside
                      blocks as their last hash unit, one BlockRemoved a hash
"""

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, Final

from kvledger.core.requests.request import Request
from kvledger.core.requests.tokens import unpack_tokens
from kvledger.core.watch.cache_changes import CacheChange, CacheCleared, HashesDropped, SpanCached
from kvledger.events.announced_blocks import AnnouncedBlock, AnnouncedBlocks, EventAdapter
from kvledger.events.event_types import AllBlocksCleared, AnyEvent, BlockRemoved, BlockStored, WireHash
from kvledger.events.group_labels import GroupLabel
from kvledger.events.salts import SaltNames

# Blocks that a part of a snapshot has at most, so that no message grows with the pool.
_SNAPSHOT_BLOCKS: Final = 4096
_LOW_64_BITS: Final = (1 << 64) - 1
_NO_ADAPTER: Final = EventAdapter(None, None)


class EventStyle(Enum):
    DISTINCT = "distinct"
    VLLM = "vllm"


class EventBuilder:
    """Changes in, events out. Remembers what it announced, as far as it is still cached."""

    def __init__(
        self,
        labels: list[GroupLabel],
        style: EventStyle = EventStyle.DISTINCT,
        int_hashes: bool = True,
        salts: SaltNames | None = None,
    ) -> None:
        """`int_hashes`: hashes are 64-bit numbers on the wire, as by default in vLLM; else whole digests. `salts`:
        what is told of them; all, when it is None."""
        self._labels: Final = labels
        self._is_distinct: Final = style is EventStyle.DISTINCT
        self._int_hashes: Final = int_hashes
        self._salts: Final = salts or SaltNames()
        self._announced: Final = AnnouncedBlocks()

    def build(self, changes: list[CacheChange]) -> list[AnyEvent]:
        """The events of these changes, in their order."""
        events: list[AnyEvent] = []
        for change in changes:
            if isinstance(change, SpanCached):
                if self._is_distinct:
                    events += self._stored_runs(change)
                else:
                    events.append(self._stored_span(change))
            elif isinstance(change, HashesDropped):
                events += self._removed(change)
            elif isinstance(change, CacheCleared) and not (self._is_distinct and _says_cleared(events)):
                events.append(self.clear())
        return events

    def clear(self) -> AnyEvent:
        """Forgets everything that was announced, and the event that says so."""
        self._announced.clear()
        return AllBlocksCleared()

    def snapshot(self) -> Iterator[list[AnyEvent]]:
        """Everything that is announced and still cached, in parts: AllBlocksCleared first, then parents first."""
        events: list[AnyEvent] = [AllBlocksCleared()]
        num_blocks = 0
        for group_id, chain in self._announced.chains():
            for first in range(0, len(chain), _SNAPSHOT_BLOCKS):
                part = chain[first : first + _SNAPSHOT_BLOCKS]
                events.append(self._chain_event(group_id, part))
                num_blocks += len(part)
                if num_blocks >= _SNAPSHOT_BLOCKS:
                    yield events
                    events, num_blocks = [], 0
        if events:
            yield events

    # Stored

    def _stored_runs(self, span: SpanCached) -> list[AnyEvent]:
        """One event for each run of blocks that follow each other and are all announced for the first time."""
        events: list[AnyEvent] = []
        run: list[tuple[bytes, AnnouncedBlock]] = []
        run_end = 0
        for start, end, block_hash, block in self._blocks(span):
            is_first = self._announced.add(span.group_id, block_hash, block)
            if run and not (is_first and start == run_end):
                events.append(self._chain_event(span.group_id, run))
                run = []
            if is_first:
                run.append((block_hash, block))
                run_end = end
        if run:
            events.append(self._chain_event(span.group_id, run))
        return events

    def _stored_span(self, span: SpanCached) -> BlockStored:
        """The span as vLLM has it."""
        hashes: list[bytes] = []
        keys: list[tuple[Any, ...] | None] = []
        lookaheads: list[bytes] | None = [] if span.sizes.num_hash_lookahead > 0 else None
        for _, _, block_hash, block in self._blocks(span):
            self._announced.add(span.group_id, block_hash, block)
            hashes.append(block_hash)
            keys.append(block.extra_key)
            if lookaheads is not None:
                lookaheads.append(block.lookahead)
        unit = span.sizes.hash_block_size
        start, size = span.start, span.sizes.block_size
        if span.is_tail:
            start, size = span.end - unit, unit
            keys = [self._extra_key(span.request, start, span.end + span.sizes.num_hash_lookahead)]
        parent = span.hashes[start // unit - 1] if start > 0 else None
        tokens = span.tokens.token_ids(start, span.end)
        return self._event(span.group_id, hashes, parent, tokens, size, _adapter(span.request), keys, lookaheads)

    def _chain_event(self, group_id: int, chain: list[tuple[bytes, AnnouncedBlock]]) -> BlockStored:
        """One event for blocks that follow each other."""
        first = chain[0][1]
        return self._event(
            group_id,
            [block_hash for block_hash, _ in chain],
            first.parent,
            unpack_tokens(b"".join([block.tokens for _, block in chain])),
            first.num_tokens,
            first.adapter,
            [block.extra_key for _, block in chain],
            [block.lookahead for _, block in chain] if first.lookahead else None,
        )

    def _event(
        self,
        group_id: int,
        hashes: list[bytes],
        parent: bytes | None,
        token_ids: list[int],
        block_size: int,
        adapter: EventAdapter,
        extra_keys: list[tuple[Any, ...] | None],
        lookaheads: list[bytes] | None,
    ) -> BlockStored:
        label = self._labels[group_id]
        return BlockStored(
            self._wire(hashes),
            None if parent is None else self._wire([parent])[0],
            token_ids,
            block_size,
            adapter.lora_id,
            label.medium,
            adapter.lora_name,
            extra_keys or None,
            group_id,
            label.kind,
            label.sliding_window,
            lookahead_token_ids=None if lookaheads is None else [unpack_tokens(packed) for packed in lookaheads],
        )

    def _blocks(self, span: SpanCached) -> Iterator[tuple[int, int, bytes, AnnouncedBlock]]:
        """Start, end, hash and meaning of each block of the span that became a hit."""
        unit = span.sizes.hash_block_size
        num_ahead = span.sizes.num_hash_lookahead
        size = span.end - span.start if span.is_tail else span.sizes.block_size
        hashes = span.hashes
        request = span.request
        adapter = _adapter(request)
        for end in span.ends if span.ends is not None else range(span.start + size, span.end + 1, size):
            start = end - size
            parent = hashes[start // unit - 1] if start > 0 else None
            tokens = span.tokens.pack(start, end)
            behind = span.tokens.pack(end, end + num_ahead) if num_ahead > 0 else b""
            key = self._extra_key(request, start, end + num_ahead)
            yield start, end, hashes[end // unit - 1], AnnouncedBlock(parent, tokens, key, adapter, behind)

    def _extra_key(self, request: Request, start: int, end: int) -> tuple[Any, ...] | None:
        """What the hash of the block over tokens [start, end) covers beside tokens, in vLLM's words."""
        if request.adapter is None and not request.cache_salt and not request.multimodal:
            return None
        key: list[Any] = [] if request.adapter is None else [request.adapter.name]
        key += [
            (item.content_hash, item.start - start)
            for item in request.multimodal
            if item.start < end and start < item.end
        ]
        if start == 0 and request.cache_salt:
            salt = self._salts.name(request.cache_salt)
            if salt is not None:
                key.append(salt)
        return tuple(key) or None

    # Removed

    def _removed(self, change: HashesDropped) -> Iterable[AnyEvent]:
        """One event for hashes of one group that follow each other; in vLLM's style one for each."""
        groups: list[tuple[int, list[bytes]]] = []
        for group_id, block_hash in zip(change.group_ids, change.hashes, strict=True):
            is_last = self._announced.remove(group_id, block_hash)
            if not self._is_distinct:
                groups.append((group_id, [block_hash]))
            elif is_last:
                if not groups or groups[-1][0] != group_id:
                    groups.append((group_id, []))
                groups[-1][1].append(block_hash)
        return [
            BlockRemoved(self._wire(hashes), self._labels[group_id].medium, group_id) for group_id, hashes in groups
        ]

    def _wire(self, hashes: list[bytes]) -> list[WireHash]:
        if not self._int_hashes:
            return list(hashes)
        return [int.from_bytes(block_hash, "big") & _LOW_64_BITS for block_hash in hashes]


def _says_cleared(events: list[AnyEvent]) -> bool:
    """Where host memory has a pool of its own, both are reset, and one event is enough."""
    return len(events) > 0 and isinstance(events[-1], AllBlocksCleared)


def _adapter(request: Request) -> EventAdapter:
    adapter = request.adapter
    return _NO_ADAPTER if adapter is None else EventAdapter(adapter.adapter_id, adapter.name)
