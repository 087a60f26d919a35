"""Waiting requests in the order of admission.

A preempted request goes back to the front under FCFS: it arrived before everything that waits. Under PRIORITY it takes
the place of its priority and arrival, so an earlier arrival of the same priority that never ran goes first.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from heapq import heappop, heappush

from kvledger.core.requests.request import Request
from kvledger.core.scheduler.config import SchedulingPolicy


class RequestQueue(ABC):
    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def add(self, request: Request) -> None:
        """Adds a request in its place."""

    @abstractmethod
    def add_first(self, request: Request) -> None:
        """Gives back a request that was taken out: to the front, where the policy has one."""

    @abstractmethod
    def peek(self) -> Request:
        """The next request. REQUIRES one."""

    @abstractmethod
    def pop(self) -> Request:
        """Takes the next request. REQUIRES one."""

    @abstractmethod
    def discard(self, request: Request) -> None:
        """Takes that request out, if it is there."""

    @abstractmethod
    def requests(self) -> list[Request]:
        """All requests in order, in a fresh list."""


class FCFSRequestQueue(RequestQueue):
    """First come, first served. Every operation is O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def add_first(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return self._requests[next(iter(self._requests))]

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def discard(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)

    def requests(self) -> list[Request]:
        return list(self._requests.values())


class PriorityRequestQueue(RequestQueue):
    """Lowest (priority, arrival_time, request_id) first. O(log n); discard O(n)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, str]] = []
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        heappush(self._heap, (request.priority, request.arrival_time, request.request_id))

    def add_first(self, request: Request) -> None:
        self.add(request)

    def peek(self) -> Request:
        return self._requests[self._heap[0][2]]

    def pop(self) -> Request:
        request = self.peek()
        heappop(self._heap)
        del self._requests[request.request_id]
        return request

    def discard(self, request: Request) -> None:
        if self._requests.pop(request.request_id, None) is not None:
            self._heap = [entry for entry in self._heap if entry[2] != request.request_id]
            self._heap.sort()

    def requests(self) -> list[Request]:
        return [self._requests[entry[2]] for entry in sorted(self._heap)]


def make_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    return PriorityRequestQueue() if policy is SchedulingPolicy.PRIORITY else FCFSRequestQueue()
