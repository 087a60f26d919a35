"""The scheduler: budget, chunks, seats, order, finishing, aborting, misuse."""

from collections.abc import Callable

import pytest

from kvledger import (
    DraftRule,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    MambaSpec,
    Request,
    RequestStatus,
)
from kvledger.errors import ConfigError, InvariantError, KVLedgerError, RequestError, RequestTooLargeError
from kvledger.errors import UnknownRequestError as Unknown
from kvledger.scheduler import SchedulerConfig, SchedulingPolicy
from tests.engine import Engine
from tests.helpers import other, request


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_num_batched_tokens", 255),
        ("long_prefill_token_threshold", -1),
        ("num_speculative_tokens", -1),
        ("num_lookahead_tokens", -1),
        ("external_lease_steps", -1),
        ("max_steps_in_flight", 0),
        ("max_steps_in_flight", 3),
    ],
)
def test_wrong_limits_are_named(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field}={value}: .*; "):
        SchedulerConfig(**{field: value})  # type: ignore[arg-type]


# One budget, no phases


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = Engine(20, max_num_batched_tokens=8)
    engine.add("a", 19, max_tokens=2)
    chunks = [engine.step().num_tokens_by_request() for _ in range(4)]
    assert chunks == [{"a": 8}, {"a": 8}, {"a": 3}, {"a": 1}]
    assert engine.tokens["a"] == [800_019, 800_020]
    assert engine.finished == {"a": "FINISHED_LENGTH"}


def test_decodes_go_first_and_prefills_fill_the_step() -> None:
    engine = Engine(20, max_num_batched_tokens=8)
    engine.add("a", 4)
    engine.step()
    engine.add("b", other(20))
    assert engine.step().num_tokens_by_request() == {"a": 1, "b": 7}
    assert engine.step().num_tokens_by_request() == {"a": 1, "b": 7}
    assert engine.step().num_tokens_by_request() == {"a": 1, "b": 6}
    assert engine.step().num_tokens_by_request() == {"a": 1, "b": 1}


def test_several_are_admitted_in_one_step_in_order() -> None:
    engine = Engine(20, max_num_batched_tokens=16)
    for number, name in enumerate("abc"):
        engine.add(name, other(6, number))
    output = engine.step()
    assert output.num_tokens_by_request() == {"a": 6, "b": 6, "c": 4}
    assert [data.request_id for data in output.new_requests] == ["a", "b", "c"]
    assert [data.block_ids for data in output.new_requests] == [([1, 2],), ([3, 4],), ([5],)]


def test_a_request_that_comes_second_hits_what_the_first_computes_in_the_same_step() -> None:
    engine = Engine(20)
    engine.add("a", 12)
    engine.add("b", 12)
    assert engine.step().num_tokens_by_request() == {"a": 12, "b": 4}


def test_no_more_than_max_num_seqs_run() -> None:
    engine = Engine(20, max_num_seqs=2)
    for number, name in enumerate("abc"):
        engine.add(name, other(3, number), max_tokens=2)
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 1)
    engine.step()
    assert list(engine.step().request_ids) == ["c"]


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_takes_it_whole() -> None:
    engine = Engine(20, max_num_batched_tokens=8, max_model_len=8, enable_chunked_prefill=False)
    engine.add("a", 5)
    engine.add("b", other(6))
    assert engine.step().num_tokens_by_request() == {"a": 5}
    assert engine.step().num_tokens_by_request() == {"a": 1, "b": 6}


def test_a_long_prompt_gets_the_threshold_a_step_while_others_are_there() -> None:
    engine = Engine(40, max_num_batched_tokens=64, long_prefill_token_threshold=8)
    engine.add("a", 20)
    assert engine.step().num_tokens_by_request() == {"a": 20}
    engine.add("b", other(20))
    assert engine.step().num_tokens_by_request() == {"a": 1, "b": 8}
    assert engine.step().num_tokens_by_request() == {"a": 1, "b": 8}
    assert engine.step().num_tokens_by_request() == {"a": 1, "b": 4}


