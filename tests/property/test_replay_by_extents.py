"""Replays in runs of blocks against the ledger itself, on random traces: the same numbers, every one of them."""

from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.core.watch.prompt_split import MissConfig
from kvledger.replay import replay
from kvledger.replay.config import ReplayConfig
from kvledger.replay.extent_ledger import ExtentLedger, why_by_blocks
from kvledger.replay.ledger import BlockLedger
from kvledger.replay.records import ReplayListener, RequestRecord
from kvledger.replay.result import ReplayResult
from kvledger.replay.scheduled import ScheduledReplay
from kvledger.replay.sequential import BlocksInTurn, ExtentsInTurn, SequentialReplay
from kvledger.replay.serving import ServingByBlocks, ServingByExtents, why_scheduled_by_blocks
from kvledger.replay.slo import Slo
from kvledger.replay.step_time import AttentionWork, StepTimeModel, StepWork
from kvledger.scheduler import SchedulerConfig
from kvledger.traces.arrivals import Arrivals, ClosedLoopArrivals, RecordedArrivals
from kvledger.traces.prompts import make_prompt_maker
from kvledger.traces.reader import sessions_of
from kvledger.traces.trace_request import TraceRequest
from tests.unit.replay.engines import card, one_group

# What tells the ways apart, or is of the machine.
_OTHER = ("counting", "why_by_blocks", "wall_seconds", "requests_per_wall_second", "tokens_per_wall_second")


