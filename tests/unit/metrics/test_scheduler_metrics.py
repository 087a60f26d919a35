"""What a scrape shows, against runs counted by hand. N usable blocks of 4 tokens."""

import urllib.request
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvledger import BlockResidency
from kvledger.errors import ConfigError
from kvledger.metrics import IntervalLog
from kvledger.metrics.prometheus import MetricsTarget, RequestMetrics, SchedulerMetrics, serve_metrics
from kvledger.scheduler import ExternalHit, RequestAccounting, Scheduler, SchedulerConfig, WaitReason
from tests.engine import Engine
from tests.helpers import admit, leave, ledger, other, request


class Watched:
    """An engine with metrics that take a snapshot in every step."""

    def __init__(self, usable: int, prefix: str = "kvledger:", **options: Any) -> None:
        self.engine = Engine(usable, **options)
        self.target = MetricsTarget(prefix, {"engine": "0"})
        self.metrics = SchedulerMetrics(self.target, self.engine.scheduler, interval=0.0)

    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.metrics.step(self.engine.step())

    def value(self, name: str, **labels: str) -> float | None:
        return self.target.registry.get_sample_value(self.target.name(name), {"engine": "0", **labels})

    def values(self, name: str, label: str) -> dict[str, float]:
        """{value of that label: sample}, without zeros."""
        return {
            sample.labels[label]: sample.value
            for family in self.target.registry.collect()
            for sample in family.samples
            if sample.name == self.target.name(name) and sample.value
        }


def test_b17_three_gauges_sum_to_the_pool_and_usage_is_a_share() -> None:
    watched = Watched(20)
    watched.engine.add("a", 12, max_tokens=1)
    watched.engine.add("b", other(10, 2), max_tokens=9)
    watched.steps(2)
    # a has ended and leaves 3 cached blocks; b holds 3 for its 11 tokens.
    assert watched.values("kv_cache_blocks", "state") == {"live": 3, "cached": 3, "unused": 14}
    assert watched.value("kv_cache_usage_perc") == pytest.approx(3 / 20)


def test_requests_by_state_and_by_reason() -> None:
    watched = Watched(20, max_num_seqs=2)
    watched.engine.source.offers["loading"] = ExternalHit(4, asynchronous=True)
    watched.engine.add("loading", 8)
    for family, name in enumerate("abc"):
        watched.engine.add(name, other(4, family + 1))
    watched.steps(1)
    assert (watched.value("num_requests_running"), watched.value("num_requests_waiting")) == (2, 2)
    assert watched.values("num_requests_waiting_by_reason", "reason") == {"capacity": 1, "deferred": 1}
    waiting = watched.values("num_requests_without_tokens", "reason")
    assert waiting == {"external_load": 1, "max_num_seqs": 1}
    assert watched.value("num_requests_without_tokens", reason="blocks") == 0


def test_every_reason_that_a_step_can_have_has_a_series_from_the_start() -> None:
    watched = Watched(8)
    without = {
        reason
        for reason in WaitReason
        if watched.value("num_requests_without_tokens", reason=reason.name.lower()) is None
    }
    assert without == {WaitReason.OUTPUT_IN_FLIGHT, WaitReason.NEVER_FITS}


def test_lookups_count_once_and_those_of_preempted_requests_apart() -> None:
    watched = Watched(4)
    watched.engine.add("a", other(8, 1), max_tokens=3)
    watched.engine.add("b", other(5, 2), max_tokens=3)
    watched.steps(12)
    # b was preempted with its 5 tokens and the one it had sampled, and found its first block again.
    assert watched.value("num_preemptions_total") == 1
    assert (watched.value("prefix_cache_queries_total"), watched.value("prefix_cache_hits_total")) == (13, 0)
    assert watched.value("prefix_cache_preempted_queries_total") == 6
    assert watched.value("prefix_cache_preempted_hits_total") == 4
    assert watched.value("num_scheduled_tokens_total") == 10 + 8


def test_b67_recomputed_tokens_are_no_hits_in_the_metrics_either() -> None:
    watched = Watched(8, max_num_seqs=6)
    for number in range(12):
        watched.engine.add(str(number), other(7, number), max_tokens=10)
    while watched.engine.scheduler.has_unfinished_requests:
        watched.steps(1)
    assert watched.value("prefix_cache_hits_total") == 0
    assert watched.value("prefix_cache_queries_total") == 12 * 7
    hits = watched.value("prefix_cache_preempted_hits_total")
    assert hits is not None
    assert hits > 0


