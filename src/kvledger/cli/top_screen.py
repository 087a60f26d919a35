"""What `kvledger top` draws: one look at a server as a few lines and tables."""

from collections.abc import Mapping
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_BAR: Final = 40
# State of blocks -> how its part of the bar looks.
_STATES: Final = {"live": ("#", "red"), "cached": ("=", "yellow"), "unused": (".", "green")}


def screen(address: str, seen: Mapping[str, Any]) -> RenderableType:
    """`seen`: as --json prints it."""
    since = "since its start" if seen["seconds"] is None else f"in the last {seen['seconds']:.1f} s"
    parts: list[RenderableType] = [
        Text.assemble(("kvledger top ", "bold"), f"{address}  {seen['model']}  ({since})"),
        _pool(seen),
        _numbers(seen),
    ]
    for title, key in (("Prompt tokens", "misses"), ("Evictions", "evictions"), ("Waiting", "waits")):
        if seen[key]:
            parts.append(Text(f"{title}: {_shares(seen[key], as_share=key == 'misses')}"))
    if seen["misses"] is None:
        parts.append(Text("Why it missed and waits: not known; KVLEDGER_VLLM=1 KVLEDGER_WHY=1 says", style="dim"))
    if seen["prefixes"] is not None:
        parts.append(_prefixes(seen))
    return Group(*parts)


def _pool(seen: Mapping[str, Any]) -> Text:
    blocks = seen["blocks"]
    if blocks is None:
        usage = seen["usage"] or 0.0
        filled = round(usage * _BAR)
        size = "" if seen["num_blocks"] is None else f" of {seen['num_blocks']:,} blocks of {seen['block_size']} tokens"
        return Text.assemble("Pool  ", ("#" * filled, "red"), "." * (_BAR - filled), f"  {usage:.1%}{size} held")
    total = sum(blocks.values()) or 1.0
    text = Text("Pool  ")
    for state, (mark, style) in _STATES.items():
        text.append(mark * round(blocks.get(state, 0) / total * _BAR), style)
    told = ", ".join(f"{blocks.get(state, 0):,.0f} {state}" for state in _STATES)
    return text.append(f"  {told}")


def _numbers(seen: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 3))
    rows = (
        (("running", _count(seen["num_running"])), ("hit rate", _share(seen["hit_rate"]))),
        (("waiting", _count(seen["num_waiting"])), ("prompt tokens/s", _rate(seen["prompt_tokens_per_second"]))),
        (("preempted", _count(seen["preemptions"])), ("output tokens/s", _rate(seen["output_tokens_per_second"]))),
        (("first token", _seconds(seen["ttft_seconds"])), ("between tokens", _seconds(seen["itl_seconds"]))),
    )
    for row in rows:
        table.add_row(*[cell for name, value in row for cell in (name, Text(value, style="bold", justify="right"))])
    return table


def _prefixes(seen: Mapping[str, Any]) -> Table:
    title = f"Largest cached prefixes ({seen['cached_blocks']:,} blocks told of)"
    table = Table("blocks", "shared tokens", "ends", "first stored", "last stored", title=title, title_justify="left")
    for tree in seen["prefixes"]:
        ages = [_age(seen["time"] - tree[key]) for key in ("first_stored", "last_stored")]
        table.add_row(f"{tree['num_blocks']:,}", f"{tree['num_shared_tokens']:,}", f"{tree['num_leaves']:,}", *ages)
    return table


def _shares(counts: Mapping[str, float], *, as_share: bool) -> str:
    total = sum(counts.values())
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{name.replace('_', ' ')} {value / total:.1%}" if as_share else f"{value:,.0f} {name.replace('_', ' ')}"
        for name, value in ordered
    )


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:,.1f} ms"


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.1f} h ago"
