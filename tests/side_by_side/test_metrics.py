"""The numbers that vLLM's own Prometheus logger exports, and ours under its prefix, on the same run.

Every step both are brought up to date, at the same moment of one clock that the test moves, and every sample that both
export is compared: requests, usage, preemptions, lookups, hits, and how long blocks stay (all blocks sampled).
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.v1.core import kv_cache_metrics
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats

from kvledger import BlockResidency
from kvledger.metrics.prometheus import MetricsTarget, SchedulerMetrics
from kvledger.scheduler import Scheduler
from tests.side_by_side.layouts import Group, Layout
from tests.side_by_side.ledger_pair import make_ours
from tests.side_by_side.scheduler_pair import Limits, SchedulerPair
from tests.side_by_side.test_scheduler import random_work

COMPARED = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    *(
        f"vllm:kv_block_{name}_seconds_{part}"
        for name in ("lifetime", "idle_before_evict", "reuse_gap")
        for part in ("bucket", "count", "sum")
    ),
}


class Clock:
    """What both sides read: theirs as the time module of kv_cache_metrics."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def seconds(self) -> float:
        return self.now_ns / 1e9


@pytest.fixture
def clock() -> Iterator[Clock]:
    theirs, kv_cache_metrics.time = kv_cache_metrics.time, Clock()
    yield kv_cache_metrics.time
    kv_cache_metrics.time = theirs


class MetricsPair:
    """A SchedulerPair with both sides' metrics."""

    def __init__(self, limits: Limits, directory: str, seed: int, clock: Clock) -> None:
        self.clock = clock
        self.pair = SchedulerPair(limits, directory, seed)
        residency = BlockResidency(clock.seconds, sample_rate=1.0)
        manager = make_ours(
            limits.layout, limits.num_blocks, limits.watermark, limits.max_model_len, observer=residency
        )
        self.pair.ours = Scheduler(manager, self.pair.ours.config)
        theirs = self.pair.theirs
        theirs.kv_metrics_collector = kv_cache_metrics.KVCacheMetricsCollector(sample_rate=1.0)
        theirs.kv_cache_manager.block_pool.metrics_collector = theirs.kv_metrics_collector
        theirs.vllm_config.observability_config.kv_cache_metrics = True
        self.logger = PrometheusStatLogger(theirs.vllm_config, [0])
        labels = {"model_name": theirs.vllm_config.model_config.served_model_name, "engine": "0"}
        self.target = MetricsTarget("vllm:", labels)
        self.metrics = SchedulerMetrics(self.target, self.pair.ours, residency=residency, interval=1e9)
        self.make_stats = theirs.make_stats
        theirs.make_stats = self.record_and_compare
        self.num_compared = 0

    def step(self) -> None:
        self.clock.now_ns += 700_000_000
        self.pair.step()
        preempted = self.pair.in_flight[-1].theirs.preempted_req_ids
        iteration = IterationStats()
        iteration.num_preempted_reqs = len(preempted)
        self.logger.record(None, iteration)

    def record_and_compare(self, *args: Any, **options: Any) -> Any:
        """Within vLLM's update_from_output, when ours is done with the same step."""
        stats = self.make_stats(*args, **options)
        self.logger.record(stats, None)
        self.metrics.update()
        theirs, ours = samples(REGISTRY), samples(self.target.registry)
        assert {name for name, _ in theirs} == {name for name, _ in ours} == COMPARED
        assert theirs.keys() == ours.keys()
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, abs=1e-6), key
        self.num_compared += 1
        return stats


def samples(registry: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name in COMPARED
    }


@pytest.mark.parametrize("seed", range(6))
def test_every_sample_that_both_export_is_equal(seed: int, tmp_path: Path, clock: Clock) -> None:
    rng = random.Random(seed)
    # Few enough blocks for preemptions: a window holds fewer.
    group, num_blocks = (Group("full", 4), 24) if seed % 2 == 0 else (Group("window", 4, window=8), 14)
    limits = Limits(num_blocks=num_blocks, layout=Layout("one", (group,)), max_num_seqs=6)
    both = MetricsPair(limits, str(tmp_path), seed, clock)
    texts = [[rng.randrange(100) for _ in range(40)] for _ in range(3)]
    number = 0
    for _ in range(150):
        while rng.random() < 0.3:
            both.pair.add(random_work(rng, number, limits, texts))
            number += 1
        if rng.random() < 0.02:
            both.pair.reset(preempt_running=False)
        both.step()
    assert both.num_compared > 140
    value = both.target.registry.get_sample_value
    labels = dict(both.target.labels)
    for name in ("kv_block_lifetime_seconds_count", "prefix_cache_hits_total", "num_preemptions_total"):
        found = value(f"vllm:{name}", labels)
        assert found is not None
        assert found > 0, name
