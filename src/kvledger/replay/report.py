"""The report of a replay for people: tables and small plots. `ReplayResult` is the one for machines."""

import io
from collections.abc import Sequence
from os.path import basename

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvledger.metrics.samples import Percentiles
from kvledger.replay.plot import bars, resample, stacked_bars
from kvledger.replay.result import Against, GroupResult, ReplayResult, Throughput
from kvledger.replay.slo import Goodput
from kvledger.replay.tally import REFUSAL_TEXTS
from kvledger.replay.why_missed import PART_WORDS, MoreBlocks, WhyMissed

_PLOT_HEIGHT = 4
_MAX_PLOT_WIDTH = 100
_LABEL_WIDTH = 10
_LIVE_COLOUR = "dodger_blue2"
_CACHED_COLOUR = "dark_sea_green4"
# Shares of the evicted tokens at which the table of larger pools has a line.
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
# Columns of an output that cuts nothing off.
_UNLIMITED = 1000


def print_report(result: ReplayResult, console: Console) -> None:
    """Prints the whole report, as wide as the console allows."""
    console.print(_heading(result))
    for note in result.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    if result.notes:
        console.print()
    grid = Table.grid(padding=(0, 4, 0, 0))
    grid.add_row(_traffic(result), _prefix_cache(result))
    grid.add_row()
    grid.add_row(_pool(result), _run(result))
    console.print(grid)
    if len(result.groups) > 1:
        console.print()
        console.print(groups_held(result.groups))
        console.print()
        console.print(groups_hit(result.groups))
    if result.why_missed is not None and result.why_missed.num_tokens > 0:
        console.print()
        console.print(missed_tables(result.why_missed))
    if result.why_waited:
        console.print()
        console.print(_waits(result))
    if result.ttft_seconds is not None:
        console.print()
        console.print(_latency(result))
    if result.throughput is not None:
        console.print()
        tables = [_rates(result.throughput)]
        if result.goodput is not None:
            tables.append(_good(result.goodput))
        console.print(_SideBySide(tables))
    if result.against is not None:
        console.print()
        console.print(_against(result.against))
    width = plot_width(console)
    if width >= 20 and can_draw(console):
        console.print(_plots(result, width))