def test_the_first_that_does_not_fit_stops_admission() -> None:
    engine = Engine(6)
    engine.add("a", 12, max_tokens=2)
    engine.add("b", other(16, 1), max_tokens=2)
    engine.add("c", other(4, 2), max_tokens=2)
    assert engine.step().request_ids == ["a"]
    engine.run()
    assert list(engine.finished) == ["a", "b", "c"]


def test_workers_get_all_ids_of_a_new_request_and_only_new_ids_of_a_running_one() -> None:
    engine = Engine(8)
    engine.add("a", 7)
    output = engine.step()
    assert output.new_requests[0].block_ids == ([1, 2],)
    assert (output.new_requests[0].num_computed_tokens, output.new_requests[0].num_tokens) == (0, 7)
    assert output.new_requests[0].token_ids == list(range(7))
    assert output.new_block_ids_by_request() == {}
    assert [engine.step().new_block_ids_by_request() for _ in range(3)] == [{}, {"a": ([3],)}, {}]
    assert all(type(block_id) is int for block_id in engine.ids("a"))


def test_a_hit_starts_behind_what_is_computed_already() -> None:
    engine = Engine(8)
    engine.add("a", 9, max_tokens=1)
    engine.run()
    engine.add("b", 11)
    output = engine.step()
    assert [*output.ranges_by_request().values()] == [(8, 11)]
    assert output.new_requests[0].block_ids[0][:2] == [1, 2]


# Ends


def test_a_stop_token_ends_a_request() -> None:
    engine = Engine(8)
    engine.add("a", 4, max_tokens=50, stop_token_ids=(5, 800_006))
    engine.run()
    assert engine.tokens["a"] == [800_004, 800_005, 800_006]
    assert engine.finished == {"a": "FINISHED_STOPPED"}


def test_max_model_len_ends_a_request() -> None:
    engine = Engine(8, max_model_len=10)
    engine.add("a", 8, max_tokens=50)
    engine.run()
    assert len(engine.tokens["a"]) == 2
    assert engine.finished == {"a": "FINISHED_LENGTH"}


def test_what_finished_is_told_to_the_workers_with_the_next_step() -> None:
    engine = Engine(8)
    engine.add("a", 4, max_tokens=1)
    engine.step()
    assert not engine.scheduler.has_unfinished_requests
    assert engine.manager.num_free_blocks == 8
    output = engine.step()
    assert (output.finished_request_ids, output.request_ids) == (["a"], [])
    assert engine.step().finished_request_ids == []


def test_abort_while_waiting_running_preempted_and_in_flight() -> None:
    engine = Engine(8)
    engine.add("waiting", 4)
    engine.scheduler.abort("waiting")
    assert engine.step().finished_request_ids == ["waiting"]

    engine.add("running", 4)
    engine.step()
    engine.scheduler.abort("running")
    assert engine.manager.num_free_blocks == 8

    engine.add("in flight", 4)
    engine.schedule()
    engine.scheduler.abort("in flight")
    assert engine.deliver() == []

    engine.add("preempted", 4)
    engine.step()
    engine.scheduler.reset_prefix_cache(preempt_running=True)
    assert engine.scheduler.waiting_requests()[0].status is RequestStatus.PREEMPTED
    engine.scheduler.abort("preempted")
    output = engine.step()
    assert output.preempted_request_ids == ["preempted"]
    assert output.finished_request_ids == ["preempted"]
    assert not engine.scheduler.has_unfinished_requests
    assert engine.manager.num_free_blocks == 8


def test_an_id_can_be_used_again_when_its_request_is_gone() -> None:
    engine = Engine(8)
    for _ in range(3):
        engine.add("a", 6, max_tokens=2)
        engine.run()
        engine.step()
    assert engine.manager.num_free_blocks == 8


# Preemption


