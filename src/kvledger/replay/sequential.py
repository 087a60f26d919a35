"""Sequential replay: requests one after another, each looked up, given its prompt's blocks, and freed.

No time passes and nothing competes for blocks, so what remains is the prefix cache under its replacement policy: the
upper bound of what the same pool can hit under load. Generated tokens play no part.
"""

from collections.abc import Callable
from time import perf_counter

from kvledger.replay.arrivals import Arrivals
from kvledger.replay.config import ReplayConfig
from kvledger.replay.meters import EvictionMeter
from kvledger.replay.prompts import PromptMaker
from kvledger.replay.result import ReplayResult
from kvledger.replay.tally import Tally

_PROGRESS_REQUESTS = 64


def replay_sequentially(
    arrivals: Arrivals, maker: PromptMaker, config: ReplayConfig, progress: Callable[[], None]
) -> ReplayResult:
    """Replays every request in the order of arrival; calls `progress` now and then."""
    started = perf_counter()
    evictions = EvictionMeter()
    manager = config.make_manager(maker, evictions)
    tally = Tally(config, manager, evictions, interval=1.0)
    while True:
        now = arrivals.next_time()
        if now == float("inf"):
            break
        recorded = arrivals.take()
        serial = tally.num_requests
        tally.num_requests += 1
        refusal = tally.refusal(recorded.num_prompt_tokens)
        if refusal is not None:
            tally.refused[refusal] += 1
        else:
            tally.accept(recorded.num_prompt_tokens)
            request = maker.make(recorded, serial)
            hit = manager.get_computed_blocks(request)
            new_blocks = manager.allocate_slots(request, request.num_tokens - hit.num_tokens, hit)
            assert new_blocks is not None, "an empty pool has room for a request that was not refused"
            manager.record_prefix_lookup(request, hit.num_tokens)
            tally.usage.add(manager.usage)
            tally.timeline.sample(serial, 1, 0, manager.occupancy())
            manager.free(request)
            tally.num_finished += 1
        arrivals.finished(recorded, now)
        if config.check:
            manager.check()
        if serial % _PROGRESS_REQUESTS == 0:
            progress()
    return tally.result("sequential", perf_counter() - started)
