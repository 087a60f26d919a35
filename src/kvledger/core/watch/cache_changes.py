"""CacheChanges: an observer that keeps what happened to the prefix cache, in order, until somebody takes it.

For whoever tells others what is cached (kvledger.events): the ledger's thread only notes down, and everything else can
happen later and elsewhere. So what is noted must not change: of a request, its token buffer and its list of hashes only
grow (Request.truncate makes new ones), so the parts that exist can be read at any time, from any thread.

Notes are two flat arrays, numbers and objects, and become one object a change only where they are read: objects made
here and freed by another thread would cost the ledger's thread several cache misses each.

    a span    numbers: 4 * group id + 0, or + 1 for a tail; start; end; how many ends follow, or -1; the ends
              objects: request, its tokens, its hashes, the group's sizes
    drops     numbers: 2; how many; their group ids        objects: the hashes
    cleared   numbers: 3
"""

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i64

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.observer import EvictionCause, GroupSizes, LedgerObserver
from kvledger.core.requests.request import Request
from kvledger.core.requests.tokens import TokenBuffer

_SPAN: Final = 0
_TAIL: Final = 1
_DROPS: Final = 2
_CLEARED: Final = 3


class CacheChange:
    """One of the classes below."""


class SpanCached(CacheChange):
    """The request's tokens [start, end) became whole blocks of a group, and all or some of these blocks hits.

    `tokens` and `hashes` are the request's, up to `end` at least. `ends`: where in the request the blocks end that
    became hits; None: all of them did. `is_tail`: instead, the span is the start of one block, and a hit up to its end.
    Of the request itself only what never changes may be read: adapter, cache_salt, multimodal.
    """

    def __init__(
        self,
        request: Request,
        tokens: TokenBuffer,
        hashes: list[bytes],
        group_id: int,
        sizes: GroupSizes,
        start: int,
        end: int,
        ends: list[int] | None,
        is_tail: bool,
    ) -> None:
        self.request: Final = request
        self.tokens: Final = tokens
        self.hashes: Final = hashes
        self.group_id: Final = group_id
        self.sizes: Final = sizes
        self.start: Final = start
        self.end: Final = end
        self.ends: Final = ends
        self.is_tail: Final = is_tail


class HashesDropped(CacheChange):
    """Blocks lost their hashes: hashes[i] of group group_ids[i], each as often as blocks lost it."""

    def __init__(self, group_ids: list[int], hashes: list[bytes]) -> None:
        self.group_ids: Final = group_ids
        self.hashes: Final = hashes


class CacheCleared(CacheChange):
    """Every hash of every group is gone."""