def test_the_last_that_started_is_preempted_and_resumes_with_fresh_ids() -> None:
    engine = Engine(4)
    a = engine.add("a", 7, max_tokens=6)
    b = engine.add("b", other(7), max_tokens=6)
    assert engine.step().request_ids == ["a", "b"]
    assert engine.step().request_ids == ["a", "b"]
    output = engine.step()
    # Both need a third block: b gives its two back.
    assert output.request_ids == ["a"]
    assert output.preempted_request_ids == ["b"]
    assert (b.status, b.num_computed_tokens, b.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
    assert (a.num_preemptions, engine.scheduler.num_preemptions) == (0, 1)
    assert not engine.manager.holds_blocks(b)
    engine.run()
    assert engine.tokens["b"] == [800_000 + position for position in range(7, 13)]
    assert engine.finished == {"a": "FINISHED_LENGTH", "b": "FINISHED_LENGTH"}


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    engine = Engine(4)
    engine.add("a", 7, max_tokens=6)
    engine.add("b", other(7), max_tokens=6)
    engine.steps(2)
    engine.add("c", other(1, 2), max_tokens=1)
    assert engine.step().request_ids == ["a"]
    assert [waiting.request_id for waiting in engine.scheduler.waiting_requests()] == ["b", "c"]


def test_a_request_already_in_the_step_is_taken_out_of_it_when_preempted() -> None:
    engine = Engine(4, policy=SchedulingPolicy.PRIORITY)
    engine.add("economy", 5, priority=5, max_tokens=6)
    engine.step()
    engine.add("vip", other(8), priority=0, max_tokens=6)
    engine.step()
    output = engine.step()
    # The step gave economy its token first; vip needs a third block, so economy loses its two and its place.
    assert output.request_ids == ["vip"]
    assert output.preempted_request_ids == ["economy"]
    engine.run()
    assert engine.finished == {"vip": "FINISHED_LENGTH", "economy": "FINISHED_LENGTH"}


def test_what_a_request_taken_out_of_the_step_would_have_computed_is_no_hit() -> None:
    engine = Engine(
        10,
        policy=SchedulingPolicy.PRIORITY,
        max_num_batched_tokens=12,
        long_prefill_token_threshold=8,
        reserve_full_sequence=False,
    )
    engine.add("economy", 38, priority=5, max_tokens=1)
    engine.step()
    engine.add("vip", other(3), priority=0, max_tokens=3)
    # The fourth step gives economy tokens 28 .. 35 and names their blocks; then vip needs one, and economy leaves.
    engine.steps(3)
    # Its worker finds two blocks that nobody has ever written.
    engine.run()
    assert set(engine.finished.values()) == {"FINISHED_LENGTH"}


def test_by_priority_the_least_urgent_and_latest_is_the_victim() -> None:
    engine = Engine(6, policy=SchedulingPolicy.PRIORITY)
    for name, priority, arrival_time in (("a", 1, 1.0), ("b", 1, 2.0), ("c", 0, 3.0)):
        prompt = other(7, ord(name))
        engine.add(name, prompt, priority=priority, arrival_time=arrival_time, max_tokens=6)
    assert engine.step().request_ids == ["c", "a", "b"]
    engine.step()
    output = engine.step()
    assert output.preempted_request_ids == ["b"]
    assert output.request_ids == ["c", "a"]


def test_priority_admits_the_urgent_first() -> None:
    engine = Engine(8, policy=SchedulingPolicy.PRIORITY, max_num_seqs=1)
    engine.add("economy", 4, priority=5, max_tokens=1)
    engine.add("vip", other(4), priority=0, max_tokens=1)
    engine.run()
    assert list(engine.finished) == ["vip", "economy"]


def test_a_preempted_request_finds_what_is_still_cached_of_it() -> None:
    engine = Engine(5)
    engine.add("a", 7, max_tokens=3)
    b = engine.add("b", other(7), max_tokens=10)
    engine.steps(3)
    assert b.num_preemptions == 1
    engine.run()
    stats = engine.manager.take_prefix_cache_stats()
    assert (stats.requests, stats.hits) == (2, 0)
    assert (stats.preempted_requests, stats.preempted_hits) == (1, 8)


# Too large


@pytest.mark.parametrize("reserve", [True, False])
def test_a_prompt_that_never_fits_is_refused_at_the_door(reserve: bool) -> None:
    engine = Engine(4, reserve_full_sequence=reserve)
    with pytest.raises(RequestTooLargeError, match="request 'a': 17 tokens need 5 blocks, the pool has 4; shorten"):
        engine.add("a", 17)
    small = Engine(4, max_model_len=8)
    with pytest.raises(RequestTooLargeError, match="8 prompt tokens leave no room to generate within max_model_len=8"):
        small.add("a", 8)
    small.add("a", 7)


def test_the_longest_request_that_fits_runs_to_its_end() -> None:
    engine = Engine(4)
    engine.add("a", 12, max_tokens=5)
    engine.run()
    assert engine.finished == {"a": "FINISHED_LENGTH"}
    assert len(engine.tokens["a"]) == 5


def test_a_request_that_outgrows_the_pool_ends_with_its_own_error() -> None:
    engine = Engine(4)
    engine.add("big", 12, max_tokens=20)
    engine.add("small", other(2), max_tokens=3)
    errors = {}
    for _ in range(12):
        errors.update(engine.step().errors)
    assert list(errors) == ["big"]
    assert isinstance(errors["big"], RequestTooLargeError)
    assert "17 tokens need 5 blocks, the pool has 4" in str(errors["big"])
    assert engine.finished == {"small": "FINISHED_LENGTH", "big": "error"}
    assert engine.manager.num_free_blocks == 4


def test_drafts_that_do_not_fit_the_pool_do_not_end_a_request() -> None:
    # 12 + 4 tokens are exactly the pool; only the drafts reach beyond it, and they are optional.
    engine = Engine(4)
    engine.add("a", 12, max_tokens=4)
    engine.step()
    for _ in range(20):
        engine.scheduler.update_draft_tokens("a", [1, 2, 3, 4])
        engine.step()
    assert engine.finished == {"a": "FINISHED_LENGTH"}


def test_lookahead_beyond_the_pool_does_not_block_the_queue() -> None:
    engine = Engine(4, num_lookahead_tokens=4)
    # 14 tokens and the 4 slots behind them take 5 blocks of 4.
    with pytest.raises(RequestTooLargeError, match="'a': 14 tokens need 5 blocks, the pool has 4"):
        engine.add("a", 14, max_tokens=2)
    engine.add("b", other(4), max_tokens=2)
    engine.run(max_steps=50)
    assert set(engine.finished) == {"b"}


def test_lookahead_beyond_the_pool_does_not_block_a_decode() -> None:
    engine = Engine(4, num_lookahead_tokens=4)
    engine.add("a", 10, max_tokens=6)
    engine.run(max_steps=50)
    assert set(engine.finished) == {"a"}


# Drafts


def test_rejected_drafts_are_taken_back_and_accepted_ones_kept() -> None:
    engine = Engine(8)
    a = engine.add("a", 5, max_tokens=20)
    engine.step()
    engine.scheduler.update_draft_tokens("a", [700_000] * 3)
    output = engine.step(accept=lambda request_id, num_drafts: 2)
    assert output.num_tokens_by_request() == {"a": 4}
    assert output.draft_token_ids == {"a": [700_000] * 3}
    # 1 sampled before, 2 accepted, 1 sampled now; all but the last are computed.
    assert (a.num_output_tokens, a.num_computed_tokens) == (4, 8)
    assert a.draft_token_ids == []
    assert engine.step().num_tokens_by_request() == {"a": 1}


def test_drafts_are_cut_to_the_budget_and_ignored_for_prompts_and_strangers() -> None:
    engine = Engine(8, max_num_batched_tokens=3, max_num_seqs=1)
    a = engine.add("a", 4, max_tokens=20)
    engine.step()
    engine.scheduler.update_draft_tokens("a", [1])
    engine.scheduler.update_draft_tokens("gone", [1])
    assert a.draft_token_ids == []
    engine.step()
    engine.scheduler.update_draft_tokens("a", [700_000] * 5)
    assert engine.step().draft_token_ids == {"a": [700_000] * 2}


def test_drafts_stop_before_max_model_len() -> None:
    engine = Engine(8, max_model_len=8)
    engine.add("a", 5, max_tokens=20)
    engine.step()
    engine.scheduler.update_draft_tokens("a", [700_000] * 5)
    # Positions 5, 6 are computed; the token sampled after them is the 8th and last.
    assert engine.step(accept=lambda request_id, num_drafts: num_drafts).num_tokens_by_request() == {"a": 2}
    assert engine.finished == {"a": "FINISHED_LENGTH"}


def test_more_tokens_than_drafts_verified_are_refused() -> None:
    engine = Engine(8)
    engine.add("a", 5)
    output = engine.scheduler.schedule()
    with pytest.raises(RequestError, match=r"sampled_token_ids\[0\]: 2 tokens for .*'a', which verified 0 drafts"):
        engine.scheduler.update_from_output(output, [[1, 2]])
    engine.scheduler.update_from_output(output, [[1]])


def test_a_lone_decode_joins_a_batch_of_decodes_padded_with_unknown_drafts() -> None:
    engine = Engine(20, num_speculative_tokens=3)
    engine.add("a", 5, max_tokens=9)
    engine.step()
    engine.add("b", other(1), max_tokens=9)
    output = engine.step()
    assert output.num_tokens_by_request() == {"a": 1, "b": 4}
    assert output.draft_token_ids == {"b": [-1, -1, -1]}
    engine.run()
    assert set(engine.finished) == {"a", "b"}


def test_a_padded_decode_waits_for_the_budget() -> None:
    engine = Engine(20, num_speculative_tokens=3, max_num_batched_tokens=4, max_num_seqs=2)
    engine.add("a", 3, max_tokens=3)
    engine.step()
    engine.add("b", other(1), max_tokens=2)
    assert engine.step().num_tokens_by_request() == {"a": 1}
    engine.run()
    assert set(engine.finished) == {"a", "b"}


# Two steps in flight


def test_a_second_step_is_scheduled_before_the_first_is_back() -> None:
    engine = Engine(8, max_steps_in_flight=2, with_source=False)
    a = engine.add("a", 6, max_tokens=3)
    assert engine.schedule().num_tokens_by_request() == {"a": 6}
    assert a.num_in_flight_tokens == 6
    assert engine.schedule().num_tokens_by_request() == {"a": 1}
    assert (a.num_in_flight_tokens, a.num_output_placeholders, a.num_tokens) == (7, 2, 6)
    with pytest.raises(RequestError, match="2 steps are in flight; call update_from_output first"):
        engine.scheduler.schedule()
    assert engine.deliver()[0].new_token_ids == [800_006]
    assert engine.schedule().num_tokens_by_request() == {"a": 1}
    # 3 output tokens are on their way: no fourth step is needed.
    engine.deliver()
    assert engine.schedule().request_ids == []
    engine.deliver()
    assert engine.finished == {"a": "FINISHED_LENGTH"}


def test_one_step_in_flight_is_the_default() -> None:
    engine = Engine(8)
    engine.add("a", 6)
    engine.schedule()
    with pytest.raises(RequestError, match="1 steps are in flight"):
        engine.scheduler.schedule()


def test_output_of_a_step_from_before_a_preemption_is_still_delivered() -> None:
    engine = Engine(4, max_steps_in_flight=2, with_source=False)
    engine.add("a", 7, max_tokens=6)
    b = engine.add("b", other(7), max_tokens=6)
    engine.schedule()
    while b.num_preemptions == 0:
        if len(engine.in_flight) == 2:
            engine.deliver()
        engine.schedule()
    assert b.num_stale_tokens > 0
    while engine.scheduler.has_unfinished_requests:
        while len(engine.in_flight) < 2:
            engine.schedule()
        engine.deliver()
    assert engine.tokens["b"] == [800_000 + position for position in range(7, 13)]


def test_output_of_steps_before_a_forced_reset_is_dropped() -> None:
    engine = Engine(8, max_steps_in_flight=2, with_source=False)
    a = engine.add("a", 6, max_tokens=4)
    engine.schedule()
    engine.schedule()
    assert engine.scheduler.reset_prefix_cache(preempt_running=True)
    assert (a.num_stale_tokens, a.num_in_flight_tokens) == (7, 7)
    assert engine.deliver() == []
    assert engine.schedule().num_tokens_by_request() == {"a": 6}
    assert engine.deliver() == []
    while engine.scheduler.has_unfinished_requests:
        engine.schedule()
        engine.deliver()
    assert len(engine.tokens["a"]) == 4


def test_drafts_in_two_steps_in_flight_are_placeholders() -> None:
    engine = Engine(16, max_steps_in_flight=2, with_source=False, num_speculative_tokens=2)
    a = engine.add("a", 6, max_tokens=12)
    engine.schedule()
    output = engine.schedule()
    assert output.draft_token_ids == {"a": [-1, -1]}
    while engine.scheduler.has_unfinished_requests:
        engine.deliver()
        if engine.scheduler.has_unfinished_requests:
            engine.schedule(accept=lambda request_id, num_drafts: min(1, num_drafts))
    assert len(engine.tokens["a"]) == a.num_output_tokens == 12


# Forks


def test_a_fork_runs_with_its_parent_and_diverges() -> None:
    engine = Engine(12)
    engine.add("a", 10, max_tokens=5)
    engine.step()
    engine.tokens |= {"b": [], "c": []}
    assert engine.scheduler.fork("a", ["b", "c"])
    output = engine.step()
    assert output.request_ids == ["a", "b", "c"]
    assert [data.request_id for data in output.new_requests] == ["b", "c"]
    assert [data.block_ids[0][:2] for data in output.new_requests] == [[1, 2], [1, 2]]
    assert [(c.source_block_id, c.target_block_id) for c in output.block_copies] == [(3, 4), (3, 5)]
    engine.run()
    assert set(engine.finished) == {"a", "b", "c"}
    assert engine.manager.num_free_blocks == 12


def test_a_fork_without_seats_or_blocks_changes_nothing() -> None:
    engine = Engine(4, max_num_seqs=3)
    engine.add("a", 10, max_tokens=5)
    engine.step()
    assert not engine.scheduler.fork("a", ["b", "c", "d"])
    # One block is left, and two tails would have to be copied.
    assert not engine.scheduler.fork("a", ["b", "c"])
    assert engine.manager.num_free_blocks == 1
    assert engine.manager.take_block_copies() == []
    assert [running.request_id for running in engine.scheduler.running_requests()] == ["a"]
    engine.check()


def test_wrong_forks_are_refused() -> None:
    engine = Engine(8)
    engine.add("a", 6)
    with pytest.raises(RequestError, match="request 'a' is waiting; only a running one can be forked"):
        engine.scheduler.fork("a", ["b"])
    engine.step()
    for child_ids, match in ((["a"], "request_id='a': in use"), (["b", "c", "b"], "'b' is listed twice")):
        with pytest.raises(RequestError, match=match):
            engine.scheduler.fork("a", child_ids)
    with pytest.raises(Unknown, match="request_id='gone'"):
        engine.scheduler.fork("gone", ["b"])
    assert engine.scheduler.num_running == 1


def test_a_fork_may_be_aborted_or_preempted_before_workers_hear_of_it() -> None:
    engine = Engine(8)
    engine.add("a", 6, max_tokens=4)
    engine.step()
    engine.tokens |= {"b": [], "c": []}
    assert engine.scheduler.fork("a", ["b", "c"])
    engine.scheduler.abort("b")
    assert engine.scheduler.reset_prefix_cache(preempt_running=True) is False
    output = engine.step()
    assert output.finished_request_ids == ["b"]
    assert [data.request_id for data in output.new_requests] == ["a", "c"]
    engine.run()
    assert engine.manager.num_free_blocks == 8


# Reset


def test_reset_is_refused_while_requests_run_and_force_preempts_them() -> None:
    engine = Engine(8)
    engine.add("a", 9, max_tokens=3)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    assert engine.scheduler.reset_prefix_cache(preempt_running=True)
    assert engine.manager.num_free_blocks == 8
    assert engine.step().num_tokens_by_request() == {"a": 10}
    engine.run()
    assert len(engine.tokens["a"]) == 3


# Misuse


def refuses(engine: Engine, error: type[KVLedgerError], match: str, misuse: Callable[[], object]) -> None:
    with pytest.raises(error, match=match):
        misuse()
    engine.check()


def test_unknown_and_duplicate_requests() -> None:
    engine = Engine(8)
    a = engine.add("a", 6)
    refuses(engine, RequestError, "request_id='a': in use", lambda: engine.add("a", 6))
    refuses(engine, Unknown, "request_id='b': not here", lambda: engine.scheduler.abort("b"))
    refuses(engine, Unknown, "request_id='b'", lambda: engine.scheduler.get_request("b"))
    assert engine.scheduler.get_request("a") is a
    engine.scheduler.abort("a")
    refuses(engine, Unknown, "or finished already; nothing was changed", lambda: engine.scheduler.abort("a"))
    refuses(engine, RequestError, "is finished: aborted; only a fresh", lambda: engine.scheduler.add_request(a))


def test_a_request_that_holds_blocks_cannot_be_added() -> None:
    engine = Engine(8)
    a = request("a", 6)
    engine.manager.allocate_slots(a, 6)
    with pytest.raises(RequestError, match="only a fresh request can be added"):
        engine.scheduler.add_request(a)


def test_steps_come_back_in_order_and_once() -> None:
    engine = Engine(8, max_steps_in_flight=2, with_source=False)
    engine.add("a", 6)
    first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
    for output in (second, Engine(4).scheduler.schedule()):
        with pytest.raises(RequestError, match="is not the oldest step in flight; steps come back in order"):
            engine.scheduler.update_from_output(output, [[1]])
    with pytest.raises(RequestError, match="sampled tokens for 0 requests, but 1 were scheduled"):
        engine.scheduler.update_from_output(first, [])
    engine.scheduler.update_from_output(first, [[1]])
    with pytest.raises(RequestError, match="not the oldest"):
        engine.scheduler.update_from_output(first, [[1]])
    engine.scheduler.update_from_output(second, [[1]])
    engine.check()


def test_one_token_a_request_can_come_back_flat() -> None:
    engine = Engine(8)
    scheduler = engine.scheduler
    for name, num_tokens in (("a", 4), ("b", 6), ("c", 5)):
        engine.add(name, num_tokens, max_tokens=3 if name == "c" else 2)
    output = scheduler.schedule()
    end = scheduler.update_from_tokens(output, [11, 12, 13])
    assert (end.finished, end.dropped_rows) == ([], [])
    b, c = scheduler.get_request("b"), scheduler.get_request("c")
    output = scheduler.schedule()
    scheduler.abort("a")
    end = scheduler.update_from_tokens(output, [21, 22, 23])
    # a had gone, b reached its limit, and c goes on.
    assert end.dropped_rows == [0]
    assert [(ended.request_id, ended.new_token_ids, ended.finish) for ended in end.finished] == [
        ("b", [22], RequestStatus.FINISHED_LENGTH)
    ]
    assert (b.output_token_ids(), c.output_token_ids()) == ([12, 22], [13, 23])
    engine.check()


def test_flat_tokens_are_one_a_request_of_the_oldest_step() -> None:
    engine = Engine(8)
    engine.add("a", 4)
    output = engine.scheduler.schedule()
    with pytest.raises(RequestError, match="sampled tokens for 2 requests, but 1 were scheduled"):
        engine.scheduler.update_from_tokens(output, [1, 2])
    engine.scheduler.update_from_tokens(output, [1])
    with pytest.raises(RequestError, match="not the oldest"):
        engine.scheduler.update_from_tokens(output, [1])


def test_a_request_whose_first_step_is_out_cannot_be_forked_yet() -> None:
    engine = Engine(8, with_source=False)
    engine.add("a", 6)
    output = engine.scheduler.schedule()
    with pytest.raises(RequestError, match="request 'a': nothing of it is back yet; fork it after its first update"):
        engine.scheduler.fork("a", ["b"])
    engine.scheduler.check()
    engine.scheduler.update_from_tokens(output, [7])
    assert engine.scheduler.fork("a", ["b"])
    assert engine.scheduler.schedule().num_tokens_by_request() == {"a": 1, "b": 1}


def test_check_finds_a_request_in_the_wrong_place() -> None:
    def broken(attribute: str, value: object, match: str) -> None:
        engine = Engine(8)
        running = engine.add("a", 6)
        engine.step()
        setattr(running, attribute, value)
        with pytest.raises(InvariantError, match=match):
            engine.scheduler.check()

    broken("status", RequestStatus.WAITING, "'a' runs as waiting")
    broken("num_stale_tokens", 3, "'a': 3 stale of 0 in flight")
    broken("num_output_placeholders", -1, "'a': negative placeholders")
    engine = Engine(8)
    waiting = engine.add("a", 6)
    waiting.status = RequestStatus.RUNNING
    with pytest.raises(InvariantError, match="'a' waits but is running"):
        engine.scheduler.check()
    engine = Engine(8)
    held = engine.add("a", 6)
    engine.manager.allocate_slots(held, 6)
    with pytest.raises(InvariantError, match="waits in the wrong queue"):
        engine.scheduler.check()
    engine = Engine(8)
    running = engine.add("a", 6)
    engine.step()
    engine.manager.free(running)
    with pytest.raises(InvariantError, match="'a' runs without blocks"):
        engine.scheduler.check()


def test_a_fork_while_a_step_is_in_flight_is_copied_by_the_next_one() -> None:
    engine = Engine(12)
    engine.add("a", 9, max_tokens=5)
    engine.step()
    engine.tokens["b"] = []
    in_flight = engine.schedule()
    assert engine.scheduler.fork("a", ["b"])
    assert in_flight.block_copies == []
    engine.deliver()
    output = engine.schedule()
    # 9 of the parent's tokens are computed and back; its 10th was in flight.
    assert [(c.source_block_id, c.target_block_id) for c in output.block_copies] == [(3, 4)]
    assert output.num_tokens_by_request() == {"a": 1, "b": 1}
    engine.deliver()
    engine.run()
    assert set(engine.finished) == {"a", "b"}


def test_a_lone_decode_is_not_padded_beyond_the_pool() -> None:
    engine = Engine(12, 1, num_speculative_tokens=2)
    engine.add("a", 11, max_tokens=1)
    engine.run(max_steps=5)
    # 10 of the same 11 tokens are cached: one is left to compute, and padding it to 3 would need 13 blocks.
    engine.add("b", 11, max_tokens=1)
    engine.run(max_steps=5)
    assert set(engine.finished) == {"a", "b"}


def test_a_padded_decode_is_longer_than_the_longest_chunk() -> None:
    """Each request gets 2 prompt tokens of a step at most, but a decode padded to 1 + 3 is no prompt."""
    engine = Engine(12, num_speculative_tokens=3, long_prefill_token_threshold=2)
    engine.add("a", 9, max_tokens=1)
    engine.run()
    engine.add("c", other(1), max_tokens=2)
    engine.step()
    engine.add("b", 9, max_tokens=1)
    output = engine.step()
    assert output.num_tokens_by_request() == {"c": 1, "b": 4}
    assert output.draft_token_ids == {"b": [-1, -1, -1]}


def test_a_chunk_near_the_end_of_a_prompt_is_not_shrunk_to_nothing() -> None:
    full = FullAttentionSpec(8, 1, 8)
    state = MambaSpec(8, ((1,),), ("float32",), mamba_cache_mode="align")
    config = KVCacheConfig(20, (KVCacheGroupSpec(("a",), full), KVCacheGroupSpec(("b",), state)))
    manager = KVCacheManager(config, 64, drafts=DraftRule(num_lookahead_tokens=8))
    prompt = Request("a", list(range(20)))
    # A chunk from 12 should end at the block's end, 16; that leaves 4 tokens, fewer than the 8 that the draft modules
    # look ahead, and 4 tokens less are none at all.
    assert manager.clip_chunk(prompt, 12, 8, 64) == 8
    # From 8 on the same rules leave a chunk of 4, up to 12.
    assert manager.clip_chunk(prompt, 8, 8, 64) == 4


def test_sampling_params_reach_the_workers_as_they_are_also_through_a_twin() -> None:
    params = {"temperature": 0.7}
    first = Request("a", [1, 2, 3], sampling_params=params)
    engine = Engine(4)
    engine.scheduler.add_request(first)
    sent = engine.scheduler.schedule().new_requests[0]
    assert sent.sampling_params is params
    assert (sent.num_tokens, sent.num_prompt_tokens) == (3, 3)
    assert first.twin("b").sampling_params is params
