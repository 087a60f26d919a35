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
from kvledger.replay.result import ReplayResult
from kvledger.replay.sequential import BlocksInTurn, ExtentsInTurn, SequentialReplay
from kvledger.traces.arrivals import RecordedArrivals
from kvledger.traces.prompts import make_prompt_maker
from kvledger.traces.trace_request import TraceRequest
from tests.unit.replay.engines import one_group

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
@settings(max_examples=200, deadline=None)
def test_one_after_another(
    requests: list[TraceRequest], num_blocks: int, block_size: int, remembered: int, hash_name: str
) -> None:
    config = ReplayConfig(
        num_blocks, one_group(block_size), max_model_len=64, explain_misses=MissConfig(max_evicted_blocks=remembered)
    )
    assert why_by_blocks(config) == ""
    assert in_turn(requests, config, None) == in_turn(requests, replace(config, check=True), hash_name)


def test_the_sample_one_after_another() -> None:
    def run(**options: Any) -> ReplayResult:
        return replay(sequential=True, limit=200, num_blocks=20_000, hash="none", **options)

    extents, blocks = run(), run(block_by_block=True)
    assert (extents.counting, blocks.counting) == ("extents", "blocks")
    assert (extents.why_by_blocks, blocks.why_by_blocks) == ("", "--block-by-block")
    assert numbers(extents) == numbers(blocks)
    assert extents.prefix_cache.num_evictions > 100_000
