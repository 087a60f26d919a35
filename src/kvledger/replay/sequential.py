"""Sequential replay: requests one after another, each looked up, given its prompt's blocks, and freed.

No time passes and nothing competes for blocks, so what remains is the prefix cache under its replacement policy: the
upper bound of what the same pool can hit under load. Generated tokens play no part.
"""

import math
from time import perf_counter
from typing import Final

from kvledger.replay.arrivals import Arrivals
from kvledger.replay.config import ReplayConfig
from kvledger.replay.meters import EvictionMeter
from kvledger.replay.prompts import PromptMaker
from kvledger.replay.result import ReplayResult
from kvledger.replay.tally import Progress, Tally
from kvledger.replay.trace_request import TraceRequest

_PROGRESS_REQUESTS: Final = 64


class SequentialReplay:
    """One replay. run() may be called once."""

    def __init__(self, arrivals: Arrivals, maker: PromptMaker, config: ReplayConfig) -> None:
        evictions = EvictionMeter()
        self._arrivals: Final = arrivals
        self._maker: Final = maker
        self._check: Final = config.check
        self._manager: Final = config.make_manager(maker, evictions)
        self._tally: Final = Tally(config, self._manager, evictions, interval=1.0)

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
            self._serve(recorded, tally.num_requests)
            tally.num_requests += 1
            arrivals.finished(recorded, now)
            if tally.num_requests % _PROGRESS_REQUESTS == 0:
                progress(tally.num_requests, tally.num_requests)
        return tally.result("sequential", perf_counter() - started)

    def _serve(self, recorded: TraceRequest, serial: int) -> None:
        tally = self._tally
        manager = self._manager
        refusal = tally.refusal(recorded.num_prompt_tokens)
        if refusal is not None:
            tally.refused[refusal] += 1
            return
        tally.accept(recorded.num_prompt_tokens)
        request = self._maker.make(recorded, serial)
        hit = manager.get_computed_blocks(request)
        new_blocks = manager.allocate_slots(request, request.num_tokens - hit.num_tokens, hit)
        assert new_blocks is not None, "an empty pool has room for a request that was not refused"
        manager.record_prefix_lookup(request, hit.num_tokens)
        # Each request weighs the same.
        tally.log_step(1.0, manager.usage, 0)
        timeline = tally.timeline
        timeline.peak_running = 1
        if serial + 1 >= timeline.next_time:
            timeline.close_intervals(serial + 1, manager.occupancy())
        manager.free(request)
        tally.num_finished += 1
        if self._check:
            manager.check()
