"""Our KVCacheManager and vLLM's, call by call: same answers, same ids, same queue, same index."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.side_by_side.layouts import MODEL_LAYOUTS, Group, Layout, random_layout
from tests.side_by_side.ledger_pair import LedgerPair

CALLS_PER_SEED = 1_000


def one_group(seed: int) -> Layout:
    rng = random.Random(seed)
    return Layout("full", (Group("full", rng.choice([1, 2, 4, 8, 16])),), enable_caching=rng.random() < 0.8)


def drive(layouts: Iterator[tuple[Layout, int]], num_calls: int) -> None:
    num_done = 0
    while num_done < num_calls:
        layout, seed = next(layouts)
        pair = LedgerPair(layout, seed)
        try:
            pair.run(CALLS_PER_SEED)
        except Exception as difference:
            raise AssertionError(f"seed {seed}, call {pair.num_calls}, {layout}") from difference
        num_done += pair.num_calls


def seeds(request: pytest.FixtureRequest) -> Iterator[int]:
    seed = request.config.getoption("--first-seed")
    while True:
        yield seed
        seed += 1


def test_one_group(request: pytest.FixtureRequest) -> None:
    drive(((one_group(seed), seed) for seed in seeds(request)), request.config.getoption("--calls"))


@pytest.mark.parametrize("layout", MODEL_LAYOUTS, ids=lambda layout: layout.name)
def test_model_layout(layout: Layout, request: pytest.FixtureRequest) -> None:
    with_and_without = (
        (layout if seed % 8 or layout.num_draft_lookahead else replace(layout, enable_caching=False), seed)
        for seed in seeds(request)
    )
    drive(with_and_without, request.config.getoption("--calls") // 2 // len(MODEL_LAYOUTS))


def test_random_layouts(request: pytest.FixtureRequest) -> None:
    layouts = ((random_layout(random.Random(seed)), seed) for seed in seeds(request))
    drive(layouts, request.config.getoption("--calls") // 2)
