"""The dashboard: what Grafana needs of the file, and that each of its queries asks for something that is exported."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvledger import BlockResidency
from kvledger.metrics import dashboard_json
from kvledger.metrics.prometheus import MetricsTarget, RequestMetrics, SchedulerMetrics
from tests.engine import Engine

DASHBOARD: dict[str, Any] = json.loads(dashboard_json())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}


def exported(prefix: str) -> dict[str, set[str]]:
    """{sample name: its labels} with everything switched on."""
    target = MetricsTarget(prefix, {"model_name": "m", "engine": "0"})
    engine = Engine(8)
    residency = BlockResidency(lambda: 0.0)
    SchedulerMetrics(target, engine.scheduler, residency=residency, misses=lambda: {"hit": 1})
    RequestMetrics(target, 256)
    return {sample.name: set(sample.labels) for family in target.registry.collect() for sample in family.samples}


def queries() -> list[str]:
    asked = [target["expr"] for panel in PANELS for target in panel["targets"]]
    return asked + [variable["query"]["query"] for variable in VARIABLES.values() if variable["type"] == "query"]


def test_a_panel_has_what_grafana_needs() -> None:
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= DASHBOARD.keys()
    assert len({panel["id"] for panel in PANELS}) == len(PANELS) == 18
    for panel in PANELS:
        assert panel["type"] in ("timeseries", "table")
        assert panel["title"]
        assert panel["targets"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        assert all(target["datasource"]["uid"] == "${datasource}" for target in [panel, *panel["targets"]])


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        covered = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & covered, panel["title"]
        cells |= covered


@pytest.mark.parametrize("prefix", ["kvledger:", "vllm:"])
def test_every_query_asks_for_metrics_and_labels_that_are_exported(prefix: str) -> None:
    assert prefix in VARIABLES["prefix"]["query"].split(",")
    samples = exported(prefix)
    for query in queries():
        names = re.findall(r"\$\{prefix\}(\w+)", query)
        assert names, query
        for name in names:
            assert prefix + name in samples, query
        selected = {label for group in re.findall(r"\{([^}$]*)\}", query) for label in re.findall(r"(\w+)=~", group)}
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
        for name in names:
            assert selected | grouped <= samples[prefix + name], query


def test_legends_show_labels_that_the_query_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"] or f"{label}=~" in target["expr"], panel["title"]


def test_every_variable_that_is_used_exists() -> None:
    text = "\n".join(queries()) + json.dumps([panel["datasource"] for panel in PANELS])
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval"}
    assert used == VARIABLES.keys()


def test_brackets_close() -> None:
    for query in queries():
        for opening, closing in ("()", "[]", "{}"):
            assert query.count(opening) == query.count(closing), query


def test_every_metric_is_in_the_guide() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text("utf-8")
    names = {
        re.sub("_(bucket|sum|count|created)$", "", name.removeprefix("kvledger:")) for name in exported("kvledger:")
    }
    assert {name for name in names if f"`{name}`" not in guide and f"`{name}_total`" not in guide} == set()
