"""ExtentPool: BlockPool, prefix index and evictions of one full-attention group, in runs of blocks.

A trace names content in blocks of, say, 512 tokens; a pool of 16-token blocks has 32 blocks of each. They are cached
together, hit together, and come to the end of the queue together, so one entry with a counted length decides the same
as 32 do. Where that does not hold an entry is split: a prompt that ends inside a trace block hits a part of it, and
what it leaves keeps its place in the queue.

    ledger    ... | a 31 | a 30 | ... | a 0 | b 31 | ...        evicted from the left, block by block
    extents   ... | a [0, 32)               | b [0, 32) ...     evicted from the left, from the end of each

Two requests may compute the same content before either can hit the other, and a prompt that is cached as a whole
computes its last block again. Then a node has several copies, and as in the ledger the oldest one is hit.

BlockPool, PrefixIndex and GhostIndex judge this: tests/unit/core/extents and tests/property hold it against them.
"""

from typing import Final

from mypy_extensions import i64

from kvledger.core.blocks.block_pool import PoolOccupancy
from kvledger.core.extents.extent import ENDLESS, Extent, ExtentQueue, Ghost, Node
from kvledger.core.extents.holding import ExtentHit, Holding
from kvledger.core.units import MAX_COUNT, require_positive
from kvledger.errors import OutOfBlocksError, require, wrong_value

# Ids below it are their own number; others, of any size, are numbered in the order in which they come, from here on.
_FIRST_NUMBER: Final = 1 << 30
# Where an id and the number of the node before it share one key.
_NODE_STEP: Final[i64] = 1 << 31


