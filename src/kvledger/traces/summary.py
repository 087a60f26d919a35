"""What is in a trace: counts, lengths, times, sessions, and how much of it a prefix cache could serve."""

import math
from collections.abc import Iterator
from typing import Final

import msgspec

from kvledger.core.watch.hit_curve import HitCurve
from kvledger.metrics.samples import Percentiles, WeightedSamples
from kvledger.traces.answers import AnswerCeiling
from kvledger.traces.trace_request import TraceRequest

# Shares of the ceiling for which the smallest pool is given.
_SHARES: Final = (0.25, 0.5, 0.75, 0.9, 1.0)


class PoolPoint(msgspec.Struct):
    """The smallest pool of `num_blocks` blocks that hits that share of the ceiling, and its hit rate over tokens."""

    share: float
    num_blocks: int
    num_tokens: int
    token_hit_rate: float


class Sharing(msgspec.Struct):
    """What equal ids allow, in blocks of `block_size` tokens and an endless pool, requests one after another.

    `ceiling`: hit tokens over prompt tokens; `ceiling_within_sessions`: if sessions shared nothing with each other,
    None for a trace without sessions. `ceiling_with_answers`: if answers that come back in prompts are hits too, as
    they are in an engine; None for a trace that does not know them. `num_distinct_blocks`: full blocks of different
    content. `pools` is empty where ids are of blocks of several sizes, and where sessions have no common clock: their
    order decides it.
    """

    block_size: int
    ceiling: float
    num_hit_tokens: int
    ceiling_within_sessions: float | None
    ceiling_with_answers: float | None
    num_distinct_blocks: int
    num_duplicates: int
    pools: list[PoolPoint]


class TrafficTimeline(msgspec.Struct):
    """Intervals of equal length in seconds: requests that arrived in each, and their tokens."""

    interval: float
    requests: list[int]
    prompt_tokens: list[int]
    output_tokens: list[int]


class TraceSummary(msgspec.Struct):
    """Times are None where the trace has no common clock. `gap_variation`: standard deviation of the seconds between
    arrivals over their mean; 1 as of a Poisson process, more in bursts. `peak_requests_per_second`: in the busiest
    interval of the timeline."""

    trace: str
    format: str
    block_size: int
    clock: str
    num_requests: int
    num_bad_lines: int
    num_sessions: int
    num_scopes: int
    num_prompt_tokens: int
    num_output_tokens: int
    prompt_tokens: Percentiles | None
    output_tokens: Percentiles | None
    requests_per_session: Percentiles | None
    think_seconds: Percentiles | None
    seconds: float | None
    requests_per_second: float | None
    peak_requests_per_second: float | None
    gap_variation: float | None
    sharing: Sharing | None
    timeline: TrafficTimeline | None
    notes: list[str]


