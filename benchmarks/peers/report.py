"""The rows of a run as a Markdown table and as JSON."""

import json
from collections.abc import Iterable
from typing import Any

from benchmarks.peers.contest import Measured, Row


def markdown(machine: list[str], rows: Iterable[Row]) -> str:
    """The machine, a table, and below it what peers leave out."""
    all_rows = list(rows)
    notes: list[str] = []
    lines = [
        ", ".join(machine),
        "",
        "| what | case | ours | +- | peer | theirs | +- | ratio |",
        "|---|---|---:|---:|---|---:|---:|---:|",
    ]
    last = ""
    for row in all_rows:
        what = row.question if row.question != last else ""
        last = row.question
        ratio = "" if row.ratio is None else f"{row.ratio:.1f}x" if row.ratio >= 1 else f"{row.ratio:.2g}x"
        if row.remark:
            if row.remark not in notes:
                notes.append(row.remark)
            ratio += f" [{notes.index(row.remark) + 1}]"
        cells = (what, row.size, *_cells(row.ours, row), row.peer_version, *_cells(row.theirs, row), ratio)
        lines.append("| " + " | ".join(cells) + " |")
    if notes:
        lines += ["", *(f"[{number}] {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(lines)


def as_json(machine: list[str], rows: Iterable[Row]) -> str:
    """An array of objects. `ours` and `peer_value` are in `unit`; `peer` is null where nobody was compared."""
    return json.dumps([_object(row, machine) for row in rows], indent=1)


def _object(row: Row, machine: list[str]) -> dict[str, Any]:
    theirs = row.theirs
    return {
        "question": row.question,
        "size": row.size,
        "unit": row.unit,
        "ours": row.ours.value,
        "ours_spread": row.ours.spread,
        "peer": row.peer or None,
        "peer_version": row.peer_version or None,
        "peer_value": None if theirs is None else theirs.value,
        "peer_spread": None if theirs is None else theirs.spread,
        "ratio": row.ratio,
        "left_out_by_peer": row.remark or None,
        "repeats": row.repeats,
        "machine": machine,
    }


def _cells(measured: Measured | None, row: Row) -> tuple[str, str]:
    if measured is None:
        return "", ""
    return quantity(measured.value, row.unit), "" if row.repeats < 4 else f"{measured.spread:.0%}"


def quantity(value: float, unit: str) -> str:
    """Three digits, in a unit that suits."""
    if unit == "us" and value >= 1000:
        return f"{value / 1000:.3g} ms" if value < 1_000_000 else f"{value / 1_000_000:.3g} s"
    return f"{value:.3g} {unit}"
