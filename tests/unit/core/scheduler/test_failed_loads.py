"""Synchronous loads that fail within their step: nobody keeps what was computed on what did not arrive."""

import pytest

from kvledger import RequestStatus
from kvledger.errors import RequestError
from kvledger.scheduler import ExternalHit
from tests.engine import Engine
from tests.groups import full, hybrid, state, window
from tests.helpers import cached_ids, other
from tests.unit.core.scheduler.test_hybrid_loads import Desk


def with_load(num_valid: int, *, steps: int = 1, **options: object) -> Engine:
    """a has 20 tokens, 16 of which a source delivers within the step; only the first num_valid arrive."""
    engine = Engine(30, max_steps_in_flight=steps, **options)  # type: ignore[arg-type]
    engine.source.offers["a"] = ExternalHit(16)
    engine.source.failing["a"] = num_valid
    engine.add("a", 20, max_tokens=3)
    return engine


@pytest.mark.parametrize(("num_valid", "goes_on_at"), [(0, 0), (3, 0), (4, 4), (10, 8), (16, 20)])
def test_the_request_starts_over_behind_what_arrived(num_valid: int, goes_on_at: int) -> None:
    engine = with_load(num_valid)
    engine.schedule()
    engine.source.offers.clear()
    gains = engine.deliver()
    failed = num_valid < 16
    assert engine.restarted == (["a"] if failed else [])
    assert (gains == []) == failed
    assert engine.step().ranges_by_request()["a"][0] == goes_on_at
    engine.run()
    assert engine.finished == {"a": "FINISHED_LENGTH"}
    assert len(engine.tokens["a"]) == 3


def test_only_what_arrived_stays_cached() -> None:
    engine = with_load(8)
    engine.schedule()
    assert cached_ids(engine.manager) == [1, 2, 3, 4, 5]
    engine.deliver()
    assert cached_ids(engine.manager) == [1, 2]


def test_whoever_hit_what_did_not_arrive_starts_over_too() -> None:
    """b hits 12 of a's tokens, c 4, which have arrived; d hits what b computes behind them."""
    engine = with_load(8)
    engine.add("b", [*range(12), *other(8)], max_tokens=2)
    engine.add("c", [*range(4), *other(8, 2)], max_tokens=2)
    engine.add("d", [*range(12), *other(9)], max_tokens=2)
    output = engine.schedule()
    assert output.ranges_by_request() == {"a": (16, 20), "b": (12, 20), "c": (4, 12), "d": (20, 21)}
    engine.source.offers.clear()
    assert [gained.request_id for gained in engine.deliver()] == ["c"]
    assert engine.restarted == ["a", "b", "d"]
    # In their order, ahead of all others; and b's hit is a's again, whose step fills it this time.
    output = engine.step()
    assert output.ranges_by_request() == {"c": (12, 13), "a": (8, 20), "b": (12, 20), "d": (20, 21)}
    engine.run()
    assert set(engine.finished.values()) == {"FINISHED_LENGTH"}


def test_a_step_behind_it_that_hit_the_same_is_dropped_too() -> None:
    engine = with_load(8, steps=2)
    engine.schedule()
    engine.add("b", [*range(16), *other(4)], max_tokens=2)
    assert engine.schedule().ranges_by_request() == {"a": (20, 21), "b": (16, 20)}
    engine.source.offers.clear()
    assert engine.deliver() == []
    assert engine.restarted == ["a", "b"]
    assert engine.deliver() == []
    for _ in range(20):
        if len(engine.in_flight) == 2:
            engine.deliver()
        engine.schedule()
    assert engine.finished == {"a": "FINISHED_LENGTH", "b": "FINISHED_LENGTH"}
    assert len(engine.tokens["a"]) == 3


@pytest.mark.parametrize("steps", [1, 2])
def test_a_request_that_is_gone_leaves_nothing_behind(steps: int) -> None:
    engine = with_load(8, steps=steps)
    engine.schedule()
    engine.scheduler.abort("a")
    engine.deliver()
    assert engine.restarted == []
    assert cached_ids(engine.manager) == [1, 2]


def test_a_load_under_way_behind_what_did_not_arrive_has_failed_too() -> None:
    engine = with_load(8)
    engine.source.offers["b"] = ExternalHit(4, asynchronous=True)
    engine.add("b", [*range(16), *other(8)], max_tokens=2)
    engine.schedule()
    b = engine.scheduler.get_request("b")
    assert (b.status, b.num_computed_tokens) == (RequestStatus.WAITING_FOR_EXTERNAL_KV, 20)
    engine.source.offers.clear()
    engine.deliver()
    assert engine.restarted == ["a", "b"]
    engine.load("b")
    # Nothing that arrived for b counts. It goes first, because it held blocks, and fills those that a hits then.
    assert engine.step().ranges_by_request() == {"b": (8, 24), "a": (16, 20)}
    engine.run()
    assert set(engine.finished) == {"a", "b"}


def test_groups_of_several_kinds() -> None:
    """Of 8 of 16 tokens full attention has two blocks; window and state have nothing to go on from."""
    desk = Desk(hybrid(60, full(), window(8), state()))
    desk.add("a", 20, ExternalHit(16), max_tokens=1)
    output = desk.scheduler.schedule()
    assert desk.scheduler.fail_loads(output, {"a": 8}) == ["a"]
    desk.scheduler.update_from_output(output, [[] for _ in output.requests])
    desk.scheduler.check()
    desk.store.offers.clear()
    assert desk.step()["a"][0] == 0


def test_a_fork_of_it_starts_over() -> None:
    engine = with_load(8, steps=2)
    engine.schedule()
    assert engine.scheduler.fork("a", ["b"])
    engine.tokens["b"] = []
    engine.source.offers.clear()
    engine.deliver()
    assert engine.restarted == ["a", "b"]


def test_what_did_not_load_in_the_step_is_refused() -> None:
    engine = with_load(16)
    engine.add("b", other(4), max_tokens=9)
    output = engine.scheduler.schedule()
    engine.tables.apply(output)
    with pytest.raises(RequestError, match="request 'x' did not start in step 1"):
        engine.scheduler.fail_loads(output, {"a": 8, "x": 0})
    for num_valid in (-1, 17):
        with pytest.raises(RequestError, match=rf"num_valid_tokens\['a'\]={num_valid}: it started behind 16 tokens"):
            engine.scheduler.fail_loads(output, {"a": num_valid})
    assert engine.scheduler.num_running == 2
    engine.scheduler.update_from_output(output, [[1], [2]])
    with pytest.raises(RequestError, match="not the oldest step in flight"):
        engine.scheduler.fail_loads(output, {"a": 8})
    engine.scheduler.check()
