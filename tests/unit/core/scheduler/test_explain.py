"""Why does it wait: each reason with its numbers, on scenarios small enough to count by hand. Blocks of 4 tokens.

tests/wait_checker.py checks the same against every step of every scheduler test.
"""

from collections import Counter

import pytest

from kvledger import KVCacheConfig, KVCacheGroupSpec, KVCacheManager, MambaSpec
from kvledger.errors import UnknownRequestError
from kvledger.scheduler import ExternalHit, Scheduler, SchedulerConfig, SchedulingPolicy, WaitExplanation, WaitReason
from tests.engine import Engine
from tests.groups import full, hybrid, state
from tests.helpers import other, request


def why(engine: Engine, request_id: str) -> WaitExplanation:
    explanation = engine.scheduler.explain(request_id)
    assert explanation is not None, f"{request_id} does not wait"
    return explanation


def test_one_that_computes_does_not_wait() -> None:
    engine = Engine(8)
    engine.add("a", 6)
    engine.step()
    assert engine.scheduler.explain("a") is None
    assert engine.scheduler.explain_all() == []
    assert engine.scheduler.wait_counts() == {}


def test_unknown_and_finished_requests_are_an_error() -> None:
    engine = Engine(8)
    engine.add("a", 6, max_tokens=1)
    engine.run()
    for request_id in ("a", "nobody"):
        with pytest.raises(UnknownRequestError, match=f"request_id='{request_id}': not here, or finished already"):
            engine.scheduler.explain(request_id)


def test_one_that_came_after_the_last_step_was_not_considered() -> None:
    engine = Engine(8)
    engine.add("a", 6)
    assert why(engine, "a") == WaitExplanation("a", WaitReason.NOT_CONSIDERED, step=0, since_step=1)
    assert str(why(engine, "a")) == "'a' waits: the last step did not come to it"


def test_the_token_budget_is_spent() -> None:
    engine = Engine(20, max_num_batched_tokens=8)
    for family, name in enumerate("abc"):
        engine.add(name, other(12, family))
    engine.steps(3)
    # Steps give 8 | 4 + 4 | 1 + 7, and a is decoding by the third.
    assert engine.scheduler.wait_counts() == {WaitReason.TOKEN_BUDGET: 1}
    told = why(engine, "c")
    assert told == WaitExplanation("c", WaitReason.TOKEN_BUDGET, step=3, since_step=1, limit=8)
    assert str(told) == "'c' waits since step 1 (3 steps): token budget spent: all 8 tokens"


def test_a_running_request_that_the_budget_does_not_reach() -> None:
    # Two prefills of 5 run; then a verifies drafts for the whole budget of a step, twice.
    engine = Engine(20, max_num_batched_tokens=6, max_num_seqs=3)
    engine.add("a", other(2, 1), max_tokens=20)
    engine.add("b", other(2, 2), max_tokens=20)
    engine.step()
    for _ in range(2):
        engine.scheduler.update_draft_tokens("a", [700_000] * 5)
        assert engine.step().request_ids == ["a"]
    assert why(engine, "b") == WaitExplanation("b", WaitReason.TOKEN_BUDGET, step=3, since_step=2, limit=6)
    engine.step()
    assert engine.scheduler.explain("b") is None
    engine.scheduler.update_draft_tokens("a", [700_000] * 5)
    engine.step()
    assert why(engine, "b").since_step == 5


def test_all_at_once_are_told_what_each_is_told_alone() -> None:
    engine = Engine(400, max_num_batched_tokens=6, max_num_seqs=6)
    engine.source.offers.update({f"asks {number}": None for number in range(3)})
    engine.add("a", other(2, 1), max_tokens=20)
    engine.add("b", other(2, 2), max_tokens=20)
    engine.step()
    for number in range(3):
        engine.add(f"asks {number}", other(4, 3 + number))
    engine.add("c", other(20, 9))
    engine.add("d", 4)
    engine.step()
    # Alone and all at once, also when the budget ends before the running b.
    for drafts in (0, 5):
        if drafts:
            engine.scheduler.update_draft_tokens("a", [700_000] * drafts)
            engine.step()
        scheduler = engine.scheduler
        alone = [scheduler.explain(each.request_id) for each in scheduler.running_requests()]
        alone += [scheduler.explain(each.request_id) for each in scheduler.waiting_requests()]
        assert scheduler.explain_all() == [each for each in alone if each is not None]
        reasons = {each.request_id: each.reason for each in scheduler.explain_all()}
        asking = WaitReason.TOKEN_BUDGET if drafts else WaitReason.EXTERNAL_LOOKUP
        assert {name: reasons[name] for name in ("asks 0", "asks 2", "d")} == {
            "asks 0": asking,
            "asks 2": asking,
            "d": WaitReason.TOKEN_BUDGET,
        }
        assert ("b" in reasons) == (drafts > 0)


