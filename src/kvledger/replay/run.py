"""One replay, from a trace and an engine to its result: what the command and the Python interface share."""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvledger.core.watch.prompt_split import MissConfig
from kvledger.errors import wrong_value
from kvledger.replay.against import compare
from kvledger.replay.config import ReplayConfig
from kvledger.replay.engine import ReplayEngine
from kvledger.replay.extent_ledger import ExtentLedger, why_by_blocks
from kvledger.replay.ledger import BlockLedger
from kvledger.replay.log import ReplayLog
from kvledger.replay.measured import read_measured
from kvledger.replay.records import ReplayListener
from kvledger.replay.result import ReplayResult
from kvledger.replay.scheduled import ScheduledReplay
from kvledger.replay.sequential import BlocksInTurn, ExtentsInTurn, SequentialReplay
from kvledger.replay.serving import ServingByBlocks, ServingByExtents, why_scheduled_by_blocks
from kvledger.replay.slo import Slo
from kvledger.replay.step_table import fit, read_step_table
from kvledger.replay.step_time import StepTimeModel
from kvledger.replay.tally import Progress
from kvledger.scheduler import SchedulerConfig, SchedulingPolicy
from kvledger.traces.arrivals import (
    Arrivals,
    ClosedLoopArrivals,
    LimitedArrivals,
    RecordedArrivals,
    SessionArrivals,
    StepArrivals,
)
from kvledger.traces.prompts import HASH_CHOICES, make_prompt_maker
from kvledger.traces.reader import TraceReader
from kvledger.traces.trace_request import TraceRequest

if TYPE_CHECKING:
    from kvledger.events import LedgerEvents

# What a replay in sequence has no use for.
NEED_TIME: Final = ("speed_up", "step_overhead", "step_time", "log_interval", "slo")
NEED_OTHERS: Final = ("policy", "watermark")


