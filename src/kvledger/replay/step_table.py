"""Step times that were measured, and the roofline that fits them best.

    prefill_tokens,prefill_computed,decode_requests,decode_context,milliseconds
    8192,0,0,0,260.5
    0,0,64,512000,14.2

A row is one step: a chunk of prefill_tokens tokens after prefill_computed tokens (0 where the column is missing),
beside decode_requests requests that have decode_context tokens in all. The fit keeps what a model has to compute and to
read, and finds what is the machine's: the overhead of a step and the shares of both peaks that it reaches. So it holds
for steps that the table does not have.
"""

import csv
import math
from contextlib import closing
from itertools import islice
from statistics import median
from typing import Final

import msgspec

from kvledger.errors import wrong_value
from kvledger.files.whole import read_whole
from kvledger.plan.gpus import Gpu
from kvledger.replay.layout import InputError
from kvledger.replay.step_time import (
    BANDWIDTH_EFFICIENCY,
    FLOPS_EFFICIENCY,
    StepTimeModel,
    StepWork,
    num_pairs,
)
from kvledger.traces.first_record import FirstRecord
from kvledger.traces.lines import TraceLines
from kvledger.traces.recording import RecordingReader, TimedStep
from kvledger.traces.trace_request import TraceError

COLUMNS: Final = ("prefill_tokens", "prefill_computed", "decode_requests", "decode_context", "milliseconds")
_OPTIONAL: Final = ("prefill_computed",)
_MAX_ROWS: Final = 100_000
_MAX_COUNT: Final = 1 << 40
_MAX_ROUNDS: Final = 50


class StepFit(msgspec.Struct):
    """`overhead`: seconds. `median_error` and `largest_error`: of the rows, over their times."""

    num_steps: int
    overhead: float
    flops_efficiency: float
    bandwidth_efficiency: float
    median_error: float
    largest_error: float

    def words(self, where: str) -> str:
        """As a note of the replay."""
        return (
            f"step times are fitted to {self.num_steps:,} steps of {where}: {self.overhead * 1000:.2f} ms a step, "
            f"{self.flops_efficiency:.0%} of the peak FLOP/s, {self.bandwidth_efficiency:.0%} of the bandwidth; off by "
            f"{self.median_error:.1%} in the median, {self.largest_error:.1%} at most"
        )


def read_step_table(path: str) -> list[TimedStep]:
    """Of a table, or of a recording of ours whose server measured its steps. InputError for what is neither."""
    recorded = _recorded_steps(path)
    if recorded is not None:
        return recorded
    text = read_whole("step_time", path).decode("utf-8-sig", "replace")
    try:
        rows = list(csv.DictReader(text.splitlines(), strict=True))
    except csv.Error as broken:
        raise InputError(f"{path}: not a CSV file ({broken})") from None
    if not 0 < len(rows) <= _MAX_ROWS:
        raise InputError(
            f"{path}: {len(rows):,} rows; expected 1 to {_MAX_ROWS:,} under the header {','.join(COLUMNS)}"
        )
    return [_step(f"{path}, line {number}", row) for number, row in enumerate(rows, 2)]


def _recorded_steps(path: str) -> list[TimedStep] | None:
    """None for what is no recording."""
    try:
        lines = TraceLines(path)
    except TraceError:
        return None
    with closing(lines):
        try:
            if not RecordingReader.recognises(FirstRecord(lines.peek())):
                return None
        except (TraceError, msgspec.DecodeError):
            return None
        steps = [
            step
            for step in islice(RecordingReader(lines, None).timed_steps(), _MAX_ROWS)
            if step.seconds > 0 and step.prefill_tokens + step.decode_requests > 0
        ]
    if not steps:
        raise InputError(f"{path}: this recording has no steps; KVLEDGER_RECORD_STEPS=1 records them")
    return steps


def _step(where: str, row: dict[str, str | None]) -> TimedStep:
    numbers: list[float] = []
    for name in COLUMNS:
        cell = row.get(name)
        if cell is None and name not in _OPTIONAL:
            raise InputError(f"{where}, column {name}: missing; the header is {','.join(COLUMNS)}")
        try:
            number = float(cell or 0)
        except ValueError:
            number = math.nan
        if not 0 <= number <= _MAX_COUNT or (name != "milliseconds" and number != int(number)):
            raise InputError(f"{where}, column {name}: expected a number from 0 on, got {str(cell)[:40]}")
        numbers.append(number)
    prefill, computed, decode, context = (int(number) for number in numbers[:4])
    if prefill + decode == 0 or numbers[4] <= 0:
        raise InputError(f"{where}: expected a step with tokens that takes time")
    if context < decode:
        raise InputError(f"{where}, column decode_context: expected {decode} or more, the requests' own tokens")
    return TimedStep(prefill, computed, decode, context, numbers[4] / 1000.0)