def test_max_num_seqs_is_reached() -> None:
    engine = Engine(20, max_num_seqs=2)
    for family, name in enumerate("abcd"):
        engine.add(name, other(4, family))
    engine.steps(2)
    assert engine.scheduler.wait_counts() == {WaitReason.MAX_NUM_SEQS: 2}
    assert (
        str(why(engine, "d")) == "'d' waits since step 1 (2 steps): max_num_seqs reached: 2 requests run, 1 ahead of it"
    )


def test_blocks_are_missing_with_the_watermark_for_the_whole_sequence() -> None:
    engine = Engine(19, watermark=0.25, max_num_batched_tokens=16)
    engine.add("a", other(30, 1))
    engine.steps(2)
    engine.add("b", other(25, 2))
    engine.add("c", other(2, 3))
    engine.steps(4)
    # a has 34 tokens in 9 of 19 blocks; b needs 7 of the other 10, and a quarter of the pool's 20 shall stay free.
    told = why(engine, "b")
    assert (told.reason, told.step, told.since_step, told.num_ahead) == (WaitReason.BLOCKS, 6, 3, 0)
    assert str(told) == "'b' waits since step 3 (4 steps): needs 7 blocks for all its tokens, 10 free, watermark 5"
    behind = why(engine, "c")
    assert (behind.reason, behind.other_id, behind.other_reason) == (WaitReason.BEHIND, "b", WaitReason.BLOCKS)
    assert str(behind) == (
        "'c' waits since step 3 (4 steps): behind 'b' "
        "(needs 7 blocks for all its tokens, 10 free, watermark 5), 1 ahead of it"
    )
    assert engine.scheduler.wait_counts() == {WaitReason.BLOCKS: 1, WaitReason.BEHIND: 1}


def test_blocks_are_missing_for_the_chunk_alone() -> None:
    engine = Engine(5, reserve_full_sequence=False, max_num_batched_tokens=12)
    engine.add("a", other(14, 1), max_tokens=2)
    engine.step()
    engine.add("b", other(12, 2))
    engine.step()
    # Of 12 tokens a takes 2, so b's chunk is 10: 3 blocks.
    assert str(why(engine, "b")) == "'b' waits: needs 3 blocks for the step, 1 free"


def test_behind_names_the_order_of_priority() -> None:
    engine = Engine(4, policy=SchedulingPolicy.PRIORITY)
    engine.add("a", other(8, 1))
    engine.step()
    engine.add("late and urgent", other(12, 2), priority=-1, arrival_time=9.0)
    engine.add("early", other(1, 3), priority=5)
    engine.step()
    assert why(engine, "late and urgent").reason is WaitReason.BLOCKS
    assert why(engine, "early").other_id == "late and urgent"


def test_a_load_that_leaves_no_room_for_those_under_way() -> None:
    engine = Engine(8)
    for family, name in enumerate("ab"):
        engine.source.offers[name] = ExternalHit(16, asynchronous=True)
        engine.add(name, other(24, family))
    engine.steps(2)
    assert str(why(engine, "a")) == (
        "'a' waits since step 1 (2 steps): waiting for external KV since step 1: 16 tokens"
    )
    # a holds 4 of 8 blocks and needs 2 more; b's load would take the other 4.
    assert str(why(engine, "b")) == ("'b' waits since step 1 (2 steps): needs 6 blocks for all its tokens, 4 free")


def test_a_load_that_fits_but_for_what_others_count_on() -> None:
    engine = Engine(8, reserve_full_sequence=False)
    for family, name in enumerate("ab"):
        engine.source.offers[name] = ExternalHit(16, asynchronous=True)
        engine.add(name, other(24, family))
    engine.steps(2)
    assert str(why(engine, "b")) == (
        "'b' waits since step 1 (2 steps): needs 4 blocks for the step, 4 free, 2 spoken for"
    )


def test_a_load_that_no_pass_looked_at_still_tells_when_it_was_asked_for() -> None:
    engine = Engine(20, max_num_seqs=1)
    engine.source.offers["a"] = ExternalHit(4, asynchronous=True)
    engine.add("a", 8)
    engine.add("b", other(4))
    engine.steps(2)
    assert str(why(engine, "a")) == (
        "'a' waits since step 1 (2 steps): max_num_seqs reached: 1 requests run, external KV asked for in step 1"
    )


