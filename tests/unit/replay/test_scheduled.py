"""The scheduled replay on a clock where every step takes one second, so that all times can be counted by hand."""

import pytest

from kvledger.replay.config import ReplayConfig
from kvledger.replay.result import ReplayResult
from kvledger.replay.scheduled import ScheduledReplay
from kvledger.replay.serving import ServingByBlocks
from kvledger.scheduler import SchedulerConfig, SchedulingPolicy
from kvledger.traces.arrivals import Arrivals, ClosedLoopArrivals, RecordedArrivals
from kvledger.traces.prompts import make_prompt_maker
from kvledger.traces.trace_request import TraceRequest, TraceSession
from tests.unit.replay.engines import ONE_SECOND, one_group


def recorded(time: float, prompt: int, output: int, *, ids: list[int] | None = None, priority: int = 0) -> TraceRequest:
    """A request whose prompt is made of trace blocks of 16 tokens where ids are given, else all its own."""
    return TraceRequest(time, prompt, output, ids or [], 16, priority=priority)


def replay(
    *requests: TraceRequest,
    num_blocks: int = 101,
    scheduler: SchedulerConfig | None = None,
    hash_name: str = "none",
    max_model_len: int | None = None,
    enable_caching: bool = True,
    arrivals: Arrivals | None = None,
) -> ReplayResult:
    """Replays with blocks of 16 tokens, every invariant checked after each step."""
    config = ReplayConfig(
        num_blocks,
        one_group(),
        max_model_len,
        enable_caching,
        check=True,
        scheduler=scheduler or SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )
    source = arrivals or RecordedArrivals(iter(requests))
    maker = make_prompt_maker(hash_name, 16)
    return ScheduledReplay(source, ServingByBlocks(config, maker), config, ONE_SECOND).run(lambda done, arrived: None)


def test_a_lone_request_gets_its_first_token_after_its_prefill_and_one_a_step_then() -> None:
    result = replay(recorded(10.0, 40, 4))
    assert result.ttft_seconds is not None
    assert result.ttft_seconds.max == 1.0
    assert result.inter_token_seconds is not None
    assert (result.inter_token_seconds.mean, result.inter_token_seconds.max) == (1.0, 1.0)
    assert (result.num_steps, result.simulated_seconds) == (4, 14.0)
    assert (result.num_finished, result.num_prompt_tokens, result.num_output_tokens) == (1, 40, 4)


def test_a_long_prompt_is_prefilled_in_chunks_of_the_budget() -> None:
    # 150 tokens in steps of 64: 64 + 64 + 22.
    result = replay(recorded(0.0, 150, 1))
    assert result.ttft_seconds is not None
    assert result.ttft_seconds.p50 == 3.0
    assert result.inter_token_seconds is None


def test_time_to_first_token_counts_from_the_arrival_not_from_admission() -> None:
    # One seat: the second waits for the first, which runs from 0 to 5.
    one_seat = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64)
    result = replay(recorded(0.0, 16, 5), recorded(2.0, 16, 1), scheduler=one_seat)
    assert result.ttft_seconds is not None
    assert (result.ttft_seconds.p50, result.ttft_seconds.max) == (1.0, 4.0)
    assert max(result.timeline.waiting) == 1


def test_decodes_go_on_while_another_prompt_is_prefilled() -> None:
    result = replay(recorded(0.0, 16, 6), recorded(1.0, 190, 1))
    assert result.inter_token_seconds is not None
    assert result.inter_token_seconds.max == 1.0
    # 63 tokens a step beside the decode: 63 + 63 + 63 + 1.
    assert result.ttft_seconds is not None
    assert result.ttft_seconds.max == 4.0


def test_a_shared_prefix_is_a_hit_and_its_last_block_is_not() -> None:
    # The second finds all but the block of its last token: 2 of 3 blocks.
    twin = recorded(5.0, 48, 1, ids=[1, 2, 3])
    for hash_name in ("sha256", "none"):
        cache = replay(recorded(0.0, 48, 1, ids=[1, 2, 3]), twin, hash_name=hash_name).prefix_cache
        assert (cache.num_hit_tokens, cache.num_query_tokens) == (32, 96)
        assert (cache.num_hit_blocks, cache.num_query_blocks) == (2, 6)
        assert cache.token_hit_rate == cache.block_hit_rate == pytest.approx(1 / 3)


def test_without_a_prefix_cache_nothing_is_asked() -> None:
    twin = recorded(5.0, 48, 1, ids=[1, 2, 3])
    cache = replay(recorded(0.0, 48, 1, ids=[1, 2, 3]), twin, enable_caching=False).prefix_cache
    assert (cache.num_query_tokens, cache.num_query_blocks, cache.token_hit_rate) == (0, 0, 0.0)


