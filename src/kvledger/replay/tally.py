"""Tally: the counts that both modes keep, and the result made of them."""

from collections import Counter
from collections.abc import Callable

from kvledger.core.ledger.lookups import PrefixCacheStats
from kvledger.core.units import cdiv
from kvledger.metrics.samples import WeightedSamples
from kvledger.replay.config import ReplayConfig
from kvledger.replay.ledger import ReplayLedger
from kvledger.replay.meters import GroupMeter, TimelineMeter, WaitMeter
from kvledger.replay.records import CUT_SHORT, ReplayListener, RequestRecord
from kvledger.replay.result import PrefixCacheResult, ReplayResult, Throughput
from kvledger.replay.slo import Goodput
from kvledger.replay.why_missed import WhyMissed, why_missed
from kvledger.traces.trace_request import TraceRequest

# Called now and then with the numbers of requests done and arrived.
Progress = Callable[[int, int], None]

PROMPT_EXCEEDS_POOL = "prompt_exceeds_pool"
PROMPT_EXCEEDS_MAX_MODEL_LEN = "prompt_exceeds_max_model_len"
OUTGREW_POOL = "outgrew_pool"

REFUSAL_TEXTS = {
    PROMPT_EXCEEDS_POOL: "prompt larger than the whole pool",
    PROMPT_EXCEEDS_MAX_MODEL_LEN: "prompt leaves no room within max_model_len",
    OUTGREW_POOL: "outgrew the whole pool while it generated",
}


