"""A report on a release of vLLM that nobody here has looked at: what changed for the plugin, and for the decisions.

    python -m kvledger.integrations.vllm.drift 0.31                from a clone, after scripts/make_reference.sh 0.31
    python -m kvledger.integrations.vllm.drift path/with/vllm      a checkout, or a wheel unpacked
    python -m kvledger.integrations.vllm.drift 0.31 --out drift-0.31.md --seeds 30

Three parts: the surface (signatures, fields, what vLLM's scheduler takes from a manager), the side-by-side suites run
on random seeds beside the release's own files, and every rule of core/groups/decisions.py turned round to see which way
the release has it. Works with the reference's Python; the machine's own vLLM plays no part.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvledger.core.groups.decisions import LATEST_RELEASE
from kvledger.integrations.vllm.served import NotServedError, nearest_release, require_version

_REFERENCE: Final = "KVLEDGER_REFERENCE"
_SEARCH: Final = Path("tests/side_by_side/search.py")


class DriftError(Exception):
    """No report can be made; the message says what is missing."""


def reference_folder() -> Path:
    """Where scripts/make_reference.sh builds."""
    return Path(os.environ.get(_REFERENCE) or Path.home() / ".cache/kvledger/reference")


def files_of(release: str) -> Path:
    """The folder that holds the release's `vllm` package."""
    given = Path(release)
    for folder in (given, given / "src", reference_folder() / "releases" / release):
        if (folder / "vllm" / "__init__.py").exists():
            return folder
    raise DriftError(f"{release!r}: no folder with a vllm package; scripts/make_reference.sh {release} lays one")


def run(files: Path, *arguments: str) -> str:
    """What a module prints in the reference's Python beside these files."""
    python = reference_folder() / "venv/bin/python"
    if not python.exists():
        raise DriftError("no reference: run scripts/make_reference.sh first")
    if not _SEARCH.exists():
        raise DriftError(f"{_SEARCH}: not here; run from the root of a clone, whose side-by-side suites are used")
    source = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (source, Path.cwd(), files))),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    done = subprocess.run(
        [str(python), "-W", "ignore", *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1) or not done.stdout.strip():
        raise DriftError(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def report(release: str, num_seeds: int) -> str:
    """The report in Markdown."""
    files = files_of(release)
    surface = _surface(files)
    version = run(files, "-c", "import vllm; print(vllm.__version__)").strip().splitlines()[-1]
    start = nearest_release(version)
    found = run(files, "-m", "tests.side_by_side.search", "--as", start, "--seeds", str(num_seeds))
    records = [json.loads(line) for line in found.splitlines() if line.startswith("{")]
    lines = [f"# vLLM {version} beside kvledger", ""]
    lines += [
        f"Compared with the decisions of {start}, {num_seeds} seeds a kind. The newest known: {LATEST_RELEASE}.",
        "",
    ]
    lines += ["## The plugin", "", _served(version), "", *_serving(files, version, num_seeds), ""]
    lines += ["## The surface", "", *[f"- {line}" for line in surface], ""]
    lines += ["## Decisions", "", *_kinds([record for record in records if "kind" in record])]
    is_whole = not any(record.get("not_compared") for record in records)
    lines += ["", "## Rules", "", *_rules([record for record in records if "rule" in record], start, is_whole)]
    return "\n".join(lines) + "\n"


def _surface(files: Path) -> list[str]:
    try:
        return run(files, "-m", "kvledger.integrations.vllm.surface").strip().splitlines()
    except DriftError as error:
        return [f"cannot be read: {str(error).strip().splitlines()[-1]}"]


def _served(version: str) -> str:
    try:
        require_version(version)
    except NotServedError as reason:
        return f"Left to vLLM's own manager: {reason}."
    return "This version is served."


def _serving(files: Path, version: str, num_seeds: int) -> Iterator[str]:
    """What it would serve if it were forced, kind by kind, beside the release's own manager."""
    try:
        found = run(files, "-m", "tests.plugin.search", "--seeds", str(num_seeds))
    except DriftError as error:
        yield f"Forced, it could not start: {str(error).strip().splitlines()[-1]}"
        return
    records = [json.loads(line) for line in found.splitlines() if line.startswith("{")]
    same = [record for record in records if not record["problem"]]
    yield f"Forced, it decides as {nearest_release(version)}: the same in {len(same)} of {len(records)} kinds."
    problems = [record for record in records if record["problem"]]
    if problems:
        yield ""
        yield "| kind | forced |"
        yield "| --- | --- |"
        yield from (f"| {record['layout']} | {record['problem']} |" for record in problems)


def _kinds(records: list[dict[str, Any]]) -> Iterator[str]:
    """A table of the kinds, then the shortest difference of each that has one."""
    yield "| kind | seeds that differ | that cannot be compared |"
    yield "| --- | --- | --- |"
    for record in records:
        yield f"| {record['kind']} | {record['differ']} of {record['seeds']} | {record['not_compared'] or ''} |"
    kinds_by_error: dict[str, list[str]] = {}
    for record in records:
        if record["shortest"] is not None:
            kinds_by_error.setdefault(record["shortest"]["error"], []).append(record["kind"])
    for record in records:
        shortest = record["shortest"]
        # The same difference in another layout needs no second look.
        if shortest is None or kinds_by_error[shortest["error"]][0] != record["kind"]:
            continue
        yield ""
        yield f"**{record['kind']}**, seed {shortest['seed']}, call {shortest['calls']}: {shortest['error']}"
        others = kinds_by_error[shortest["error"]][1:]
        if others:
            yield f"(and {', '.join(others)})"
        yield ""
        yield f"    {shortest['layout']}"
        yield from (f"    {call}" for call in shortest["last_calls"])


def _rules(records: list[dict[str, Any]], start: str, is_whole: bool) -> Iterator[str]:
    """`is_whole`: every seed could be compared."""
    if not records:
        part = "Nothing differs" if is_whole else "Of what could be compared nothing differs"
        yield f"{part}, so each rule {'holds' if is_whole else 'may hold'} as in {start}."
        return
    yield f"| rule | as {start} | turned round, seeds that differ | so |"
    yield "| --- | --- | --- | --- |"
    for record in records:
        before, after = record["before"], record["after"]
        verdict = f"as {start}" if after > before else "not decided by these seeds"
        if after < before:
            verdict = "the other way"
        yield f"| {record['rule']} | {record['value']} | {before} -> {after} | {verdict} |"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvledger.integrations.vllm.drift", description="reports on a release")
    parser.add_argument("release", help="a release such as 0.31, or a folder with a vllm package")
    parser.add_argument("--seeds", type=int, default=10, help="random seeds a kind (default: 10, a few minutes)")
    parser.add_argument("--out", type=Path, help="write the report there instead of printing it")
    options = parser.parse_args(argv)
    try:
        text = report(options.release, options.seeds)
    except DriftError as error:
        print(f"drift: {error}", file=sys.stderr)
        return 2
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