def test_the_source_does_not_know_yet() -> None:
    engine = Engine(8)
    engine.source.offers["a"] = None
    engine.add("a", 8)
    engine.steps(3)
    assert why(engine, "a") == WaitExplanation("a", WaitReason.EXTERNAL_LOOKUP, step=3, since_step=1)


@pytest.mark.parametrize(("lease", "text"), [(0, ""), (3, " until step 4")])
def test_orphaned_loads_are_named_where_blocks_are_missing(lease: int, text: str) -> None:
    engine = Engine(8, external_lease_steps=lease)
    engine.source.offers["lost"] = ExternalHit(16, asynchronous=True)
    engine.add("lost", 17)
    engine.step()
    engine.scheduler.abort("lost")
    engine.add("next", other(24))
    engine.step()
    assert str(why(engine, "next")) == (
        f"'next' waits: needs 6 blocks for all its tokens, 4 free, 4 held by orphaned loads{text}"
    )


def test_preempted_by_itself_and_then_short_of_blocks() -> None:
    engine = Engine(4)
    engine.add("a", other(7, 1), max_tokens=9)
    engine.add("b", other(8, 2), max_tokens=9)
    engine.add("c", other(1, 3))
    engine.steps(2)
    # Two prompts of two blocks fill the pool. The token that b sampled needs a third one, and b came last.
    assert str(why(engine, "b")) == ("'b' waits: preempted by itself, which needs 1 block for the step, 0 free")
    assert str(why(engine, "c")) == (
        "'c' waits since step 1 (2 steps): a step that preempts admits nobody: 'b' was preempted, 1 ahead of it"
    )
    engine.step()
    # a has taken a third block for its 9th token.
    assert str(why(engine, "b")) == "'b' waits since step 2 (2 steps): needs 3 blocks for all its tokens, 1 free"


def test_preempted_by_another() -> None:
    engine = Engine(4)
    engine.add("a", other(8, 1), max_tokens=9)
    engine.add("b", other(5, 2), max_tokens=9)
    engine.steps(2)
    told = why(engine, "b")
    assert (told.reason, told.other_id, told.since_step) == (WaitReason.PREEMPTED, "a", 2)
    assert str(told) == "'b' waits: preempted by 'a', which needs 1 block for the step, 0 free"


def test_a_running_request_behind_one_that_preempted_itself() -> None:
    engine = Engine(5, decisions="0.32", policy=SchedulingPolicy.PRIORITY)
    engine.add("low", other(7, 1), priority=1, max_tokens=9)
    engine.step()
    engine.add("high", other(9, 2), priority=0, max_tokens=9)
    engine.step()
    # low comes first in the running list, needs a third block for its 9th token, and is the least urgent itself.
    assert engine.step().request_ids == []
    assert engine.preemptions == {"low": 1}
    assert str(why(engine, "high")) == "'high' waits: a step that preempts admits nobody: 'low' was preempted"
    assert engine.scheduler.wait_counts() == {WaitReason.PREEMPTED: 1, WaitReason.STEP_PREEMPTED: 1}


def test_from_0_33_on_it_has_its_turn_in_the_same_step() -> None:
    engine = Engine(5, policy=SchedulingPolicy.PRIORITY)
    engine.add("low", other(7, 1), priority=1, max_tokens=9)
    engine.step()
    engine.add("high", other(9, 2), priority=0, max_tokens=9)
    engine.step()
    assert engine.step().request_ids == ["high"]
    assert engine.preemptions == {"low": 1}
    assert why(engine, "low").reason is WaitReason.PREEMPTED
    assert engine.scheduler.wait_counts() == {WaitReason.PREEMPTED: 1}


def test_a_reset_that_preempts_leaves_nobody_considered() -> None:
    engine = Engine(8)
    engine.add("a", 6)
    engine.step()
    engine.scheduler.reset_prefix_cache(preempt_running=True)
    assert why(engine, "a") == WaitExplanation("a", WaitReason.NOT_CONSIDERED, step=1, since_step=2)


