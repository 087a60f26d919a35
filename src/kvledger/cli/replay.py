"""`kvledger replay`: drive the real ledger and scheduler with recorded traffic, without a GPU.

Everything about typer is here and in replay_options.py. What is heavy to import comes in when the command runs, so that
--help is quick.
"""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

import typer

from kvledger.cli.app import GroupedCommand, OptionsCommand, in_option_words
from kvledger.cli.replay_options import ReplayOptions
from kvledger.errors import ConfigError, wrong_value

if TYPE_CHECKING:
    from kvledger.events import LedgerEvents
    from kvledger.replay.engine import ReplayEngine
    from kvledger.replay.result import ReplayResult
    from kvledger.replay.tally import Progress
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
    from kvledger.cli.replay_outputs import ReplayOutputs
    from kvledger.replay.engine import replay_engine
    from kvledger.replay.run import arrivals_of, replay_trace

    try:
        options.validate()
        how = options.how()
        engine = replay_engine(options.engine_choice())
        reader = options.open_trace()
        with closing(reader):
            # What can be wrong is refused first: opening a recording empties it, and a socket waits for a subscriber.
            arrivals = arrivals_of(reader, how)
            with (
                ReplayOutputs(options) as outputs,
                _events(options, engine) as events,
                _progress(options, reader) as show,
            ):
                result = replay_trace(
                    reader,
                    engine,
                    how,
                    arrivals=arrivals,
                    events=events,
                    listeners=outputs.listeners,
                    progress=show,
                    write_log=_write_line,
                )
            result.trace = options.trace_name
            outputs.write_report(result)
    except ConfigError as error:
        raise typer.BadParameter(in_option_words(str(error))) from error
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


def _write_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _progress(options: ReplayOptions, reader: "TraceReader") -> "Iterator[Progress | None]":
    """A bar on a terminal, unless log lines are printed there."""
    if not sys.stderr.isatty() or options.log_interval > 0:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replay", total=1.0)

        def show(num_done: int, num_arrived: int) -> None:
            read = reader.num_bytes_read / max(1, reader.num_bytes)
            bar.update(task, completed=read * num_done / max(1, num_arrived), description=f"{num_done:,} requests")

        yield show


def _print(result: "ReplayResult", as_json: bool) -> None:
    if as_json:
        import msgspec

        print(msgspec.json.encode(result).decode())
        return
    from rich.console import Console

    from kvledger.replay.report import print_report

    print_report(result, Console())
