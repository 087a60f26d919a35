"""BlockResidency: an observer of how long blocks stay, sampled.

Of the blocks that the pool hands out a share is followed until it hands them out again (or their hashes are taken):

    handed out --hit--> --hit--> ... handed out again
    | lifetime .................... |
             | gap  |      | idle . |

Sampling needs no number per block: the distance to the next sampled one is drawn, and counted down. What it measures is
what vLLM's KVCacheMetricsCollector measures.
"""

from collections.abc import Callable
from math import log
from typing import Final

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.observer import EvictionCause, LedgerObserver
from kvledger.core.record import Record
from kvledger.errors import require, wrong_value

# Accesses of a block that are remembered: its last ones.
MAX_ACCESSES: Final = 4
# A sampled end waits here until it is taken; beyond so many the oldest are dropped.
MAX_ENDS: Final = 100_000


class BlockStay(Record):
    """A sampled block that was handed out again. All in seconds; `reuse_gaps`: between its last hits."""

    __match_args__ = ("lifetime", "idle", "reuse_gaps")

    def __init__(self, lifetime: float, idle: float, reuse_gaps: list[float]) -> None:
        self.lifetime: Final = lifetime
        self.idle: Final = idle
        self.reuse_gaps: Final = reuse_gaps


class _Sample:
    """A block that is followed."""

    def __init__(self, now: float) -> None:
        self.born: Final = now
        self.last_access: float = now
        self.accesses: list[float] = []

    def access(self, now: float) -> None:
        self.last_access = now
        self.accesses.append(now)
        if len(self.accesses) > MAX_ACCESSES:
            del self.accesses[0]

    def end(self, now: float) -> BlockStay:
        accesses = self.accesses
        gaps = [accesses[index] - accesses[index - 1] for index in range(1, len(accesses))]
        return BlockStay(now - self.born, now - self.last_access, gaps)


class BlockResidency(LedgerObserver):
    """Follows a share `sample_rate` of the blocks that one ledger hands out.

    `clock`: seconds; asked only when something happens to a followed block. `seed`: which blocks are followed.
    """

    def __init__(self, clock: Callable[[], float], sample_rate: float = 0.01, seed: int = 0) -> None:
        if not 0.0 < sample_rate <= 1.0:
            raise wrong_value("sample_rate", sample_rate, "not a share of the blocks", "give above 0.0 up to 1.0")
        self.sample_rate: Final = sample_rate
        self._clock: Final = clock
        self._log_missed: Final = log(1.0 - sample_rate) if sample_rate < 1.0 else 0.0
        self._random: int = (seed * 2 + 1) & 0xFFFFFFFF
        # By block id; grows with the highest id that was followed.
        self._samples: list[_Sample | None] = []
        self._num_samples: int = 0
        self._ends: list[BlockStay] = []
        self.num_dropped: int = 0
        # Blocks that are passed over before the next is followed.
        self._num_to_skip: int = self._draw()

    @property
    def num_samples(self) -> int:
        """Blocks that are followed now."""
        return self._num_samples

    def take_ends(self) -> list[BlockStay]:
        """The stays that ended since the last call."""
        ends = self._ends
        self._ends = []
        return ends

    # What the ledger tells

    def blocks_taken(self, group_id: int, blocks: list[KVCacheBlock]) -> None:
        """These blocks get new content: their stay ends, and another one begins."""
        if self._num_samples > 0:
            self._end(blocks)
        num_blocks = len(blocks)
        if self._num_to_skip >= num_blocks:
            self._num_to_skip -= num_blocks
            return
        now = self._clock()
        position = self._num_to_skip
        while position < num_blocks:
            self._begin(blocks[position].block_id, now)
            position += 1 + self._draw()
        self._num_to_skip = position - num_blocks

    def blocks_touched(self, blocks: list[KVCacheBlock]) -> None:
        """These blocks were hits."""
        if self._num_samples == 0:
            return
        for block_id in self._followed(blocks):
            sample = self._samples[block_id]
            assert sample is not None
            sample.access(self._clock())

    def blocks_evicted(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> None:
        """Blocks that are reused are taken right away; what a reset takes is told at once."""
        if cause is EvictionCause.EVICTED and self._num_samples > 0:
            self._end(blocks)

    def prefix_cache_reset(self) -> None:
        """The whole cache is forgotten: no stay ends as it would have, so none is told."""
        self._samples = []
        self._num_samples = 0
        self._ends = []

    def check(self) -> None:
        """Proves that the followed blocks are counted."""
        num_samples = len([sample for sample in self._samples if sample is not None])
        require(num_samples == self._num_samples, f"{num_samples} blocks are followed, {self._num_samples} counted")

    def _followed(self, blocks: list[KVCacheBlock]) -> list[int]:
        """Ids of those that are followed."""
        samples = self._samples
        num_known = len(samples)
        found: list[int] = []
        for block in blocks:
            block_id: int = block.block_id
            if block_id < num_known and samples[block_id] is not None:
                found.append(block_id)
        return found

    def _end(self, blocks: list[KVCacheBlock]) -> None:
        """These blocks lose their content."""
        for block_id in self._followed(blocks):
            sample = self._samples[block_id]
            assert sample is not None
            self._samples[block_id] = None
            self._num_samples -= 1
            self._keep(sample.end(self._clock()))

    def _begin(self, block_id: int, now: float) -> None:
        samples = self._samples
        while len(samples) <= block_id:
            samples.append(None)
        if samples[block_id] is None:
            self._num_samples += 1
        samples[block_id] = _Sample(now)

    def _keep(self, end: BlockStay) -> None:
        if len(self._ends) >= MAX_ENDS:
            del self._ends[: MAX_ENDS // 10]
            self.num_dropped += MAX_ENDS // 10
        self._ends.append(end)

    def _draw(self) -> int:
        """Blocks to pass over: each block is followed with probability sample_rate, whatever happened to others."""
        if self._log_missed == 0.0:
            return 0
        # A multiplicative generator; both factors stay below 2 ** 63.
        self._random = self._random * 2862933555777941757 + 3037000493 & 0x7FFFFFFFFFFFFFFF
        uniform = (float(self._random >> 11) + 1.0) / 4503599627370496.0
        return int(log(uniform) / self._log_missed)
