"""The "why" tables of a replay's report."""

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvledger.replay.why_missed import PART_WORDS, MoreBlocks, WhyMissed

# Shares of the evicted tokens at which the table of larger pools has a line.
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
# Columns of an output that cuts nothing off.
_UNLIMITED = 1000


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
    table = _table("Why did it miss", "prompt tokens", "share")
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
    table = _table("A larger pool", "tokens kept", "hit rate", "of evicted")
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


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", header_style="dim", no_wrap=True)
    return table
