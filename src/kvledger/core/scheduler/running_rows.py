"""RunningRows: the running requests in their order, and the table that counts for those of them that just decode.

Row r of the table is running request r. A request whose next steps only count enters its row; whatever else reads or
changes it meets its own counters (Request.leave). Nearly all requests of nearly all steps stay in their rows, where a
step costs a few instructions each and reads no object.
"""

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i32, i64

from kvledger.core.ledger.coordinator import RequestBlocks
from kvledger.core.requests.request import Request, RequestStatus
from kvledger.core.requests.running_table import RunningTable
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.errors import require


class RunningRows:
    """`clips_chunks`: some group wants to be asked about every step of a request, so that none may enter a row."""

    def __init__(self, config: SchedulerConfig, max_model_len: int, clips_chunks: bool) -> None:
        self.requests: Final[list[Request]] = []
        # What each of them holds.
        self.held: Final[list[RequestBlocks]] = []
        self.table: Final = RunningTable(config.max_steps_in_flight > 1)
        # Changes when a row gets another request: rows of a step that was put together before need not be those of now.
        self.version: i64 = 0
        self._max_model_len: Final[i64] = max_model_len
        self._num_ahead: Final[i64] = 1 + config.num_lookahead_tokens
        self._may_enter: Final = not clips_chunks
        self._ids: Final[list[str]] = []
        # What steps share as long as the same requests run; never written to.
        self._shared_requests: list[Request] = []
        self._shared_ids: list[str] = []
        self._are_shared_current: bool = True
        self._ones: vec[i32] = vec[i32]()

    def append(self, request: Request, held: RequestBlocks) -> None:
        """It runs, behind all others."""
        row = len(self.requests)
        self.requests.append(request)
        self.held.append(held)
        self._ids.append(request.request_id)
        if row == len(self.table.computed):
            self.table.add_row()
            self._ones = append(self._ones, i32(1))
        self.table.event_at[row] = 0
        self._are_shared_current = False

    def remove(self, request: Request) -> None:
        """It runs no longer. At once for the last one, otherwise O(requests behind it)."""
        request.leave()
        place = self.place_of(request)
        del self.requests[place]
        del self.held[place]
        del self._ids[place]
        for row in range(place, len(self.requests)):
            self._move(self.requests[row], row + 1, row)
        self._rows_have_changed()

    def sweep(self) -> None:
        """Removes all whose status says that they run no longer. O(requests)."""
        kept = [request for request in self.requests if _runs(request)]
        if len(kept) == len(self.requests):
            return
        target: i64 = 0
        for row, request in enumerate(self.requests):
            if _runs(request):
                self._move(request, row, target)
                target += 1
        self.held[:] = [self.held[row] for row, request in enumerate(self.requests) if _runs(request)]
        self.requests[:] = kept
        self._ids[:] = [request.request_id for request in kept]
        self._rows_have_changed()

    def place_of(self, request: Request) -> int:
        """Where it runs. O(1) for the last one."""
        last = len(self.requests) - 1
        return last if self.requests[last] is request else self.requests.index(request)

    def leave_from(self, place: int) -> None:
        """The requests from that place on are in the next step not all, or not with one token each."""
        for index in range(place, len(self.requests)):
            self.requests[index].leave()

    def try_enter(self, request: Request, row: i64) -> None:
        """A request that a step has just counted, with one token, enters its row if its next steps only count."""
        if self._may_enter:
            request.try_enter(self.table, row, self._max_model_len, self._num_ahead)

    # For steps

    def first(self, num_rows: int) -> list[Request]:
        """The first requests, in a list that is shared if that is all of them."""
        return self.requests[:num_rows] if num_rows < len(self.requests) else self._share()._shared_requests

    def first_ids(self, num_rows: int) -> list[str]:
        """The ids of the same, likewise."""
        return self._ids[:num_rows] if num_rows < len(self.requests) else self._share()._shared_ids

    def ones(self) -> vec[i32]:
        """One token for each request that runs now, in a fresh array."""
        return self._ones[: len(self.requests)]

    def check(self) -> None:
        """Proves that rows and requests belong together."""
        table = self.table
        require(len(self._ids) == len(self.requests), "an id runs without its request")
        for row, request in enumerate(self.requests):
            name = f"request {request.request_id!r} in row {row}"
            require(self.held[row].request is request and self.held[row].is_held, f"{name} holds nothing")
            require(self._ids[row] == request.request_id, f"{name} runs under the id of another")
            is_entered = request.row_in(table) >= 0
            require(is_entered or table.event_at[row] == 0, f"{name} is counted without knowing")
            if is_entered:
                require(request.row_in(table) == row, f"{name} is counted in row {request.row_in(table)}")
                num_own = request.num_tokens
                require(num_own == request.num_computed_tokens + 1 - table.num_in_flight, f"{name}: {num_own} tokens")
                require(len(request.tokens) == num_own, f"{name}: {len(request.tokens)} of {num_own} tokens are there")

    def _share(self) -> "RunningRows":
        if not self._are_shared_current:
            self._shared_requests = self.requests.copy()
            self._shared_ids = self._ids.copy()
            self._are_shared_current = True
        return self

    def _rows_have_changed(self) -> None:
        self.version += 1
        self._are_shared_current = False

    def _move(self, request: Request, source: i64, target: i64) -> None:
        if source != target:
            self.table.move_row(source, target)
            request.move_to(target)


def _runs(request: Request) -> bool:
    return request.status is RequestStatus.RUNNING
