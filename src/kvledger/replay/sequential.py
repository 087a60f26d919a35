"""Sequential replay: requests one after another, each looked up, given its prompt's blocks, and freed.

No time passes and nothing competes for blocks, so what remains is the prefix cache under its replacement policy: the
upper bound of what the same pool can hit under load. Generated tokens play no part.
"""

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Final

from kvledger.core.blocks.kv_cache_blocks import PrefixHit
from kvledger.core.requests.request import Request
from kvledger.replay.config import ReplayConfig
from kvledger.replay.meters import EvictionMeter
from kvledger.replay.records import FINISHED, ReplayListener, RequestRecord
from kvledger.replay.result import ReplayResult
from kvledger.replay.tally import Progress, Tally, refused
from kvledger.traces.arrivals import Arrivals
from kvledger.traces.prompts import PromptMaker
from kvledger.traces.trace_request import TraceRequest

_PROGRESS_REQUESTS: Final = 64


class SequentialReplay:
    """One replay. run() may be called once."""

    def __init__(
        self,
        arrivals: Arrivals,
        maker: PromptMaker,
        config: ReplayConfig,
        listeners: Sequence[ReplayListener] = (),
    ) -> None:
        evictions = EvictionMeter()
        self._arrivals: Final = arrivals
        self._maker: Final = maker
        self._check: Final = config.check
        self._events: Final = config.events
        self._max_chunk: Final = config.scheduler.max_num_batched_tokens
        self._num_lookahead: Final = config.layout.drafts
        self._manager: Final = config.make_manager(maker, evictions)
        self._tally: Final = Tally(config, self._manager, evictions, interval=1.0)
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
        manager = self._manager
        refusal = tally.refusal(recorded.num_prompt_tokens)
        if refusal is not None:
            self._tell(refused(recorded, serial, now, now, refusal))
            return
        tally.accept(recorded.num_prompt_tokens)
        request = self._maker.make(recorded, serial)
        num_hit = self._prefill(request)
        # Each request weighs the same.
        tally.log_step(1.0, manager.usage, 0)
        timeline = tally.timeline
        timeline.peak_running = 1
        if serial + 1 >= timeline.next_time:
            timeline.close_intervals(serial + 1, manager.occupancy())
        if serial + 1 >= tally.group_meter.next_time:
            tally.group_meter.sample(serial + 1)
        manager.free(request)
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
        if self._events is not None:
            self._events.end_step(serial + 1.0)
        if self._check:
            manager.check()

    def _tell(self, record: RequestRecord) -> None:
        for listener in self._listeners:
            listener.ended(record)

    def _prefill(self, request: Request) -> int:
        """Looks the prompt up and computes the rest, in steps of the scheduler's budget: windows move on with every
        step, and states are cached where one ends. Returns the tokens that were hit.
        """
        manager = self._manager
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
