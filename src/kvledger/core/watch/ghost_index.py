"""GhostIndex: which block hashes were evicted, when and why, after the pool has forgotten them.

Eviction takes a sequence from its end, so what goes comes as runs: each block the parent of the one before it. A run
is kept as a plain vector and only its top, the block nearest to the sequence's start, is found by name:

    sequence   | 0 | 1 | 2 | 3 | 4 | 5 |            evicted in the order 5 4 3
    run        names = [5, 4, 3]                     tops = {3: run}

A name is 64 bits of a hash: two blocks of one name would be told apart wrongly, and a million of them have two with a
chance of one in 30 million. Whoever reads a sequence forwards finds the top and then compares down the vector. So
remembering a block costs 8 bytes and one append, and a run about 200 bytes. When a block at the top is cached again it
leaves its run, and the next one becomes findable. Two facts make that complete: a chained hash is only cached where its
parents are, and the parent of a block that is not at a top stands next to it.

What a call takes (a reset, evict_blocks) comes in any order, so it is put into that order first: all of it goes at
the same time. It makes runs only while no request holds a block whose hash was taken, because such a request may cache
what is behind that block, and a parent would be missing.

Groups of windows or states cache blocks without their parents: there every block is a run of its own.

What is remembered is bounded: of what gave way to new blocks the last `max_blocks` evictions, to the block; memory is
given back a run at a time.
"""

from typing import Final

from librt.vecs import append, pop, vec
from mypy_extensions import i32, i64

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.observer import EvictionCause
from kvledger.core.blocks.prefix_index import PrefixIndex
from kvledger.core.requests.request import Request
from kvledger.errors import require

# Longer runs are cut, so that the oldest one can be forgotten without forgetting much.
MAX_RUN: Final = 4096

# Forgotten runs leave the list of runs so many at a time.
_FORGOTTEN_AT_ONCE: Final = 1024

_REUSED: Final = EvictionCause.REUSED


class EvictedRun:
    """names[i] lost its block as eviction number first_eviction + i; of what a call took, all have that first number.
    The last one is the top.
    """

    def __init__(self, number: i64, group_id: i32, eviction: i64, cause: EvictionCause) -> None:
        self.number: i64 = number
        self.first_eviction: i64 = eviction
        self.group_id: i32 = group_id
        # As long as it was when it was complete.
        self.num_blocks: i32 = 0
        self.cause: Final = cause
        self.names: vec[i64] = vec[i64]([])

    @property
    def top(self) -> int:
        """REQUIRES a run that is not taken back."""
        return int(self.names[len(self.names) - 1])


class EvictedPart:
    """Tokens [start, end) of a sequence, evicted for one cause. With num_short more blocks its first block would have
    been kept, each later block needs one more."""

    def __init__(self, start: int, end: int, num_short: int, cause: EvictionCause) -> None:
        self.start: Final = start
        self.end: Final = end
        self.num_short: Final = num_short
        self.cause: Final = cause


class GhostTrace:
    """What was evicted of one sequence in one group. Every block up to token `end` was cached once."""

    def __init__(self, block_size: int, parts: list[EvictedPart], end: int) -> None:
        self.end: Final = end
        # So far read: most blocks that the pool was short of, and the first cause that no block would have helped with.
        self.num_short: int = 0
        self.cause: EvictionCause = _REUSED
        self.block_size: Final = block_size
        self.parts: Final = parts
        self._next: int = 0

    def read_to(self, end: int) -> None:
        """Takes in what lies before that token. REQUIRES ends that grow from call to call."""
        while self._next < len(self.parts):
            part = self.parts[self._next]
            if part.start >= end:
                return
            last = min(end, part.end) - 1
            if part.cause is _REUSED:
                num_short = part.num_short + (last - part.start) // self.block_size
                if num_short > self.num_short:
                    self.num_short = num_short
            elif self.cause is _REUSED:
                self.cause = part.cause
            if part.end > end:
                return
            self._next += 1


class GhostGroup:
    """What is remembered of one group; of one without an index, nothing. `is_chain`: it caches no block without the
    blocks before it. `is_counted`: its blocks are of the pool whose evictions are counted.
    """

    def __init__(self, index: PrefixIndex | None, block_size: int, is_chain: bool, is_counted: bool) -> None:
        self.index: Final = index
        self.block_size: Final = block_size
        self.is_counted: Final = is_counted
        self.is_chain: Final = is_chain
        # Tokens that the next block of a run ends before this one. Nothing continues a block of a group without chains.
        self.stride: i32 = i32(block_size if is_chain else 1 << 30)
        self.tops: Final[dict[int, EvictedRun]] = {}


