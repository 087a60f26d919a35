"""WeightedSamples: means and percentiles of values with weights, in memory that does not grow with their number.

Exact up to EXACT values; what comes beyond goes into a sketch (DDSketch), whose percentiles are within ACCURACY of a
value of that rank. Mean, peak and total weight stay exact up to rounding.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate, compress
from math import ceil, log2
from operator import mul
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from ddsketch import DDSketch

EXACT: Final = 1 << 16
ACCURACY: Final = 0.001
# The sketch counts from 0 to its weight less 1, so a weight is many of its units.
_UNITS: Final = float(1 << 20)
# Buckets of the sketch for each doubling of values; 0.0 has one of its own.
_BUCKETS_PER_OCTAVE: Final = 1.0 / math.log2((1.0 + ACCURACY) / (1.0 - ACCURACY))
_BUCKET_OF_ZERO: Final = -(1 << 40)


class Percentiles(msgspec.Struct):
    """Of values in the unit of what they were made of."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Usage(msgspec.Struct):
    """Share of the usable blocks that requests hold, weighted by simulated time."""

    mean: float
    p95: float
    peak: float


class WeightedSamples:
    """Values with weights: n tokens that each waited so long, or a usage that lasted so long. None is negative."""

    def __init__(self, values: Iterable[float] = (), weights: Iterable[float] = ()) -> None:
        """Starts with these values of these weights."""
        self._values: list[float] = list(values)
        self._weights: list[float] = list(weights)
        # Sums of the weights up to each value, made when the values have been sorted.
        self._sums: list[float] = []
        self._sketch: DDSketch | None = None
        # Of what is in the sketch: sum of weights, of values times weights, and the largest value.
        self._weight: float = 0.0
        self._product: float = 0.0
        self._peak: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        self._values.append(value)
        self._weights.append(weight)
        if self._sums:
            self._sums = []
        if len(self._values) >= EXACT:
            self._fold()

    def add_all(self, values: list[float], weights: list[float]) -> None:
        """add(values[i], weights[i]) for each of them, in order."""
        start = 0
        self._sums = []
        while start < len(values):
            end = start + EXACT - len(self._values)
            self._values += values[start:end]
            self._weights += weights[start:end]
            start = end
            if len(self._values) >= EXACT:
                self._fold()

    @property
    def total_weight(self) -> float:
        self._sort()
        return self._weight + (self._sums[-1] if self._sums else 0.0)

    @property
    def num_held(self) -> int:
        """Values that are in memory one by one."""
        return len(self._values)

    def mean(self) -> float:
        """0.0 without samples, as of every figure here."""
        total = self.total_weight
        return (self._product + math.fsum(map(mul, self._values, self._weights))) / total if total > 0 else 0.0

    def peak(self) -> float:
        return max(self._peak, max(self._values, default=0.0))

    def percentile(self, share: float) -> float:
        """The smallest value such that at least that share of the weight lies at or below it."""
        if self._sketch is not None:
            self._fold()
            found = self._sketch.get_quantile_value(share)
            return min(self._peak, 0.0 if found is None else float(found))
        # A hair less, so that the sum of many weights does not miss the mark by its rounding.
        target = share * self.total_weight * (1.0 - 1e-12)
        index = bisect_left(self._sums, target)
        return self._values[index] if index < len(self._values) else self.peak()

    def percentiles(self) -> Percentiles | None:
        """None without samples."""
        if self.total_weight <= 0:
            return None
        p50, p90, p95, p99 = (self.percentile(share) for share in (0.5, 0.9, 0.95, 0.99))
        return Percentiles(self.mean(), p50, p90, p95, p99, self.peak())

    def usage(self) -> Usage:
        return Usage(self.mean(), self.percentile(0.95), self.peak())

    def _sort(self) -> None:
        """Sorts by value, once after the last sample; values without weight go."""
        if self._sums or not self._values:
            return
        weights = self._weights
        order = sorted(compress(range(len(weights)), weights), key=self._values.__getitem__)
        self._values = [self._values[i] for i in order]
        self._weights = [weights[i] for i in order]
        self._sums = list(accumulate(self._weights))

    def _fold(self) -> None:
        """Moves all values into the sketch. Those of one bucket of it go together, as the first of them."""
        if self._sketch is None:
            from ddsketch import DDSketch

            self._sketch = DDSketch(ACCURACY)
        self._peak = self.peak()
        first: dict[int, float] = {}
        together: dict[int, float] = {}
        for value, weight in zip(self._values, self._weights, strict=True):
            if weight > 0:
                bucket = ceil(log2(value) * _BUCKETS_PER_OCTAVE) if value > 0.0 else _BUCKET_OF_ZERO
                if bucket in together:
                    together[bucket] += weight
                else:
                    first[bucket], together[bucket] = value, weight
        for bucket, weight in together.items():
            self._sketch.add(first[bucket], weight * _UNITS)
        self._product += math.fsum(map(mul, self._values, self._weights))
        self._weight += math.fsum(self._weights)
        self._values, self._weights, self._sums = [], [], []
