"""The adapter against vLLM's own manager: whatever vLLM could see of either is the same after every call."""

import random

import pytest

from tests.plugin.manager_pair import ManagerPair
from tests.side_by_side.layouts import MODEL_LAYOUTS, Group, Layout, random_layout

CALLS = 400


def drive(layout: Layout, seed: int) -> None:
    pair = ManagerPair(layout, seed)
    try:
        pair.run(CALLS)
    except Exception as difference:
        raise AssertionError(f"seed {seed}, call {pair.num_calls}, {layout}") from difference


@pytest.mark.parametrize("layout", MODEL_LAYOUTS, ids=lambda layout: layout.name)
def test_model_layout(layout: Layout) -> None:
    for seed in range(3):
        drive(layout, seed)


def test_one_group_without_caching() -> None:
    drive(Layout("full", (Group("full", 4),), enable_caching=False), 1)


def test_random_layouts() -> None:
    for seed in range(40):
        drive(random_layout(random.Random(seed)), seed)