class GhostIndex:
    """One ledger's evictions. Groups that nobody follows are counted and not remembered."""

    def __init__(self, num_groups: int, max_blocks: int) -> None:
        # Of runs that are gone.
        self._num_given_up: int = 0
        self._num_evictions: i64 = 0
        self._max_blocks: Final = max_blocks
        self._groups: Final = [GhostGroup(None, 1, False, True) for _ in range(num_groups)]
        self._call: i32 = 0
        # Whether a request may hold a block whose hash was taken by a call.
        self._any_held_taken: bool = False
        # All runs from number _first_run on, the oldest first; those before it are forgotten.
        self._runs: Final[list[EvictedRun]] = []
        self._first_run: int = 0
        self._num_remembered: int = 0
        self._next_number: i64 = 0
        # Runs before that number were forgotten by the prefix cache as a whole since.
        self._reset_number: i64 = 0
        # The run that the next eviction may continue, and is not in tops yet. It does if it has that number and is of a
        # block that ends at that token and was cached by that call.
        self._open: EvictedRun | None = None
        self._open_eviction: i64 = 0
        self._open_tokens: i32 = 0
        self._open_call: i32 = 0

    @property
    def num_runs(self) -> int:
        """Runs that the remembered evictions take: what memory they cost."""
        return len(self._runs) - self._first_run + (1 if self._open is not None else 0)

    @property
    def num_evictions(self) -> int:
        """Cached blocks that gave way to new ones."""
        return int(self._num_evictions)

    @property
    def num_forgotten(self) -> int:
        """Evictions that are known no more. Above 0, what is not found may have been evicted long ago."""
        return max(self._num_given_up, self._first_known)

    @property
    def _first_known(self) -> int:
        """The number of the first eviction for room that is still known."""
        return max(0, int(self._num_evictions) - self._max_blocks)

    def follow(self, group_id: int, index: PrefixIndex, block_size: int, is_chain: bool) -> None:
        """Remembers that group from now on. To be called before anything is cached."""
        self._groups[group_id] = GhostGroup(index, block_size, is_chain, True)

    def ignore(self, group_id: int) -> None:
        """Does not count that group: its blocks are of another pool."""
        self._groups[group_id] = GhostGroup(None, 1, False, False)

    # What the ledger reports

    def blocks_cached(self, request: Request, group_id: int, blocks: list[KVCacheBlock]) -> None:
        group = self._groups[group_id]
        index = group.index
        if index is None:
            return
        call = (self._call + 1) & 0x3FFFFFFF
        self._call = call
        for block in blocks:
            block.cached_call = call
        if group.tops or self._open is not None:
            self._take_back(group, index, blocks)

    def blocks_evicted(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> None:
        """About 20 ns a block: this is called with every block that gives way to another."""
        step: i64 = 1
        joins = True
        if cause is not _REUSED:
            # Nothing was evicted for room, so the count stands still.
            step = 0
            joins = self._joins(blocks, cause)
            blocks = sorted(blocks, key=_place_from_end)
        eviction = self._num_evictions
        gone: dict[bytes, int] | None = None
        run = self._open
        tokens = self._open_tokens
        for block in blocks:
            group = self._groups[i64(block.group_id)]
            index = group.index
            block_hash = block.block_hash
            if index is None or block_hash is None:
                if group.is_counted:
                    eviction += step
                continue
            if index.has_several(block_hash):
                if gone is None:
                    gone = {}
                if not _is_last_copy(index, block_hash, gone):
                    eviction += step
                    continue
            if (
                run is None
                or not joins
                or tokens != block.num_hash_tokens
                or self._open_eviction != eviction
                or self._open_call != block.cached_call
                or run.group_id != i32(block.group_id)
                or run.cause is not cause
                or len(run.names) >= MAX_RUN
            ):
                self._close()
                run = EvictedRun(self._next_number, i32(block.group_id), eviction, cause)
                self._next_number += 1
                self._open = run
                self._open_call = block.cached_call
                tokens = block.num_hash_tokens
            run.names = append(run.names, i64(hash(block_hash)))
            tokens -= group.stride
            eviction += step
            self._open_eviction = eviction
        self._open_tokens = tokens
        self._num_evictions = eviction

    def prefix_cache_reset(self) -> None:
        self._close()
        self._reset_number = self._next_number
        # Nothing is held when the cache is reset.
        self._any_held_taken = False

    # What it answers

    def trace(self, group_id: int, hashes: list[bytes], hashes_per_block: int, start: int) -> GhostTrace:
        """What was evicted of a sequence from block `start` on, up to the first block that was never cached or is
        forgotten. REQUIRES a followed group that is a chain, and that block `start` is not cached.

        O(blocks evicted of that sequence), and one look for a sequence that is new.
        """
        group = self._groups[group_id]
        index = group.index
        assert index is not None
        self._close()
        block_size = group.block_size
        parts: list[EvictedPart] = []
        num_blocks = len(hashes) // hashes_per_block
        first_known = self._first_known
        block = start
        while block < num_blocks:
            block_hash = hashes[(block + 1) * hashes_per_block - 1]
            run = self._find_top(group, block_hash)
            if run is None:
                if index.get(block_hash) is None:
                    break
                block += 1  # cached, behind a gap
                continue
            first = block
            names = run.names
            position = len(names) - 1
            num_short = self.num_evictions - int(run.first_eviction) - position
            last = max(0, first_known - int(run.first_eviction)) if run.cause is _REUSED else 0
            while (
                position >= last
                and block < num_blocks
                and names[position] == i64(hash(hashes[(block + 1) * hashes_per_block - 1]))
            ):
                position -= 1
                block += 1
            parts.append(EvictedPart(first * block_size, block * block_size, num_short, self._cause(run)))
        return GhostTrace(block_size, parts, block * block_size)

    def has_top(self, group_id: int, block_hash: bytes) -> bool:
        """Whether a hash whose parent is cached was evicted. If not, nothing behind it in a chain was ever cached."""
        self._close()
        return self._find_top(self._groups[group_id], block_hash) is not None

    def find(self, group_id: int, block_hash: bytes) -> EvictedPart | None:
        """The eviction of one hash that stands at a top: of every hash in a group that is no chain."""
        group = self._groups[group_id]
        self._close()
        run = self._find_top(group, block_hash)
        if run is None:
            return None
        num_short = self.num_evictions - int(run.first_eviction) - (len(run.names) - 1)
        return EvictedPart(0, group.block_size, num_short, self._cause(run))

    def _find_top(self, group: GhostGroup, block_hash: bytes) -> EvictedRun | None:
        """The run whose top has that name, unless it is forgotten."""
        run = group.tops.get(hash(block_hash))
        if run is None or run.cause is not _REUSED:
            return run
        return run if run.first_eviction + len(run.names) > self._first_known else None

    def check(self) -> None:
        """Proves that exactly the tops of runs are found by hash, and the limit. O(runs)."""
        self._close()
        for group in self._groups:
            for name, run in group.tops.items():
                require(len(run.names) > 0 and run.top == name, "ghost index: found by what is not its top")
        num_blocks = sum([int(run.num_blocks) for run in self._runs[self._first_run :]])
        require(num_blocks == self._num_remembered, "ghost index: the count of remembered evictions is wrong")
        require(num_blocks <= self._max_blocks + MAX_RUN, "ghost index: more is remembered than the limit allows")

    # Runs

    def _close(self) -> None:
        """Makes the open run findable, and forgets the oldest ones beyond the limit."""
        run = self._open
        if run is None:
            return
        self._open = None
        group = self._groups[run.group_id]
        group.tops[run.top] = run
        run.num_blocks = i32(len(run.names))
        self._runs.append(run)
        self._num_remembered += run.num_blocks
        while self._num_remembered > self._max_blocks:
            oldest = self._runs[self._first_run]
            if self._num_remembered - oldest.num_blocks < self._max_blocks:
                break
            self._forget(oldest)
            self._first_run += 1
            if self._first_run == _FORGOTTEN_AT_ONCE:
                del self._runs[:_FORGOTTEN_AT_ONCE]
                self._first_run = 0

    def _joins(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> bool:
        """Whether what a call takes may make runs of more than one block."""
        if cause is EvictionCause.EVICTED and any(block.ref_cnt > 0 for block in blocks):
            self._any_held_taken = True
        return cause is EvictionCause.RESET or (cause is EvictionCause.EVICTED and not self._any_held_taken)

    def _forget(self, run: EvictedRun) -> None:
        self._num_remembered -= run.num_blocks
        self._num_given_up += run.num_blocks
        group = self._groups[run.group_id]
        if len(run.names) > 0 and group.tops.get(run.top) is run:
            del group.tops[run.top]

    def _take_back(self, group: GhostGroup, index: PrefixIndex, blocks: list[KVCacheBlock]) -> None:
        """Lets hashes leave their runs that are cached again. `blocks`: in the order of their sequence."""
        open_run = self._open
        tops = group.tops
        position = 0
        num_blocks = len(blocks)
        while position < num_blocks:
            block_hash = blocks[position].block_hash
            assert block_hash is not None
            name = hash(block_hash)
            if open_run is not None and open_run.top == name:
                self._close()
                open_run = None
            run = tops.get(name)
            if run is None:
                # A chain that was never cached up to here was never cached further on. Another block that carries the
                # same hash tells nothing of that.
                if group.is_chain and not index.has_several(block_hash):
                    return
                position += 1
                continue
            del tops[name]
            while position < num_blocks and len(run.names) > 0 and run.top == _name(blocks[position]):
                run.names, _ = pop(run.names)
                position += 1
            if len(run.names) > 0:
                known = tops.get(run.top)
                if known is None or known.number < run.number:
                    tops[run.top] = run

    def _cause(self, run: EvictedRun) -> EvictionCause:
        """A reset would have taken everything from before it anyway."""
        return EvictionCause.RESET if run.number < self._reset_number else run.cause


def _name(block: KVCacheBlock) -> int:
    block_hash = block.block_hash
    assert block_hash is not None
    return hash(block_hash)


def _place_from_end(block: KVCacheBlock) -> tuple[int, int]:
    """Sorts what was cached together, which is of one sequence and group, side by side and from its end."""
    return int(block.cached_call), -int(block.num_hash_tokens)


def _is_last_copy(index: PrefixIndex, block_hash: bytes, gone: dict[bytes, int]) -> bool:
    """Whether a hash that several blocks carry goes with this one: the others are gone in the same call, as counted."""
    gone[block_hash] = gone.get(block_hash, 0) + 1
    return gone[block_hash] == index.num_blocks(block_hash)
