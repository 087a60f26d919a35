"""Counts what `mypyc -a` calls slow in the hot modules, and compares with the committed counts.

    scripts/check_counts.sh                  a module with more of them: says which lines, and fails
    scripts/check_counts.sh --update         writes the counts of now into benchmarks/counts.json

Runs mypyc's front end, which takes half a minute, and no C compiler.
"""

import argparse
import re
import runpy
import sys
from contextlib import redirect_stdout
from html import unescape
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.instructions import UPDATE, read_counts, write_counts

PACKAGE = "src/kvledger/core"
HOT = (
    "blocks/block",
    "blocks/block_pool",
    "blocks/prefix_index",
    "ledger/block_demand",
    "ledger/coordinator",
    "ledger/kv_cache_manager",
    "blocks/new_blocks",
    "requests/request",
    "requests/tokens",
    "groups/base",
    "groups/full_attention",
    "scheduler/running_pass",
    "scheduler/returning_pass",
    "scheduler/step",
    "scheduler/scheduler",
    "tables/block_table",
    "tables/slots",
)

# What mypyc's report has for a slow line: its number and text, then the hint.
SLOW_LINE = re.compile(
    r'class="collapsible"[^>]*>(.*?)</div><div class="content">\s*<div class="hint">(.*?)</div>', re.DOTALL
)
# What runs once, or for subclasses in interpreted Python only: a definition's line stands for its glue. And what runs
# when something is wrong: errors are interpreted classes, and require() is for check().
GLUE = re.compile(r"\d+\s+(from|import|def|class|@|raise|require)\b")


def find(html: str) -> dict[str, list[str]]:
    """Module -> its slow lines but for glue, each with its number, text and hint."""
    found: dict[str, list[str]] = {}
    for part in html.split("<h2><tt>")[1:]:
        path, _, lines = part.partition("</tt></h2>")
        module = path.partition(f"{PACKAGE}/")[2].removesuffix(".py")
        slow = [(unescape(line).strip(), hint) for line, hint in SLOW_LINE.findall(lines)]
        found[module] = [f"{line}  <- {hint}" for line, hint in slow if GLUE.match(line) is None]
    return found


def annotate() -> str:
    """mypyc's report over all compiled modules."""
    from mypyc.build import mypycify

    compiled: list[str] = runpy.run_path("setup.py", run_name="setup")["COMPILED"]
    with TemporaryDirectory() as directory:
        report = Path(directory, "report.html")
        with redirect_stdout(sys.stderr):
            mypycify(["--strict", "-a", str(report), *compiled], target_dir=directory, group_name="kvledger")
        return report.read_text()


def more(committed: dict[str, int], found: dict[str, list[str]]) -> list[str]:
    """What to print for each hot module that has more slow lines than the committed count."""
    lines: list[str] = []
    for module in HOT:
        slow = found[module]
        allowed = committed.get(module, 0)
        if len(slow) > allowed:
            lines += [f"{module}: {len(slow)} slow lines, {allowed} committed:", *(f"    {line}" for line in slow)]
    return lines


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.slow_operations", description="counts slow lines and compares")
    parser.add_argument("--update", action="store_true", help="write the counts of now")
    options = parser.parse_args(argv)
    found = find(annotate())
    if options.update:
        write_counts(slow_lines={module: len(found[module]) for module in HOT})
        return 0
    lines = more(read_counts()["slow_lines"], found)
    print(f"{sum(len(found[module]) for module in HOT):>14,}  slow lines in {len(HOT)} hot modules")
    for line in lines:
        print(line)
    if lines:
        print(f"If that is meant: {UPDATE}, and say why in the commit.")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
