"""What a real server did with some traffic, from what it leaves behind: its metrics, its log, or a recording."""

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Final

import msgspec

from kvledger.errors import wrong_value
from kvledger.files.whole import read_whole
from kvledger.metrics.samples import WeightedSamples
from kvledger.replay.layout import InputError
from kvledger.traces.first_record import FirstRecord
from kvledger.traces.lines import TraceLines
from kvledger.traces.recording import RecordingReader
from kvledger.traces.trace_request import TraceError

# Families of vLLM's metrics -> the latency that they are.
_LATENCIES: Final = {
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}
_QUERIES: Final = "vllm:prefix_cache_queries_total"
_HITS: Final = "vllm:prefix_cache_hits_total"
_PREEMPTIONS: Final = "vllm:num_preemptions_total"
_SUCCESS: Final = "vllm:request_success_total"
_LOG_LINE: Final = re.compile(
    r"(?:Engine (?P<engine>\d+): )?Avg prompt throughput: [\d.]+ tokens/s.*?Running: (?P<running>\d+) reqs.*?"
    r"(?:Preemptions: (?P<preemptions>\d+).*?)?KV cache usage: (?P<usage>[\d.]+)%(?P<rest>.*)"
)
_HIT_RATE: Final = re.compile(r"(?<!External )Prefix cache hit rate: ([\d.]+)%")


class MeasuredLatency:
    """`mean` in seconds, and what is known of the distribution: buckets of a histogram, or values."""

    def __init__(self, mean: float, buckets: list[tuple[float, float]] | None = None) -> None:
        """`buckets`: (upper bound, values at or below it), by bound."""
        self.mean: Final = mean
        self.buckets: Final = buckets or []
        self.values: WeightedSamples | None = None

    @property
    def has_distribution(self) -> bool:
        return self.values is not None or len(self.buckets) > 0

    def range_of(self, share: float) -> tuple[float, float]:
        """(low, high) between which the value of that rank lies; equal where it is known."""
        if self.values is not None:
            found = self.values.percentile(share)
            return found, found
        low = 0.0
        wanted = share * self.buckets[-1][1]
        for bound, number in self.buckets:
            if number >= wanted:
                return low, bound
            low = bound
        return low, low


class Measured(msgspec.Struct):
    """What is None is not known. `kind`: metrics, log or recording."""

    source: str
    kind: str
    num_requests: int | None = None
    token_hit_rate: float | None = None
    num_preemptions: int | None = None
    usage_mean: float | None = None
    ttft: MeasuredLatency | None = None
    itl: MeasuredLatency | None = None
    e2e: MeasuredLatency | None = None
    notes: list[str] = []


def read_measured(text: str) -> Measured:
    """Of a file: a scrape of /metrics, two of them with a comma between (before, after), vLLM's log, or a recording in
    our own format. InputError for what is none of them."""
    paths = text.split(",")
    if len(paths) > 2:
        raise InputError(f"against={text!r}: expected one file, or two scrapes as before,after")
    for path in paths:
        if not os.path.isfile(path):
            raise wrong_value("against", path, "cannot be read (no such file)", "give the path of a file")
    if len(paths) == 1:
        recording = _recording(paths[0])
        if recording is not None:
            return recording
    contents = [read_whole("against", path).decode("utf-8", "replace") for path in paths]
    if len(contents) == 1 and _LOG_LINE.search(contents[0]):
        return _log(paths[0], contents[0])
    scrapes = [_samples(path, content) for path, content in zip(paths, contents, strict=True)]
    return _metrics(text, scrapes)


# Metrics

Samples = dict[tuple[str, str], float]


def _samples(path: str, content: str) -> Samples:
    """(name, bound of a bucket) -> value, added up over engines and models."""
    if find_spec("prometheus_client") is None:
        raise InputError(f"{path}: a scrape needs a package to be read: pip install 'kvledger[metrics]'")
    from kvledger.metrics.scrape import Page, ScrapeError

    found: Samples = {}
    try:
        page = Page(content)
    except ScrapeError as broken:
        raise InputError(f"{path}: neither a scrape of /metrics nor vLLM's log ({broken})") from None
    for name in page.names():
        if name.startswith("vllm:"):
            for bound, value in (page.by(name, "le") or {}).items():
                found[name, bound] = value
    if (_QUERIES, "") not in found:
        raise InputError(
            f"{path}: neither vLLM's log nor a scrape of its /metrics, which has {_QUERIES}; give one of the two, or a "
            "recording"
        )
    return found


