"""SchedulerState: where every request is, and the moves between those places.

    waiting ---start---> running ---finish---> gone
       ^                    |
       +------preempt-------+

The passes over running and waiting requests decide; this class moves, so that a move is written once and check() can
prove that every request is in exactly one place.
"""

from typing import Final

from mypy_extensions import i64

from kvledger.core.change import AT_REST, Change
from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.core.requests.request import Request, RequestStatus
from kvledger.core.scheduler.accounting import RequestAccounting
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.core.scheduler.external import ExternalLoads
from kvledger.core.scheduler.output import SchedulerOutput
from kvledger.core.scheduler.queues import make_request_queue
from kvledger.core.scheduler.running_rows import RunningRows
from kvledger.core.scheduler.wait_log import WaitLog
from kvledger.core.scheduler.write_fence import WriteFence
from kvledger.errors import RequestError, RequestTooLargeError, require


class SchedulerState:
    """All live requests of one scheduler, and what the workers have not been told yet."""

    def __init__(
        self,
        manager: KVCacheManager,
        config: SchedulerConfig,
        accounting: RequestAccounting | None = None,
        has_source: bool = False,
    ) -> None:
        self.manager: Final = manager
        self._has_source: Final = has_source
        # None where nobody but the steps writes blocks, or one step is out at a time.
        self.fence: Final = WriteFence(manager) if has_source and config.max_steps_in_flight > 1 else None
        self.config: Final = config
        self.accounting: Final = accounting
        self.requests: Final[dict[str, Request]] = {}
        self.rows: Final = RunningRows(config, manager.max_model_len, manager.clips_chunks)
        # In the order of scheduling; only `rows` changes it.
        self.running: Final[list[Request]] = self.rows.requests
        self.waiting: Final = make_request_queue(config.policy)
        # Waiting requests that hold blocks. They are admitted before all others, or they could wait behind a request
        # that waits for their blocks.
        self.waiting_holders: Final = make_request_queue(config.policy)
        self.loads: Final = ExternalLoads(config.external_lease_steps)
        # Forked and running, but not yet sent to the workers.
        self.forked_ids: Final[set[str]] = set()
        # Steps that the workers have not given back yet, the oldest first.
        self.in_flight: Final[list[SchedulerOutput]] = []
        # What is under way, and what collaborators raised meanwhile: it surfaces when the call is complete.
        self.change: Final = Change("scheduler")
        self.raised: list[BaseException] = []
        # Requests that ended by an error since the last step was put together.
        self.errors: dict[str, RequestError] = {}
        self.wait_log: Final = WaitLog()
        self.preempted_ids: list[str] = []
        self.finished_ids: list[str] = []
        self.num_preemptions: int = 0

    def begin(self, what: i64) -> None:
        """A change begins, whose checks are passed. UnfinishedChangeError when another one is under way."""
        self.change.begin(what)
        self.manager.hold_errors()

    def end(self) -> None:
        """It is complete. Raises what collaborators raised meanwhile."""
        self.change.under_way = AT_REST
        if self.accounting is not None:
            self.accounting.tell(self.raised)
        if self.raised:
            raised = self.raised
            self.raised = []
            for other in raised[1:]:
                raised[0].add_note(f"then, within the same call: {other!r}")
            try:
                self.manager.surface_errors()
            except BaseException as error:
                raised[0].add_note(f"then, within the same call: {error!r}")
            raise raised[0]
        self.manager.surface_errors()

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.waiting_holders)

    def num_blocks_held_by_orphans(self) -> int:
        """Blocks of aborted requests whose external load never reported."""
        num_blocks = 0
        for orphan in self.loads.orphans.values():
            num_blocks += self.manager.num_blocks_held(orphan)
        return num_blocks

    def num_blocks_held_by_waiting(self) -> int:
        """Blocks of requests that wait, for a load or to go on after one: held, and not to be had by preempting."""
        num_blocks = 0
        for request in self.waiting_holders.requests():
            num_blocks += self.manager.num_blocks_held(request)
        return num_blocks

    def waiting_requests(self) -> list[Request]:
        """Everything that waits, in the order of admission."""
        return self.waiting_holders.requests() + self.waiting.requests()

    def in_prefill(self) -> list[Request]:
        """Running requests that are not through their known tokens."""
        return [request for request in self.running if request.is_prefill_chunk]

    def add(self, request: Request) -> None:
        """A fresh request waits."""
        request.waiting_since_step = self.wait_log.next_step
        request.num_computed_before = 0
        self.requests[request.request_id] = request
        self.waiting.add(request)
        if self.accounting is not None:
            self.accounting.add(request)

    def start(self, request: Request, num_new_tokens: int) -> None:
        """A request that was taken out of its queue runs from this step on."""
        request.status = RequestStatus.RUNNING
        request.is_prefill_chunk = request.num_computed_tokens + num_new_tokens < request.num_tokens
        self.rows.append(request, self.manager.held_by(request))
        if self.accounting is not None:
            self.accounting.run(request)

    def start_fork(self, child: Request, num_computed_tokens: int) -> None:
        """A fork runs from the next step on."""
        child.num_computed_tokens = num_computed_tokens
        child.status = RequestStatus.RUNNING
        self.requests[child.request_id] = child
        self.rows.append(child, self.manager.held_by(child))
        self.forked_ids.add(child.request_id)
        if self.accounting is not None:
            self.accounting.add_fork(child)

    def preempt(self, request: Request, drop_stale_output: bool) -> None:
        """Takes a running request's blocks; it keeps its tokens and waits to start over."""
        self.rows.remove(request)
        self.wait_log.preempt(request, self.manager.shortage)
        if self.accounting is not None:
            self.accounting.preempt(request)
        self.give_back(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_before = max(request.num_computed_before, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.draft_token_ids = []
        # What is in flight counts for nothing any more. Output that must be dropped stays so until it is drained.
        request.drops_stale_output = drop_stale_output or (request.drops_stale_output and request.num_stale_tokens > 0)
        request.num_stale_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        request.is_prefill_chunk = False
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.forked_ids.discard(request.request_id)
        self.waiting.add_first(request)
        self.preempted_ids.append(request.request_id)

    def finish(self, request: Request, status: RequestStatus, keep_blocks: bool = False) -> None:
        """Ends a request wherever it is. `keep_blocks`: an external load may still write them.

        It stays in the running list until rows.sweep(): many finish in one step, and one sweep removes them all.
        """
        if request.status is not RequestStatus.RUNNING:
            self.waiting.discard(request)
            self.waiting_holders.discard(request)
        request.leave()
        request.status = status
        if self.accounting is not None:
            self.accounting.finish(request)
        if not keep_blocks and self.manager.holds_blocks(request):
            if self._has_source:
                # A source that saves blocks sees none that nobody reads any more.
                self.manager.release_skipped(request)
            self.give_back(request)
        self.forked_ids.discard(request.request_id)
        self.finished_ids.append(request.request_id)
        del self.requests[request.request_id]

    def fail(self, request: Request, error: RequestError) -> None:
        """Ends a request for an error of its own; the next step that is put together tells it."""
        self.finish(request, RequestStatus.FINISHED_ERROR)
        self.errors[request.request_id] = error

    def give_back(self, request: Request) -> None:
        """Frees a request's blocks: at once, or when the steps in flight that may write them are back."""
        fence = self.fence
        if fence is not None and fence.must_wait(request):
            fence.hold(request)
        else:
            self.manager.free(request)

    def restart_holder(self, request: Request) -> None:
        """A waiting request loses its blocks and starts over, in its place among those that wait without."""
        self.waiting_holders.discard(request)
        self.manager.free(request)
        request.num_computed_tokens = 0
        self.waiting.add_first(request)

    def long_prefill_threshold(self) -> int:
        """Most prompt tokens for one request, 0 for no limit. A request that is alone starves nobody: no limit."""
        threshold = self.config.long_prefill_token_threshold
        return threshold if threshold > 0 and len(self.running) + self.num_waiting > 1 else 0

    def pool_error(self, request: Request, num_tokens: int) -> RequestTooLargeError | None:
        """The error of a request whose first num_tokens tokens the whole pool may be too small for, the slots behind
        them that a drafter writes included; None when they can be computed in it.

        Everything that refuses or ends a request for its size asks here, and everything that waits may rely on the
        answer: what is not refused fits once nobody else is there."""
        num_lookahead = self.config.num_lookahead_tokens
        num_needed = self.manager.num_blocks_for(num_tokens, request.num_encoder_tokens, num_lookahead)
        num_usable = self.manager.num_usable_blocks
        if num_needed <= num_usable:
            return None
        return RequestTooLargeError(
            f"request {request.request_id!r}: {num_tokens} tokens need {num_needed} blocks, the pool has {num_usable}; "
            "shorten the request or give the pool more blocks"
        )

    def check(self) -> None:
        """Proves that every request is where its status says, and every layer below."""
        self.change.check()
        self.manager.check()
        if self.fence is not None:
            self.fence.check()
        if self.accounting is not None:
            self.accounting.check()
        waiting = self.waiting_requests()
        require(len(waiting) + len(self.running) == len(self.requests), "a request is in no queue, or in two")
        require(len(self.running) <= self.config.max_num_seqs, "more requests run than max_num_seqs")
        for request in self.running:
            require(request.status is RequestStatus.RUNNING, f"{request.request_id!r} runs as {request.status.value}")
            require(self.manager.holds_blocks(request), f"{request.request_id!r} runs without blocks")
        for request in waiting:
            require(request.status is not RequestStatus.RUNNING, f"{request.request_id!r} waits but is running")
            is_holder = self.manager.holds_blocks(request)
            require(
                is_holder == (request in self.waiting_holders.requests()),
                f"{request.request_id!r} waits in the wrong queue",
            )
        for request in self.running + waiting:
            require(self.requests.get(request.request_id) is request, f"{request.request_id!r} is not registered")
            require(
                0 <= request.num_stale_tokens <= request.num_in_flight_tokens,
                f"{request.request_id!r}: {request.num_stale_tokens} stale of {request.num_in_flight_tokens} in flight",
            )
            require(request.num_output_placeholders >= 0, f"{request.request_id!r}: negative placeholders")
        self.rows.check()
        in_flight = self.rows.table.num_in_flight
        require(in_flight == len(self.in_flight), f"{len(self.in_flight)} steps in flight, {in_flight} counted")
