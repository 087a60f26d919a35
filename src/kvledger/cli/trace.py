"""`kvledger trace`: what is in a trace, and the trace in another form."""

import sys
from contextlib import closing, nullcontext
from os.path import basename
from typing import TYPE_CHECKING

import typer

from kvledger.cli.app import GroupedCommand, OptionsCommand, in_option_words
from kvledger.cli.outputs import require_free
from kvledger.cli.trace_options import TraceOptions
from kvledger.errors import ConfigError

if TYPE_CHECKING:
    from kvledger.traces.summary import TraceSummary
    from kvledger.traces.writing import TraceWriter


def register(app: typer.Typer) -> None:
    """Adds the subcommand."""
    app.command(
        "trace",
        cls=GroupedCommand,
        help="Say what is in a trace: requests, lengths, times, sessions, and what a cache could serve of it.\n\n"
        "--to writes it, or a part of it, in kvledger's own format. Formats are explained in docs/traces.md.",
    )(OptionsCommand("trace", TraceOptions, run))


def run(options: TraceOptions) -> None:
    """Reads one trace and prints what is in it. typer.Exit(1) when nothing is."""
    try:
        options.validate()
        if options.to not in (None, "-"):
            require_free("to", str(options.to), overwrite=options.overwrite)
        summary = read_trace(options)
    except ConfigError as error:
        raise typer.BadParameter(in_option_words(str(error))) from error
    if options.to != "-":
        _print(summary, options.json)
    if options.to is not None:
        print(f"kvledger: {summary.num_requests:,} requests written to {options.to}", file=sys.stderr)
    if summary.num_requests == 0:
        print("kvledger: no request of the trace is left", file=sys.stderr)
        raise typer.Exit(1)


def read_trace(options: TraceOptions) -> "TraceSummary":
    """Reads, writes what --to asks for, and sums up."""
    from kvledger.traces.summary import Summarizer
    from kvledger.traces.traffic import Traffic, select

    reader = options.open_trace()
    with closing(reader):
        traffic = Traffic(reader)
        kept = select(
            iter(traffic), share=options.sample, seed=options.seed, num_sessions=options.sessions, limit=options.limit
        )
        summarizer = Summarizer(
            options.block_size,
            has_clock=traffic.clock == "trace",
            has_sessions=traffic.has_sessions,
            knows_answers=traffic.knows_answers,
        )
        with _writer(options, traffic.clock, traffic.follows, reader.block_size) or nullcontext() as writer:
            for time, request in summarizer.watch(kept):
                if writer is not None:
                    writer.add(time, request)
        return summarizer.summary(options.trace_name, reader.name, reader.block_size, reader.num_bad, reader.notes)


def _writer(options: TraceOptions, clock: str, follows: bool, block_size: int) -> "TraceWriter | None":
    if options.to is None:
        return None
    from kvledger.traces.writing import TraceWriter

    return TraceWriter(
        options.to,
        clock=clock,
        follows=follows,
        block_size=block_size,
        anonymous=options.anonymize,
        source=basename(options.trace_name),
    )


def _print(summary: "TraceSummary", as_json: bool) -> None:
    if as_json:
        import msgspec

        print(msgspec.json.encode(summary).decode())
        return
    from rich.console import Console

    from kvledger.cli.trace_report import print_summary

    print_summary(summary, Console())
