"""The scheduler in runs of blocks: what it takes together, and where it stops to look."""

import pytest

from kvledger.core.extents.admissions import ExtentAdmissions
from kvledger.core.extents.extent_pool import ExtentPool
from kvledger.core.extents.extent_request import ExtentRequest
from kvledger.core.extents.extent_scheduler import ExtentScheduler
from kvledger.core.extents.step_clock import StepClock
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.core.scheduler.wait_reason import WaitReason

BLOCK = 4
# A step takes a second and a hundredth for each token of context.
CLOCK = StepClock(1.0, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0, 0.0)
FOR_EVER = float("inf")


def scheduler(num_blocks: int, max_seqs: int = 8, max_tokens: int = 100, max_model_len: int = 1000) -> ExtentScheduler:
    admissions = ExtentAdmissions(ExtentPool(num_blocks, BLOCK, 0), explains=False)
    return ExtentScheduler(admissions, SchedulerConfig(max_seqs, max_tokens), max_model_len, 0)


def add(engine: ExtentScheduler, name: str, num_prompt: int, num_output: int) -> ExtentRequest:
    """A request whose tokens are its own."""
    request = ExtentRequest(name, num_prompt, num_output, engine._pool.enter([], 1, 0, num_prompt))
    engine.add_request(request)
    return request


def step(engine: ExtentScheduler) -> tuple[list[str], list[str]]:
    """Who computed something, and who ended."""
    made = engine.schedule()
    ended = engine.update(made)
    engine.check()
    return made.request_ids, ended


def test_steps_are_taken_together_up_to_the_one_that_ends_a_request() -> None:
    engine = scheduler(100)
    one, _ = add(engine, "one", 10, 20), add(engine, "two", 5, 9)
    assert step(engine) == (["one", "two"], [])
    quiet = engine.quiet(CLOCK, 5.0, FOR_EVER, 1000)
    assert quiet is not None
    # Both have one of their tokens; two's last one, the ninth, is for a step of its own.
    assert len(quiet.seconds) == 9 - 1 - 1
    assert one.num_output_tokens == 1 + 7
    # Ten and five tokens are computed before, and in each step two more.
    assert quiet.seconds == pytest.approx([1.0 + 0.01 * (15 + 2 * k) for k in range(1, 8)])
    assert quiet.end == pytest.approx(5.0 + sum(quiet.seconds))
    engine.check()
    assert engine.quiet(CLOCK, quiet.end, FOR_EVER, 1000) is None
    assert step(engine) == (["one", "two"], ["two"])


def test_they_end_behind_a_time_at_a_most_and_before_a_block_that_lacks() -> None:
    engine = scheduler(1 + 5)
    add(engine, "one", 3, 12)
    step(engine)
    until = engine.quiet(CLOCK, 0.0, 2.0, 1000)
    # 1.04 s and 1.05 s: the second one ends behind two seconds.
    assert until is not None
    assert until.seconds == pytest.approx([1.04, 1.05])
    most = engine.quiet(CLOCK, 0.0, FOR_EVER, 3)
    assert most is not None
    assert len(most.seconds) == 3
    add(engine, "two", 7, 9)
    assert step(engine) == (["one", "two"], [])
    # Nine tokens of one are in three blocks and seven of two in two. Two has room for one more, and no block is free.
    rest = engine.quiet(CLOCK, 0.0, FOR_EVER, 1000)
    assert rest is not None
    assert (len(rest.seconds), rest.usages) == (1, [1.0])
    assert engine.schedule().preempted_request_ids == ["two"]


def test_who_waits_for_blocks_waits_on_until_somebody_ends() -> None:
    engine = scheduler(1 + 6)
    add(engine, "one", 12, 6)
    step(engine)
    add(engine, "large", 16, 5)
    assert step(engine) == (["one"], [])
    assert engine.wait_counts(2) == {WaitReason.BLOCKS: 1, WaitReason.BEHIND: 2}
    quiet = engine.quiet(CLOCK, 0.0, FOR_EVER, 1000)
    assert quiet is not None
    assert len(quiet.seconds) == 3
    assert engine.wait_counts(0) == {WaitReason.BLOCKS: 1}
    assert step(engine) == (["one"], ["one"])
    assert step(engine) == (["large"], [])
    assert engine.wait_counts(0) == {}


def test_whoever_comes_is_looked_at_in_the_next_step() -> None:
    engine = scheduler(100, max_seqs=1)
    add(engine, "one", 4, 9)
    step(engine)
    add(engine, "two", 4, 9)
    assert engine.quiet(CLOCK, 0.0, FOR_EVER, 1000) is None
    assert step(engine) == (["one"], [])
    assert engine.wait_counts(0) == {WaitReason.MAX_NUM_SEQS: 1}
    assert engine.quiet(CLOCK, 0.0, FOR_EVER, 1000) is not None


def test_a_prompt_in_chunks_is_nobody_who_decodes() -> None:
    engine = scheduler(100, max_seqs=4, max_tokens=8)
    request = add(engine, "one", 17, 3)
    for num_computed in (8, 16, 17):
        assert engine.quiet(CLOCK, 0.0, FOR_EVER, 1000) is None
        step(engine)
        assert request.num_computed_tokens == num_computed
    assert engine.quiet(CLOCK, 0.0, FOR_EVER, 1000) is not None


def test_the_last_one_is_preempted_and_what_it_had_is_computed_again() -> None:
    engine = scheduler(1 + 5)
    add(engine, "one", 8, 9)
    add(engine, "two", 8, 9)
    step(engine)
    # Both need a third block for their ninth token, and one is left.
    made = engine.schedule()
    assert (made.request_ids, made.preempted_request_ids) == (["one"], ["two"])
    assert engine.wait_counts(0) == {WaitReason.PREEMPTED: 1}
    engine.update(made)
    while engine.has_unfinished_requests:
        if engine.quiet(CLOCK, 0.0, FOR_EVER, 1000) is None:
            step(engine)
        engine.check()
    # Of two's eight tokens one block was found cached, four had to be computed again.
    assert (engine.num_preemptions, engine.num_recomputed_tokens) == (1, 4)


def test_who_outgrows_the_pool_ends() -> None:
    engine = scheduler(1 + 3)
    add(engine, "one", 10, 9)
    step(engine)
    while engine.quiet(CLOCK, 0.0, FOR_EVER, 1000) is not None:
        engine.check()
    made = engine.schedule()
    assert (made.outgrown_ids, made.request_ids) == (["one"], [])
    assert not engine.has_unfinished_requests
    assert engine._pool.num_free == 3
