"""MetricsTarget: where metrics go, and what stands before their names and in their labels."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvledger.errors import wrong_value
from kvledger.metrics.families import MetricFamilies

DEFAULT_PREFIX: Final = "kvledger:"
# Labels that the metrics themselves have.
_OWN_LABELS: Final = ("reason", "state", "holder", "cause", "group", "finished_reason", "le")


def _no_labels() -> Mapping[str, str]:
    return {"model_name": "", "engine": "0"}


@dataclass(frozen=True)
class MetricsTarget:
    """`prefix`: "vllm:" makes dashboards for vLLM work. `labels` stand on every metric, vLLM's own two by default.

    `registry`: one of its own unless given, so that nothing of the process is exported with it. It can have the metrics
    of one target and of those that are beside it: one for each engine of the process.
    """

    prefix: str = DEFAULT_PREFIX
    labels: Mapping[str, str] = field(default_factory=_no_labels)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    # What stands in the registry already, of this target and those beside it.
    families: MetricFamilies = field(default_factory=MetricFamilies, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.prefix, str):
            raise wrong_value("prefix", self.prefix, "not a text", "give a str; '' for names without a prefix")
        if not isinstance(self.labels, Mapping):
            raise wrong_value("labels", self.labels, "no labels", "give a dict of texts; {} for none")
        if not isinstance(self.registry, CollectorRegistry):
            raise wrong_value("registry", self.registry, "no registry", "give a prometheus_client.CollectorRegistry")
        if not re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?", self.prefix):
            raise wrong_value("prefix", self.prefix, "no metric name can begin so", "give letters, digits, _ and :")
        require_labels("labels", self.labels, taken=_OWN_LABELS)

    @property
    def label_names(self) -> list[str]:
        return list(self.labels)

    @property
    def label_values(self) -> list[str]:
        return list(self.labels.values())

    def name(self, name: str) -> str:
        """The full name of a metric."""
        return self.prefix + name

    def beside(self, **labels: str) -> "MetricsTarget":
        """A target for one more engine in the same registry: the same metrics, with other values of these labels."""
        for name, value in labels.items():
            if name not in self.labels:
                raise wrong_value(name, value, "no label of these metrics", f"use one of {self.label_names}")
        target = MetricsTarget(self.prefix, {**self.labels, **labels}, self.registry)
        object.__setattr__(target, "families", self.families)
        return target

    def counter(self, name: str, text: str, **more: str) -> Counter:
        """A registered counter with these labels, and `more` of them."""
        labels = {**self.labels, **more}
        return self.families.counter(self.registry, self.name(name), text, labels)

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        """A registered histogram with these labels. `buckets`: upper bounds, growing."""
        return self.families.histogram(self.registry, self.name(name), text, self.labels, buckets)


def require_labels(field: str, labels: Mapping[str, str], taken: Collection[str]) -> None:
    """ConfigError for labels that would show only when somebody scrapes. `taken`: names that mean something else."""
    for name, value in labels.items():
        if name in taken:
            raise wrong_value(field, {name: value}, "the metrics have that label already", "name it otherwise")
        if not re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name):
            raise wrong_value(field, {name: value}, "no name of a label", "give letters, digits and _")
        if not isinstance(value, str):
            raise wrong_value(field, {name: value}, "not a text", "give a str")