class Tally(ReplayListener):
    """What happened so far."""

    def __init__(
        self,
        config: ReplayConfig,
        ledger: ReplayLedger,
        interval: float,
    ) -> None:
        self.config = config
        self.ledger = ledger
        self.num_requests = 0
        self.num_finished = 0
        self.num_cut_short = 0
        self.refused: Counter[str] = Counter()
        self.num_prompt_tokens = 0
        self.num_query_blocks = 0
        # Prompts that end before the first place where a hit can end.
        self.num_short_prompts = 0
        self._block_size = config.smallest_block_size
        self._hit_step = config.hit_step
        self.num_output_tokens = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_steps = 0
        # Of the pool, for the seconds of each step.
        self._usage = WeightedSamples()
        # Seconds between two tokens: most are a step, whose tokens come at once.
        self.gaps = WeightedSamples()
        self.timeline = TimelineMeter(interval, ledger.num_usable_blocks)
        self.group_meter = GroupMeter(config, ledger, interval)
        self.ttft = WeightedSamples()
        self.waits = WaitMeter()
        self.e2e = WeightedSamples()
        self.simulated_seconds = 0.0
        self._slo = config.slo
        self._num_good = 0
        self._missed: Counter[str] = Counter()

    def accept(self, num_prompt_tokens: int) -> None:
        """A request that will be served."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_query_blocks += cdiv(num_prompt_tokens, self._block_size)
        if num_prompt_tokens <= self._hit_step:
            self.num_short_prompts += 1

    def ended(self, record: RequestRecord) -> None:
        self.num_output_tokens += record.num_output_tokens
        if not record.is_served:
            self.refused[record.outcome] += 1
            return
        self.num_finished += 1
        if record.outcome == CUT_SHORT:
            self.num_cut_short += 1
        if record.first_token is not None:
            self.e2e.add(record.end - record.arrival)
        if self._slo is not None:
            missed = self._slo.missed(record)
            self._missed.update(missed)
            self._num_good += not missed

    def log_step(self, seconds: float, usage: float, num_steady_tokens: int) -> None:
        """A step, of which num_steady_tokens tokens came one step after the token before them."""
        self._usage.add(usage, seconds)
        if num_steady_tokens:
            self.gaps.add(seconds, num_steady_tokens)

    def log_steps(self, seconds: list[float], usages: list[float], num_steady_tokens: int) -> None:
        """log_step for each of these."""
        self.num_steps += len(seconds)
        self._usage.add_all(usages, seconds)
        self.gaps.add_all(seconds, [num_steady_tokens] * len(seconds))

    @property
    def num_done(self) -> int:
        return self.num_finished + self.refused.total()

    def refusal(self, num_prompt_tokens: int) -> str | None:
        """Why a prompt of that length can never be served; None when it can."""
        if self.ledger.num_blocks_for(num_prompt_tokens) > self.ledger.num_usable_blocks:
            return PROMPT_EXCEEDS_POOL
        if num_prompt_tokens >= self.config.longest:
            return PROMPT_EXCEEDS_MAX_MODEL_LEN
        return None

    def result(self, mode: str, wall_seconds: float) -> ReplayResult:
        """The result; the fields about the trace are the caller's to fill in."""
        num_tokens = self.num_prompt_tokens + self.num_output_tokens
        stats = self.ledger.take_prefix_cache_stats()
        return ReplayResult(
            mode=mode,
            counting=self.ledger.counting,
            num_blocks=self.config.num_blocks,
            block_size=self._block_size,
            max_model_len=self.config.max_model_len,
            num_requests=self.num_requests,
            num_finished=self.num_finished,
            num_cut_short=self.num_cut_short,
            num_refused=self.refused.total(),
            refused=dict(self.refused),
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_preemptions=self.num_preemptions,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_steps=self.num_steps,
            prefix_cache=self._prefix_cache(stats),
            usage=self._usage.usage(),
            occupancy=self.timeline.shares(),
            ttft_seconds=self.ttft.percentiles(),
            inter_token_seconds=self.gaps.percentiles(),
            e2e_seconds=self.e2e.percentiles(),
            throughput=self._throughput(),
            goodput=self._goodput(),
            simulated_seconds=self.simulated_seconds,
            wall_seconds=wall_seconds,
            requests_per_wall_second=self.num_finished / wall_seconds,
            tokens_per_wall_second=num_tokens / wall_seconds,
            timeline=self.timeline.timeline(),
            groups=self.group_meter.results(stats),
            bytes_per_block=self.config.layout.bytes_per_block,
            hash_block_size=self.config.hash_block_size,
            vllm_version=self.config.decisions,
            hit_step=self._hit_step,
            num_short_prompts=self.num_short_prompts,
            why_missed=self._why_missed(),
            why_waited=self.waits.times(),
        )

    def _throughput(self) -> Throughput | None:
        seconds = self.simulated_seconds
        if seconds <= 0:
            return None
        return Throughput(
            self.num_finished / seconds, self.num_prompt_tokens / seconds, self.num_output_tokens / seconds
        )

    def _goodput(self) -> Goodput | None:
        slo, seconds = self._slo, self.simulated_seconds
        if slo is None or self.num_requests == 0:
            return None
        missed = {name: self._missed[name] for name in slo.__struct_fields__ if getattr(slo, name) is not None}
        rate = self._num_good / seconds if seconds > 0 else 0.0
        return Goodput(slo, self._num_good, self._num_good / self.num_requests, rate, missed)

    def _why_missed(self) -> WhyMissed | None:
        limits = self.config.explain_misses
        misses = self.ledger.misses
        if misses is None or limits is None:
            return None
        return why_missed(misses, limits.max_evicted_blocks, self._hit_step)

    def _prefix_cache(self, stats: PrefixCacheStats) -> PrefixCacheResult:
        # Hits are whole blocks.
        num_hit_blocks = stats.hits // self._block_size
        return PrefixCacheResult(
            token_hit_rate=stats.hits / stats.queries if stats.queries else 0.0,
            block_hit_rate=num_hit_blocks / self.num_query_blocks if stats.queries else 0.0,
            num_query_tokens=stats.queries,
            num_hit_tokens=stats.hits,
            num_query_blocks=self.num_query_blocks if stats.queries else 0,
            num_hit_blocks=num_hit_blocks,
            num_evictions=self.ledger.num_evictions,
        )


def refused(recorded: TraceRequest, number: int, arrival: float, now: float, reason: str) -> RequestRecord:
    """The record of a request that never entered the engine."""
    return RequestRecord(
        number, recorded.session, recorded.priority, arrival, now, recorded.num_prompt_tokens, 0, reason
    )
