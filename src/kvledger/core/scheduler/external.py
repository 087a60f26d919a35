"""KV values from outside the pool: another engine, host memory, a store. The scheduler asks, allocates and waits.

    lookup -> a synchronous hit: the worker loads within the step, the rest of the prompt is computed with it
           -> an asynchronous hit: blocks are taken now and nothing is computed until external_load_finished

A request that waits for a load holds blocks, makes no progress and cannot be preempted. Two rules keep such holders
from blocking each other for ever (vllm-project/vllm#45388, #40968): a load is admitted only if it leaves free what
requests in flight still need to finish their prompts, and holders are admitted before everything else that waits.
"""

from abc import ABC, abstractmethod
from typing import Final

from mypy_extensions import mypyc_attr

from kvledger.core.record import Record
from kvledger.core.requests.request import Request
from kvledger.errors import RequestError


class ExternalHit(Record):
    """`num_tokens` beyond the local hit that the source can deliver; `asynchronous`: it takes longer than a step."""

    __match_args__ = ("num_tokens", "asynchronous")

    def __init__(self, num_tokens: int, asynchronous: bool = False) -> None:
        if num_tokens < 0:
            raise RequestError(f"num_tokens={num_tokens}: an external hit cannot be negative")
        self.num_tokens: Final = num_tokens
        self.asynchronous: Final = asynchronous and num_tokens > 0


@mypyc_attr(allow_interpreted_subclasses=True)
class ExternalKVSource(ABC):
    """A connector, as the scheduler sees it. It must not call back into the scheduler. What it raises surfaces from
    schedule(), once the step is complete without the request that it was asked about."""

    @abstractmethod
    def lookup(self, request: Request, num_local_tokens: int) -> ExternalHit | None:
        """What it has beyond the first num_local_tokens tokens, with which a block of every group ends; None: not known
        yet, ask in the next step. What the cache has beyond that is used if the source has no more.

        A question only: it may be asked many times before the request is admitted, so nothing may be pinned here. A
        preempted request asks again; a source that can deliver once only must then answer 0.
        """

    @abstractmethod
    def allocated(self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int) -> None:
        """The request was admitted with that many external tokens (0: the offer was not needed). Pin and load now.

        Fewer than offered when they would be the whole prompt: its last token is computed here, and of a recurrent
        state the one before that token is needed. A group in host memory may hit more than the others: where it has
        the tokens already, its blocks are shared and not to be written.

        Raising takes the admission back: its blocks are others' then, so nothing must be written to them any more.
        """


class ExternalLoads:
    """Asynchronous loads under way: who waits, what arrived, and whose request died meanwhile."""

    def __init__(self, lease_steps: int) -> None:
        self._lease_steps: Final = lease_steps
        self.loading: dict[str, Request] = {}
        # Request id -> step that asked for it.
        self._started_at: dict[str, int] = {}
        # Request id -> tokens that had values before the load.
        self._num_local: dict[str, int] = {}
        self._spoiled: set[str] = set()
        # Request id -> tokens of it that are valid now.
        self._arrived: dict[str, int] = {}
        # Aborted during its load: blocks stay held, because the load may still write them. -> step of the abort
        self.orphans: dict[str, Request] = {}
        self._orphaned_at: dict[str, int] = {}

    def start(self, request: Request, step: int, num_local_tokens: int) -> None:
        """A load begins behind so many tokens that the request hit here."""
        self.loading[request.request_id] = request
        self._started_at[request.request_id] = step
        self._num_local[request.request_id] = num_local_tokens

    def started_at(self, request_id: str) -> int:
        """The step that asked for the load of a request; 0 when it is not loading."""
        return self._started_at.get(request_id, 0)

    def is_awaited(self, request_id: str) -> bool:
        """Whether a load of that request is under way and has not been reported."""
        return request_id in self.orphans or (request_id in self.loading and request_id not in self._arrived)

    def finish(self, request_id: str, num_valid_tokens: int) -> Request | None:
        """Notes an arrival; returns the request instead if it is an orphan, whose blocks may be freed now.

        REQUIRES is_awaited.
        """
        orphan = self.orphans.pop(request_id, None)
        if orphan is not None:
            del self._orphaned_at[request_id]
            return orphan
        self._arrived[request_id] = num_valid_tokens
        return None

    def take_arrival(self, request: Request) -> int | None:
        """Valid tokens of a request whose load arrived, once; 0: it failed. None while it is under way."""
        num_valid = self._arrived.pop(request.request_id, None)
        if num_valid is None:
            return None
        del self.loading[request.request_id]
        del self._started_at[request.request_id]
        num_local = self._num_local.pop(request.request_id)
        if request.request_id in self._spoiled:
            self._spoiled.discard(request.request_id)
            return 0
        return max(num_valid, num_local) if num_valid > 0 else 0

    def spoil(self, request_id: str) -> None:
        """What was hit before a load under way has no values: whatever arrives, the load has failed."""
        self._spoiled.add(request_id)

    def orphan(self, request: Request, step: int) -> bool:
        """Takes over a request that is aborted. False if its load is done, so that its blocks can be freed."""
        request_id = request.request_id
        self._started_at.pop(request_id, None)
        self._num_local.pop(request_id, None)
        self._spoiled.discard(request_id)
        if self.loading.pop(request_id, None) is None or self._arrived.pop(request_id, None) is not None:
            return False
        self.orphans[request_id] = request
        self._orphaned_at[request_id] = step
        return True

    def lease_ends(self) -> int:
        """The step that takes back the last of the orphans, if none reports before; 0 without a lease or an orphan."""
        if self._lease_steps == 0 or not self._orphaned_at:
            return 0
        return max(list(self._orphaned_at.values())) + self._lease_steps

    def take_expired(self, step: int) -> list[Request]:
        """Orphans whose lease is over."""
        if self._lease_steps == 0 or not self.orphans:
            return []
        expired = [r for r in self.orphans.values() if step - self._orphaned_at[r.request_id] >= self._lease_steps]
        for request in expired:
            del self.orphans[request.request_id]
            del self._orphaned_at[request.request_id]
        return expired
