"""`kvledger curve`: the hit rate of a trace in pools of every size, in one pass."""

import sys
from contextlib import closing
from dataclasses import dataclass
from os.path import basename
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from kvledger.cli.app import GroupedCommand, OptionsCommand, in_option_words
from kvledger.cli.trace_source import TraceSource, whole
from kvledger.errors import ConfigError, wrong_value

if TYPE_CHECKING:
    from rich.console import Console

    from kvledger.traces.trace_curve import CurvePoint, TraceCurve

WHAT = "What is asked"
OUTPUT = "Output"


@dataclass(frozen=True)
class CurveOptions(TraceSource):
    """The fields carry the names of what they set, so that an error about a field names its option."""

    at: Annotated[
        str | None,
        Option(metavar="N,N,...", help="Pools to tell of, in blocks. Default: a row of sizes.", rich_help_panel=WHAT),
    ] = None
    num_blocks: Annotated[int | None, whole(WHAT, "Today's pool, marked in the table.")] = None
    block_size: Annotated[int, whole(WHAT, "Tokens of a block of the pool.")] = 16
    limit: Annotated[int | None, whole(WHAT, "The first LIMIT requests only.")] = None
    json: Annotated[bool, Option("--json", help="Print one JSON object.", rich_help_panel=OUTPUT)] = False

    def validate(self) -> None:
        """ConfigError for the first option that is out of its range."""
        for name, least in (("block_size", 1), ("limit", 1), ("num_blocks", 2), ("trace_block_size", 1)):
            value = getattr(self, name)
            if value is not None and not least <= value <= 1 << 40:
                raise wrong_value(name, value, "out of range", f"give {least} or more")


def register(app: typer.Typer) -> None:
    """Adds the subcommand."""
    app.command(
        "curve",
        cls=GroupedCommand,
        help="Give the hit rate of a trace in pools of every size, from one pass over it.\n\n"
        "Requests one after another, full attention, the least recently used block goes first. docs/curve.md explains "
        "the numbers.",
    )(OptionsCommand("curve", CurveOptions, run))


def run(options: CurveOptions) -> None:
    """Reads one trace and prints its curve."""
    try:
        options.validate()
        curve = read_curve(options)
    except ConfigError as error:
        raise typer.BadParameter(in_option_words(str(error))) from error
    if options.json:
        import msgspec

        sys.stdout.write(msgspec.json.format(msgspec.json.encode(curve), indent=2).decode() + "\n")
        return
    from rich.console import Console

    _print(curve, options, Console(highlight=False))


def read_curve(options: CurveOptions) -> "TraceCurve":
    from itertools import islice

    from kvledger.traces.trace_curve import trace_curve
    from kvledger.traces.traffic import Traffic

    sizes = [] if options.at is None else parse_sizes(options.at)
    reader = options.open_trace()
    with closing(reader):
        if reader.block_size == 0:
            raise wrong_value(
                "trace", options.trace_name, f"the {reader.name} format has no ids: no prompt shares with another",
                "give a trace with ids",
            )  # fmt: skip
        traffic = Traffic(reader)
        if traffic.clock == "session":
            reader.notes.append("the sessions have no common clock: they are taken one after another")
        return trace_curve(
            (request for _, request in islice(traffic, options.limit)),
            block_size=options.block_size,
            sizes=sizes,
            today=options.num_blocks,
            trace=options.trace_name,
            format=reader.name,
            notes=reader.notes,
        )


def parse_sizes(text: str) -> list[int]:
    """1000,5000 or 1k,5k as sizes of pools. ConfigError for what is none."""
    from kvledger.plan.counts import parse_count

    sizes = [parse_count("at", word.strip()) for word in text.split(",")]
    for size in sizes:
        if not 2 <= size <= 1 << 40:
            raise wrong_value("at", size, "no size of a pool", "give 2 blocks or more, the null block among them")
    return sizes


def _print(curve: "TraceCurve", options: CurveOptions, console: "Console") -> None:
    from rich.text import Text

    from kvledger.replay.report import can_draw, columns, count_plot, plot_width

    console.print(Text.assemble(("kvledger curve ", "bold"), (basename(curve.trace.rstrip("/")), "bold cyan")))
    for note in curve.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    console.print()
    table = columns("Pools", ["", "blocks"], ["tokens hit", "hit rate", "of the ceiling"])
    for point in sorted(_rows(curve), key=lambda each: each.num_blocks):
        share = point.num_hit_tokens / curve.ceiling.num_hit_tokens if curve.ceiling.num_hit_tokens else 0.0
        table.add_row(
            _mark(curve, options, point),
            f"{point.num_blocks:,}",
            f"{point.num_hit_tokens:,}",
            f"{point.token_hit_rate:.2%}",
            f"{share:.1%}",
        )
    console.print(table)
    console.print(
        f"Blocks of {curve.block_size} tokens; {curve.num_requests:,} requests, one after another, "
        f"{curve.num_prompt_tokens:,} prompt tokens, {curve.num_distinct_blocks:,} distinct blocks."
    )
    width = plot_width(console)
    if options.at is None and width >= 20 and can_draw(console) and len(curve.points) > 2:
        rates = [100 * point.token_hit_rate for point in curve.points if point.num_blocks != options.num_blocks]
        end = f"{curve.ceiling.num_blocks:,} blocks"
        for line in count_plot("Hit rate in %, sizes by their logarithm", rates, width, "cyan", end):
            console.print(line)


def _rows(curve: "TraceCurve") -> "list[CurvePoint]":
    marked = [curve.smallest, curve.knee, curve.nine_tenths, curve.ceiling]
    seen = {point.num_blocks for point in curve.points}
    return curve.points + [
        point for index, point in enumerate(marked)
        if point.num_blocks not in seen and point.num_blocks not in {each.num_blocks for each in marked[:index]}
    ]  # fmt: skip


def _mark(curve: "TraceCurve", options: CurveOptions, point: "CurvePoint") -> str:
    names = (
        ("today's pool", options.num_blocks),
        ("holds the longest prompt", curve.smallest.num_blocks),
        ("knee", curve.knee.num_blocks),
        ("90 % of the ceiling", curve.nine_tenths.num_blocks),
        ("ceiling", curve.ceiling.num_blocks),
    )
    return ", ".join(name for name, size in names if size == point.num_blocks)