def test_cached_blocks_that_make_room_are_evictions() -> None:
    # 4 usable blocks. The first leaves 3 cached; the second needs 3: the 1 that is unused and 2 of the cached ones.
    result = replay(recorded(0.0, 48, 1), recorded(5.0, 48, 1), num_blocks=5)
    assert result.prefix_cache.num_evictions == 2


def test_usage_is_weighted_by_time() -> None:
    # 1 of 4 usable blocks for 1 second, then nothing for 1 second without a step, then 3 of 4 for 1 second.
    result = replay(recorded(0.0, 16, 1), recorded(2.0, 48, 1), num_blocks=5)
    assert (result.usage.mean, result.usage.p95, result.usage.peak) == (0.5, 0.75, 0.75)


def test_a_preempted_request_pays_in_recomputed_tokens_and_one_long_gap() -> None:
    # 4 usable blocks, two prompts of 2 blocks each. Step 1 prefills both. In step 2 the first needs a third block, so
    # the second is preempted; it starts over in step 5, when the first has its 4 tokens.
    result = replay(recorded(0.0, 32, 4), recorded(0.0, 32, 4), num_blocks=5)
    assert result.num_preemptions == 1
    assert result.inter_token_seconds is not None
    # Its token 1 came at 1, its token 2 comes at 5.
    assert result.inter_token_seconds.max == 4.0
    # Of its 2 blocks the first request took the last one; the other is a hit.
    assert result.num_recomputed_tokens == 16
    assert (result.num_finished, result.num_output_tokens) == (2, 8)


def test_a_prompt_that_can_never_fit_is_refused_and_the_rest_goes_on() -> None:
    result = replay(recorded(0.0, 65, 1), recorded(0.0, 16, 1), num_blocks=5)
    assert result.refused == {"prompt_exceeds_pool": 1}
    assert (result.num_requests, result.num_finished, result.num_refused) == (2, 1, 1)


def test_a_prompt_without_room_in_the_model_is_refused() -> None:
    result = replay(recorded(0.0, 32, 1), recorded(0.0, 16, 1), max_model_len=32)
    assert result.refused == {"prompt_exceeds_max_model_len": 1}


def test_an_answer_that_reaches_max_model_len_is_cut_short() -> None:
    result = replay(recorded(0.0, 16, 50), max_model_len=20)
    assert (result.num_finished, result.num_cut_short, result.num_output_tokens) == (1, 1, 4)


def test_an_answer_that_outgrows_the_whole_pool_ends_its_request_only() -> None:
    result = replay(recorded(0.0, 60, 50), recorded(0.0, 16, 1), num_blocks=5)
    assert result.refused == {"outgrew_pool": 1}
    assert result.num_finished == 1


def test_under_the_priority_policy_the_urgent_go_first() -> None:
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, policy=SchedulingPolicy.PRIORITY)
    lax, urgent = recorded(0.0, 16, 3, priority=1), recorded(0.0, 16, 1)
    result = replay(lax, urgent, scheduler=config)
    assert result.ttft_seconds is not None
    # The urgent one at 1; the lax one, although it came first, at 2.
    assert result.ttft_seconds.max == 2.0
    assert result.simulated_seconds == 4.0


def test_a_closed_loop_thinks_after_every_answer() -> None:
    requests = [TraceRequest(0.0, 16, 2, [], 64, session=1, think_time=think) for think in (0.0, 3.0)]
    arrivals = ClosedLoopArrivals(iter([TraceSession(1, requests)]), 0.0, 0)
    result = replay(arrivals=arrivals)
    # 0 to 2, thinking until 5, 5 to 7.
    assert (result.num_finished, result.simulated_seconds) == (2, 7.0)


def test_a_closed_loop_goes_on_after_a_refusal() -> None:
    requests = [TraceRequest(0.0, prompt, 1, [], 64, session=1) for prompt in (1000, 16)]
    arrivals = ClosedLoopArrivals(iter([TraceSession(1, requests)]), 0.0, 0)
    result = replay(arrivals=arrivals, num_blocks=5)
    assert (result.num_refused, result.num_finished) == (1, 1)


def test_a_crowd_beyond_the_seats_waits_in_order() -> None:
    # 20 requests at once for 2 seats, 1 step each.
    two_seats = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64)
    result = replay(*[recorded(0.0, 16, 1) for _ in range(20)], scheduler=two_seats)
    assert (result.num_finished, result.num_steps) == (20, 10)
    assert result.ttft_seconds is not None
    assert (result.ttft_seconds.p50, result.ttft_seconds.max) == (5.0, 10.0)
    assert max(result.timeline.running) == 2
    assert max(result.timeline.waiting) == 18
