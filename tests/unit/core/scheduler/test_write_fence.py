"""Two steps in flight and a source that fills blocks on its own: no load gets a block that a step may still write."""

from collections.abc import Callable

import pytest

from kvledger import Request, RequestStatus
from kvledger.scheduler import ExternalHit, SchedulingPolicy, WaitReason
from tests.engine import Engine
from tests.helpers import free_order, other


def two_out(**options: object) -> Engine:
    """6 usable blocks of 4. a has 9 tokens in 3 of them, and two steps of it are out."""
    engine = Engine(6, max_steps_in_flight=2, **options)  # type: ignore[arg-type]
    engine.add("a", 9, max_tokens=50, stop_token_ids=(800_009,))
    engine.schedule()
    engine.schedule()
    assert engine.ids("a") == [1, 2, 3]
    return engine


def load_of(engine: Engine, name: str) -> set[int]:
    """A load of 16 tokens is asked for; the blocks that it may write."""
    engine.source.offers[name] = ExternalHit(16, asynchronous=True)
    engine.add(name, other(17), max_tokens=1)
    engine.schedule()
    return set(engine.ids(name)) if engine.manager.holds_blocks(engine.scheduler.get_request(name)) else set()


def stop(engine: Engine) -> None:
    """The first step brings a stop token while the second is out."""
    engine.deliver()
    assert engine.finished == {"a": "FINISHED_STOPPED"}


def abort(engine: Engine) -> None:
    engine.scheduler.abort("a")
    engine.deliver()


def reset(engine: Engine) -> None:
    assert not engine.scheduler.reset_prefix_cache(preempt_running=True)
    engine.scheduler.abort("a")
    engine.deliver()


def fail(engine: Engine) -> None:
    output, _ = engine.in_flight.pop(0)
    assert engine.scheduler.fail_step(output) == ["a"]


@pytest.mark.parametrize("leave", [stop, abort, reset, fail])
def test_a_load_gets_no_block_of_a_request_whose_step_is_out(leave: Callable[[Engine], None]) -> None:
    engine = two_out()
    leave(engine)
    # Blocks 1 to 3 are nobody's any more, and not free before the second step is back; the load needs 4.
    assert engine.manager.num_free_blocks == 3
    assert load_of(engine, "b") == set()
    why = engine.scheduler.explain("b")
    assert why is not None
    assert why.reason is WaitReason.BLOCKS
    engine.deliver()
    assert engine.manager.num_free_blocks == 6
    engine.schedule()
    assert len(engine.ids("b")) == 4
    engine.check()


def test_blocks_come_back_in_the_order_of_any_request_that_ends() -> None:
    engine = two_out()
    engine.deliver()
    assert free_order(engine.manager) == [4, 5, 6]
    engine.deliver()
    # The last one has no hash: it is reused first. The cached prefix loses its tail before its head.
    assert free_order(engine.manager) == [3, 4, 5, 6, 2, 1]


def test_without_a_source_there_is_no_fence() -> None:
    engine = two_out(with_source=False)
    engine.deliver()
    assert engine.manager.num_free_blocks == 6


def test_with_one_step_at_a_time_there_is_no_fence() -> None:
    engine = Engine(6)
    engine.add("a", 9, max_tokens=50, stop_token_ids=(800_009,))
    engine.schedule()
    engine.deliver()
    assert engine.manager.num_free_blocks == 6


def test_a_victim_whose_step_is_out_is_not_preempted() -> None:
    """Preempting b would give a no block now, so b goes on, and a waits for the step that is out."""
    engine = Engine(6, max_steps_in_flight=2)
    engine.add("a", 11, max_tokens=9)
    engine.add("b", other(11), max_tokens=9)
    for _ in range(2):
        engine.schedule()
    waits = []
    for _ in range(40):
        if not engine.scheduler.has_unfinished_requests:
            break
        if len(engine.in_flight) == 2:
            engine.deliver()
        engine.schedule()
        waits += [each for each in engine.scheduler.explain_all() if each.reason is WaitReason.BLOCKS_IN_FLIGHT]
    assert [each.request_id for each in waits] == ["a"]
    assert "may still be written by a step in flight; it needs 1 block for the step, 0 free" in str(waits[0])
    assert engine.finished == {"a": "FINISHED_LENGTH", "b": "FINISHED_LENGTH"}
    assert engine.preemptions == {"b": 1}
    assert engine.manager.num_free_blocks == 6


def test_under_priority_a_victim_that_runs_first_is_waited_for_too() -> None:
    engine = Engine(6, max_steps_in_flight=2, policy=SchedulingPolicy.PRIORITY)
    engine.add("late", 11, max_tokens=9, priority=5)
    engine.schedule()
    engine.add("soon", other(11), max_tokens=9, priority=0)
    for _ in range(60):
        if not engine.scheduler.has_unfinished_requests:
            break
        if len(engine.in_flight) == 2:
            engine.deliver()
        engine.schedule()
    assert set(engine.finished) == {"late", "soon"}
    assert engine.manager.num_free_blocks == 6


def test_an_ended_request_that_no_step_has_is_freed_at_once() -> None:
    engine = two_out()
    engine.add("w", other(4), max_tokens=1)
    engine.scheduler.abort("w")
    engine.deliver()
    engine.deliver()
    assert engine.scheduler.num_running == 0
    engine.add("c", other(4, 2), max_tokens=3)
    engine.schedule()
    engine.deliver()
    c: Request = engine.scheduler.get_request("c")
    assert (c.status, c.num_in_flight_tokens) == (RequestStatus.RUNNING, 0)
    engine.scheduler.abort("c")
    assert engine.manager.num_free_blocks == 6