class ExtentPool:
    """`num_blocks` counts the null block, as BlockPool does. `max_evicted`: of how many evictions it is known what went
    (MissConfig.max_evicted_blocks). One owner thread."""

    def __init__(self, num_blocks: int, block_size: int, max_evicted: int) -> None:
        require_positive("num_blocks", num_blocks, MAX_COUNT)
        require_positive("block_size", block_size)
        if num_blocks < 2:
            raise wrong_value("num_blocks", num_blocks, "block 0 is the null block", "give 2 or more")
        self.block_size: Final[i64] = block_size
        self.num_usable: Final[i64] = num_blocks - 1
        # Free blocks, without content and with.
        self.num_unused: i64 = self.num_usable
        self.num_free_cached: i64 = 0
        self.num_evictions: i64 = 0
        # Different prefixes that can be hit.
        self.num_distinct: i64 = 0
        self._max_evicted: Final[i64] = max_evicted
        self._queue: Final = ExtentQueue()
        self._numbers: Final[dict[int, int]] = {}
        # (node before, id) -> node, but for the first one behind each.
        self._nodes: Final[dict[int, Node]] = {}
        # (scope, tokens of an id) -> the node in which its paths begin.
        self._roots: Final[dict[tuple[int, int], Node]] = {}
        self._num_nodes: i64 = 0

    @property
    def num_free(self) -> i64:
        return self.num_unused + self.num_free_cached

    @property
    def first_known(self) -> i64:
        """The number of the first eviction of which it is known what went."""
        oldest = self.num_evictions - self._max_evicted
        return oldest if oldest > 0 else 0

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold."""
        return 1.0 - int(self.num_free) / int(self.num_usable)

    def occupancy(self) -> PoolOccupancy:
        live = self.num_usable - self.num_free
        return PoolOccupancy(int(live), int(self.num_free_cached), int(self.num_unused))

    # Requests

    def enter(self, ids: list[int], id_tokens: int, scope: int, num_tokens: int) -> Holding:
        """A request whose first num_tokens tokens are named by ids of id_tokens tokens each, as far as there are ids;
        what it has behind them nobody shares. Equal ids of one size within one scope are equal content."""
        path: list[Node] = []
        known: i64 = 0
        block_size = self.block_size
        if ids:
            size: i64 = id_tokens
            named: i64 = min(num_tokens, len(ids) * id_tokens)
            known = named // block_size
            node = self._root(scope, id_tokens)
            end: i64 = 0
            k: i64 = 0
            while end < known:
                k += 1
                node = self._next(node, ids[k - 1], end, k * size // block_size)
                end = node.end
                path.append(node)
        path.append(self._new_node(known, ENDLESS))
        return Holding(path)

    def find(self, holding: Holding, most: i64) -> ExtentHit:
        """The longest cached prefix of at most so many blocks. Changes nothing."""
        hit = ExtentHit()
        place: i64 = 0
        while place < len(holding.path):
            node = holding.path[place]
            end = holding.end_of(place)
            if end > most:
                end = most
            place += 1
            depth = node.start
            while depth < end:
                extent = node.first
                stop = end
                while extent is not None and not extent.lo <= depth < extent.hi:
                    # An older copy further on goes before this one.
                    if depth < extent.lo < stop:
                        stop = extent.lo
                    extent = extent.sibling
                if extent is None:
                    return hit
                if extent.hi < stop:
                    stop = extent.hi
                hit.add(extent, depth, stop)
                depth = stop
        return hit

    def attach(self, holding: Holding, hit: ExtentHit) -> None:
        """Gives a hit to a request that holds nothing. REQUIRES that nothing has changed since it was found."""
        k: i64 = 0
        while k < len(hit.extents):
            extent = hit.extents[k]
            start = hit.starts[k]
            end = hit.ends[k]
            k += 1
            while extent.hi <= start:
                # Split since, for the piece before.
                rest = extent.rest
                assert rest is not None
                extent = rest
            if extent.lo < start:
                extent = self._split(extent, start)
            if extent.hi > end:
                self._split(extent, end)
            if extent.num_holders == 0:
                self._queue.remove(extent)
                self.num_free_cached -= end - start
            extent.num_holders += 1
            holding.hold(extent, end)
        holding.num_blocks = holding.num_cached

    def take(self, num_blocks: i64) -> None:
        """Takes free blocks, those without content first, then by eviction.

        OutOfBlocksError, changing nothing, when fewer are free.
        """
        if num_blocks > self.num_free:
            raise OutOfBlocksError(f"num_blocks={num_blocks}: {self.num_free} of {self.num_usable} are free")
        if num_blocks <= self.num_unused:
            self.num_unused -= num_blocks
            return
        num_blocks -= self.num_unused
        self.num_unused = 0
        self.num_free_cached -= num_blocks
        while num_blocks > 0:
            extent = self._queue.first()
            size = extent.hi - extent.lo
            num_taken = size if size < num_blocks else num_blocks
            num_blocks -= num_taken
            self._note_eviction(extent, extent.hi - num_taken)
            if num_taken == size:
                self._queue.remove(extent)
                extent.node.remove(extent)
            else:
                extent.hi -= num_taken

    def grow(self, holding: Holding, num_blocks: i64, num_full: i64) -> None:
        """Lets a request hold so many blocks, so many of them full: those are hits for others from now on."""
        if num_blocks > holding.num_blocks:
            self.take(num_blocks - holding.num_blocks)
            holding.num_blocks = num_blocks
        if num_full > holding.num_cached:
            self._cache(holding, num_full)

    def release(self, holding: Holding) -> None:
        """Takes back all blocks, the last one first: to the front of the queue without content, to its end with."""
        self.num_unused += holding.num_blocks - holding.num_cached
        for extent in holding.let_go():
            extent.num_holders -= 1
            if extent.num_holders == 0:
                self.num_free_cached += extent.hi - extent.lo
                self._queue.append(extent)

    def check(self, holdings: list[Holding]) -> None:
        """Proves the counts, of all that hold something. O(everything)."""
        num_free = 0
        for extent in self._queue.extents():
            require(extent.num_holders == 0 and extent.lo < extent.hi, "an extent in the queue is held or empty")
            require(extent.node.has_other(None, extent.hi - 1), "an extent in the queue is no copy of its node")
            num_free += int(extent.hi - extent.lo)
        require(num_free == self.num_free_cached, "the count of free cached blocks is wrong")
        held: dict[Extent, int] = {}
        num_blocks = 0
        for holding in holdings:
            require(holding.num_cached <= holding.num_blocks, "a request caches what it lacks")
            num_blocks += int(holding.num_blocks - holding.num_cached)
            for k, piece in enumerate(holding.pieces):
                part: Extent | None = piece
                while part is not None and part.lo < holding.ends[k]:
                    held[part] = held.get(part, 0) + 1
                    part = part.rest
        for extent, num_holders in held.items():
            require(extent.num_holders == num_holders, "an extent has other holders than it says")
            num_blocks += int(extent.hi - extent.lo)
        require(num_blocks + self.num_free == self.num_usable, "blocks were lost or doubled")

    # Nodes

    def _root(self, scope: int, id_tokens: int) -> Node:
        root = self._roots.get((scope, id_tokens))
        if root is None:
            root = self._roots[scope, id_tokens] = self._new_node(0, 0)
        return root

    def _next(self, before: Node, chunk_id: int, start: i64, end: i64) -> Node:
        number: i64
        if 0 <= chunk_id < _FIRST_NUMBER:
            number = chunk_id
        else:
            number = _FIRST_NUMBER + self._numbers.setdefault(chunk_id, len(self._numbers))
        if before.next_number == number:
            node = before.next
            assert node is not None
            return node
        if before.next is None:
            before.next_number = number
            before.next = self._new_node(start, end)
            return before.next
        key = int(before.number * _NODE_STEP + number)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = self._new_node(start, end)
        return node

    def _new_node(self, start: i64, end: i64) -> Node:
        self._num_nodes += 1
        return Node(self._num_nodes, start, end)

    # Extents

    def _split(self, extent: Extent, depth: i64) -> Extent:
        """Cuts an extent in two at that depth and returns the deeper part, which goes before the other."""
        rest = Extent(extent.node, depth, extent.hi, extent.num_holders)
        extent.hi = depth
        rest.sibling = extent.sibling
        extent.sibling = rest
        rest.rest = extent.rest
        extent.rest = rest
        if extent.num_holders == 0:
            self._queue.insert(rest, extent)
        return rest

    def _cache(self, holding: Holding, end: i64) -> None:
        """Makes the request's blocks up to that depth hits, behind those that are."""
        depth = holding.num_cached
        place = holding.place
        while depth < end:
            stop = holding.end_of(place)
            if depth >= stop:
                place += 1
                continue
            if stop > end:
                stop = end
            self._add_copy(holding, holding.path[place], depth, stop)
            depth = stop
        holding.place = place

    def _add_copy(self, holding: Holding, node: Node, start: i64, end: i64) -> None:
        if node.first is None:
            self.num_distinct += end - start
        else:
            depth = start
            while depth < end:
                if not node.has_other(None, depth):
                    self.num_distinct += 1
                depth += 1
        num_pieces = len(holding.pieces)
        last = holding.pieces[num_pieces - 1] if num_pieces > 0 else None
        if (
            last is not None
            and last.node is node
            and last.hi == start
            and last.num_holders == 1
            and last.sibling is None
        ):
            # Its own and the youngest: it grows.
            last.hi = end
            # Of a part that was evicted.
            last.rest = None
            holding.ends[num_pieces - 1] = end
            holding.num_cached = end
        else:
            extent = Extent(node, start, end, 1)
            node.append(extent)
            holding.hold(extent, end)
        ghost = node.ghost
        while ghost is not None and ghost.lo < end:
            if ghost.hi > end:
                ghost.lo = end
                break
            ghost = ghost.below
        node.ghost = ghost

    def _note_eviction(self, extent: Extent, lo: i64) -> None:
        """Counts that the blocks of an extent from that depth on lose their content, and remembers which did."""
        node = extent.node
        hi = extent.hi
        number = self.num_evictions
        self.num_evictions += hi - lo
        if node.first is extent and extent.sibling is None:
            self.num_distinct -= hi - lo
            _remember(node, lo, hi, number + hi - 1)
            return
        depth = hi
        while depth > lo:
            depth -= 1
            if not node.has_other(extent, depth):
                self.num_distinct -= 1
                _remember(node, depth, depth + 1, number + depth)
            number += 1


def _remember(node: Node, lo: i64, hi: i64, number: i64) -> None:
    """Depths [lo, hi) of a node are gone, the last ones of what is cached."""
    ghost = node.ghost
    if ghost is not None and ghost.number == number:
        ghost.lo = lo
    else:
        node.ghost = Ghost(lo, hi, number, ghost)
