"""What is charged to the parts of a prompt, however the evictions are known: by the ledger's ghosts or by extents."""

from typing import Final

from kvledger.core.blocks.observer import EvictionCause
from kvledger.core.units import round_down
from kvledger.core.watch.ghost_index import EvictedPart, GhostTrace
from kvledger.core.watch.prompt_split import NUM_CURVE_POINTS, PromptAccount, PromptSplit, curve_blocks

_REUSED: Final = EvictionCause.REUSED


def charge_traces(
    account: PromptAccount, curve: list[int], traces: list[GhostTrace], step: int, position: int, end: int
) -> int:
    """Charges tokens [position, end), one step after the other: a hit covers a step or nothing of it. `traces`: of all
    groups that tell, each of which was cached up to there once. Returns where what was charged ends."""
    if len(traces) == 1 and traces[0].block_size == step and _covers(traces[0].parts, position, end):
        return _charge_parts(account, curve, traces[0], end)
    point = 0
    step_end = round_down(position, step) + step
    while step_end <= end:
        num_short = 0
        cause = _REUSED
        for trace in traces:
            trace.read_to(step_end)
            num_short = max(num_short, trace.num_short)
            if trace.cause is not _REUSED:
                cause = trace.cause
        num_tokens = step_end - position
        if cause is _REUSED:
            point = curve_point(num_short, point)
            curve[point] += num_tokens
            account.split.evicted += num_tokens
            account.num_blocks_short = num_short
        else:
            charge_cause(account.split, cause, num_tokens)
        position = step_end
        step_end += step
    return position


def _covers(parts: list[EvictedPart], start: int, end: int) -> bool:
    """Whether these parts follow upon one another from start to end, with nothing cached between them."""
    for part in parts:
        if part.start != start:
            return False
        start = part.end
        if start >= end:
            return True
    return False


def _charge_parts(account: PromptAccount, curve: list[int], trace: GhostTrace, end: int) -> int:
    """The same for one trace whose blocks are the steps: not block by block, as of a part each one is short of one
    block more than the one before."""
    step = trace.block_size
    split = account.split
    cause = _REUSED
    num_short = 0
    point = 0
    position = end
    for part in trace.parts:
        if part.start >= end:
            break
        position = min(part.end, end)
        num_tokens = position - part.start
        if cause is _REUSED:
            cause = part.cause
        if cause is not _REUSED:
            charge_cause(split, cause, num_tokens)
            continue
        split.evicted += num_tokens
        num_left = num_tokens // step
        num_next = part.num_short
        while num_left > 0:
            if num_next <= num_short:
                # What was short before is short of more than these.
                num_blocks = min(num_left, num_short - num_next + 1)
                point = curve_point(num_short, point)
            else:
                point = curve_point(num_next, point)
                room = curve_blocks(point) - num_next + 1
                num_blocks = num_left if point == NUM_CURVE_POINTS - 1 else min(num_left, room)
            curve[point] += num_blocks * step
            num_next += num_blocks
            num_left -= num_blocks
        num_short = max(num_short, num_next - 1)
        account.num_blocks_short = num_short
    return position


def charge_rest(split: PromptSplit, num_tokens: int, position: int, limit: int, step: int) -> None:
    """Charges everything from `position` on: up to `limit`, where hits end at most, it was never seen."""
    if limit > position:
        split.never_seen = limit - position
        position = limit
    if num_tokens % step == 0:
        split.last_token_rule = num_tokens - position
    else:
        split.shorter_than_block = num_tokens - position


def charge_cause(split: PromptSplit, cause: EvictionCause, num_tokens: int) -> None:
    """Evictions that a larger pool would not have prevented."""
    if cause is EvictionCause.RESET:
        split.reset += num_tokens
    elif cause is EvictionCause.PROMOTED:
        split.promoted += num_tokens
    else:
        split.evicted_by_call += num_tokens


def curve_point(num_short: int, point: int = 0) -> int:
    """The first point of the curve, from `point` on, whose blocks are enough."""
    while curve_blocks(point) < num_short and point < NUM_CURVE_POINTS - 1:
        point += 1
    return point
