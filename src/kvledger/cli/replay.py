"""`kvledger replay`: drive the real ledger and scheduler with recorded traffic, without a GPU.

Everything about typer is here and in replay_options.py. What is heavy to import comes in when the command runs, so that
--help is quick.
"""

import gc
import inspect
import re
import sys
from contextlib import closing
from dataclasses import fields
from typing import TYPE_CHECKING, get_type_hints

import typer

from kvledger.cli.replay_options import ReplayOptions
from kvledger.errors import ConfigError, wrong_value

if TYPE_CHECKING:
    from kvledger.cli.replay_engine import ReplayEngine
    from kvledger.replay.arrivals import Arrivals
    from kvledger.replay.result import ReplayResult
    from kvledger.replay.scheduled import ScheduledReplay
    from kvledger.replay.sequential import SequentialReplay
    from kvledger.replay.trace_reader import TraceReader


class _ReplayCommand:
    """The command as typer wants it: a callable whose signature lists the options."""

    __name__ = "replay"

    def __init__(self) -> None:
        hints = get_type_hints(ReplayOptions, include_extras=True)
        self.__annotations__ = hints
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    option.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=option.default,
                    annotation=hints[option.name],
                )
                for option in fields(ReplayOptions)
            ]
        )

    def __call__(self, **values: object) -> None:
        import msgspec

        run(msgspec.convert(values, ReplayOptions))


def register(app: typer.Typer) -> None:
    """Adds the subcommand."""
    app.command(
        "replay",
        help="Replay recorded traffic through the real scheduler and ledger, without a GPU.\n\n"
        "Prints hit rates, preemptions, pool usage and simulated latencies. Formats, options and the step-time model "
        "are explained in docs/replay.md.",
    )(_ReplayCommand())


def run(options: ReplayOptions) -> None:
    """Runs one replay and prints its result. typer.Exit(1) when nothing finished."""
    result = replay(options)
    _print(result, options.json)
    if result.num_finished == 0:
        print(f"kvledger: none of the {result.num_requests} requests finished", file=sys.stderr)
        raise typer.Exit(1)


def replay(options: ReplayOptions) -> "ReplayResult":
    """Runs one replay. typer.BadParameter for options that are wrong, TraceError for a trace that is."""
    from kvledger.cli.replay_engine import make_engine
    from kvledger.replay.trace_formats import open_trace, sample_path

    try:
        options.validate()
        engine = make_engine(options)
        reader = open_trace(options.trace or sample_path(), options.format, options.trace_block_size, options.skip_bad)
        with closing(reader.lines):
            result = _run_with_progress(_make_replay(options, engine, reader), reader)
    except ConfigError as error:
        raise typer.BadParameter(_in_option_words(str(error))) from error
    result.trace = options.trace or "bundled sample"
    result.format = reader.name
    result.hash = options.hash if engine.enable_caching else "off"
    result.model = engine.name
    result.gpu = engine.gpu.name
    result.num_gpus = engine.num_gpus
    result.notes = engine.notes
    result.num_bad_lines = reader.lines.num_bad
    return result


def _make_replay(
    options: ReplayOptions, engine: "ReplayEngine", reader: "TraceReader"
) -> "ScheduledReplay | SequentialReplay":
    from kvledger.replay.config import ReplayConfig
    from kvledger.replay.prompts import make_prompt_maker
    from kvledger.replay.scheduled import ScheduledReplay
    from kvledger.replay.sequential import SequentialReplay
    from kvledger.replay.step_time import StepTimeModel
    from kvledger.scheduler import SchedulerConfig, SchedulingPolicy

    scheduler = SchedulerConfig(
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
        SchedulingPolicy(options.policy),
        num_lookahead_tokens=options.drafts,
    )
    config = ReplayConfig(
        num_blocks=engine.num_blocks,
        max_model_len=engine.max_model_len,
        enable_caching=engine.enable_caching,
        watermark=options.watermark,
        check=options.check,
        scheduler=scheduler,
        layout=engine.layout,
    )
    maker = make_prompt_maker(options.hash, config.hash_block_size)
    arrivals = _arrivals(options, reader)
    if options.sequential:
        return SequentialReplay(arrivals, maker, config)
    step_time = StepTimeModel(engine.work, engine.gpu, engine.num_gpus, options.step_overhead / 1000.0)
    return ScheduledReplay(arrivals, maker, config, step_time)


def _arrivals(options: ReplayOptions, reader: "TraceReader") -> "Arrivals":
    from kvledger.replay.arrivals import ClosedLoopArrivals, LimitedArrivals, RecordedArrivals, SessionArrivals

    sessions = reader.sessions()
    arrivals: Arrivals
    if sessions is None:
        if options.closed_loop:
            raise wrong_value("closed_loop", True, f"the {reader.name} format has no sessions", "leave it out")
        arrivals = RecordedArrivals(reader.requests(), options.speed_up)
    else:
        arrivals_class = ClosedLoopArrivals if options.closed_loop else SessionArrivals
        arrivals = arrivals_class(sessions, options.session_gap, options.seed, options.speed_up)
    return arrivals if options.limit is None else LimitedArrivals(arrivals, options.limit)


def _run_with_progress(replay: "ScheduledReplay | SequentialReplay", reader: "TraceReader") -> "ReplayResult":
    # The pool is up to millions of objects that live to the end: no collection needs to walk over them.
    gc.freeze()
    try:
        if not sys.stderr.isatty():
            return replay.run(lambda num_done, num_arrived: None)
        from rich.console import Console
        from rich.progress import Progress

        lines = reader.lines
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("replay", total=1.0)

            def show(num_done: int, num_arrived: int) -> None:
                read = lines.num_bytes_read / max(1, lines.num_bytes)
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


def _in_option_words(message: str) -> str:
    """A ConfigError with its field as the option that set it."""
    return re.sub(r"^(\w+)=", lambda match: f"--{match.group(1).replace('_', '-')} ", message)
