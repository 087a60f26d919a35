"""Looks for the first difference of every kind beside a release, and for the shortest way to it, rule by rule.

    scripts/reference_python.sh pure -m tests.side_by_side.search --seeds 20

Prints JSON lines for kvledger.integrations.vllm.drift. A kind is a layout by name, one group, random layouts, and the
same through the schedulers. Each is tried with the rules that are thought to hold, and then with each rule turned
round: where fewer seeds differ then, the release has that rule the other way.
"""

import argparse
import json
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvledger.core.groups.decisions import Decisions, decisions_of
from kvledger.errors import KVLedgerError
from tests.side_by_side import reference
from tests.side_by_side.layouts import MODEL_LAYOUTS, Layout, random_layout
from tests.side_by_side.ledger_pair import LedgerPair
from tests.side_by_side.test_manager import one_group
from tests.side_by_side.test_scheduler import can_be_scheduled_there, drive, random_limits
from tests.side_by_side.test_scheduler import one_group as one_scheduled_group

NUM_CALLS = 400
SHOWN_CALLS = 12


class Recorder:
    """Stands before a manager and notes what is called, for the shortest sequence."""

    def __init__(self, manager: Any, calls: list[str]) -> None:
        self._manager = manager
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._manager, name)
        if not callable(found) or name.startswith(("num_", "take_prefix", "check", "get_block")):
            return found

        def noted(*arguments: Any, **options: Any) -> Any:
            self._calls.append(f"{name}({', '.join([*map(_brief, arguments), *_options(options)])})")
            return found(*arguments, **options)

        return noted


def _brief(argument: Any) -> str:
    request_id = getattr(argument, "request_id", None)
    if request_id is not None:
        return f"{request_id}: {argument.num_computed_tokens} of {argument.num_tokens} tokens"
    num_tokens = getattr(argument, "num_tokens", None)
    return repr(argument) if num_tokens is None else f"hit of {num_tokens}"


def _options(options: dict[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if value not in (0, False, None):
            yield f"{name}={_brief(value)}"


def manager_seed(layout: Layout, seed: int) -> dict[str, Any] | None:
    """The difference that this seed finds, or None."""
    calls: list[str] = []
    num_calls = 0
    try:
        pair = LedgerPair(layout, seed)
        pair.ours = Recorder(pair.ours, calls)
        try:
            pair.run(NUM_CALLS)
        finally:
            num_calls = pair.num_calls
    except Exception as difference:
        return _found(difference, seed, num_calls, repr(layout), calls[-SHOWN_CALLS:])
    return None


def scheduler_seed(make_layout: Callable[[random.Random], Layout], seed: int) -> dict[str, Any] | None:
    rng = random.Random(seed)
    layout = make_layout(rng)
    while not can_be_scheduled_there(layout):
        layout = make_layout(rng)
    limits = random_limits(rng, layout)
    with TemporaryDirectory() as directory:
        try:
            drive(limits, Path(directory), rng, seed)
        except Exception as difference:
            return _found(difference, seed, 0, repr(limits), [])
    return None


def _found(difference: Exception, seed: int, num_calls: int, layout: str, last_calls: list[str]) -> dict[str, Any]:
    """`is_difference`: both sides were there to be compared; otherwise the release lacks what the suite asks for."""
    return {
        "seed": seed,
        "calls": num_calls,
        "layout": layout,
        "error": describe_failure(difference),
        "last_calls": last_calls,
        "is_difference": isinstance(difference, (AssertionError, KVLedgerError)),
    }


def describe_failure(difference: Exception) -> str:
    """What differed: in the words of the comparison, or its source; or what a side raised."""
    where = traceback.extract_tb(difference.__traceback__)[-1]
    text = (str(difference).strip().splitlines() or [""])[0][:300]
    if isinstance(difference, AssertionError) and text:
        return text
    return f"{type(difference).__name__} {text}".strip() + f" ({Path(where.filename).name}: {where.line})"


def kinds() -> dict[str, Callable[[int], dict[str, Any] | None]]:
    """Name -> what tries a seed."""
    found: dict[str, Callable[[int], dict[str, Any] | None]] = {
        "manager: one group": lambda seed: manager_seed(one_group(seed), seed)
    }
    for layout in MODEL_LAYOUTS:
        found[f"manager: {layout.name}"] = lambda seed, layout=layout: manager_seed(layout, seed)
    found["manager: random layouts"] = lambda seed: manager_seed(random_layout(random.Random(seed)), seed)
    found["scheduler: one group"] = lambda seed: scheduler_seed(one_scheduled_group, seed)
    found["scheduler: random layouts"] = lambda seed: scheduler_seed(random_layout, seed)
    return found


def search(rules: Decisions, num_seeds: int, only: set[str] | None = None) -> dict[str, dict[str, Any]]:
    """Of each kind: how many seeds differ, how many cannot be compared, and the shortest difference."""
    reference.decisions = rules
    results: dict[str, dict[str, Any]] = {}
    for kind, attempt in kinds().items():
        if only is not None and kind not in only:
            continue
        found = [each for seed in range(num_seeds) if (each := attempt(seed)) is not None]
        num_differ = sum(each["is_difference"] for each in found)
        shortest = min(found, key=lambda each: (not each["is_difference"], each["calls"]), default=None)
        results[kind] = {
            "seeds": num_seeds,
            "differ": num_differ,
            "not_compared": len(found) - num_differ,
            "shortest": shortest,
        }
    return results


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.side_by_side.search")
    parser.add_argument("--seeds", type=int, default=10, help="seeds a kind")
    parser.add_argument("--as", dest="release", default=None, help="start from the rules of this release")
    options = parser.parse_args(argv)
    rules = decisions_of(options.release).exact() if options.release else reference.decisions
    results = search(rules, options.seeds)
    for kind, result in results.items():
        print(json.dumps({"kind": kind, **result}), flush=True)
    differing = {kind for kind, result in results.items() if result["differ"]}
    for field in fields(rules) if differing else ():
        value = getattr(rules, field.name)
        if isinstance(value, bool):
            turned = search(replace(rules, **{field.name: not value}), options.seeds, differing)
            before = sum(results[kind]["differ"] for kind in turned)
            after = sum(result["differ"] for result in turned.values())
            print(json.dumps({"rule": field.name, "value": value, "before": before, "after": after}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
