"""Counts of prefix-cache lookups since they were last taken, as vLLM counts them: per admission, in tokens."""

from typing import Final

from kvledger.core.blocks.kv_cache_blocks import PrefixHit
from kvledger.core.record import Record
from kvledger.core.requests.request import Request


class PrefixCacheStats(Record):
    """Lookups of requests that were preempted before are counted apart: finding one's own blocks is no reuse.

    `limited[group]`: lookups that this group kept from being longer; `lost[group]`: tokens behind these hits that the
    other groups had cached and this one had not.
    """

    def __init__(self, num_groups: int = 1) -> None:
        self.requests: int = 0
        self.queries: int = 0  # tokens looked up
        self.hits: int = 0  # tokens found
        self.limited: list[int] = [0] * num_groups
        self.lost: list[int] = [0] * num_groups
        self.preempted_requests: int = 0
        self.preempted_queries: int = 0
        self.preempted_hits: int = 0
        # Lookups beyond the local hits, in an external source.
        self.external_requests: int = 0
        self.external_queries: int = 0
        self.external_hits: int = 0
        self.reset: bool = False  # the cache was reset since

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits

    def record_limit(self, group_id: int, num_lost: int) -> None:
        """The lookup that was recorded last would have found num_lost tokens more, but for that group."""
        self.limited[group_id] += 1
        self.lost[group_id] += num_lost

    def record_external(self, num_tokens: int, num_hits: int) -> None:
        """An external source was asked for num_tokens tokens behind the local hit and has num_hits of them."""
        self.external_requests += 1
        self.external_queries += num_tokens
        self.external_hits += num_hits

    def add(self, other: "PrefixCacheStats") -> None:
        """Counts all that `other` counted."""
        self.requests += other.requests
        self.queries += other.queries
        self.hits += other.hits
        for group_id in range(len(self.limited)):
            self.limited[group_id] += other.limited[group_id]
            self.lost[group_id] += other.lost[group_id]
        self.preempted_requests += other.preempted_requests
        self.preempted_queries += other.preempted_queries
        self.preempted_hits += other.preempted_hits
        self.external_requests += other.external_requests
        self.external_queries += other.external_queries
        self.external_hits += other.external_hits
        self.reset = self.reset or other.reset


class LookupCounter:
    """Counts lookups of one ledger; who takes the counts now and then does not take them from the totals."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups: Final = num_groups
        self._taken: Final = PrefixCacheStats(num_groups)
        self._stats: PrefixCacheStats = PrefixCacheStats(num_groups)

    def record(self, request: Request, num_hit_tokens: int, hit: PrefixHit | None) -> None:
        """Counts one lookup. `hit`: what was found, to count which group limited it."""
        preempted = request.num_preemptions > 0
        self._stats.record(request.num_tokens, num_hit_tokens, preempted)
        if hit is not None and hit.limiting_group >= 0 and not preempted:
            self._stats.record_limit(hit.limiting_group, max(0, hit.limited_end - hit.num_tokens))

    def record_external(self, request: Request, num_local_tokens: int, num_hit_tokens: int) -> None:
        """Counts one lookup in an external source. Those of preempted requests do not count."""
        if request.num_preemptions == 0:
            self._stats.record_external(request.num_tokens - num_local_tokens, num_hit_tokens)

    def record_reset(self) -> None:
        """The cache was reset."""
        self._stats.reset = True

    def take(self) -> PrefixCacheStats:
        """The counts since the last call."""
        stats = self._stats
        self._taken.add(stats)
        self._stats = PrefixCacheStats(self._num_groups)
        return stats

    def totals(self) -> PrefixCacheStats:
        """The counts since the beginning, in a fresh object."""
        totals = PrefixCacheStats(self._num_groups)
        totals.add(self._taken)
        totals.add(self._stats)
        return totals
