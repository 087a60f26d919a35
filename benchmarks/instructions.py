"""Instructions of the main operations, counted by callgrind and compared with the committed counts.

    scripts/check_counts.sh                  more than 10 % above a count: says which and by how much, and fails
    scripts/check_counts.sh --update         writes the counts of now into benchmarks/counts.json

Counts do not depend on what else the machine does. They do depend on the compiler and on Python, so counts.json says
which it was made with, and others are told that nothing was compared.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

COUNTS = Path(__file__).with_name("counts.json")
TOLERANCE = 0.10
UPDATE = "scripts/check_counts.sh --update"


def environment() -> str:
    """What the counts depend on besides the code."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    answer = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True, check=False)
    major = answer.stdout.strip().split(".")[0] or "?"
    python = ".".join(platform.python_version_tuple()[:2])
    return f"CPython {python}, {compiler} {major}, {platform.machine()}"


def count() -> dict[str, float]:
    """Instructions of each operation, a run."""
    from benchmarks.counted_operations import FEW, MANY

    with TemporaryDirectory() as directory:
        # Under valgrind addresses are the same in each run, so nothing depends on where the system loads things.
        command = [
            *("valgrind", "-q", "--tool=callgrind", "--dump-before=getppid"),
            *(f"--callgrind-out-file={directory}/part", sys.executable, "-m", "benchmarks.counted_operations"),
        ]
        run = subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        names = run.stdout.splitlines()
        parts = sorted(Path(directory).glob("part.*"), key=lambda path: int(path.suffix[1:]))
        totals = [_total(path) for path in parts]
    # Three marks an operation; the part before a mark has its number. What precedes the first mark is setting up.
    if len(totals) != 3 * len(names):
        raise SystemExit(f"callgrind wrote {len(totals)} parts for {len(names)} operations: 3 each were expected")
    return {name: (totals[3 * index + 2] - totals[3 * index + 1]) / (MANY - FEW) for index, name in enumerate(names)}


def _total(path: Path) -> int:
    found = re.search(r"^(?:summary|totals): (\d+)", path.read_text(errors="replace"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{path}: no summary in callgrind's output")
    return int(found.group(1))


def worse(committed: dict[str, float], now: dict[str, float]) -> list[str]:
    """A line for each operation that takes more than the committed count allows, or that has none."""
    lines = []
    for name, instructions in now.items():
        known = committed.get(name)
        if known is None:
            lines.append(f"{name}: {instructions:,.0f} instructions, and no committed count")
        elif instructions > known * (1 + TOLERANCE):
            share = instructions / known - 1
            lines.append(f"{name}: {instructions:,.0f} instructions, {share:.0%} more than the committed {known:,.0f}")
    return lines


def read_counts() -> dict[str, Any]:
    counts: dict[str, Any] = json.loads(COUNTS.read_text())
    return counts


def write_counts(**changes: object) -> None:
    known = read_counts() if COUNTS.exists() else {}
    COUNTS.write_text(json.dumps({**known, **changes}, indent=1) + "\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.instructions", description="counts instructions and compares")
    parser.add_argument("--update", action="store_true", help="write the counts of now")
    options = parser.parse_args(argv)
    if shutil.which("valgrind") is None:
        print("SKIPPED: no valgrind on this machine, so no instructions are counted (apt-get install valgrind)")
        return 0
    now = count()
    if options.update:
        write_counts(environment=environment(), instructions={name: round(number) for name, number in now.items()})
        return 0
    known = read_counts()
    for name, instructions in now.items():
        print(f"{instructions:>14,.0f}  {name}")
    if known["environment"] != environment():
        print(f"NOT COMPARED: counts.json was made with {known['environment']}, this is {environment()}")
        return 0
    lines = worse(known["instructions"], now)
    for line in lines:
        print(line)
    if lines:
        print(f"If that is meant: {UPDATE}, and say why in the commit.")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
