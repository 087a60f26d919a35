"""SchedulerMetrics: the gauges, counters and residency histograms of one scheduler and its ledger.

    target = MetricsTarget(prefix="vllm:", labels={"model_name": "llama", "engine": "0"})
    metrics = SchedulerMetrics(target, scheduler)
    serve_metrics(target.registry, 9100)
    output = scheduler.schedule()
    metrics.step(output)                                   # once a step, by the thread that owns the scheduler

Names and meanings are vLLM's where vLLM has the metric. docs/metrics.md lists all of them.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvledger.core.blocks.observer import EvictionCause
from kvledger.core.watch.block_residency import BlockResidency
from kvledger.errors import wrong_value
from kvledger.metrics.buckets import RESIDENCY_SECONDS
from kvledger.metrics.snapshot import Snapshot, WatchedScheduler
from kvledger.metrics.target import MetricsTarget, require_labels
from kvledger.scheduler import SchedulerOutput, WaitReason

# What vLLM calls deferred: the pass looked at them and went on with the next.
_DEFERRED: Final = (WaitReason.EXTERNAL_LOAD, WaitReason.EXTERNAL_LOOKUP, WaitReason.STALE_OUTPUT)
# Those that a step has by the time of a snapshot: the others are about one request that somebody asks about.
_COUNTED: Final = tuple(
    reason for reason in WaitReason if reason not in (WaitReason.OUTPUT_IN_FLIGHT, WaitReason.NEVER_FITS)
)


class _Residency:
    """The three histograms of sampled block stays."""

    def __init__(self, target: MetricsTarget, residency: BlockResidency) -> None:
        self._residency: Final = residency
        self._lifetime: Final = target.histogram(
            "kv_block_lifetime_seconds", "Time from a block's allocation to its eviction, sampled.", RESIDENCY_SECONDS
        )
        self._idle: Final = target.histogram(
            "kv_block_idle_before_evict_seconds",
            "Time from a block's last use to its eviction, sampled.",
            RESIDENCY_SECONDS,
        )
        self._reuse_gap: Final = target.histogram(
            "kv_block_reuse_gap_seconds",
            "Time between hits of a block, its last four only, sampled.",
            RESIDENCY_SECONDS,
        )

    def update(self) -> None:
        for stay in self._residency.take_ends():
            self._lifetime.observe(stay.lifetime)
            self._idle.observe(stay.idle)
            for gap in stay.reuse_gaps:
                self._reuse_gap.observe(gap)


class SchedulerMetrics:
    """Registers itself with the target's registry. For each scheduler one, with a target of its own.

    `residency`: the manager's, for its three histograms. `misses`: prompt tokens by reason up to now, such as
    `lambda: misses.new.split.as_dict()`. `info`: more labels for cache_config_info. `interval`: seconds of
    `clock` between two snapshots; step() costs next to nothing in between.
    """

    def __init__(
        self,
        target: MetricsTarget,
        scheduler: WatchedScheduler,
        *,
        residency: BlockResidency | None = None,
        misses: Callable[[], Mapping[str, int]] | None = None,
        info: Mapping[str, str] | None = None,
        interval: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Written so that a NaN is refused as well.
        if not interval >= 0.0:
            raise wrong_value("interval", interval, "must not be negative", "give 0 for a snapshot every step")
        require_labels("info", info or {}, taken=target.label_names)
        target.families.take(target.name("num_requests_running"), target.labels)
        self._target: Final = target
        self._scheduler: Final = scheduler
        self._residency: Final = None if residency is None else _Residency(target, residency)
        self._misses: Final = misses
        self._info: Final = {**_cache_config(scheduler), **(info or {})}
        self._interval: Final = interval
        self._clock: Final = clock
        self._num_scheduled_tokens: int = 0
        self._next_time: float = 0.0
        self._snapshot: Snapshot
        self.update()
        target.families.add(target.registry, self)

    def step(self, output: SchedulerOutput) -> None:
        """Counts the step that schedule() just put together, and takes a snapshot when the last one is old."""
        self._num_scheduled_tokens += output.total_num_scheduled_tokens
        if self.is_due():
            self.update()

    def is_due(self) -> bool:
        """Whether the last snapshot is old."""
        return self._clock() >= self._next_time

    def update(self) -> None:
        """Takes a snapshot now. For the thread that owns the scheduler."""
        misses = {} if self._misses is None else self._misses()
        self._snapshot = Snapshot.of(self._scheduler, self._num_scheduled_tokens, misses)
        if self._residency is not None:
            self._residency.update()
        self._next_time = self._clock() + self._interval

    def collect(self) -> Iterator[Metric]:
        """All families, from the last snapshot. Called by scrapes, in any thread."""
        snapshot = self._snapshot
        yield from self._requests(snapshot)
        yield from self._blocks(snapshot)
        yield from self._groups(snapshot)
        yield from self._prefix_cache(snapshot)
        yield self._cache_config_info()

    def _requests(self, now: Snapshot) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests that run.", now.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait.", now.num_waiting)
        # The waits are those of the last step; some may have ended since.
        num_deferred = min(now.num_waiting, sum(now.waits.get(reason, 0) for reason in _DEFERRED))
        by_reason = {"capacity": now.num_waiting - num_deferred, "deferred": num_deferred}
        text = "Requests that wait for capacity, or for something else (a load, an external source, stale output)."
        yield self._gauges("num_requests_waiting_by_reason", text, "reason", by_reason)
        by_reason = {reason.name.lower(): now.waits.get(reason, 0) for reason in _COUNTED}
        text = "Requests that the last step gave no tokens, running ones included, by Scheduler.explain's reasons."
        yield self._gauges("num_requests_without_tokens", text, "reason", by_reason)
        yield self._counter("num_preemptions", "Preemptions.", now.num_preemptions)
        yield self._counter("num_steps", "Steps scheduled.", now.num_steps)
        yield self._counter("num_scheduled_tokens", "Tokens scheduled.", now.num_scheduled_tokens)

    def _blocks(self, now: Snapshot) -> Iterator[Metric]:
        yield self._gauge("kv_cache_usage_perc", "Share of the blocks that requests hold; 1 means all.", now.usage)
        states = {"live": now.occupancy.live, "cached": now.occupancy.cached, "unused": now.occupancy.unused}
        text = "Blocks held by requests, free and serving hits, free and carrying nothing. They sum to the pool."
        yield self._gauges("kv_cache_blocks", text, "state", states)
        holders = {"waiting": now.num_blocks_held_by_waiting, "orphaned_load": now.num_blocks_held_by_orphans}
        text = "Blocks held by requests that do not run and cannot be preempted."
        yield self._gauges("kv_cache_blocks_stuck", text, "holder", holders)
        causes = {cause.name.lower(): now.evictions[cause] for cause in EvictionCause}
        yield self._counters("kv_cache_evictions", "Blocks that lost their cached content.", "cause", causes)

    def _groups(self, now: Snapshot) -> Iterator[Metric]:
        held = {str(group_id): group.num_held for group_id, group in enumerate(now.groups)}
        yield self._gauges("kv_cache_group_blocks", "Blocks that requests hold, shared ones once.", "group", held)
        null = {str(group_id): group.num_null for group_id, group in enumerate(now.groups)}
        text = "Entries of requests' tables without a block, because their tokens are read no more."
        yield self._gauges("kv_cache_group_null_entries", text, "group", null)
        cached = {str(group_id): group.num_cached for group_id, group in enumerate(now.groups)}
        yield self._gauges("kv_cache_group_cached_prefixes", "Prefixes that can be hit.", "group", cached)

    def _prefix_cache(self, now: Snapshot) -> Iterator[Metric]:
        stats = now.prefix_cache
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.queries)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", stats.hits)
        text = "Tokens looked up again by preempted requests; no part of prefix_cache_queries."
        yield self._counter("prefix_cache_preempted_queries", text, stats.preempted_queries)
        text = "Tokens that preempted requests found again; no part of prefix_cache_hits."
        yield self._counter("prefix_cache_preempted_hits", text, stats.preempted_hits)
        text = "Tokens behind local hits that an external source was asked for."
        yield self._counter("external_prefix_cache_queries", text, stats.external_queries)
        yield self._counter("external_prefix_cache_hits", "Tokens that it had.", stats.external_hits)
        limited = {str(group_id): number for group_id, number in enumerate(stats.limited)}
        yield self._counters("prefix_cache_limited_lookups", "Hits that this group kept short.", "group", limited)
        lost = {str(group_id): number for group_id, number in enumerate(stats.lost)}
        yield self._counters("prefix_cache_limited_tokens", "Tokens lost by that.", "group", lost)
        if self._misses is not None:
            text = "Prompt tokens by where they came from, or why they missed."
            yield self._counters("prefix_cache_tokens", text, "reason", now.misses)

    def _cache_config_info(self) -> Metric:
        labels = {**self._target.labels, **self._info}
        text = "Configuration of the KV cache, in labels; the value is 1."
        family = GaugeMetricFamily(self._target.name("cache_config_info"), text, labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._target.name(name), text, labels=self._target.label_names)
        family.add_metric(self._target.label_values, value)
        return family

    def _gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(self._target.name(name), text, labels=[*self._target.label_names, label])
        for key, value in values.items():
            family.add_metric([*self._target.label_values, key], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(self._target.name(name), text, labels=self._target.label_names)
        family.add_metric(self._target.label_values, value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(self._target.name(name), text, labels=[*self._target.label_names, label])
        for key, value in values.items():
            family.add_metric([*self._target.label_values, key], value)
        return family


def _cache_config(scheduler: WatchedScheduler) -> dict[str, str]:
    """What the ledger knows of vLLM's CacheConfig, under its names; lists of groups have commas."""
    manager = scheduler.manager
    groups = manager.config.groups
    return {
        "block_size": ",".join(str(group.spec.block_size) for group in groups),
        "num_gpu_blocks": str(manager.config.num_blocks),
        "enable_prefix_caching": str(manager.enable_caching),
        "kv_cache_groups": ",".join(type(group.spec).__name__ for group in groups),
    }
