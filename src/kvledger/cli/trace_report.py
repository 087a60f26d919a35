"""What `kvledger trace` prints for people: tables and small plots. `TraceSummary` is for machines."""

from os.path import basename

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvledger.metrics.samples import Percentiles
from kvledger.replay.report import can_draw, columns, count_plot, duration, label_table, plot_width
from kvledger.traces.summary import Sharing, TraceSummary


def print_summary(summary: TraceSummary, console: Console) -> None:
    """Prints all of it, as wide as the console allows."""
    heading = Text("kvledger trace ", style="bold")
    heading.append(basename(summary.trace.rstrip("/")), style="bold cyan")
    heading.append(f"  {summary.format} format", style="dim")
    console.print(heading)
    for note in summary.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    console.print()
    grid = Table.grid(padding=(0, 4, 0, 0))
    grid.add_row(_traffic(summary), _time(summary))
    console.print(grid)
    console.print()
    console.print(_lengths(summary))
    console.print()
    if summary.sharing is None:
        console.print("The trace has no ids: every prompt counts as unique, so a prefix cache can serve none of it.")
    else:
        _print_sharing(summary, summary.sharing, console)
    width = plot_width(console)
    if summary.timeline is not None and width >= 20 and can_draw(console):
        seconds = summary.timeline.interval
        rates = [number / seconds for number in summary.timeline.requests]
        tokens = [number / seconds for number in summary.timeline.prompt_tokens]
        end = duration(summary.seconds or 0.0)
        for line in count_plot("Requests per second", rates, width, "cyan", end):
            console.print(line)
        for line in count_plot("Prompt tokens per second", tokens, width, "dodger_blue2", end):
            console.print(line)


def _traffic(summary: TraceSummary) -> Table:
    rows = [("requests", f"{summary.num_requests:,}")]
    if summary.num_bad_lines:
        rows.append(("broken lines skipped", f"{summary.num_bad_lines:,}"))
    rows.append(("prompt tokens", f"{summary.num_prompt_tokens:,}"))
    rows.append(("output tokens", f"{summary.num_output_tokens:,}"))
    if summary.num_sessions:
        rows.append(("sessions", f"{summary.num_sessions:,}"))
    if summary.num_scopes > 1:
        rows.append(("scopes of ids", f"{summary.num_scopes:,}"))
    if summary.block_size:
        rows.append(("tokens of an id", f"{summary.block_size:,}"))
    return label_table("Traffic", rows)


def _time(summary: TraceSummary) -> Table:
    if summary.seconds is None:
        return label_table("Time", [("no common clock", "")])
    if summary.requests_per_second is None:
        return label_table("Time", [("all at once", "")])
    rows = [
        ("from first to last", duration(summary.seconds)),
        ("requests a second", f"{summary.requests_per_second:,.3g}"),
        ("  at the peak", f"{summary.peak_requests_per_second or 0.0:,.3g}"),
        ("tokens a second", f"{(summary.num_prompt_tokens + summary.num_output_tokens) / summary.seconds:,.0f}"),
    ]
    if summary.gap_variation is not None:
        rows.append(("variation of gaps", f"{summary.gap_variation:.2f}"))
    return label_table("Time", rows)


def _lengths(summary: TraceSummary) -> Table:
    table = columns("Lengths", ("",), ("mean", "p50", "p90", "p95", "p99", "max"))
    for label, figures in (
        ("prompt tokens", summary.prompt_tokens),
        ("output tokens", summary.output_tokens),
        ("requests of a session", summary.requests_per_session),
    ):
        if figures is not None:
            table.add_row(label, *[f"{value:,.0f}" for value in _values(figures)])
    if summary.think_seconds is not None:
        table.add_row("think time", *[duration(value) for value in _values(summary.think_seconds)])
    return table


def _values(figures: Percentiles) -> tuple[float, ...]:
    return figures.mean, figures.p50, figures.p90, figures.p95, figures.p99, figures.max


def _print_sharing(summary: TraceSummary, sharing: Sharing, console: Console) -> None:
    rows = [
        ("ceiling of the hit rate", f"{sharing.ceiling:.2%}"),
        ("tokens of it", f"{sharing.num_hit_tokens:,}"),
    ]
    if sharing.ceiling_within_sessions is not None:
        rows.append(("if sessions shared nothing", f"{sharing.ceiling_within_sessions:.2%}"))
    if sharing.ceiling_with_answers is not None:
        rows.append(("with answers that come back", f"{sharing.ceiling_with_answers:.2%}"))
    rows.append((f"distinct blocks of {sharing.block_size}", f"{sharing.num_distinct_blocks:,}"))
    grid = Table.grid(padding=(0, 4, 0, 0))
    tables = [label_table("Sharing", rows)]
    if sharing.pools:
        pools = columns("The smallest pool", ("of the ceiling",), ("blocks", "tokens", "hit rate"))
        for point in sharing.pools:
            pools.add_row(
                f"{point.share:.0%}",
                f"{point.num_blocks:,}",
                f"{point.num_blocks * sharing.block_size:,}",
                f"{point.token_hit_rate:.2%}",
            )
        tables.append(pools)
    grid.add_row(*tables)
    console.print(grid)
    if sharing.pools:
        words = "Pools: requests one after another, full attention, the least recently used block goes first."
        console.print(Text(words, style="dim"))