def _metrics(source: str, scrapes: list[Samples]) -> Measured:
    after = scrapes[-1]
    if len(scrapes) == 2:
        before = scrapes[0]
        after = {key: value - before.get(key, 0.0) for key, value in after.items()}
        if any(after.get((name, ""), 0.0) < 0 for name in (_QUERIES, _HITS, _SUCCESS)):
            raise InputError(f"against={source!r}: the counters fell: before comes first, of the same server")
    queries, hits = after[_QUERIES, ""], after.get((_HITS, ""), 0.0)
    requests = after.get((_SUCCESS, ""))
    preemptions = after.get((_PREEMPTIONS, ""))
    measured = Measured(
        source,
        "metrics",
        None if requests is None else round(requests),
        hits / queries if queries > 0 else None,
        None if preemptions is None else round(preemptions),
    )
    for name, family in _LATENCIES.items():
        setattr(measured, name, _histogram(after, family))
    if len(scrapes) == 1:
        measured.notes.append("one scrape: counts are from the start of the server on")
    return measured


def _histogram(samples: Samples, family: str) -> MeasuredLatency | None:
    count, total = samples.get((f"{family}_count", ""), 0.0), samples.get((f"{family}_sum", ""), 0.0)
    if count <= 0:
        return None
    buckets = [(float(bound), value) for (name, bound), value in samples.items() if name == f"{family}_bucket"]
    return MeasuredLatency(total / count, sorted(buckets))


# Logs


def _log(path: str, content: str) -> Measured:
    """Every engine says of an interval how full the pool was, of its last 1,000 requests how much they hit."""
    usages: list[float] = []
    num_preemptions = 0
    rates: dict[str, float] = {}
    for line in _log_lines(content):
        num_preemptions += int(line["preemptions"] or 0)
        if int(line["running"]) > 0:
            usages.append(float(line["usage"]) / 100)
        rate = _HIT_RATE.search(line["rest"])
        if rate is not None:
            rates[line["engine"] or ""] = float(rate[1]) / 100
    return Measured(
        path,
        "log",
        token_hit_rate=sum(rates.values()) / len(rates) if rates else None,
        num_preemptions=num_preemptions,
        usage_mean=sum(usages) / len(usages) if usages else None,
        notes=["a log's hit rate is of the last 1,000 requests; its usage, of the lines with running requests"],
    )


def _log_lines(content: str) -> Iterator[dict[str, Any]]:
    for line in content.splitlines():
        match = _LOG_LINE.search(line)
        if match is not None:
            yield match.groupdict()


# Recordings


def _recording(path: str) -> Measured | None:
    """None for what is no recording. InputError for one that has measured nothing."""
    try:
        lines = TraceLines(path)
        try:
            if not RecordingReader.recognises(FirstRecord(lines.peek())):
                return None
            return _measured_rows(path, RecordingReader(lines, None))
        finally:
            lines.close()
    except TraceError as failed:
        raise InputError(f"against: {failed}") from None


def _measured_rows(path: str, reader: RecordingReader) -> Measured:
    latencies = {name: WeightedSamples() for name in _LATENCIES}
    num_requests = num_prompt = num_hit = num_preemptions = num_asked = 0
    for row in reader.rows():
        num_requests += 1
        num_preemptions += row.preempted
        if row.hit is not None:
            num_asked += 1
            num_prompt += row.num_prompt_tokens
            num_hit += row.hit
        if row.first is not None:
            latencies["ttft"].add(max(0.0, row.first - row.t))
        if row.end is not None:
            latencies["e2e"].add(max(0.0, row.end - row.t))
        if row.first is not None and row.end is not None and row.num_output_tokens > 1:
            num_gaps = row.num_output_tokens - 1
            latencies["itl"].add(max(0.0, row.end - row.first) / num_gaps, num_gaps)
    if num_asked == 0 and not any(samples.total_weight for samples in latencies.values()):
        raise InputError(f"{path}: nothing was measured in this trace; rows with hit, first and end have it")
    measured = Measured(path, "recording", num_requests, num_hit / num_prompt if num_prompt else None, num_preemptions)
    for name, samples in latencies.items():
        if samples.total_weight > 0:
            latency = MeasuredLatency(samples.mean())
            # Of the gaps between tokens only the mean of each request is known.
            latency.values = None if name == "itl" else samples
            setattr(measured, name, latency)
    return measured
