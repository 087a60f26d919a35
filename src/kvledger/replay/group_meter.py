"""GroupMeter: what each KV cache group holds over time, and what it did to the hits."""

from typing import Final

from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.core.ledger.lookups import PrefixCacheStats
from kvledger.plan.view import kind_words
from kvledger.replay.config import ReplayConfig
from kvledger.replay.layout import is_sparse
from kvledger.replay.meters import WeightedSamples
from kvledger.replay.result import GroupResult


class GroupMeter:
    """Samples the groups at moments of equal distance. A look costs as much as there are blocks held, so there are few:
    when there are too many, every second one goes and the distance doubles.
    """

    MAX_SAMPLES: Final = 64

    def __init__(self, config: ReplayConfig, manager: KVCacheManager, interval: float) -> None:
        self._config: Final = config
        self._manager: Final = manager
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
            self._held[0].append(self._manager.occupancy().live)
            self._null[0].append(0)
        else:
            for group_id, occupancy in enumerate(self._manager.group_occupancies()):
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
        for group_id, occupancy in enumerate(self._manager.group_occupancies()):
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
