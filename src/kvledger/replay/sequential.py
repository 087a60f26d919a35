"""Sequential replay: requests one after another, each looked up, given its prompt's blocks, and freed.

No time passes and nothing competes for blocks, so what remains is the prefix cache under its replacement policy: the
upper bound of what the same pool can hit under load. Generated tokens play no part.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import perf_counter
from typing import Final

from kvledger.core.blocks.kv_cache_blocks import PrefixHit
from kvledger.core.extents.holding import Holding
from kvledger.core.requests.request import Request
from kvledger.replay.config import ReplayConfig
from kvledger.replay.extent_ledger import ExtentLedger
from kvledger.replay.ledger import BlockLedger, ReplayLedger
from kvledger.replay.records import FINISHED, ReplayListener, RequestRecord
from kvledger.replay.result import ReplayResult
from kvledger.replay.tally import Progress, Tally, refused
from kvledger.traces.arrivals import Arrivals
from kvledger.traces.trace_request import TraceRequest

_PROGRESS_REQUESTS: Final = 64


class InTurn(ABC):
    """Serves one request at a time on its ledger."""

    ledger: ReplayLedger

    @abstractmethod
    def serve(self, recorded: TraceRequest, serial: int) -> int:
        """Looks a prompt up and gives it its blocks. Returns the tokens that were hit."""

    @abstractmethod
    def release(self) -> None:
        """The request that was served gives its blocks back."""


class SequentialReplay:
    """One replay. run() may be called once."""

    def __init__(
        self,
        arrivals: Arrivals,
        server: InTurn,
        config: ReplayConfig,
        listeners: Sequence[ReplayListener] = (),
    ) -> None:
        self._arrivals: Final = arrivals
        self._server: Final = server
        self._ledger: Final = server.ledger
        self._tally: Final = Tally(config, server.ledger, interval=1.0)
        self._listeners: Final = [self._tally, *listeners]

    def run(self, progress: Progress) -> ReplayResult:
        """Replays every request in the order of arrival."""
        started = perf_counter()
        arrivals = self._arrivals
        tally = self._tally
        while True:
            now = arrivals.next_time()
            if now == math.inf:
                break
            recorded = arrivals.take()
            self._serve(recorded, tally.num_requests, now)
            tally.num_requests += 1
            arrivals.finished(recorded, now)
            if tally.num_requests % _PROGRESS_REQUESTS == 0:
                progress(tally.num_requests, tally.num_requests)
        return tally.result("sequential", perf_counter() - started)

    def _serve(self, recorded: TraceRequest, serial: int, now: float) -> None:
        tally = self._tally
        ledger = self._ledger
        refusal = tally.refusal(recorded.num_prompt_tokens)
        if refusal is not None:
            self._tell(refused(recorded, serial, now, now, refusal))
            return
        tally.accept(recorded.num_prompt_tokens)
        num_hit = self._server.serve(recorded, serial)
        # Each request weighs the same.
        tally.log_step(1.0, ledger.usage, 0)
        timeline = tally.timeline
        timeline.peak_running = 1
        if serial + 1 >= timeline.next_time:
            timeline.close_intervals(serial + 1, ledger.occupancy())
        if serial + 1 >= tally.group_meter.next_time:
            tally.group_meter.sample(serial + 1)
        self._server.release()
        # Nothing is generated, and no time passes.
        self._tell(
            RequestRecord(
                serial,
                recorded.session,
                recorded.priority,
                now,
                now,
                recorded.num_prompt_tokens,
                0,
                FINISHED,
                num_hit_tokens=num_hit,
            )
        )

    def _tell(self, record: RequestRecord) -> None:
        for listener in self._listeners:
            listener.ended(record)


class BlocksInTurn(InTurn):
    """On the library's ledger."""

    def __init__(self, config: ReplayConfig, ledger: BlockLedger) -> None:
        self.ledger = ledger
        self._maker: Final = ledger.maker
        self._manager: Final = ledger.manager
        self._check: Final = config.check
        self._events: Final = config.events
        self._max_chunk: Final = config.scheduler.max_num_batched_tokens
        self._num_lookahead: Final = config.layout.drafts
        self._request: Request | None = None

    def serve(self, recorded: TraceRequest, serial: int) -> int:
        """In steps of the scheduler's budget: windows move on with every step, and states are cached where one ends."""
        manager = self._manager
        request = self._request = self._maker.make(recorded, serial)
        hit: PrefixHit | None = manager.get_computed_blocks(request)
        assert hit is not None
        request.shared_prefix_boundary = hit.shared_prefix_boundary
        manager.record_prefix_lookup(request, hit.num_tokens, hit)
        start = num_hit = hit.num_tokens
        while start < request.num_tokens:
            manager.start_step()
            num_new = min(self._max_chunk, request.num_tokens - start)
            if manager.clips_chunks:
                num_new = manager.clip_chunk(request, start, num_new, self._max_chunk) or num_new
            new_blocks = manager.allocate_slots(request, num_new, hit, num_lookahead_tokens=self._num_lookahead)
            assert new_blocks is not None, "an empty pool has room for a request that was not refused"
            manager.release_block_copies(manager.take_block_copies())
            hit = None
            start += num_new
            request.num_computed_tokens = start
        return num_hit

    def release(self) -> None:
        request = self._request
        assert request is not None
        self._manager.free(request)
        if self._events is not None:
            self._events.end_step(float(request.request_id) + 1.0)
        if self._check:
            self._manager.check()


class ExtentsInTurn(InTurn):
    """In runs of blocks."""

    def __init__(self, ledger: ExtentLedger) -> None:
        self.ledger = ledger
        self._extents: Final = ledger
        self._holding: Holding | None = None

    def serve(self, recorded: TraceRequest, serial: int) -> int:
        extents = self._extents
        holding = self._holding = extents.enter(recorded)
        return extents.prefill(holding, recorded.num_prompt_tokens)

    def release(self) -> None:
        assert self._holding is not None
        self._extents.pool.release(self._holding)