def test_b69_usage_counts_held_blocks_and_the_configuration_says_of_how_many() -> None:
    watched = Watched(19)
    watched.engine.add("a", 17)
    watched.steps(1)
    assert watched.value("kv_cache_usage_perc") == pytest.approx(5 / 19)
    info = {"block_size": "4", "num_gpu_blocks": "20", "enable_prefix_caching": "True"}
    assert watched.value("cache_config_info", **info, kv_cache_groups="FullAttentionSpec") == 1


def test_counts_survive_somebody_else_who_takes_the_statistics() -> None:
    watched = Watched(20)
    for name in "ab":
        watched.engine.add(name, 9, max_tokens=1)
        watched.steps(1)
        watched.engine.manager.take_prefix_cache_stats()
    watched.metrics.update()
    assert (watched.value("prefix_cache_queries_total"), watched.value("prefix_cache_hits_total")) == (18, 8)


def test_external_lookups_are_of_what_lies_behind_the_local_hit() -> None:
    watched = Watched(20)
    watched.engine.add("a", 8, max_tokens=1)
    watched.steps(1)
    watched.engine.source.offers["b"] = ExternalHit(5)
    watched.engine.add("b", list(range(8)) + other(8), max_tokens=1)
    watched.steps(1)
    # a asked for 8 tokens and got none; b had 8 here, asked for the other 8, and got 5.
    assert watched.value("external_prefix_cache_queries_total") == 16
    assert watched.value("external_prefix_cache_hits_total") == 5


def test_evictions_by_cause() -> None:
    watched = Watched(4)
    engine = watched.engine
    engine.add("a", other(16, 1), max_tokens=1)
    engine.run()
    engine.add("b", other(5, 2), max_tokens=1)
    engine.run()
    engine.manager.evict_blocks([1])
    engine.manager.reset_prefix_cache()
    watched.metrics.update()
    # b took a's blocks 4 and 3 and cached one of them; a call took block 1's hash; 2 and b's were left for the reset.
    assert watched.values("kv_cache_evictions_total", "cause") == {"reused": 2, "evicted": 1, "reset": 2}


def test_blocks_that_preempting_cannot_free() -> None:
    watched = Watched(20)
    for family, name in enumerate("ab"):
        watched.engine.source.offers[name] = ExternalHit(16, asynchronous=True)
        watched.engine.add(name, other(17, family))
    watched.steps(1)
    assert watched.values("kv_cache_blocks_stuck", "holder") == {"waiting": 8}
    watched.engine.scheduler.abort("a")
    watched.steps(1)
    assert watched.values("kv_cache_blocks_stuck", "holder") == {"waiting": 4, "orphaned_load": 4}


def test_groups() -> None:
    watched = Watched(20)
    watched.engine.add("a", 9)
    watched.engine.add("b", 9)
    watched.steps(1)
    # Two shared blocks, and one of its own for each.
    assert watched.values("kv_cache_group_blocks", "group") == {"0": 4}
    assert watched.values("kv_cache_group_cached_prefixes", "group") == {"0": 2}


def test_misses_come_from_whoever_knows_them() -> None:
    engine = Engine(8)
    target = MetricsTarget(labels={})
    misses = {"hit": 8, "never_seen": 3}
    metrics = SchedulerMetrics(target, engine.scheduler, misses=lambda: misses)
    misses["never_seen"] = 5
    value = target.registry.get_sample_value
    assert value("kvledger:prefix_cache_tokens_total", {"reason": "never_seen"}) == 3
    metrics.update()
    assert value("kvledger:prefix_cache_tokens_total", {"reason": "never_seen"}) == 5


def test_a_snapshot_is_taken_when_the_last_one_is_old() -> None:
    engine = Engine(20)
    now = [100.0]
    target = MetricsTarget(labels={})
    metrics = SchedulerMetrics(target, engine.scheduler, interval=5.0, clock=lambda: now[0])
    engine.add("a", 4)

    def running() -> float | None:
        return target.registry.get_sample_value("kvledger:num_requests_running")

    for seconds, shown in ((104.9, 0), (105.0, 1)):
        now[0] = seconds
        metrics.step(engine.step())
        assert running() == shown


