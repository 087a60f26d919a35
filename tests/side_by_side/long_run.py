"""Random lives of both schedulers, one seed after the other, until so many steps were compared:

    scripts/reference_python.sh compiled -m tests.side_by_side.long_run --steps 1000000 --first-seed 1000

Ends at the first difference, with its seed. Prints how many steps of each kind were the same.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.side_by_side.layouts import MODEL_LAYOUTS, Layout, random_layout
from tests.side_by_side.scheduler_pair import Limits
from tests.side_by_side.test_scheduler import can_be_scheduled_there, drive, one_group, random_limits, with_source

NAMED = [layout for layout in MODEL_LAYOUTS if can_be_scheduled_there(layout)]


def random_groups(rng: random.Random) -> Layout:
    layout = random_layout(rng)
    while not can_be_scheduled_there(layout):
        layout = random_layout(rng)
    return layout


def life(seed: int) -> tuple[str, Limits, random.Random]:
    """What a seed plays: one group, groups of all kinds or those of a model; every second seed with a source."""
    rng = random.Random(seed)
    kind = ("one group", "random groups", "a model's groups")[seed // 2 % 3]
    layout = one_group(rng) if kind == "one group" else rng.choice(NAMED) if kind[0] == "a" else random_groups(rng)
    if seed % 2 == 0:
        return kind, random_limits(rng, layout), rng
    return f"{kind}, external source", with_source(rng, layout), rng


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.side_by_side.long_run")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    steps: Counter[str] = Counter()
    seed = options.first_seed
    while steps.total() < options.steps:
        kind, limits, rng = life(seed)
        with tempfile.TemporaryDirectory() as directory:
            try:
                steps[kind] += drive(limits, Path(directory), rng, seed)
            except BaseException:
                print(f"seed {seed} ({kind}) after {steps.total()} steps: {limits}", file=sys.stderr)
                raise
        seed += 1
    print(f"{steps.total()} steps the same, seeds {options.first_seed} to {seed - 1}: {dict(steps)}")


if __name__ == "__main__":
    main()
