"""ReplayResult: everything a replay found out, as plain data. What --json prints; docs/replay.md explains the keys."""

import msgspec

from kvledger.metrics.samples import Percentiles, Usage
from kvledger.replay.slo import Goodput
from kvledger.replay.why_missed import WhyMissed


class PrefixCacheResult(msgspec.Struct):
    """Hits over lookups, each admitted request once; what preempted requests find of themselves is counted apart.

    Blocks are the engine's, a prompt's partial last one included, which can never be hit.
    """

    token_hit_rate: float
    block_hit_rate: float
    num_query_tokens: int
    num_hit_tokens: int
    num_query_blocks: int
    num_hit_blocks: int
    num_evictions: int


class Shares(msgspec.Struct):
    """Mean shares of the usable blocks: held by requests, free but serving hits, free and empty. They sum to 1."""

    live: float
    cached: float
    unused: float


class Timeline(msgspec.Struct):
    """Intervals of equal length in simulated seconds (in requests, in sequential mode).

    `running` and `waiting`: the most in each; `live` and `cached`: shares of the usable blocks at its end.
    """

    interval: float
    running: list[int]
    waiting: list[int]
    live: list[float]
    cached: list[float]


class GroupResult(msgspec.Struct):
    """One KV cache group. `held_blocks`: by requests, in blocks; `null_entries`: mean of table entries without a block.

    `num_cached_blocks`: prefixes that could be hit in the end. `num_limited_hits`: lookups that this group kept from
    being longer; `num_lost_tokens`: what the other groups had cached behind these hits.
    """

    kind: str
    block_size: int
    num_layers: int
    bytes_per_block: int
    held_blocks: Usage
    null_entries: float
    num_cached_blocks: int
    num_limited_hits: int
    num_lost_tokens: int


class WaitTime(msgspec.Struct):
    """What one reason cost: requests times the simulated seconds of the steps that gave them nothing for it."""

    reason: str
    words: str
    request_seconds: float
    request_steps: int


class Throughput(msgspec.Struct):
    """A simulated second: requests that finished, prompt tokens that were served (hits included), tokens generated."""

    requests_per_second: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float


class AgainstRow(msgspec.Struct):
    """One quantity: a server's lies between `low` and `high`, equal where it is known. `unit`: "" (a count), "%" (a
    share) or "s". `verdict`: agrees, more, less, slower, faster: the replay, seen from the server."""

    quantity: str
    unit: str
    low: float
    high: float
    replayed: float
    verdict: str


class Against(msgspec.Struct):
    """The replay beside what a real server did. `kind`: metrics, log or recording."""

    source: str
    kind: str
    rows: list[AgainstRow]
    verdict: str
    notes: list[str]


class ReplayResult(msgspec.Struct):
    """Latencies and throughput are None in sequential mode, where no time passes; `why_missed` and `goodput` when they
    were not asked for."""

    mode: str
    # The ledger that ran: "blocks" or "extents".
    counting: str
    num_blocks: int
    block_size: int
    max_model_len: int | None
    num_requests: int
    num_finished: int
    num_cut_short: int
    num_refused: int
    refused: dict[str, int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_steps: int
    prefix_cache: PrefixCacheResult
    usage: Usage
    occupancy: Shares
    ttft_seconds: Percentiles | None
    inter_token_seconds: Percentiles | None
    e2e_seconds: Percentiles | None
    throughput: Throughput | None
    goodput: Goodput | None
    simulated_seconds: float
    wall_seconds: float
    requests_per_wall_second: float
    tokens_per_wall_second: float
    timeline: Timeline
    groups: list[GroupResult]
    bytes_per_block: int
    hash_block_size: int
    hit_step: int
    num_short_prompts: int
    # The release of vLLM whose decisions were made.
    vllm_version: str
    # The costliest reason first; empty in sequential mode, where nobody waits.
    why_waited: list[WaitTime]
    why_missed: WhyMissed | None = None
    against: Against | None = None
    model: str = ""
    gpu: str = ""
    num_gpus: int = 0
    notes: list[str] = []
    trace: str = ""
    format: str = ""
    hash: str = ""
    # Why it was counted by blocks; empty for extents.
    why_by_blocks: str = ""
    num_bad_lines: int = 0

    def _repr_html_(self) -> str:
        """The report as a notebook shows it."""
        from kvledger.replay.report import html_of

        return html_of(self)
