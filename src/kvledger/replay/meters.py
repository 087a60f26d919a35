"""Meters: what a replay measures while it runs, kept small and turned into results at the end."""

from typing import Final

from kvledger.core.blocks.block_pool import PoolOccupancy
from kvledger.core.ledger.lookups import PrefixCacheStats
from kvledger.metrics.samples import WeightedSamples
from kvledger.plan.view import kind_words
from kvledger.replay.config import ReplayConfig
from kvledger.replay.layout import is_sparse
from kvledger.replay.ledger import ReplayLedger
from kvledger.replay.result import GroupResult, Shares, Timeline, WaitTime
from kvledger.scheduler import WaitReason


class TimelineMeter:
    """What happened in each of many intervals of equal length: peaks of two counts, and the pool at the end.

    When there are too many intervals, every two become one. The driver raises the peaks itself, because it does so in
    every step, and calls close_intervals when `next_time` has come.
    """

    MAX_INTERVALS: Final = 240

    def __init__(self, interval: float, num_usable_blocks: int) -> None:
        self._interval: float = interval
        self._num_usable_blocks: Final = num_usable_blocks
        self._running: list[int] = []
        self._waiting: list[int] = []
        self._occupancy: list[PoolOccupancy] = []
        # End of the interval that is open, and the peaks in it so far.
        self.next_time: float = interval
        self.peak_running: int = 0
        self.peak_waiting: int = 0

    def close_intervals(self, now: float, occupancy: PoolOccupancy) -> None:
        """Closes every interval that is over. What lies within one step counts for all intervals that it spans."""
        while self.next_time <= now:
            self._close(occupancy)
        self.peak_running = 0
        self.peak_waiting = 0

    def end(self, occupancy: PoolOccupancy) -> None:
        """Closes the last interval, of which only a part has passed."""
        self._close(occupancy)

    def timeline(self) -> Timeline:
        num_usable = self._num_usable_blocks
        live = [occupancy.live / num_usable for occupancy in self._occupancy]
        cached = [occupancy.cached / num_usable for occupancy in self._occupancy]
        return Timeline(self._interval, self._running, self._waiting, live, cached)

    def shares(self) -> Shares:
        """Mean of the pool at the ends of the intervals."""
        total = max(1, len(self._occupancy)) * self._num_usable_blocks
        live = sum(occupancy.live for occupancy in self._occupancy) / total
        cached = sum(occupancy.cached for occupancy in self._occupancy) / total
        return Shares(live, cached, 1.0 - live - cached)

    def _close(self, occupancy: PoolOccupancy) -> None:
        self._running.append(self.peak_running)
        self._waiting.append(self.peak_waiting)
        self._occupancy.append(occupancy)
        if len(self._running) == self.MAX_INTERVALS:
            self._running = [max(pair) for pair in zip(self._running[::2], self._running[1::2], strict=True)]
            self._waiting = [max(pair) for pair in zip(self._waiting[::2], self._waiting[1::2], strict=True)]
            self._occupancy = self._occupancy[1::2]
            self._interval *= 2
        self.next_time = (len(self._running) + 1) * self._interval


class WaitMeter:
    """Sums up Scheduler.wait_counts. The driver leaves out steps in which nobody waits."""

    def __init__(self) -> None:
        self._seconds: Final[dict[WaitReason, float]] = {}
        self._steps: Final[dict[WaitReason, int]] = {}

    def add(self, counts: dict[WaitReason, int], seconds: float) -> None:
        """A step that took so long gave these requests nothing."""
        for reason, number in counts.items():
            self._seconds[reason] = self._seconds.get(reason, 0.0) + number * seconds
            self._steps[reason] = self._steps.get(reason, 0) + number

    def add_all(self, counts: dict[WaitReason, int], seconds: list[float]) -> None:
        """add(counts, seconds[i]) for each of them."""
        for reason, number in counts.items():
            total = self._seconds.get(reason, 0.0)
            for each in seconds:
                # One by one: their sum first would round otherwise.
                total += number * each
            self._seconds[reason] = total
            self._steps[reason] = self._steps.get(reason, 0) + number * len(seconds)

    def times(self) -> list[WaitTime]:
        """The costliest reason first; only those that occurred."""
        order = sorted(self._steps, key=lambda reason: (-self._seconds[reason], -self._steps[reason]))
        return [
            WaitTime(reason.name.lower(), reason.value, self._seconds[reason], self._steps[reason]) for reason in order
        ]


class GroupMeter:
    """Samples the groups at moments of equal distance. A look costs as much as there are blocks held, so there are few:
    when there are too many, every second one goes and the distance doubles.
    """

    MAX_SAMPLES: Final = 64

    def __init__(self, config: ReplayConfig, ledger: ReplayLedger, interval: float) -> None:
        self._config: Final = config
        self._ledger: Final = ledger
        self._interval: float = interval
        groups = config.layout.groups
        # One group that keeps everything holds what the pool has lent.
        self._is_plain: Final = len(groups) == 1 and not is_sparse(groups[0].spec)
        self._held: Final[list[list[int]]] = [[] for _ in groups]
        self._null: Final[list[list[int]]] = [[] for _ in groups]
        self.next_time: float = interval

    def sample(self, now: float) -> None:
        """Looks at the groups. To be called when `next_time` has come."""
        if self._is_plain:
            self._held[0].append(self._ledger.occupancy().live)
            self._null[0].append(0)
        else:
            for group_id, occupancy in enumerate(self._ledger.group_occupancies()):
                self._held[group_id].append(occupancy.num_held)
                self._null[group_id].append(occupancy.num_null)
        if len(self._held[0]) == self.MAX_SAMPLES:
            for samples in (*self._held, *self._null):
                del samples[::2]
            self._interval *= 2
        self.next_time = now - now % self._interval + self._interval

    def results(self, stats: PrefixCacheStats) -> list[GroupResult]:
        """One entry for each group."""
        layout = self._config.layout
        results: list[GroupResult] = []
        for group_id, occupancy in enumerate(self._ledger.group_occupancies()):
            group = layout.groups[group_id]
            num_null = self._null[group_id]
            results.append(
                GroupResult(
                    kind=kind_words(group.spec),
                    block_size=self._config.group_block_sizes[group_id],
                    num_layers=len(group.layer_names),
                    bytes_per_block=layout.group_bytes[group_id],
                    held_blocks=WeightedSamples(self._held[group_id], [1.0] * len(num_null)).usage(),
                    null_entries=sum(num_null) / max(1, len(num_null)),
                    num_cached_blocks=occupancy.num_cached,
                    num_limited_hits=stats.limited[group_id],
                    num_lost_tokens=stats.lost[group_id],
                )
            )
        return results
