"""ExtentMisses: what MissExplainer says of prompts, read off an ExtentPool."""

from typing import Final

from mypy_extensions import i64

from kvledger.core.blocks.observer import EvictionCause
from kvledger.core.extents.extent_pool import ExtentPool
from kvledger.core.extents.holding import Holding
from kvledger.core.watch.ghost_index import EvictedPart, GhostTrace
from kvledger.core.watch.miss_charges import charge_rest, charge_traces
from kvledger.core.watch.prompt_split import MissTotals, PromptAccount

_REUSED: Final = EvictionCause.REUSED


class ExtentMisses:
    """`new` and `resumed` as MissExplainer has them."""

    def __init__(self, pool: ExtentPool) -> None:
        self.new: Final = MissTotals(1)
        self.resumed: Final = MissTotals(1)
        self._pool: Final = pool

    @property
    def num_forgotten(self) -> int:
        return int(self._pool.first_known)

    def admitted(self, holding: Holding, num_tokens: int, num_hit: int, num_cached: int, is_resumed: bool) -> None:
        """A request starts with num_hit blocks, of num_cached that could be hit. To be called before it takes any."""
        account = PromptAccount("", num_tokens, is_resumed)
        totals = self.resumed if is_resumed else self.new
        split = account.split
        step = int(self._pool.block_size)
        limit = (num_tokens - 1) // step * step
        position = num_hit * step
        split.hit = position
        # Not used, though it was there.
        split.lookup_off = max(0, min(num_cached * step, limit) - position)
        position += split.lookup_off
        if position < limit:
            trace = self._trace(holding, position // step)
            position = charge_traces(account, totals.tokens_kept_by, [trace], step, position, min(limit, trace.end))
        charge_rest(split, num_tokens, position, limit, step)
        totals.add(account)

    def _trace(self, holding: Holding, start: i64) -> GhostTrace:
        """What was evicted of a sequence from that depth on, up to the first block that was never cached or is
        forgotten."""
        pool = self._pool
        block_size = pool.block_size
        first_known = pool.first_known
        parts: list[EvictedPart] = []
        depth = start
        place: i64 = 0
        while place < len(holding.path):
            node = holding.path[place]
            node_end = holding.end_of(place)
            place += 1
            if node_end <= depth:
                continue
            ghost = node.ghost
            while ghost is not None:
                # The deepest ones went first.
                last_known = ghost.number - first_known
                end = ghost.hi if ghost.hi <= last_known else last_known + 1
                if end <= depth:
                    break
                num_short = pool.num_evictions - (ghost.number - depth)
                parts.append(EvictedPart(int(depth * block_size), int(end * block_size), int(num_short), _REUSED))
                depth = end
                if end < ghost.hi:
                    break
                ghost = ghost.below
            if depth < node_end:
                break
        return GhostTrace(int(block_size), parts, int(depth * block_size))