def numbers(result: ReplayResult) -> dict[str, Any]:
    """All that a replay found out."""
    return {name: value for name, value in msgspec.to_builtins(result).items() if name not in _OTHER}


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Prompts that begin alike, of a few ids: some go on where another ends, some end inside a block of the trace, some
    have tokens of their own behind the last id, and some answers have ids too."""
    id_tokens = draw(st.sampled_from([1, 3, 4, 8, 12, 16]))
    requests: list[TraceRequest] = []
    prompts: list[list[int]] = [[]]
    time = 0.0
    for _ in range(draw(st.integers(1, 14))):
        begun = draw(st.sampled_from(prompts))
        ids = begun[: draw(st.integers(0, len(begun)))] + draw(st.lists(st.integers(0, 3), max_size=5))
        prompts.append(ids)
        num_named = len(ids) * id_tokens
        num_tokens = max(1, num_named + draw(st.integers(-id_tokens + 1, 9)))
        num_output = draw(st.integers(1, 30))
        output_ids: list[int] = []
        if num_tokens <= num_named + id_tokens - 1 and draw(st.integers(0, 3)) == 0:
            ids = ids[: num_tokens // id_tokens]
            whole = (num_tokens + num_output) // id_tokens - len(ids)
            output_ids = draw(st.lists(st.integers(0, 3), max_size=max(0, whole)))
            if output_ids:
                prompts.append(ids + output_ids)
        time += draw(st.sampled_from([0.0, 0.0, 1.0, 7.0, 40.0]))
        scope = draw(st.sampled_from([0, 0, 0, 1]))
        requests.append(TraceRequest(time, num_tokens, num_output, ids, id_tokens, scope=scope, output_ids=output_ids))
    return requests


def in_turn(requests: list[TraceRequest], config: ReplayConfig, hash_name: str | None) -> dict[str, Any]:
    """`hash_name` None: by extents."""
    made = msgspec.convert(msgspec.to_builtins(requests), list[TraceRequest])
    server = (
        ExtentsInTurn(ExtentLedger(config))
        if hash_name is None
        else BlocksInTurn(config, BlockLedger(config, make_prompt_maker(hash_name, config.hash_block_size)))
    )
    return numbers(SequentialReplay(RecordedArrivals(iter(made)), server, config).run(lambda done, arrived: None))


@given(
    traces(),
    st.integers(2, 40),
    st.sampled_from([1, 4, 6]),
    st.sampled_from([1, 3, 10, 1000]),
    st.sampled_from(["none", "xxh3"]),
)
@settings(max_examples=120, deadline=None)
def test_one_after_another(
    requests: list[TraceRequest], num_blocks: int, block_size: int, remembered: int, hash_name: str
) -> None:
    config = ReplayConfig(
        num_blocks, one_group(block_size), max_model_len=64, explain_misses=MissConfig(max_evicted_blocks=remembered)
    )
    assert why_by_blocks(config) == ""
    assert in_turn(requests, config, None) == in_turn(requests, replace(config, check=True), hash_name)


class Records(ReplayListener):
    """Every request, as it ended."""

    def __init__(self) -> None:
        self.requests: list[RequestRecord] = []

    def ended(self, record: RequestRecord) -> None:
        self.requests.append(record)


# A model with experts, on a card where reading, computing and the overhead of a step are about as long as each other.
WORK = StepWork(3, 2, 160, expert_bytes=90, expert_share=0.25, attention=(AttentionWork(1.5, 2.0),), state_bytes=7)


def scheduled(
    requests: list[TraceRequest],
    config: ReplayConfig,
    hash_name: str | None,
    *,
    overhead: float,
    speed: float,
    closed_loop: bool,
) -> tuple[dict[str, Any], list[RequestRecord]]:
    """`hash_name` None: by extents."""
    made = msgspec.convert(msgspec.to_builtins(requests), list[TraceRequest])
    arrivals: Arrivals = RecordedArrivals(iter(made))
    if closed_loop:
        arrivals = ClosedLoopArrivals(sessions_of(iter(made)), 3.0, 0)
    gpu = card("test", bandwidth_bytes_s=1000.0 * speed, peak_flops=300.0 * speed)
    clock = StepTimeModel(WORK, gpu, 1, overhead / speed)
    assert why_scheduled_by_blocks(config, clock, has_log=False) == ""
    serving = (
        ServingByExtents(config)
        if hash_name is None
        else ServingByBlocks(config, make_prompt_maker(hash_name, config.hash_block_size))
    )
    records = Records()
    driver = ScheduledReplay(arrivals, serving, config, clock, None, [records])
    return numbers(driver.run(lambda done, arrived: None)), records.requests


@given(
    traces(),
    st.integers(3, 40),
    st.sampled_from([1, 4, 6]),
    st.sampled_from([(1, 5), (2, 2), (3, 7), (8, 40), (8, 200)]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([None, 50]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([1.0, 30.0]),
    st.booleans(),
    st.sampled_from(["none", "xxh3"]),
)
@settings(max_examples=120, deadline=None)
def test_scheduled(
    requests: list[TraceRequest],
    num_blocks: int,
    block_size: int,
    limits: tuple[int, int],
    watermark: float,
    longest: int | None,
    overhead: float,
    speed: float,
    closed_loop: bool,
    hash_name: str,
) -> None:
    config = ReplayConfig(
        num_blocks,
        one_group(block_size),
        longest,
        watermark=watermark,
        check=True,
        scheduler=SchedulerConfig(*limits),
        explain_misses=MissConfig(max_evicted_blocks=20),
        slo=Slo(ttft=2.0, itl=0.5),
    )
    way: dict[str, Any] = {"overhead": overhead, "speed": speed, "closed_loop": closed_loop}
    assert scheduled(requests, config, None, **way) == scheduled(requests, config, hash_name, **way)


def test_a_preempted_request_that_fits_only_without_its_hit() -> None:
    """Of 5 blocks the second request needs a sixth, but holds five when the first one takes one of them, and ends. Four
    are still cached: beside that hit its tokens will never fit, so it starts over with none, and outgrows the pool."""
    requests = [TraceRequest(0.0, 8, 2, [1, 2], 4), TraceRequest(0.0, 20, 5, [1, 2, 3, 4, 5], 4)]
    config = ReplayConfig(
        1 + 5,
        one_group(4),
        check=True,
        scheduler=SchedulerConfig(4, 20),
        explain_misses=MissConfig(max_evicted_blocks=20),
    )
    way: dict[str, Any] = {"overhead": 0.1, "speed": 1.0, "closed_loop": False}
    extents, records = scheduled(requests, config, None, **way)
    assert (extents, records) == scheduled(requests, config, "none", **way)
    assert [record.outcome for record in records] == ["finished", "outgrew_pool"]
    assert extents["why_missed"]["resumed_tokens"]["lookup_off"] == 16


def test_the_sample_one_after_another() -> None:
    def run(**options: Any) -> ReplayResult:
        return replay(sequential=True, limit=200, num_blocks=20_000, hash="none", **options)

    extents, blocks = run(), run(block_by_block=True)
    assert (extents.counting, blocks.counting) == ("extents", "blocks")
    assert (extents.why_by_blocks, blocks.why_by_blocks) == ("", "--block-by-block")
    assert numbers(extents) == numbers(blocks)
    assert extents.prefix_cache.num_evictions > 100_000


def test_the_sample_with_arrivals() -> None:
    def run(**options: Any) -> ReplayResult:
        return replay(limit=60, num_blocks=6_000, tp=1, hash="none", **options)

    extents, blocks = run(), run(block_by_block=True)
    assert (extents.counting, blocks.counting) == ("extents", "blocks")
    assert numbers(extents) == numbers(blocks)
    assert extents.num_preemptions > 0
    assert extents.prefix_cache.num_evictions > 10_000
