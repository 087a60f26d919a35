"""Writes what `vllm serve` of one release takes into the table that `kvledger plan` reads pasted commands with.

KVLEDGER_VLLM_RELEASE=0.33 scripts/reference_python.sh pure scripts/vllm_options.py 0.33
scripts/reference_python.sh pure scripts/vllm_options.py 0.32

The rows of other releases in the table stay. What a value must be is found out by giving the parser's own converter a
few.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "src" / "kvledger" / "plan" / "data" / "vllm_options.tsv"
HEADER = ("releases", "dest", "takes", "times", "names", "off_names", "choices")

Row = tuple[str, ...]


def server_parser() -> argparse.ArgumentParser:
    """The parser of `vllm serve`, on a machine without a GPU."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    vllm.platforms._current_platform = CpuPlatform()
    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    return parser


def converted(convert: Callable[[str], Any], text: str) -> Any:
    """What the converter makes of a text; None where it refuses it."""
    try:
        return convert(text)
    except Exception:
        return None


def kind_of(convert: Callable[[str], Any] | None) -> str:
    """What a value must be: text, json, either, float, int, count (2k is 2000) or length (a count or auto)."""
    if convert is None:
        return "text"
    if isinstance(converted(convert, '{"a": 1}'), dict):
        return "either" if converted(convert, "some-name") is not None else "json"
    if converted(convert, "some-name") is not None:
        return "text"
    if converted(convert, "auto") == -1:
        return "length"
    if converted(convert, "2k") == 2000:
        return "count"
    if converted(convert, "2") is not None:
        return "float" if converted(convert, "1.5") is not None else "int"
    return "json"


def takes(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "switch" if isinstance(action, argparse.BooleanOptionalAction) else "flag"
    return kind_of(action.type if callable(action.type) else None)


def row_of(release: str, action: argparse.Action, names: Iterable[str]) -> Row:
    """One option. `names`: every one that the parser takes, also those that its help leaves out."""
    every = sorted(names, key=lambda name: (not name.startswith("--"), name))
    off: list[str] = []
    if isinstance(action, argparse.BooleanOptionalAction):
        negative = getattr(action, "negative_option_strings", None)
        off = [name for name in every if (name in negative if negative is not None else name.startswith("--no-"))]
    times = str(action.nargs) if action.nargs in ("+", "*", "?") else ""
    choices = [str(choice) for choice in action.choices or () if choice is not None]
    on = [name for name in every if name not in off]
    return (release, action.dest, takes(action), times, " ".join(on), " ".join(off), " ".join(sorted(choices)))


def rows_of(release: str, parser: argparse.ArgumentParser) -> list[Row]:
    names: dict[int, list[str]] = {}
    actions: dict[int, argparse.Action] = {}
    for name, action in parser._option_string_actions.items():
        names.setdefault(id(action), []).append(name)
        actions[id(action)] = action
    return [row_of(release, actions[key], names[key]) for key in actions if actions[key].dest != "help"]


def merged(old: Iterable[Row], new: Iterable[Row], release: str) -> list[Row]:
    """Both, with equal rows of several releases on one line."""
    releases: dict[Row, set[str]] = {}
    for row in old:
        kept = set(row[0].split()) - {release}
        if kept:
            releases.setdefault(row[1:], set()).update(kept)
    for row in new:
        releases.setdefault(row[1:], set()).add(release)
    return sorted(
        ((" ".join(sorted(found)), *rest) for rest, found in releases.items()), key=lambda row: (row[1], row[0])
    )


def main() -> None:
    (release,) = sys.argv[1:]
    lines = TABLE.read_text().splitlines()[1:] if TABLE.exists() else []
    rows = merged((tuple(line.split("\t")) for line in lines), rows_of(release, server_parser()), release)
    TABLE.write_text("".join("\t".join(row) + "\n" for row in (HEADER, *rows)))
    print(f"wrote {len(rows)} options to {TABLE}")


if __name__ == "__main__":
    main()
