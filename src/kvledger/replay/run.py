"""One replay, from a trace and an engine to its result: what the command and the Python interface share."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvledger.core.watch.prompt_split import MissConfig
from kvledger.errors import wrong_value
from kvledger.replay.config import ReplayConfig
from kvledger.replay.engine import ReplayEngine
from kvledger.replay.log import ReplayLog
from kvledger.replay.records import ReplayListener
from kvledger.replay.result import ReplayResult
from kvledger.replay.scheduled import ScheduledReplay
from kvledger.replay.sequential import SequentialReplay
from kvledger.replay.slo import Slo
from kvledger.replay.step_time import StepTimeModel
from kvledger.replay.tally import Progress
from kvledger.scheduler import SchedulerConfig, SchedulingPolicy
from kvledger.traces.arrivals import (
    Arrivals,
    ClosedLoopArrivals,
    LimitedArrivals,
    RecordedArrivals,
    SessionArrivals,
)
from kvledger.traces.prompts import make_prompt_maker
from kvledger.traces.reader import TraceReader

if TYPE_CHECKING:
    from kvledger.events import LedgerEvents


@dataclass(frozen=True)
class ReplayHow:
    """How traffic is replayed; docs/replay.md explains each. Times are seconds, `step_overhead` milliseconds."""

    policy: str = "fcfs"
    hash: str = "sha256"
    sequential: bool = False
    closed_loop: bool = False
    session_gap: float = 30.0
    speed_up: float = 1.0
    seed: int = 0
    limit: int | None = None
    watermark: float = 0.0
    check: bool = False
    remember_evictions: int = 1 << 22
    step_overhead: float = 2.0
    log_interval: float = 0.0
    slo: Slo | None = None


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
    """Replays everything that `arrivals` (by default arrivals_of) bring. `listeners` are told of requests and steps."""
    arrivals = arrivals or arrivals_of(reader, how)
    config = _config(engine, how, events)
    maker = make_prompt_maker(how.hash, config.hash_block_size)
    driver: ScheduledReplay | SequentialReplay
    if how.sequential:
        driver = SequentialReplay(arrivals, maker, config, listeners)
    else:
        step_time = StepTimeModel(engine.work, engine.gpu, engine.num_gpus, how.step_overhead / 1000.0)
        log = ReplayLog(how.log_interval, write_log) if how.log_interval > 0 else None
        driver = ScheduledReplay(arrivals, maker, config, step_time, log, listeners)
    # The pool is up to millions of objects that live to the end: no collection needs to walk over them.
    gc.freeze()
    try:
        result = driver.run(progress or _silent)
    finally:
        gc.unfreeze()
    result.format = reader.name
    result.hash = how.hash if engine.enable_caching else "off"
    result.model = engine.name
    result.gpu = engine.gpu.name
    result.num_gpus = engine.num_gpus
    result.notes = [*engine.notes, *reader.notes]
    result.num_bad_lines = reader.num_bad
    return result


def arrivals_of(reader: TraceReader, how: ReplayHow) -> Arrivals:
    """The trace's requests as they arrive. ConfigError for a way that the trace does not have."""
    arrivals: Arrivals
    if how.closed_loop and not reader.has_sessions:
        raise wrong_value("closed_loop", True, f"the {reader.name} format has no sessions", "leave it out")
    if reader.has_clock and not how.closed_loop:
        arrivals = RecordedArrivals(reader.requests(), how.speed_up)
    else:
        if reader.needs_closed_loop and not (how.closed_loop or how.sequential):
            problem = f"a {reader.name} trace has no times between turns: the next one follows the answer"
            raise wrong_value("closed_loop", False, problem, "give --closed-loop")
        arrivals_class = ClosedLoopArrivals if how.closed_loop else SessionArrivals
        arrivals = arrivals_class(reader.sessions(), how.session_gap, how.seed, how.speed_up)
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
