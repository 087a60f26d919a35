"""Waiting queues: first come first served, and by priority."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger import Request
from kvledger.core.scheduler.queues import FCFSRequestQueue, PriorityRequestQueue, RequestQueue, make_request_queue
from kvledger.scheduler import SchedulingPolicy
from tests.helpers import request


def names(queue: RequestQueue) -> list[str]:
    order = [waiting.request_id for waiting in queue.requests()]
    assert len(queue) == len(order)
    if order:
        assert queue.peek().request_id == order[0]
    return order


def urgent(name: str, priority: int, arrival_time: float = 0.0) -> Request:
    return request(name, 1, priority=priority, arrival_time=arrival_time)


def test_the_policy_chooses_the_queue() -> None:
    assert isinstance(make_request_queue(SchedulingPolicy.FCFS), FCFSRequestQueue)
    assert isinstance(make_request_queue(SchedulingPolicy.PRIORITY), PriorityRequestQueue)


def test_fcfs_serves_in_order_and_what_is_given_back_first() -> None:
    queue = FCFSRequestQueue()
    a, b, c = (request(name, 1) for name in "abc")
    for waiting in (a, b, c):
        queue.add(waiting)
    assert names(queue) == ["a", "b", "c"]
    assert queue.pop() is a
    queue.discard(b)
    queue.discard(b)
    queue.add_first(a)
    assert names(queue) == ["a", "c"]


def test_priority_then_arrival_then_id() -> None:
    queue = PriorityRequestQueue()
    for waiting in (urgent("late", 1, 9.0), urgent("b", 1, 1.0), urgent("a", 1, 1.0), urgent("vip", 0, 99.0)):
        queue.add(waiting)
    assert names(queue) == ["vip", "a", "b", "late"]


def test_by_priority_what_is_given_back_takes_its_place() -> None:
    queue = PriorityRequestQueue()
    queue.add(urgent("vip", 0))
    queue.add_first(urgent("economy", 2))
    assert names(queue) == ["vip", "economy"]


def test_discarding_from_the_middle_keeps_the_order() -> None:
    queue = PriorityRequestQueue()
    waiting = {name: urgent(name, priority) for name, priority in (("a", 3), ("b", 1), ("c", 2), ("d", 0))}
    for each in waiting.values():
        queue.add(each)
    for gone in ("b", "d", "b"):
        queue.discard(waiting[gone])
    assert names(queue) == ["c", "a"]
    queue.add(waiting["d"])
    assert [queue.pop().request_id for _ in range(3)] == ["d", "c", "a"]
    assert names(queue) == []


@pytest.mark.parametrize("policy", list(SchedulingPolicy))
@given(moves=st.lists(st.tuples(st.sampled_from(["add", "first", "pop", "discard"]), st.integers(0, 9)), max_size=40))
def test_queues_behave_like_a_sorted_list(policy: SchedulingPolicy, moves: list[tuple[str, int]]) -> None:
    queue, model = make_request_queue(policy), list[Request]()
    everybody = [urgent(str(number), number % 3, float(number % 2)) for number in range(10)]
    for move, number in moves:
        waiting = everybody[number]
        if move in ("add", "first") and waiting not in model:
            model.insert(0 if move == "first" else len(model), waiting)
            (queue.add_first if move == "first" else queue.add)(waiting)
        elif move == "pop" and model:
            assert queue.pop() is model.pop(0)
        elif move == "discard":
            model = [each for each in model if each is not waiting]
            queue.discard(waiting)
        if policy is SchedulingPolicy.PRIORITY:
            model.sort(key=lambda each: (each.priority, each.arrival_time, each.request_id))
        assert names(queue) == [each.request_id for each in model]
