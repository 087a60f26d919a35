"""MetricFamilies: the metrics of all engines that share a registry, each name in it once.

    kvledger:num_steps_total{engine="0"} 7.0
    kvledger:num_steps_total{engine="1"} 9.0        one family, a child for each engine

Histograms and counters of requests are prometheus_client's, with a child for each set of label values. What schedulers
show is collected from them, and what has the same name goes into one family.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvledger.errors import ConfigError, wrong_value


class MetricSource(Protocol):
    """One engine's part."""

    def collect(self) -> Iterator[Metric]: ...


class MetricFamilies(Collector):
    """Registers itself and each family once. No family can be given the same label values twice."""

    def __init__(self) -> None:
        self._counters: Final[dict[str, Counter]] = {}
        self._histograms: Final[dict[str, Histogram]] = {}
        # (name, label values) that somebody counts already.
        self._taken: Final[set[tuple[str, tuple[str, ...]]]] = set()
        # Replaced and not changed: a scrape in another thread may be reading it.
        self._sources: tuple[MetricSource, ...] = ()

    def counter(self, registry: CollectorRegistry, name: str, text: str, labels: Mapping[str, str]) -> Counter:
        """A child of that counter."""
        family = self._counters.get(name)
        if family is None:
            try:
                family = Counter(name, text, list(labels), registry=registry)
            except ValueError:
                raise _foreign(name) from None
            self._counters[name] = family
        self.take(name, labels)
        return family.labels(*labels.values()) if labels else family

    def histogram(
        self, registry: CollectorRegistry, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> Histogram:
        """A child of that histogram; all have the bounds of the first."""
        family = self._histograms.get(name)
        if family is None:
            try:
                family = Histogram(name, text, list(labels), registry=registry, buckets=tuple(buckets))
            except ValueError:
                raise _foreign(name) from None
            self._histograms[name] = family
        self.take(name, labels)
        return family.labels(*labels.values()) if labels else family

    def add(self, registry: CollectorRegistry, source: MetricSource) -> None:
        """Collects from that one as well."""
        before = self._sources
        self._sources = (*before, source)
        if before:
            return
        try:
            registry.register(self)
        except ValueError:
            self._sources = ()
            raise _foreign("of a scheduler") from None

    def take(self, name: str, labels: Mapping[str, str]) -> None:
        """ConfigError when somebody counts that under these label values already."""
        key = (name, tuple(labels.values()))
        if key in self._taken:
            fix = "give every engine a target of its own: target.beside(engine='1')"
            raise wrong_value("labels", dict(labels), f"these are counted in {name} already", fix)
        self._taken.add(key)

    def describe(self) -> Iterator[Metric]:
        """Tells the registry which names are taken."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Each family once, with the samples of all engines."""
        families: dict[str, Metric] = {}
        for source in self._sources:
            for family in source.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        yield from families.values()


def _foreign(name: str) -> ConfigError:
    """The registry has metrics that this target knows nothing of."""
    problem = "the registry has metrics of that name already, of another target or another library"
    return wrong_value("registry", name, problem, "make one target and the others with its beside(), or another prefix")
