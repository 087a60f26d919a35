"""`kvledger replay`: drive the real ledger and scheduler with recorded traffic, without a GPU.

Everything about typer is here and in replay_options.py. What is heavy to import comes in when the command runs, so that
--help is quick.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

import typer

from kvledger.cli.app import GroupedCommand, OptionsCommand, in_option_words
from kvledger.cli.replay_options import ReplayOptions
from kvledger.errors import ConfigError, wrong_value

if TYPE_CHECKING:
    from kvledger.cli.replay_engine import ReplayEngine
    from kvledger.events import LedgerEvents
    from kvledger.replay.result import ReplayResult
    from kvledger.replay.scheduled import ScheduledReplay
    from kvledger.replay.sequential import SequentialReplay
    from kvledger.traces.arrivals import Arrivals
    from kvledger.traces.reader import TraceReader


def register(app: typer.Typer) -> None:
    """Adds the subcommand."""
    app.command(
        "replay",
        cls=GroupedCommand,
        help="Replay recorded traffic through the real scheduler and ledger, without a GPU.\n\n"
        "Prints hit rates, preemptions, pool usage and simulated latencies. Formats, options and the step-time model "
        "are explained in docs/replay.md.",
    )(OptionsCommand("replay", ReplayOptions, run))


def run(options: ReplayOptions) -> None:
    """Runs one replay and prints its result. typer.Exit(1) when nothing finished."""
    result = replay(options)
    _print(result, options.json)
    if result.num_finished == 0:
        print(f"kvledger: none of the {result.num_requests} requests finished", file=sys.stderr)
        raise typer.Exit(1)


def replay(options: ReplayOptions) -> "ReplayResult":
    """Runs one replay. typer.BadParameter for options that are wrong, TraceError for a trace that is."""
    from kvledger.cli.replay_engine import replay_engine

    try:
        options.validate()
        engine = replay_engine(options)
        reader = options.open_trace()
        with closing(reader):
            # What can be wrong is refused first: opening a recording empties it, and a socket waits for a subscriber.
            arrivals = _arrivals(options, reader)
            with _events(options, engine) as events:
                driver = _make_replay(options, engine, arrivals, events)
                result = _run_with_progress(driver, reader, options.log_interval > 0)
    except ConfigError as error:
        raise typer.BadParameter(in_option_words(str(error))) from error
    result.trace = options.trace_name
    result.format = reader.name
    result.hash = options.hash if engine.enable_caching else "off"
    result.model = engine.name
    result.gpu = engine.gpu.name
    result.num_gpus = engine.num_gpus
    result.notes = [*engine.notes, *reader.notes]
    result.num_bad_lines = reader.num_bad
    return result


@contextmanager
def _events(options: ReplayOptions, engine: "ReplayEngine") -> "Iterator[LedgerEvents | None]":
    """What --events opens, closed when the replay is done. EventError when not everything could be sent."""
    if options.events is None:
        yield None
        return
    from kvledger.cli.outputs import require_free
    from kvledger.cli.replay_events import CLOSE_S, open_events
    from kvledger.events import EventError

    if not engine.enable_caching:
        raise wrong_value("events", options.events, "nothing is cached, so there are none", "leave it out")
    if "://" not in options.events:
        require_free("events", options.events, overwrite=options.overwrite)
    events = open_events(options.events, options.hash, engine.layout.config(engine.num_blocks))
    try:
        yield events
    except BaseException:
        with suppress(EventError):
            events.close()
        raise
    events.close(CLOSE_S)


def _make_replay(
    options: ReplayOptions, engine: "ReplayEngine", arrivals: "Arrivals", events: "LedgerEvents | None"
) -> "ScheduledReplay | SequentialReplay":
    from kvledger.core.watch.prompt_split import MissConfig
    from kvledger.replay.config import ReplayConfig
    from kvledger.replay.log import ReplayLog
    from kvledger.replay.scheduled import ScheduledReplay
    from kvledger.replay.sequential import SequentialReplay
    from kvledger.replay.step_time import StepTimeModel
    from kvledger.scheduler import SchedulerConfig, SchedulingPolicy
    from kvledger.traces.prompts import make_prompt_maker

    scheduler = SchedulerConfig(
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
        SchedulingPolicy(options.policy),
        num_lookahead_tokens=engine.num_lookahead,
    )
    config = ReplayConfig(
        num_blocks=engine.num_blocks,
        layout=engine.layout,
        max_model_len=engine.max_model_len,
        enable_caching=engine.enable_caching,
        watermark=options.watermark,
        check=options.check,
        scheduler=scheduler,
        events=events,
        decisions=engine.vllm_version,
        explain_misses=MissConfig(max_evicted_blocks=options.remember_evictions)
        if options.remember_evictions
        else None,
    )
    maker = make_prompt_maker(options.hash, config.hash_block_size)
    if options.sequential:
        return SequentialReplay(arrivals, maker, config)
    step_time = StepTimeModel(engine.work, engine.gpu, engine.num_gpus, options.step_overhead / 1000.0)
    log = ReplayLog(options.log_interval, _write_line) if options.log_interval > 0 else None
    return ScheduledReplay(arrivals, maker, config, step_time, log)


def _write_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arrivals(options: ReplayOptions, reader: "TraceReader") -> "Arrivals":
    from kvledger.traces.arrivals import ClosedLoopArrivals, LimitedArrivals, RecordedArrivals, SessionArrivals

    arrivals: Arrivals
    if options.closed_loop and not reader.has_sessions:
        raise wrong_value("closed_loop", True, f"the {reader.name} format has no sessions", "leave it out")
    if reader.has_clock and not options.closed_loop:
        arrivals = RecordedArrivals(reader.requests(), options.speed_up)
    else:
        if reader.needs_closed_loop and not (options.closed_loop or options.sequential):
            problem = f"a {reader.name} trace has no times between turns: the next one follows the answer"
            raise wrong_value("closed_loop", False, problem, "give --closed-loop")
        arrivals_class = ClosedLoopArrivals if options.closed_loop else SessionArrivals
        arrivals = arrivals_class(reader.sessions(), options.session_gap, options.seed, options.speed_up)
    return arrivals if options.limit is None else LimitedArrivals(arrivals, options.limit)


def _run_with_progress(
    replay: "ScheduledReplay | SequentialReplay", reader: "TraceReader", has_log: bool
) -> "ReplayResult":
    """A bar on a terminal, unless log lines are printed there."""
    # The pool is up to millions of objects that live to the end: no collection needs to walk over them.
    gc.freeze()
    try:
        if not sys.stderr.isatty() or has_log:
            return replay.run(lambda num_done, num_arrived: None)
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("replay", total=1.0)

            def show(num_done: int, num_arrived: int) -> None:
                read = reader.num_bytes_read / max(1, reader.num_bytes)
                bar.update(task, completed=read * num_done / max(1, num_arrived), description=f"{num_done:,} requests")

            return replay.run(show)
    finally:
        gc.unfreeze()


def _print(result: "ReplayResult", as_json: bool) -> None:
    if as_json:
        import msgspec

        print(msgspec.json.encode(result).decode())
        return
    from rich.console import Console

    from kvledger.replay.report import print_report

    print_report(result, Console())
