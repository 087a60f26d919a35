"""Extents: runs of blocks of one sequence that were cached together, stay together, and are evicted from their end.

Depths count full blocks from the start of a sequence; ranges of them are half-open. A path of nodes leads to each
block, so a depth within a node is what a block hash is elsewhere: equal for equal prefixes and only for them.
"""

from typing import Final

from mypy_extensions import i64

# Where the node of what one request has for itself ends: nowhere.
ENDLESS: Final[i64] = 1 << 60


class Ghost:
    """Depths [lo, hi) of a node that nobody has cached any more. Depth d went as eviction `number - d`, so the deepest
    first; `below`: what lies deeper, evicted at another time."""

    def __init__(self, lo: i64, hi: i64, number: i64, below: "Ghost | None") -> None:
        self.lo: i64 = lo
        self.hi: Final[i64] = hi
        self.number: Final[i64] = number
        self.below: Final[Ghost | None] = below


class Node:
    """Depths [start, end) behind one path of ids: what a trace's block of that id holds there, or what one request has
    for itself.

    `first`: the copies of it that are cached, in the order in which they were (a lookup finds the oldest); `ghost`:
    what was evicted. Both together begin at `start` and have no gap, as no block is cached without those before it.
    """

    def __init__(self, number: i64, start: i64, end: i64) -> None:
        self.number: Final[i64] = number
        self.start: Final[i64] = start
        self.end: Final[i64] = end
        # The first node behind it, under the number of its id; others are found in the pool. Most have one only.
        self.next_number: i64 = -1
        self.next: Node | None = None
        self.first: Extent | None = None
        self.ghost: Ghost | None = None

    def has_other(self, extent: "Extent | None", depth: i64) -> bool:
        """Whether an extent besides that one holds a copy of the block at that depth."""
        other = self.first
        while other is not None:
            if other is not extent and other.lo <= depth < other.hi:
                return True
            other = other.sibling
        return False

    def append(self, extent: "Extent") -> None:
        """Puts a new copy behind all others."""
        last = self.first
        if last is None:
            self.first = extent
            return
        while last.sibling is not None:
            last = last.sibling
        last.sibling = extent

    def remove(self, extent: "Extent") -> None:
        """Takes out a copy. REQUIRES that it is there."""
        if self.first is extent:
            self.first = extent.sibling
        else:
            before = self.first
            assert before is not None
            while before.sibling is not extent:
                before = before.sibling
                assert before is not None
            before.sibling = extent.sibling
        extent.sibling = None


class Extent:
    """One copy of the blocks [lo, hi) of a node, full and cached, all held by the same number of requests.

    Without holders it stands in the queue of the pool: `earlier` goes before it, `later` behind it. `sibling`: the next
    copy within the node. `rest`: what was behind it before it was split, for those who hold both parts.
    """

    def __init__(self, node: Node, lo: i64, hi: i64, num_holders: i64) -> None:
        self.node: Final = node
        self.lo: i64 = lo
        self.hi: i64 = hi
        self.num_holders: i64 = num_holders
        self.sibling: Extent | None = None
        self.rest: Extent | None = None
        self.earlier: Extent | None = None
        self.later: Extent | None = None


class ExtentQueue:
    """Extents that nobody holds, the least recently released first: the order of eviction. O(1) but for check()."""

    def __init__(self) -> None:
        seam = Extent(Node(-1, 0, 0), 0, 0, 0)
        seam.earlier = seam
        seam.later = seam
        self._seam: Final = seam

    def first(self) -> Extent:
        """REQUIRES one that is not empty."""
        extent = self._seam.later
        assert extent is not None
        return extent

    def append(self, extent: Extent) -> None:
        self.insert(extent, self._seam)

    def insert(self, extent: Extent, later: Extent) -> None:
        """Puts an extent before one that is there."""
        earlier = later.earlier
        assert earlier is not None
        extent.earlier = earlier
        extent.later = later
        earlier.later = extent
        later.earlier = extent

    def remove(self, extent: Extent) -> None:
        earlier = extent.earlier
        later = extent.later
        assert earlier is not None
        assert later is not None
        earlier.later = later
        later.earlier = earlier
        extent.earlier = None
        extent.later = None

    def extents(self) -> list[Extent]:
        """All of them in order, in a fresh list. O(extents)."""
        extents: list[Extent] = []
        extent = self._seam.later
        while extent is not None and extent is not self._seam:
            extents.append(extent)
            extent = extent.later
        return extents
