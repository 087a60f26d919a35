"""Holding: what one request is to an ExtentPool: its path of nodes, and the copies of blocks that it holds along it."""

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i64

from kvledger.core.extents.extent import Extent, Node


class Holding:
    """`path`: nodes from the start of its sequence, the last one its own, which has no end.

    The first num_cached of its num_blocks blocks are full, and cached: `pieces` holds them in order, each up to a depth
    of `ends` (an extent that was split since goes on in its rest).
    """

    def __init__(self, path: list[Node]) -> None:
        self.path: Final = path
        self._own: Final[i64] = len(path) - 1
        self.num_blocks: i64 = 0
        self.num_cached: i64 = 0
        self.pieces: list[Extent] = []
        self.ends: vec[i64] = vec[i64]()
        # Place in the path of the node behind num_cached, or before it.
        self.place: i64 = 0

    @property
    def names_more(self) -> bool:
        """Whether blocks that it is still to fill can be shared: its answer is known."""
        return self.num_cached < self.path[self._own].start

    def end_of(self, place: i64) -> i64:
        """Where the node at that place of the path ends for this request: its prompt may end inside a named one."""
        end = self.path[place].end
        if place < self._own and end > self.path[self._own].start:
            return self.path[self._own].start
        return end

    def move_end(self, end: i64) -> None:
        """The last piece has grown up to there."""
        self.ends[len(self.ends) - 1] = end
        self.num_cached = end

    def hold(self, extent: Extent, end: i64) -> None:
        """Adds a piece behind all others."""
        self.pieces.append(extent)
        self.ends = append(self.ends, end)
        self.num_cached = end

    def let_go(self) -> list[Extent]:
        """Forgets everything. Returns the extents, the deepest first."""
        extents: list[Extent] = []
        k: i64 = len(self.pieces)
        while k > 0:
            k -= 1
            extent = self.pieces[k]
            end = self.ends[k]
            if extent.hi == end:
                extents.append(extent)
                continue
            parts = [extent]
            while extent.hi < end:
                rest = extent.rest
                assert rest is not None
                extent = rest
                parts.append(extent)
            parts.reverse()
            extents.extend(parts)
        self.pieces = []
        self.ends = vec[i64]()
        self.num_blocks = 0
        self.num_cached = 0
        self.place = 0
        return extents


class ExtentHit:
    """A cached prefix of num_blocks blocks: `extents[k]` has its depths [starts[k], ends[k]). `num_free`: blocks of it
    that nobody holds. Stands until the pool changes."""

    def __init__(self) -> None:
        self.num_blocks: i64 = 0
        self.num_free: i64 = 0
        self.extents: list[Extent] = []
        self.starts: vec[i64] = vec[i64]()
        self.ends: vec[i64] = vec[i64]()

    def add(self, extent: Extent, start: i64, end: i64) -> None:
        self.extents.append(extent)
        self.starts = append(self.starts, start)
        self.ends = append(self.ends, end)
        self.num_blocks = end
        if extent.num_holders == 0:
            self.num_free += end - start