class Summarizer:
    """Looks at requests as they pass. Its memory grows with distinct content and sessions, and with requests that have
    ids."""

    def __init__(self, block_size: int, *, has_clock: bool, has_sessions: bool, knows_answers: bool = False) -> None:
        self._block_size: Final = block_size
        self._has_clock: Final = has_clock
        self._has_sessions: Final = has_sessions
        self._prompts: Final = WeightedSamples()
        self._outputs: Final = WeightedSamples()
        self._thinks: Final = WeightedSamples()
        self._num_requests: int = 0
        self._num_prompt_tokens: int = 0
        self._num_output_tokens: int = 0
        self._sessions: Final[dict[int, int]] = {}
        self._num_alone: int = 0
        self._scopes: Final[set[int]] = set()
        # Tokens of an id -> the curve; and the same with every session in a scope of its own.
        self._curves: Final[dict[int, HitCurve]] = {}
        self._alone: Final[dict[int, HitCurve]] = {}
        self._has_ids: bool = False
        self._answers: Final = AnswerCeiling(block_size) if knows_answers else None
        self._last_time: float = 0.0
        self._first_time: float | None = None
        self._gaps: Final = _Moments()
        self._timeline: Final = _Buckets()

    def watch(self, requests: Iterator[tuple[float, TraceRequest]]) -> Iterator[tuple[float, TraceRequest]]:
        """Passes them on."""
        for time, request in requests:
            self._add(time, request)
            yield time, request

    def summary(self, trace: str, format_name: str, block_size: int, num_bad: int, notes: list[str]) -> TraceSummary:
        """`block_size`: tokens of an id."""
        first = self._first_time
        seconds = None if first is None else self._last_time - first
        rate = self._num_requests / seconds if seconds else None
        timeline = self._timeline.timeline() if first is not None and seconds else None
        sessions = WeightedSamples([float(number) for number in self._sessions.values()], [1.0] * len(self._sessions))
        return TraceSummary(
            trace,
            format_name,
            block_size,
            "trace" if self._has_clock else "session",
            self._num_requests,
            num_bad,
            len(self._sessions),
            len(self._scopes),
            self._num_prompt_tokens,
            self._num_output_tokens,
            self._prompts.percentiles(),
            self._outputs.percentiles(),
            sessions.percentiles(),
            self._thinks.percentiles(),
            seconds,
            rate,
            max(timeline.requests) / timeline.interval if timeline else None,
            self._gaps.variation() if seconds else None,
            self._sharing() if self._has_ids else None,
            timeline,
            notes,
        )

    def _add(self, time: float, request: TraceRequest) -> None:
        num_prompt, num_output = request.num_prompt_tokens, request.num_output_tokens
        self._num_requests += 1
        self._num_prompt_tokens += num_prompt
        self._num_output_tokens += num_output
        self._prompts.add(num_prompt)
        self._outputs.add(num_output)
        session = request.session
        if self._has_sessions:
            if session > 0:
                before = self._sessions.get(session, 0)
                self._sessions[session] = before + 1
                if before:
                    self._thinks.add(request.think_time)
            else:
                self._num_alone += 1
        if self._has_clock:
            if self._first_time is None:
                self._first_time = time
            else:
                self._gaps.add(time - self._last_time)
            self._last_time = time
            self._timeline.add(time - self._first_time, num_prompt, num_output)
        self._add_ids(request, session if session > 0 else -self._num_alone)

    def _add_ids(self, request: TraceRequest, session: int) -> None:
        size = request.block_size or self._block_size
        if request.hash_ids:
            self._has_ids = True
            self._scopes.add(request.scope)
        elif not self._has_ids and not self._curves:
            # Nothing is to be remembered of a trace without ids; requests without them take up room in one with.
            return
        curve = self._curves.get(size)
        if curve is None:
            curve = self._curves[size] = HitCurve(self._block_size, size)
            self._alone[size] = HitCurve(self._block_size, size)
        if self._answers is not None:
            self._answers.add(request)
        curve.add(request.num_prompt_tokens, request.hash_ids, request.scope)
        if self._has_sessions:
            self._alone[size].add(request.num_prompt_tokens, request.hash_ids, self._own_scope(session, request.scope))

    def _own_scope(self, session: int, scope: int) -> int:
        """One scope for each session in each scope."""
        return hash((session, scope))

    def _sharing(self) -> Sharing:
        hits = sum(_most(curve) for curve in self._curves.values())
        alone = sum(_most(curve) for curve in self._alone.values())
        answers, total = self._answers, self._num_prompt_tokens
        return Sharing(
            self._block_size,
            hits / total,
            hits,
            alone / total if self._has_sessions else None,
            answers.num_hit_tokens / total if answers is not None and answers.has_answers else None,
            sum(curve.num_distinct_blocks for curve in self._curves.values()),
            sum(curve.num_duplicates for curve in self._curves.values()),
            self._pools(hits),
        )

    def _pools(self, num_hits: int) -> list[PoolPoint]:
        if len(self._curves) > 1 or num_hits == 0 or not self._has_clock:
            return []
        (curve,) = self._curves.values()
        points: list[PoolPoint] = []
        for share in _SHARES:
            num_blocks = max(curve.smallest_pool(share), curve.num_blocks_of_longest + 1)
            num_tokens = curve.num_hit_tokens(num_blocks)
            if points and points[-1].num_blocks == num_blocks:
                # The longest prompt alone needs so many.
                points.pop()
            points.append(PoolPoint(share, num_blocks, num_tokens, num_tokens / self._num_prompt_tokens))
        return points


def _most(curve: HitCurve) -> int:
    """Hit tokens of an endless pool."""
    return curve.num_hit_tokens(curve.num_blocks_of_ceiling)


class _Moments:
    """Mean and variance of numbers that pass (Welford)."""

    def __init__(self) -> None:
        self._count: int = 0
        self._mean: float = 0.0
        self._squares: float = 0.0

    def add(self, value: float) -> None:
        self._count += 1
        delta = value - self._mean
        self._mean += delta / self._count
        self._squares += delta * (value - self._mean)

    def variation(self) -> float | None:
        """Standard deviation over mean; None without a mean."""
        return math.sqrt(self._squares / self._count) / self._mean if self._mean > 0 else None


class _Buckets:
    """Sums over intervals of equal length; when there are too many, every two become one."""

    MAX_INTERVALS: Final = 240

    def __init__(self) -> None:
        self._interval: float = 0.25
        self._sums: list[list[int]] = []

    def add(self, time: float, num_prompt: int, num_output: int) -> None:
        while time >= self._interval * self.MAX_INTERVALS:
            self._halve()
        index = int(time / self._interval)
        sums = self._sums
        while len(sums) <= index:
            sums.append([0, 0, 0])
        row = sums[index]
        row[0] += 1
        row[1] += num_prompt
        row[2] += num_output

    def timeline(self) -> TrafficTimeline:
        requests, prompts, outputs = ([row[column] for row in self._sums] for column in range(3))
        return TrafficTimeline(self._interval, requests, prompts, outputs)

    def _halve(self) -> None:
        sums = self._sums
        if len(sums) % 2:
            sums.append([0, 0, 0])
        self._sums = [
            [a + b for a, b in zip(first, second, strict=True)]
            for first, second in zip(sums[::2], sums[1::2], strict=True)
        ]
        self._interval *= 2
