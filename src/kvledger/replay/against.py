"""A replay held against what a real server did with the same traffic: side by side, with a verdict."""

from typing import Final

from kvledger.replay.measured import Measured, MeasuredLatency
from kvledger.replay.result import Against, AgainstRow, ReplayResult

# The replay agrees when a hit rate is off by no more than this, and a time by no more than this factor.
HIT_RATE_POINTS: Final = 0.01
TIME_FACTOR: Final = 1.25
# Share of requests by which two runs may differ and still be of the same traffic.
_SAME_TRAFFIC: Final = 0.02
_SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_WORDS: Final = {"ttft": "time to first token", "itl": "between tokens", "e2e": "from arrival to end"}


def compare(measured: Measured, result: ReplayResult) -> Against:
    """The rows of what both know."""
    rows: list[AgainstRow] = []
    if measured.num_requests is not None:
        tolerance = _SAME_TRAFFIC * measured.num_requests
        rows.append(_counted("requests finished", "", measured.num_requests, result.num_finished, tolerance))
    if measured.token_hit_rate is not None:
        # A printed 0.01 is not more than 0.01.
        tolerance = HIT_RATE_POINTS + 1e-9
        rows.append(
            _counted("hit rate, tokens", "%", measured.token_hit_rate, result.prefix_cache.token_hit_rate, tolerance)
        )
    if measured.num_preemptions is not None and result.mode == "scheduled":
        tolerance = max(1.0, (TIME_FACTOR - 1) * measured.num_preemptions)
        rows.append(_counted("preemptions", "", measured.num_preemptions, result.num_preemptions, tolerance))
    if measured.usage_mean is not None and result.mode == "scheduled":
        rows.append(_counted("usage of the pool, mean", "%", measured.usage_mean, result.usage.mean, 0.05))
    figures = {"ttft": result.ttft_seconds, "itl": result.inter_token_seconds, "e2e": result.e2e_seconds}
    for name, found in figures.items():
        latency: MeasuredLatency | None = getattr(measured, name)
        if latency is None or found is None:
            continue
        rows.append(_timed(f"{_WORDS[name]}, mean", latency.mean, latency.mean, found.mean))
        for label, share in _SHARES.items() if latency.has_distribution else ():
            low, high = latency.range_of(share)
            rows.append(_timed(f"{_WORDS[name]}, {label}", low, high, getattr(found, label)))
    against = Against(measured.source, measured.kind, rows, "", list(measured.notes))
    against.verdict = _verdict(against)
    return against


def _counted(quantity: str, unit: str, measured: float, replayed: float, tolerance: float) -> AgainstRow:
    difference = replayed - measured
    verdict = "agrees" if abs(difference) <= tolerance else "more" if difference > 0 else "less"
    return AgainstRow(quantity, unit, measured, measured, replayed, verdict)


def _timed(quantity: str, low: float, high: float, replayed: float) -> AgainstRow:
    verdict = "agrees"
    if replayed > high * TIME_FACTOR:
        verdict = "slower"
    elif replayed < low / TIME_FACTOR:
        verdict = "faster"
    return AgainstRow(quantity, "s", low, high, replayed, verdict)


def _verdict(against: Against) -> str:
    rows = {row.quantity: row for row in against.rows}
    if not rows:
        return "Nothing of it can be held against this replay."
    finished = rows.get("requests finished")
    if finished is not None and finished.verdict != "agrees":
        both = f"the server finished {finished.low:,.0f} requests, the replay {finished.replayed:,.0f}"
        return f"Not the same traffic: {both}."
    parts: list[str] = []
    hits = rows.get("hit rate, tokens")
    if hits is not None:
        both = f"{hits.replayed:.1%} where the server hit {hits.low:.1%}"
        parts.append(f"The replay hits as the server did ({both})" if hits.verdict == "agrees" else f"It hits {both}")
    preempted = rows.get("preemptions")
    if preempted is not None and preempted.verdict != "agrees":
        parts.append(f"it preempts {preempted.replayed:,.0f} times instead of {preempted.low:,.0f}")
    off = [rows[f"{words}, mean"] for words in _WORDS.values() if f"{words}, mean" in rows]
    wrong = [row for row in off if row.verdict != "agrees"]
    if off and not wrong:
        parts.append(f"its mean times are within {TIME_FACTOR - 1:.0%}")
    for row in wrong:
        factor = row.replayed / row.low if row.low > 0 else 0.0
        parts.append(f"{row.quantity} is {factor:.2g} times the server's")
    words = "; ".join(parts) or "What both know agrees"
    advice = ". Step times of your own (--step-time) set the clock" if wrong else ""
    return words[0].upper() + words[1:] + advice + "."
