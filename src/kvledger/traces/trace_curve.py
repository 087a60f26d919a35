"""TraceCurve: the hit rate of a trace's traffic in pools of every size, from one pass (core/watch/hit_curve.py)."""

import math
from collections.abc import Iterable
from typing import Final

import msgspec

from kvledger.core.watch.hit_curve import HitCurve
from kvledger.traces.trace_request import TraceError, TraceRequest

_NUM_POINTS: Final = 16
_NINE_TENTHS: Final = 0.9


class CurvePoint(msgspec.Struct):
    """A pool of num_blocks blocks, the null block among them, as vLLM counts them."""

    num_blocks: int
    num_hit_tokens: int
    token_hit_rate: float


class TraceCurve(msgspec.Struct):
    """`ceiling`: the smallest pool that hits all that an endless one hits; `nine_tenths`: that hits 90 % of it; `knee`:
    the pool behind which more blocks gain least (farthest above the chord of the curve over the logarithm of sizes).
    `smallest`: that holds the longest prompt; a smaller one refuses requests, and the curve does not count that.
    """

    trace: str
    format: str
    block_size: int
    num_requests: int
    num_prompt_tokens: int
    num_distinct_blocks: int
    num_duplicates: int
    smallest: CurvePoint
    knee: CurvePoint
    nine_tenths: CurvePoint
    ceiling: CurvePoint
    points: list[CurvePoint]
    notes: list[str]


def trace_curve(
    requests: Iterable[TraceRequest],
    *,
    block_size: int,
    sizes: list[int],
    today: int | None,
    trace: str,
    format: str,
    notes: list[str],
) -> TraceCurve:
    """Of these requests, one after another. `sizes`: of `points`; a geometric row of them where it is empty. `today`: a
    size besides. `notes` is read at the end, when the reader has said what it has to say.

    TraceError for a trace without ids, or with ids of several sizes.
    """
    curve: HitCurve | None = None
    for request in requests:
        if curve is None:
            curve = HitCurve(block_size, request.block_size or block_size)
        if request.hash_ids and request.block_size != curve.chunk_size:
            raise TraceError(
                f"{trace}: ids of {request.block_size} and of {curve.chunk_size} tokens: a curve needs one size; "
                "kvledger replay --sequential takes any"
            )
        curve.add(request.num_prompt_tokens, request.hash_ids, request.scope)
    if curve is None or curve.num_prompt_tokens == 0:
        raise TraceError(f"{trace}: no requests")
    smallest = curve.num_blocks_of_longest + 1
    ceiling = max(curve.num_blocks_of_ceiling, smallest)
    row = _geometric(smallest, ceiling)
    told = [*notes]
    if any(size < smallest for size in sizes):
        told.append(f"pools below {smallest:,} blocks refuse the longest prompt, which their points count all the same")
    if curve.num_duplicates:
        told.append(
            f"{curve.num_duplicates:,} prompts were cached as a whole: their last block is computed again, and for a "
            "while a pool has a block less for others"
        )
    return TraceCurve(
        trace,
        format,
        block_size,
        curve.num_requests,
        curve.num_prompt_tokens,
        curve.num_distinct_blocks,
        curve.num_duplicates,
        _point(curve, smallest),
        _knee(_points(curve, row)),
        _point(curve, max(curve.smallest_pool(_NINE_TENTHS), smallest)),
        _point(curve, ceiling),
        _points(curve, (sizes or row) + ([] if today is None else [today])),
        told,
    )


def _point(curve: HitCurve, num_blocks: int) -> CurvePoint:
    return _points(curve, [num_blocks])[0]


def _points(curve: HitCurve, sizes: list[int]) -> list[CurvePoint]:
    hits = curve.hit_tokens_at(sizes)
    return [CurvePoint(size, hit, hit / curve.num_prompt_tokens) for size, hit in zip(sizes, hits, strict=True)]


def _geometric(first: int, last: int) -> list[int]:
    """Sizes from the first to the last, each about as many times the one before."""
    if last <= first:
        return [first]
    step = (last / first) ** (1 / (_NUM_POINTS - 1))
    return sorted({min(last, max(first, round(first * step**k))) for k in range(_NUM_POINTS)} | {last})


def _knee(points: list[CurvePoint]) -> CurvePoint:
    first, last = points[0], points[-1]
    width = math.log(last.num_blocks / first.num_blocks) if last.num_blocks > first.num_blocks else 0.0
    gain = last.token_hit_rate - first.token_hit_rate
    if width == 0.0 or gain <= 0.0:
        return first

    def above(point: CurvePoint) -> float:
        along = math.log(point.num_blocks / first.num_blocks) / width
        return (point.token_hit_rate - first.token_hit_rate) / gain - along

    return max(points, key=above)
