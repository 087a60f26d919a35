"""ServerView: what a running server does between two looks at it, from its /metrics and, where there is one, the page
on which the ledger inside it says why (docs/vllm.md).
"""

import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from kvledger.metrics.scrape import Page, ScrapeError

PREFIXES: Final = ("vllm:", "kvledger:")


class ServerState(msgspec.Struct):
    """What is None is not known. Rates and shares are of the time since the look before, `seconds` ago, or since the
    server started where there was none (`seconds` None). `waits`, `blocks`, `misses`, `evictions`: from the ledger."""

    model: str
    seconds: float | None
    num_running: float | None = None
    num_waiting: float | None = None
    usage: float | None = None
    num_blocks: int | None = None
    block_size: str | None = None
    hit_rate: float | None = None
    queried_tokens: float | None = None
    preemptions: float | None = None
    prompt_tokens_per_second: float | None = None
    output_tokens_per_second: float | None = None
    ttft_seconds: float | None = None
    itl_seconds: float | None = None
    waits: dict[str, float] | None = None
    blocks: dict[str, float] | None = None
    misses: dict[str, float] | None = None
    evictions: dict[str, float] | None = None


class ServerView:
    """`read`: the server's page now. `read_why`: the ledger's, or None where it has none; asked each time."""

    def __init__(
        self,
        read: Callable[[], Page],
        read_why: Callable[[], Page | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read: Final = read
        self._read_why: Final = read_why
        self._clock: Final = clock
        self._before: tuple[float, Page, Page | None] | None = None

    def look(self) -> ServerState:
        """ScrapeError when the server does not answer, or shows another kind of metrics."""
        page, why, now = self._read(), self._read_why(), self._clock()
        prefix = next((prefix for prefix in PREFIXES if page.has(f"{prefix}num_requests_running")), None)
        if prefix is None:
            raise ScrapeError("its metrics are neither vLLM's nor a ledger's")
        if why is None and prefix == "kvledger:":
            why = page
        before = self._before
        if before is not None and _is_younger(page, before[1], prefix):
            before = None
        self._before = (now, page, why)
        then, old, old_why = before or (None, None, None)
        state = _state(page, old, prefix, None if then is None else now - then)
        if why is not None:
            state.waits = _positive(why.by("kvledger:num_requests_without_tokens", "reason"))
            state.blocks = why.by("kvledger:kv_cache_blocks", "state")
            state.misses = _grown(why, old_why, "kvledger:prefix_cache_tokens_total", "reason")
            state.evictions = _grown(why, old_why, "kvledger:kv_cache_evictions_total", "cause")
        return state


def _state(page: Page, old: Page | None, prefix: str, seconds: float | None) -> ServerState:
    def gained(name: str) -> float | None:
        now = page.total(prefix + name)
        return None if now is None else now - ((old.total(prefix + name) or 0.0) if old else 0.0)

    def rate(name: str) -> float | None:
        number = gained(name)
        return None if number is None or not seconds else number / seconds

    def mean(name: str) -> float | None:
        total, count = gained(f"{name}_sum"), gained(f"{name}_count")
        return total / count if total is not None and count else None

    queried, hit = gained("prefix_cache_queries_total"), gained("prefix_cache_hits_total")
    infos = page.labels(f"{prefix}cache_config_info")
    models = sorted({labels.get("model_name", "") for labels in page.labels(f"{prefix}num_requests_running")})
    usages = page.by(f"{prefix}kv_cache_usage_perc", "engine")
    return ServerState(
        ", ".join(models),
        seconds,
        page.total(f"{prefix}num_requests_running"),
        page.total(f"{prefix}num_requests_waiting"),
        sum(usages.values()) / len(usages) if usages else None,
        sum(_number(labels.get("num_gpu_blocks")) for labels in infos) or None,
        infos[0].get("block_size") if infos else None,
        hit / queried if hit is not None and queried else None,
        queried,
        gained("num_preemptions_total"),
        rate("prompt_tokens_total"),
        rate("generation_tokens_total"),
        mean("time_to_first_token_seconds"),
        mean("inter_token_latency_seconds"),
    )


def _is_younger(page: Page, before: Page, prefix: str) -> bool:
    """Whether another server has taken this one's place since, whose counters began anew."""
    name = f"{prefix}prefix_cache_queries_total"
    return (page.total(name) or 0.0) < (before.total(name) or 0.0)


def _grown(page: Page, old: Page | None, name: str, label: str) -> dict[str, float] | None:
    now = page.by(name, label)
    if now is None:
        return None
    then = (old.by(name, label) if old else None) or {}
    return _positive({key: value - then.get(key, 0.0) for key, value in now.items()})


def _positive(counts: Mapping[str, float] | None) -> dict[str, float] | None:
    return None if counts is None else {key: value for key, value in counts.items() if value > 0}


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
