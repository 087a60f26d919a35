"""The stall detector: steps pass, work exists, and nothing of it gets done."""

import pytest

from kvledger.errors import ConfigError, StallError
from kvledger.scheduler import ExternalHit, StallDetector, StallReport
from tests.engine import Engine
from tests.helpers import admitted, other


def stuck_engine(usable: int = 8) -> Engine:
    """b waits for blocks that a leak keeps: a stranger took them behind the scheduler's back."""
    engine = Engine(usable)
    admitted(engine.manager, "stranger", other(20, 9))
    engine.add("a", other(16, 1))
    engine.add("b", other(1, 2), max_tokens=4)
    return engine


def watched_steps(engine: Engine, detector: StallDetector, num_steps: int) -> None:
    for _ in range(num_steps):
        detector.watch(engine.step())


def test_a_stall_is_raised_with_the_reason_of_everybody_who_waits() -> None:
    engine = stuck_engine()
    detector = StallDetector(engine.scheduler, max_steps=5)
    watched_steps(engine, detector, 4)
    with pytest.raises(StallError) as stall:
        watched_steps(engine, detector, 1)
    assert str(stall.value).splitlines() == [
        "no progress in 5 steps up to step 5; 5 blocks held, 0 free and cached, 3 unused",
        "  'a' waits since step 1 (5 steps): needs 4 blocks for all its tokens, 3 free",
        "  'b' waits since step 1 (5 steps): behind 'a' (needs 4 blocks for all its tokens, 3 free), 1 ahead of it",
    ]


def test_a_callback_hears_of_a_stall_once_and_of_the_next_one_again() -> None:
    engine = stuck_engine()
    heard: list[StallReport] = []
    detector = StallDetector(engine.scheduler, max_steps=3, on_stall=heard.append)
    watched_steps(engine, detector, 10)
    assert [(report.step, report.num_steps) for report in heard] == [(3, 3)]
    engine.scheduler.abort("a")
    watched_steps(engine, detector, 1)
    assert (len(heard), detector.num_steps) == (1, 0)
    engine.add("c", other(16, 3))
    watched_steps(engine, detector, 20)
    # b gets its 4 tokens in steps 11 to 14; step 15 tells the workers of its end; then c waits alone.
    assert [(report.step, report.num_steps) for report in heard] == [(3, 3), (18, 3)]


def test_an_idle_scheduler_is_not_stalled() -> None:
    engine = Engine(8)
    detector = StallDetector(engine.scheduler, max_steps=1)
    watched_steps(engine, detector, 3)
    assert detector.num_steps == 0


def test_tokens_that_are_only_computed_again_are_no_progress() -> None:
    engine = Engine(8)
    a = engine.add("a", other(8, 1))
    detector = StallDetector(engine.scheduler, max_steps=3)
    # The caller resets the cache whenever the prompt has been computed, before its token is back.
    for num_steps in range(3):
        detector.watch(engine.schedule())
        assert detector.num_steps == num_steps
        engine.scheduler.reset_prefix_cache(preempt_running=True)
        engine.deliver()
    with pytest.raises(StallError, match="no progress in 3 steps"):
        detector.watch(engine.schedule())
    assert (a.num_preemptions, a.num_output_tokens) == (3, 0)


def test_a_slow_source_has_a_limit_of_its_own() -> None:
    engine = Engine(8)
    engine.source.offers["a"] = ExternalHit(4, asynchronous=True)
    engine.add("a", 8)
    patient = StallDetector(engine.scheduler, max_steps=2)
    strict = StallDetector(engine.scheduler, max_steps=2, max_outside_steps=10)
    for _ in range(9):
        output = engine.step()
        patient.watch(output)
        strict.watch(output)
    output = engine.step()
    patient.watch(output)
    with pytest.raises(StallError, match=r"'a' waits since step 1 \(10 steps\): waiting for external KV"):
        strict.watch(output)
    # When the load is there at last, the polling steps are forgotten.
    engine.load("a")
    watched_steps(engine, strict, 1)
    assert (strict.num_steps, patient.num_steps) == (0, 10)


@pytest.mark.parametrize(("field", "values"), [("max_steps", (0, 0)), ("max_outside_steps", (1, -1))])
def test_wrong_limits_are_named(field: str, values: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=f"{field}="):
        StallDetector(Engine(8).scheduler, *values)


def test_b02_requests_that_hold_the_pool_between_them_are_reported() -> None:
    # What the reservation for loads prevents is brought about by hand: two loaded requests hold all blocks.
    engine = Engine(8, reserve_full_sequence=False)
    for family, name in enumerate("ab"):
        engine.source.offers[name] = ExternalHit(16, asynchronous=True)
        engine.add(name, other(24, family))
    engine.step()
    admitted(engine.manager, "stranger", other(16, 9))
    engine.load("a")
    detector = StallDetector(engine.scheduler, max_steps=4)
    with pytest.raises(StallError) as stall:
        watched_steps(engine, detector, 4)
    assert "'a' waits since step 1 (5 steps): needs 2 blocks for the step, 0 free" in str(stall.value)