@dataclass(frozen=True)
class ReplayHow:
    """How traffic is replayed; docs/replay.md explains each. Times are seconds, `step_overhead` milliseconds.
    `step_time` and `against` are paths."""

    policy: str = "fcfs"
    hash: str = "sha256"
    sequential: bool = False
    closed_loop: bool = False
    by_steps: bool = False
    session_gap: float = 30.0
    speed_up: float = 1.0
    seed: int = 0
    limit: int | None = None
    watermark: float = 0.0
    check: bool = False
    remember_evictions: int = 1 << 22
    step_overhead: float = 2.0
    step_time: str | None = None
    log_interval: float = 0.0
    slo: Slo | None = None
    against: str | None = None
    block_by_block: bool = False

    def __post_init__(self) -> None:
        """ConfigError for the first field that is out of its range, or without effect in sequence."""
        for name, known in (("policy", [policy.value for policy in SchedulingPolicy]), ("hash", HASH_CHOICES)):
            if getattr(self, name) not in known:
                raise wrong_value(name, getattr(self, name), "not known", "use one of " + ", ".join(known))
        # Written so that what is not a number is refused, too.
        if not 0.0 < self.speed_up < math.inf:
            raise wrong_value("speed_up", self.speed_up, "must be above 0", "give a positive number")
        for name in ("session_gap", "step_overhead", "log_interval", "remember_evictions", "seed"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise wrong_value(name, value, "not a number from 0 on", "give 0 or a positive number")
        if self.limit is not None and self.limit < 1:
            raise wrong_value("limit", self.limit, "out of range", "give 1 or more")
        if self.step_time is not None and self.step_overhead != ReplayHow.step_overhead:
            raise wrong_value("step_overhead", self.step_overhead, "step_time says so itself", "give one of the two")
        if self.by_steps and (self.closed_loop or self.sequential or self.speed_up != 1.0):
            problem = "the recorded steps say when requests come"
            raise wrong_value("by_steps", True, problem, "leave out closed_loop, sequential and speed_up")
        if self.sequential:
            for names, reason in ((NEED_TIME, "no time passes"), (NEED_OTHERS, "nobody competes")):
                for name in names:
                    if getattr(self, name) != getattr(ReplayHow, name):
                        raise wrong_value(name, getattr(self, name), f"{reason} in sequence", "leave it out")


def replay_trace(
    reader: TraceReader,
    engine: ReplayEngine,
    how: ReplayHow,
    *,
    arrivals: Arrivals | None = None,
    events: "LedgerEvents | None" = None,
    listeners: Sequence[ReplayListener] = (),
    progress: Progress | None = None,
    write_log: Callable[[str], None] = print,
) -> ReplayResult:
    """Replays a trace, all of it or what `arrivals` (made of it by arrivals_of) bring."""
    result = replay_arrivals(
        arrivals or arrivals_of(reader, how), engine, how,
        events=events, listeners=listeners, progress=progress, write_log=write_log,
    )  # fmt: skip
    result.format = reader.name
    result.notes += reader.notes
    result.num_bad_lines = reader.num_bad
    return result


def replay_arrivals(
    arrivals: Arrivals,
    engine: ReplayEngine,
    how: ReplayHow,
    *,
    events: "LedgerEvents | None" = None,
    listeners: Sequence[ReplayListener] = (),
    progress: Progress | None = None,
    write_log: Callable[[str], None] = print,
) -> ReplayResult:
    """Replays what arrives. `listeners` are told of requests and steps."""
    # Whatever can be wrong is read before anything runs.
    measured = None if how.against is None else read_measured(how.against)
    config = _config(engine, how, events)
    notes = list(engine.notes)
    by_blocks = "--block-by-block" if how.block_by_block else why_by_blocks(config)
    maker = make_prompt_maker(how.hash, config.hash_block_size)
    driver: ScheduledReplay | SequentialReplay
    if how.sequential:
        in_turn = BlocksInTurn(config, BlockLedger(config, maker)) if by_blocks else ExtentsInTurn(ExtentLedger(config))
        driver = SequentialReplay(arrivals, in_turn, config, listeners)
    else:
        step_time = _step_time(engine, how, notes)
        log = ReplayLog(how.log_interval, write_log) if how.log_interval > 0 else None
        by_blocks = by_blocks or why_scheduled_by_blocks(config, step_time, has_log=log is not None)
        serving = ServingByBlocks(config, maker) if by_blocks else ServingByExtents(config)
        driver = ScheduledReplay(arrivals, serving, config, step_time, log, listeners)
    # The pool is up to millions of objects that live to the end: no collection needs to walk over them.
    gc.freeze()
    try:
        result = driver.run(progress or _silent)
    finally:
        gc.unfreeze()
    result.hash = _hash_name(how, engine, result)
    result.why_by_blocks = by_blocks
    result.model = engine.name
    result.gpu = engine.gpu.name
    result.num_gpus = engine.num_gpus
    result.notes = notes
    if measured is not None:
        result.against = compare(measured, result)
    return result


def _hash_name(how: ReplayHow, engine: ReplayEngine, result: ReplayResult) -> str:
    """What names blocks; extents have no need of names."""
    if not engine.enable_caching:
        return "off"
    return how.hash if result.counting == "blocks" else "none"


def _step_time(engine: ReplayEngine, how: ReplayHow, notes: list[str]) -> StepTimeModel:
    if how.step_time is None:
        return StepTimeModel(engine.work, engine.gpu, engine.num_gpus, how.step_overhead / 1000.0)
    model, found = fit(read_step_table(how.step_time), engine.work, engine.gpu, engine.num_gpus)
    notes.append(found.words(how.step_time))
    return model


def arrivals_of(reader: TraceReader, how: ReplayHow) -> Arrivals:
    """The trace's requests as they arrive. ConfigError for a way that the trace does not have."""
    arrivals: Arrivals
    if how.closed_loop and not reader.has_sessions:
        raise wrong_value("closed_loop", True, f"the {reader.name} format has no sessions", "leave it out")
    if how.by_steps:
        if not reader.has_steps:
            problem = "the trace does not say at which step of the server its requests came"
            raise wrong_value("by_steps", True, problem, "leave it out, or record with KVLEDGER_RECORD_STEPS=1")
        arrivals = StepArrivals(reader.requests())
    elif reader.has_clock and not how.closed_loop:
        arrivals = RecordedArrivals(reader.requests(), how.speed_up)
    else:
        if reader.needs_closed_loop and not (how.closed_loop or how.sequential):
            problem = f"a {reader.name} trace has no times between turns: the next one follows the answer"
            raise wrong_value("closed_loop", False, problem, "give --closed-loop")
        arrivals_class = ClosedLoopArrivals if how.closed_loop else SessionArrivals
        arrivals = arrivals_class(reader.sessions(), how.session_gap, how.seed, how.speed_up)
    return arrivals if how.limit is None else LimitedArrivals(arrivals, how.limit)


def arrivals_of_requests(requests: Iterator[TraceRequest], how: ReplayHow) -> Arrivals:
    """Requests in the order of arrival, at their times. ConfigError for a closed loop, which needs sessions."""
    if how.closed_loop:
        raise wrong_value("closed_loop", True, "requests on one clock have no sessions", "leave it out")
    arrivals = RecordedArrivals(requests, how.speed_up)
    return arrivals if how.limit is None else LimitedArrivals(arrivals, how.limit)


def _config(engine: ReplayEngine, how: ReplayHow, events: "LedgerEvents | None") -> ReplayConfig:
    scheduler = SchedulerConfig(
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
        SchedulingPolicy(how.policy),
        num_lookahead_tokens=engine.num_lookahead,
    )
    return ReplayConfig(
        num_blocks=engine.num_blocks,
        layout=engine.layout,
        max_model_len=engine.max_model_len,
        enable_caching=engine.enable_caching,
        watermark=how.watermark,
        check=how.check,
        scheduler=scheduler,
        events=events,
        decisions=engine.vllm_version,
        explain_misses=MissConfig(max_evicted_blocks=how.remember_evictions) if how.remember_evictions else None,
        slo=how.slo,
    )


def _silent(num_done: int, num_arrived: int) -> None:
    return