class CacheNotes:
    """What was noted between two calls of CacheChanges.take. Belongs to whoever took it, in any thread."""

    def __init__(self, numbers: "vec[i64]", objects: list[object], num_changes: int) -> None:
        self._numbers: vec[i64] = numbers
        self._objects: Final = objects
        self._num_changes: Final = num_changes

    def __len__(self) -> int:
        """Number of changes."""
        return self._num_changes

    def changes(self) -> list[CacheChange]:
        """One object a change, in the order in which they happened."""
        numbers = self._numbers
        changes: list[CacheChange] = []
        position = 0
        num_objects = 0
        while len(changes) < self._num_changes:
            kind = int(numbers[position]) % 4
            if kind == _CLEARED:
                changes.append(CacheCleared())
                position += 1
            elif kind == _DROPS:
                num_drops = int(numbers[position + 1])
                changes.append(self._dropped(position + 2, num_objects, num_drops))
                position += 2 + num_drops
                num_objects += num_drops
            else:
                changes.append(self._span(position, num_objects))
                position += 4 + max(0, int(numbers[position + 3]))
                num_objects += 4
        return changes

    def _span(self, position: int, first_object: int) -> SpanCached:
        numbers = self._numbers
        code = int(numbers[position])
        num_ends = int(numbers[position + 3])
        ends: list[int] | None = None
        if num_ends >= 0:
            ends = [int(numbers[position + 4 + index]) for index in range(num_ends)]
        request, tokens, hashes, sizes = self._objects[first_object : first_object + 4]
        assert isinstance(request, Request)
        assert isinstance(tokens, TokenBuffer)
        assert isinstance(hashes, list)
        assert isinstance(sizes, GroupSizes)
        start, end = int(numbers[position + 1]), int(numbers[position + 2])
        return SpanCached(request, tokens, hashes, code // 4, sizes, start, end, ends, code % 4 == _TAIL)

    def _dropped(self, position: int, first_object: int, num_drops: int) -> HashesDropped:
        hashes: list[bytes] = []
        for block_hash in self._objects[first_object : first_object + num_drops]:
            assert isinstance(block_hash, bytes)
            hashes.append(block_hash)
        return HashesDropped([int(self._numbers[position + index]) for index in range(num_drops)], hashes)


class CacheChanges(LedgerObserver):
    """What happened since the last take(). Grows until it is called, so call it once a step."""

    def __init__(self) -> None:
        self._numbers: vec[i64] = vec[i64]()
        self._objects: list[object] = []
        self._num_changes: int = 0
        # Further hashes of the few blocks that answer for more than one prefix.
        self._more_hashes: dict[KVCacheBlock, list[bytes]] = {}

    def __len__(self) -> int:
        """Number of changes since the last take()."""
        return self._num_changes

    def take(self) -> CacheNotes:
        """All changes since the last call."""
        notes = CacheNotes(self._numbers, self._objects, self._num_changes)
        self._numbers = vec[i64]()
        self._objects = []
        self._num_changes = 0
        return notes

    def blocks_filled(
        self, request: Request, group_id: int, blocks: list[KVCacheBlock], start: int, end: int, sizes: GroupSizes
    ) -> None:
        if len(blocks) * sizes.block_size == end - start:
            self._note_span(request, group_id * 4 + _SPAN, start, end, -1, sizes)
            return
        self._note_span(request, group_id * 4 + _SPAN, start, end, len(blocks), sizes)
        for block in blocks:
            self._numbers = append(self._numbers, i64(block.num_hash_tokens))

    def prefix_cached(
        self, request: Request, group_id: int, block: KVCacheBlock, num_tokens: int, sizes: GroupSizes
    ) -> None:
        block_hash = request.block_hashes[num_tokens // sizes.hash_block_size - 1]
        if block.block_hash != block_hash:
            self._more_hashes.setdefault(block, []).append(block_hash)
        start = (num_tokens - 1) // sizes.block_size * sizes.block_size
        self._note_span(request, group_id * 4 + _TAIL, start, num_tokens, -1, sizes)

    def hashes_moved(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        if source in self._more_hashes:
            self._more_hashes[target] = self._more_hashes.pop(source)

    def blocks_evicted(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> None:
        if cause is EvictionCause.RESET:
            return
        position = len(self._numbers) + 1
        self._note(_DROPS)
        self._note(0)
        num_drops = 0
        for block in blocks:
            block_hash = block.block_hash
            if block_hash is None:
                continue
            self._note_drop(block, block_hash)
            num_drops += 1
            if self._more_hashes and block in self._more_hashes:
                for other in self._more_hashes.pop(block):
                    self._note_drop(block, other)
                    num_drops += 1
        self._numbers[position] = i64(num_drops)
        self._num_changes += 1

    def prefix_cache_reset(self) -> None:
        self._more_hashes.clear()
        self._note(_CLEARED)
        self._num_changes += 1

    def _note_span(self, request: Request, code: int, start: int, end: int, num_ends: int, sizes: GroupSizes) -> None:
        self._note(code)
        self._note(start)
        self._note(end)
        self._note(num_ends)
        objects = self._objects
        objects.append(request)
        objects.append(request.tokens)
        objects.append(request.block_hashes)
        objects.append(sizes)
        self._num_changes += 1

    def _note_drop(self, block: KVCacheBlock, block_hash: bytes) -> None:
        self._note(int(block.group_id))
        self._objects.append(block_hash)

    def _note(self, number: int) -> None:
        self._numbers = append(self._numbers, i64(number))