def test_stale_output_is_awaited_and_the_last_token_too() -> None:
    engine = Engine(4, max_steps_in_flight=2, with_source=False)
    engine.add("a", other(7, 1), max_tokens=4)
    engine.add("b", other(8, 2), max_tokens=4)
    engine.schedule()
    engine.schedule()
    # b is preempted although its first step is not back yet; so that step's output is awaited before b goes on.
    assert why(engine, "b").reason is WaitReason.PREEMPTED
    engine.deliver()
    engine.schedule()
    assert why(engine, "b").reason is WaitReason.BLOCKS
    engine.deliver()
    engine.schedule()
    engine.deliver()
    engine.schedule()
    # Three tokens of a's four are known, and the fourth is being computed.
    assert why(engine, "a") == WaitExplanation("a", WaitReason.OUTPUT_IN_FLIGHT, step=5, since_step=5)


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_budget() -> None:
    engine = Engine(40, max_model_len=64, max_num_batched_tokens=64, enable_chunked_prefill=False)
    engine.add("a", other(40, 1))
    engine.add("b", other(30, 2))
    engine.step()
    assert str(why(engine, "b")) == "'b' waits: budget left is too small for the whole prompt: 30 tokens, 24 left"


def test_a_decode_that_is_padded_with_drafts_waits_for_room_in_the_budget() -> None:
    engine = Engine(20, num_speculative_tokens=3, max_num_batched_tokens=4, max_num_seqs=2)
    engine.add("a", 3, max_tokens=3)
    engine.step()
    engine.add("b", other(1), max_tokens=2)
    engine.step()
    # a decodes one token, and b's one token with the three unknown drafts that make its row as long as others.
    assert str(why(engine, "b")) == (
        "'b' waits: budget left is too small for a decode padded with drafts: 4 tokens, 3 left"
    )


def test_a_chunk_that_cannot_end_at_a_state_waits() -> None:
    spec = MambaSpec(8, ((1,),), ("float32",), mamba_cache_mode="align")
    manager = KVCacheManager(KVCacheConfig(20, (KVCacheGroupSpec(("layer",), spec),)), 64)
    scheduler = Scheduler(manager, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12))
    scheduler.add_request(request("a", other(7, 1)))
    scheduler.add_request(request("b", other(20, 2)))
    output = scheduler.schedule()
    assert output.num_tokens_by_request() == {"a": 7}
    # States are cached after 8 tokens, so a chunk of the 5 that are left would cache none.
    told = scheduler.explain("b")
    assert told is not None
    assert str(told) == "'b' waits: budget left is too small for a chunk that can be cached: 5 tokens, 5 left"


def test_a_running_prompt_whose_chunk_is_clipped_to_nothing() -> None:
    manager = hybrid(60, full(8), state(8, drafts=9), max_model_len=128)
    scheduler = Scheduler(manager, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16))
    scheduler.add_request(request("a", other(9, 1)))
    scheduler.add_request(request("b", other(80, 2)))
    scheduler.add_request(request("c", other(80, 3)))
    steps = []
    for _ in range(5):
        output = scheduler.schedule()
        steps.append(output.num_tokens_by_request())
        reasons = {told.request_id: told.reason for told in scheduler.explain_all()}
        assert scheduler.wait_counts() == Counter(reasons.values())
        scheduler.update_from_output(
            output, [[7] if r.num_computed_tokens >= r.num_tokens else [] for r in output.requests]
        )
        scheduler.update_draft_tokens("a", [700_000] * 9 if len(steps) >= 2 else [])
    # With 10 of 16 tokens gone to a and its drafts, b has no room for a chunk of 8 that ends at a state.
    assert steps == [{"a": 8, "b": 8}, {"a": 1, "b": 8}, {"a": 10}, {"a": 10}, {"a": 10}]
    told = scheduler.explain("b")
    assert told == WaitExplanation("b", WaitReason.CHUNK_CLIPPED, step=5, since_step=3)


def test_a_hit_that_the_same_step_writes() -> None:
    scheduler = Scheduler(hybrid(20, full(), state(), max_model_len=64), SchedulerConfig(max_num_seqs=8))
    scheduler.add_request(request("a", 9))
    scheduler.add_request(request("b", 9))
    assert scheduler.schedule().num_tokens_by_request() == {"a": 8}
    # a writes the state after 8 tokens, which b could start from when it is there.
    told = scheduler.explain("b")
    assert told is not None
    assert (told.reason, told.shortage) == (WaitReason.HIT_IN_WRITING, None)
    assert str(told) == "'b' waits: its prefix hit is written by this very step"


def test_larger_than_the_whole_pool() -> None:
    engine = Engine(4, max_model_len=64)
    engine.add("a", 14, max_tokens=40)
    while "a" not in engine.finished:
        engine.step()
    told = why(engine, "a")
    assert told.reason is WaitReason.NEVER_FITS
    assert told.error == (
        "request 'a': 17 tokens need 5 blocks, the pool has 4; shorten the request or give the pool more blocks"
    )
    engine.step()
    with pytest.raises(UnknownRequestError):
        engine.scheduler.explain("a")