def test_residency_goes_into_three_histograms() -> None:
    now = [0.0]
    residency = BlockResidency(lambda: now[0], sample_rate=1.0)
    manager = ledger(usable=2, observer=residency)
    scheduler = Scheduler(manager, SchedulerConfig())
    target = MetricsTarget(labels={})
    metrics = SchedulerMetrics(target, scheduler, residency=residency)
    for seconds in (0.0, 0.4, 1.0):
        now[0] = seconds
        a = request("a", 8)
        admit(manager, a)
        leave(manager, a)
    now[0] = 7.0
    admit(manager, request("b", other(8)))
    metrics.update()

    def value(name: str, **labels: str) -> float | None:
        return target.registry.get_sample_value(f"kvledger:kv_block_{name}", labels)

    # The first block is handed out at 0, hit at 0.4 and 1.0, and goes to b at 7. The second ends with the prompt, so it
    # is computed every time: handed out at 0, 0.4, 1.0 and 7, which ends three stays.
    assert (value("lifetime_seconds_count"), value("reuse_gap_seconds_count")) == (4, 1)
    assert value("reuse_gap_seconds_sum") == pytest.approx(0.6)
    assert value("lifetime_seconds_bucket", le="10.0") == 4


def test_a_prefix_of_the_users_choice() -> None:
    watched = Watched(8, prefix="vllm:")
    assert watched.target.registry.get_sample_value("vllm:num_requests_running", {"engine": "0"}) == 0
    for prefix in ("9", "a b", "{"):
        with pytest.raises(ConfigError, match=r"prefix=.*: no metric name can begin so"):
            MetricsTarget(prefix)
    with pytest.raises(ConfigError, match=r"^prefix=None: not a text; give a str"):
        MetricsTarget(prefix=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^labels=None: no labels; give a dict"):
        MetricsTarget(labels=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^registry=None: no registry; give"):
        MetricsTarget(registry=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"interval=-1\.0: must not be negative"):
        SchedulerMetrics(MetricsTarget(), watched.engine.scheduler, interval=-1.0)


def test_nothing_of_the_process_is_exported_with_it() -> None:
    watched = Watched(8)
    assert all(family.name.startswith("kvledger:") for family in watched.target.registry.collect())
    assert MetricsTarget().registry is not MetricsTarget().registry


def test_requests_that_ended() -> None:
    target = MetricsTarget(labels={})
    requests = RequestMetrics(target, max_model_len=256)
    manager = ledger(usable=4, max_model_len=256)
    now = [0.0]
    scheduler = Scheduler(
        manager, SchedulerConfig(max_num_seqs=8), None, RequestAccounting(manager, lambda: now[0], requests.finished)
    )
    scheduler.add_request(request("a", other(8, 1), max_tokens=3))
    scheduler.add_request(request("b", other(5, 2), max_tokens=3))
    scheduler.add_request(request("c", other(5, 3)))
    scheduler.abort("c")
    while scheduler.has_unfinished_requests:
        now[0] += 2.0
        output = scheduler.schedule()
        scheduler.update_from_tokens(output, [7] * len(output.request_ids))

    def value(name: str, **labels: str) -> float | None:
        return target.registry.get_sample_value(f"kvledger:{name}", labels)

    assert (
        value("request_success_total", finished_reason="length"),
        value("request_success_total", finished_reason="abort"),
    ) == (2, 1)
    assert (value("request_prompt_tokens_sum"), value("request_generation_tokens_sum")) == (18, 6)
    assert (value("request_num_preemptions_sum"), value("request_recomputed_tokens_sum")) == (1, 1)
    assert (value("request_computed_tokens_total"), value("request_cached_tokens_total")) == (18, 4)
    assert value("request_lost_tokens_total") == 5
    # a waited from 0 to 2; b too, and from the step at 4 that preempted it to the one at 8.
    assert value("request_waiting_seconds_sum") == pytest.approx(2 + 2 + 4)


def test_two_engines_in_one_registry_are_one_family_with_two_children() -> None:
    first = MetricsTarget(labels={"model_name": "m", "engine": "0"})
    targets = [first, first.beside(engine="1")]
    engines = [Engine(20), Engine(20)]
    residencies = [BlockResidency(lambda: 0.0), BlockResidency(lambda: 0.0)]
    requests = [RequestMetrics(target, max_model_len=256) for target in targets]
    metrics = [
        SchedulerMetrics(target, engine.scheduler, residency=residency)
        for target, engine, residency in zip(targets, engines, residencies, strict=True)
    ]
    # Engine 0 makes three steps and engine 1 one, whose request ends.
    engines[0].add("a", other(8, 1), max_tokens=9)
    engines[1].add("b", other(5, 2), max_tokens=1)
    for number in (0, 0, 0, 1):
        metrics[number].step(engines[number].step())
    for each in metrics:
        each.update()
    requests[1].finished(engines[1].accounts["b"])

    text = scrape(first.registry)
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    by_name = {family.name: family for family in families}

    def by_engine(family: str, sample: str) -> dict[str, float]:
        samples = by_name[f"kvledger:{family}"].samples
        return {each.labels["engine"]: each.value for each in samples if each.name == f"kvledger:{sample}"}

    assert by_engine("num_steps", "num_steps_total") == {"0": 3, "1": 1}
    assert by_engine("num_requests_running", "num_requests_running") == {"0": 1, "1": 0}
    assert by_engine("request_prompt_tokens", "request_prompt_tokens_sum") == {"0": 0, "1": 5}
    assert by_engine("kv_block_lifetime_seconds", "kv_block_lifetime_seconds_count") == {"0": 0, "1": 0}
    # Each family stands in one place, under one heading: a scrape of Prometheus insists on it.
    assert text.count("# TYPE kvledger:num_steps_total counter") == 1


def test_one_registry_counts_nothing_twice() -> None:
    target = MetricsTarget(labels={"model_name": "m", "engine": "0"})
    scheduler = Watched(8).engine.scheduler
    SchedulerMetrics(target, scheduler)
    RequestMetrics(target, 256)
    for again in (target, target.beside(model_name="m")):
        with pytest.raises(ConfigError, match=r"^labels=.*'engine': '0'.*already; .*target\.beside\(engine='1'\)"):
            SchedulerMetrics(again, scheduler)
        with pytest.raises(ConfigError, match=r"^labels=.*'engine': '0'.*already; .*target\.beside\(engine='1'\)"):
            RequestMetrics(again, 256)
    # A target that was not made beside the first knows nothing of it, so its families would be there twice.
    stranger = MetricsTarget(labels={"model_name": "m", "engine": "1"}, registry=target.registry)
    with pytest.raises(ConfigError, match=r"^registry='of a scheduler': .* already.*; .*beside\(\)"):
        SchedulerMetrics(stranger, scheduler)
    with pytest.raises(ConfigError, match=r"^registry='kvledger:request_success': .* already.*; .*beside\(\)"):
        RequestMetrics(stranger, 256)
    # With a prefix of its own it is something else.
    SchedulerMetrics(MetricsTarget("mine:", registry=target.registry), scheduler)
    with pytest.raises(ConfigError, match=r"^rank='1': no label of these metrics; use one of"):
        target.beside(rank="1")


def scrape(registry: CollectorRegistry) -> str:
    """As Prometheus asks, which likes OpenMetrics best."""
    server = serve_metrics(registry, 0)
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    asked = urllib.request.Request(f"http://127.0.0.1:{server.server_port}/metrics", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(asked) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            text: str = answer.read().decode()
            return text
    finally:
        server.shutdown()
        server.server_close()


def test_a_scrape_over_http_is_what_prometheus_reads() -> None:
    watched = Watched(20)
    watched.engine.add("a", 9)
    watched.steps(1)
    families = {family.name: family for family in text_string_to_metric_families(scrape(watched.target.registry))}
    assert families["kvledger:kv_cache_blocks"].type == "gauge"
    assert families["kvledger:num_preemptions"].type == "counter"
    assert {sample.labels["state"]: sample.value for sample in families["kvledger:kv_cache_blocks"].samples} == {
        "live": 3,
        "cached": 0,
        "unused": 17,
    }


def test_labels_that_would_spoil_a_scrape_are_refused_at_once() -> None:
    for labels, problem in (
        ({"reason": "x"}, "the metrics have that label already"),
        ({"le": "x"}, "the metrics have that label already"),
        ({"a-b": "x"}, "no name of a label"),
        ({"__name__": "x"}, "no name of a label"),
        ({"engine": 0}, "not a text"),
    ):
        with pytest.raises(ConfigError, match=rf"^labels=.*: {problem}; "):
            MetricsTarget(labels=labels)  # type: ignore[arg-type]
    scheduler = Watched(8).engine.scheduler
    with pytest.raises(ConfigError, match=r"^info=\{'engine': '1'\}: the metrics have that label already"):
        SchedulerMetrics(MetricsTarget(), scheduler, info={"engine": "1"})
    with pytest.raises(ConfigError, match=r"^info=\{'tp': 2\}: not a text"):
        SchedulerMetrics(MetricsTarget(), scheduler, info={"tp": 2})  # type: ignore[dict-item]


def test_an_interval_that_is_no_number() -> None:
    scheduler = Watched(8).engine.scheduler
    with pytest.raises(ConfigError, match="interval=nan"):
        SchedulerMetrics(MetricsTarget(), scheduler, interval=float("nan"))
    with pytest.raises(ConfigError, match="interval=nan"):
        IntervalLog(scheduler, float("nan"), lambda: 0.0)