def fit(steps: list[TimedStep], work: StepWork, gpu: Gpu, num_gpus: int) -> tuple[StepTimeModel, StepFit]:
    """The roofline with the least squares of relative errors. ConfigError where more work takes less time.

    A step is bound by what it computes or by what it reads; which of the two is decided by the numbers, and the other
    way round, until nothing changes. What no step is bound by stays as it is without a table.
    """
    peak = StepTimeModel(work, gpu, num_gpus, 0.0, flops_efficiency=1.0, bandwidth_efficiency=1.0)
    sides = [_sides(peak, step) for step in steps]
    costs = [1.0 / FLOPS_EFFICIENCY, 1.0 / BANDWIDTH_EFFICIENCY]
    overhead, before = 0.0, None
    for _ in range(_MAX_ROUNDS):
        bound = [0 if compute * costs[0] >= read * costs[1] else 1 for compute, read in sides]
        if bound == before:
            break
        before = bound
        overhead = _solve(steps, sides, bound, costs)
    if min(costs) <= 0:
        raise wrong_value("step_time", f"{len(steps)} steps", "those with more work take less time", "measure again")
    model = StepTimeModel(
        work, gpu, num_gpus, overhead, flops_efficiency=1.0 / costs[0], bandwidth_efficiency=1.0 / costs[1]
    )
    errors = [abs(_seconds(model, step) - step.seconds) / step.seconds for step in steps]
    return model, StepFit(len(steps), overhead, 1.0 / costs[0], 1.0 / costs[1], median(errors), max(errors))


def _solve(steps: list[TimedStep], sides: list[tuple[float, float]], bound: list[int], costs: list[float]) -> float:
    """Sets the costs of the sides that bind steps, and returns the overhead, which is not below 0."""
    free = sorted(set(bound))
    for has_overhead in (True, False):
        # Each row over its time, so that short steps count as much: 1 = overhead / t + cost * side / t.
        rows = [
            [
                *([1.0 / step.seconds] if has_overhead else []),
                *[side[one] / step.seconds if one == binds else 0.0 for one in free],
            ]
            for step, side, binds in zip(steps, sides, bound, strict=True)
        ]
        found = least_squares(rows)
        if found is None:
            continue
        overhead = found[0] if has_overhead else 0.0
        if overhead < 0:
            continue
        for one, cost in zip(free, found[-len(free) :], strict=True):
            costs[one] = cost
        return overhead
    return 0.0


def least_squares(rows: list[list[float]]) -> list[float] | None:
    """x such that rows . x is as near to 1 as can be; None where that says nothing of some x."""
    size = len(rows[0])
    scales = [math.sqrt(math.fsum(row[i] * row[i] for row in rows)) or 1.0 for i in range(size)]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    matrix = [
        [*[math.fsum(row[i] * row[j] for row in scaled) for j in range(size)], math.fsum(row[i] for row in scaled)]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(matrix[k][i]))
        if abs(matrix[pivot][i]) < 1e-9:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for k in range(size):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] / scales[i] for i in range(size)]


def _numbers(model: StepTimeModel, step: TimedStep) -> tuple[int, int, float, int, list[tuple[int, float]]]:
    """Of the step, as the model takes them."""
    prefill, computed, decode, context = (
        step.prefill_tokens, step.prefill_computed, step.decode_requests, step.decode_context
    )  # fmt: skip
    tokens = prefill + (computed if prefill else 0) + context
    pairs = num_pairs(prefill, computed) + context
    each = context // decode - 1 if decode else 0
    local = [
        (
            (reach.context(prefill, computed) if prefill else 0) + decode * (reach.context(1, each) if decode else 0),
            reach.pairs(prefill, computed) + decode * (reach.pairs(1, each) if decode else 0.0),
        )
        for reach in model.reaches
    ]
    return prefill + decode, tokens, pairs, decode + (prefill > 0), local


def _sides(model: StepTimeModel, step: TimedStep) -> tuple[float, float]:
    return model.sides(*_numbers(model, step))


def _seconds(model: StepTimeModel, step: TimedStep) -> float:
    return model.seconds(*_numbers(model, step))