def html_of(result: ReplayResult, width: int = 110) -> str:
    """The report with its colours, as one element of a page."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, force_jupyter=False)
    print_report(result, console)
    return console.export_html(
        inline_styles=True, code_format='<pre style="font-family:monospace;line-height:1.2">{code}</pre>'
    )


def plot_width(console: Console) -> int:
    """Columns of a plot on it."""
    return min(_MAX_PLOT_WIDTH, console.width - _LABEL_WIDTH - 1)


def can_draw(console: Console) -> bool:
    """Whether the output can take block characters."""
    try:
        "▁█".encode(console.encoding)
    except UnicodeEncodeError:
        return False
    return True


def _heading(result: ReplayResult) -> Text:
    heading = Text("kvledger replay ", style="bold")
    heading.append(basename(result.trace), style="bold cyan")
    counted = "extents"
    if result.counting == "blocks":
        reason = f" ({result.why_by_blocks})" if result.why_by_blocks else ""
        counted = f"blocks{reason}, hash {result.hash}"
    heading.append(f"  {result.format} format, {result.mode}, by {counted}\n", style="dim")
    if result.model:
        gpus = f"{result.num_gpus} x {result.gpu}"
        limit = f", at most {result.max_model_len:,} tokens" if result.max_model_len else ""
        heading.append(result.model, style="bold")
        heading.append(f"  on {gpus}, vLLM {result.vllm_version}, groups: {len(result.groups)}{limit}\n", style="dim")
    return heading


def label_table(title: str, rows: list[tuple[str, str]]) -> Table:
    """Labels and their values under a title."""
    table = Table(
        title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 1, 0, 0)
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for label, value in rows:
        table.add_row(label, value)
    return table


def _traffic(result: ReplayResult) -> Table:
    rows = [("requests", f"{result.num_requests:,}"), ("finished", f"{result.num_finished:,}")]
    if result.num_cut_short:
        rows.append(("  cut at max_model_len", f"{result.num_cut_short:,}"))
    rows.append(("refused", f"{result.num_refused:,}"))
    rows += [(f"  {REFUSAL_TEXTS[reason]}", f"{number:,}") for reason, number in sorted(result.refused.items())]
    if result.num_bad_lines:
        rows.append(("broken lines skipped", f"{result.num_bad_lines:,}"))
    rows.append(("prompt tokens", f"{result.num_prompt_tokens:,}"))
    rows.append(("output tokens", f"{result.num_output_tokens:,}"))
    return label_table("Traffic", rows)


def _prefix_cache(result: ReplayResult) -> Table:
    cache = result.prefix_cache
    if cache.num_query_tokens == 0:
        return label_table("Prefix cache", [("off, or never asked", "")])
    rows = [
        ("hit rate, tokens", _percent(cache.token_hit_rate)),
        ("hit rate, blocks", _percent(cache.block_hit_rate)),
        ("tokens hit", f"{cache.num_hit_tokens:,}"),
        ("tokens looked up", f"{cache.num_query_tokens:,}"),
        ("blocks evicted", f"{cache.num_evictions:,}"),
    ]
    if len(result.groups) > 1:
        rows.append(("hits end at multiples of", f"{result.hit_step:,}"))
        rows.append(("prompts too short for that", f"{result.num_short_prompts:,}"))
    return label_table("Prefix cache", rows)


def _pool(result: ReplayResult) -> Table:
    usage = result.usage
    shares = result.occupancy
    rows = [
        ("blocks", f"{result.num_blocks:,} x {_block_sizes(result)} tokens"),
        ("usage mean / p95", f"{_percent(usage.mean)} / {_percent(usage.p95)}"),
        ("usage peak", _percent(usage.peak)),
        ("live/cached/unused", f"{shares.live:.1%}/{shares.cached:.1%}/{shares.unused:.1%}"),
    ]
    return label_table("Pool", rows)


def _block_sizes(result: ReplayResult) -> str:
    sizes = sorted({group.block_size for group in result.groups})
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def like_groups(groups: list[GroupResult]) -> list[tuple[str, list[GroupResult]]]:
    """Groups next to each other that keep the same, under their numbers: ("0-2", three groups)."""
    runs: list[tuple[int, list[GroupResult]]] = []
    for group_id, group in enumerate(groups):
        if runs and _keeps(runs[-1][1][0]) == _keeps(group):
            runs[-1][1].append(group)
        else:
            runs.append((group_id, [group]))
    return [(str(first) if len(run) == 1 else f"{first}-{first + len(run) - 1}", run) for first, run in runs]


def _keeps(group: GroupResult) -> tuple[str, int, int, int]:
    return group.kind, group.block_size, group.num_layers, group.bytes_per_block


def groups_held(groups: list[GroupResult]) -> Table:
    """What each group keeps, and the blocks of it that requests hold; of like groups, each."""
    numbers = ("layers", "tokens/block", "block", "mean", "p95", "peak")
    table = columns("Groups: blocks held by requests", ("group", "keeps"), numbers)
    for ids, run in like_groups(groups):
        group = run[0]
        each = " each" if len(run) > 1 else ""
        held = [_mean([getattr(one.held_blocks, name) for one in run]) for name in ("mean", "p95", "peak")]
        table.add_row(
            ids,
            group.kind,
            f"{group.num_layers}{each}",
            f"{group.block_size:,}",
            _bytes(group.bytes_per_block),
            *[f"{value:,.0f}" for value in held],
        )
    return table


def groups_hit(groups: list[GroupResult]) -> Table:
    """Table entries without a block, cached prefixes, and which group limited the hits."""
    numbers = ("null entries", "cached blocks", "hits limited", "tokens lost")
    table = columns("Groups: tables and hits", ("group",), numbers)
    for ids, run in like_groups(groups):
        table.add_row(
            ids,
            f"{_mean([group.null_entries for group in run]):,.0f}",
            f"{_mean([group.num_cached_blocks for group in run]):,.0f}",
            f"{sum(group.num_limited_hits for group in run):,}",
            f"{sum(group.num_lost_tokens for group in run):,}",
        )
    return table


def columns(title: str, left: Sequence[str], numbers: Sequence[str]) -> Table:
    """A table with a title and columns under these headings: words to the left, numbers to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    for heading in left:
        # Words without a heading are labels.
        table.add_column(heading, header_style="dim", style="" if heading else "dim", no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", header_style="dim", no_wrap=True)
    return table


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _bytes(size: int) -> str:
    """Bytes in the unit that suits them."""
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"


def _run(result: ReplayResult) -> Table:
    rows: list[tuple[str, str]] = []
    if result.mode == "scheduled":
        rows = [
            ("steps", f"{result.num_steps:,}"),
            ("preemptions", f"{result.num_preemptions:,}"),
            ("tokens recomputed", f"{result.num_recomputed_tokens:,}"),
            ("simulated time", duration(result.simulated_seconds)),
        ]
    rows += [
        ("wall time", duration(result.wall_seconds)),
        ("requests per wall second", f"{result.requests_per_wall_second:,.0f}"),
        ("tokens per wall second", f"{result.tokens_per_wall_second:,.0f}"),
    ]
    return label_table("Run", rows)


def missed_tables(why: WhyMissed) -> Group:
    """Where the prompts' tokens came from, what a larger pool would have kept, and a sentence."""
    tables = [_parts(why)]
    if why.more_blocks:
        tables.append(_larger_pools(why))
    lines: list[RenderableType] = [_SideBySide(tables), Text(why.summary, style="bold")]
    if why.num_forgotten_evictions:
        words = f"What was evicted more than {why.num_remembered_evictions:,} evictions ago counts as never seen: "
        lines.append(Text(words + "--remember-evictions tells them apart.", style="dim"))
    return Group(*lines)


class _SideBySide:
    """Tables in a row, or one below the other where the output is too narrow for all of their numbers."""

    def __init__(self, tables: list[Table]) -> None:
        self._tables = tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        row = Table.grid(padding=(0, 4, 0, 0))
        row.add_row(*self._tables)
        # What the row takes when nothing limits it: a table shortens its columns to what it is offered.
        wanted = Measurement.get(console, options.update(width=_UNLIMITED), row).maximum
        if wanted <= options.max_width:
            yield row
            return
        for number, table in enumerate(self._tables):
            if number:
                yield Text()
            yield table


def _parts(why: WhyMissed) -> Table:
    table = columns("Why did it miss", ("",), ("prompt tokens", "share"))
    for part, words in PART_WORDS.items():
        num_tokens = why.tokens[part]
        if num_tokens == 0:
            continue
        table.add_row(words, f"{num_tokens:,}", f"{num_tokens / why.num_tokens:.2%}")
        if part == "limited_by_group":
            for group_id, num_limited in enumerate(why.limited_by_group):
                if num_limited:
                    table.add_row(f"  not by group {group_id}", f"{num_limited:,}", "")
    table.add_row("all", f"{why.num_tokens:,}", "100.00%", style="dim")
    return table


def _larger_pools(why: WhyMissed) -> Table:
    table = columns("A larger pool", ("",), ("tokens kept", "hit rate", "of evicted"))
    for point in larger_pools(why):
        share = point.num_tokens / why.tokens["evicted"]
        table.add_row(
            f"{point.num_blocks:,} more blocks", f"{point.num_tokens:,}", f"{point.token_hit_rate:.2%}", f"{share:.0%}"
        )
    return table


def larger_pools(why: WhyMissed) -> list[MoreBlocks]:
    """The smallest pools that keep certain shares of what was evicted."""
    evicted = why.tokens["evicted"]
    points: list[MoreBlocks] = []
    for share in _SHARES:
        point = next(point for point in why.more_blocks if point.num_tokens >= share * evicted)
        if point not in points:
            points.append(point)
    return points


def _waits(result: ReplayResult) -> Table:
    table = Table(title="Why did it wait", title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    # Reasons are sentences: in a narrow output they go on in a second line, so that the numbers stay whole.
    table.add_column(style="dim")
    for header in ("request-seconds", "share", "request-steps"):
        table.add_column(header, justify="right", no_wrap=True)
    total = sum(wait.request_seconds for wait in result.why_waited)
    for wait in result.why_waited:
        share = f"{wait.request_seconds / total:.2%}" if total > 0 else ""
        table.add_row(wait.words, f"{wait.request_seconds:,.1f}", share, f"{wait.request_steps:,}")
    return table


def _latency(result: ReplayResult) -> Table:
    table = columns("Latency, simulated", ("",), ("mean", "p50", "p90", "p95", "p99", "max"))
    for label, figures in (
        ("time to first token", result.ttft_seconds),
        ("between tokens", result.inter_token_seconds),
        ("from arrival to end", result.e2e_seconds),
    ):
        if figures is not None:
            table.add_row(label, *_durations(figures))
    return table


def _rates(throughput: Throughput) -> Table:
    return label_table(
        "Throughput, simulated",
        [
            ("requests a second", f"{throughput.requests_per_second:,.2f}"),
            ("prompt tokens a second", f"{throughput.prompt_tokens_per_second:,.0f}"),
            ("output tokens a second", f"{throughput.output_tokens_per_second:,.0f}"),
        ],
    )


def _against(against: Against) -> Group:
    """The server's numbers beside the replay's, and a sentence."""
    table = columns(f"Against the server's {against.kind}", ("",), ("server", "replay", ""))
    for row in against.rows:
        low, high = (_measured(row.unit, value) for value in (row.low, row.high))
        table.add_row(
            row.quantity,
            low if low == high else f"{low} to {high}",
            _measured(row.unit, row.replayed),
            Text(row.verdict, style="" if row.verdict == "agrees" else "yellow"),
        )
    notes = [Text(f"note: {note}", style="dim") for note in against.notes]
    return Group(table, Text(against.verdict, style="bold"), *notes)


def _measured(unit: str, value: float) -> str:
    if value == float("inf"):
        return "more"
    if unit == "%":
        return _percent(value)
    return duration(value) if unit == "s" else f"{value:,.0f}"


_LIMIT_WORDS = {"ttft": "first token within", "itl": "between tokens at most", "e2e": "done within"}


def _good(goodput: Goodput) -> Table:
    rows = [
        ("requests within the limits", f"{goodput.num_good:,}"),
        ("  of all", f"{goodput.share:.2%}"),
        ("  a second", f"{goodput.requests_per_second:,.2f}"),
    ]
    for name, number in goodput.missed.items():
        limit = duration(getattr(goodput.limits, name))
        rows.append((f"{_LIMIT_WORDS[name]} {limit}: missed by", f"{number:,}"))
    return label_table("Goodput", rows)


def _plots(result: ReplayResult, width: int) -> Group:
    timeline = result.timeline
    parts: list[RenderableType] = []
    if result.mode == "scheduled":
        end = duration(result.simulated_seconds)
        parts += count_plot("Running requests", timeline.running, width, "cyan", end)
        parts += count_plot("Waiting requests", timeline.waiting, width, "yellow", end)
    else:
        end = f"{result.num_requests:,} requests"
    title = Text("\nBlocks of the pool: ", style="bold")
    title.append("live", style=_LIVE_COLOUR)
    title.append(" and ")
    title.append("cached", style=_CACHED_COLOUR)
    parts.append(title)
    live = resample(timeline.live, width)
    # The two peaks of a stretch need not fall together; their sum stays a share.
    cached = [min(c, 1.0 - v) for c, v in zip(resample(timeline.cached, width), live, strict=True)]
    lines = stacked_bars(live, cached, _PLOT_HEIGHT, (_LIVE_COLOUR, _CACHED_COLOUR))
    parts += _framed(lines, "100%", width, end)
    return Group(*parts)


def count_plot(title: str, counts: Sequence[float], width: int, colour: str, end: str) -> list[RenderableType]:
    values = resample([float(count) for count in counts], width)
    top = max(1.0, *values)
    lines = [Text(line, style=colour) for line in bars(values, top, _PLOT_HEIGHT)]
    return [Text(f"\n{title}", style="bold"), *_framed(lines, f"{top:,.0f}", width, end)]


def _framed(lines: list[Text], top: str, width: int, end: str) -> list[RenderableType]:
    """Lines with the value of their top, 0 at the bottom, and the length of the horizontal axis."""
    labels = [top, *[""] * (len(lines) - 2), "0"]
    framed: list[RenderableType] = []
    for label, line in zip(labels, lines, strict=True):
        framed.append(Text().append(f"{label:>{_LABEL_WIDTH - 1}} ", style="dim").append_text(line))
    axis = "0" + f"{end:>{width - 1}}"
    framed.append(Text(" " * _LABEL_WIDTH + axis, style="dim"))
    return framed


def _percent(share: float) -> str:
    return f"{share:.2%}"


def _durations(figures: Percentiles) -> list[str]:
    values = (figures.mean, figures.p50, figures.p90, figures.p95, figures.p99, figures.max)
    return [duration(value) for value in values]


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds < 1.0:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 600.0:
        return f"{seconds:.2f} s"
    return f"{seconds / 60:.1f} min"
