"""Whoever is let in ends: random lives of the scheduler (stalls.py), and those in which somebody once did not."""

import pytest

from tests.conftest import LONG
from tests.property.stalls import play


@pytest.mark.parametrize("first", range(0, 200 * LONG, 20))
def test_whoever_is_let_in_ends(first: int) -> None:
    for seed in range(first, first + 20):
        play(seed)


# A copy and the next block in one step behind several draft modules; decodes padded beyond the budget of a step; the
# state of a prompt's end cached when it had gone on; how long a request waits when the reason changes; what is told of
# a load for which the host has no blocks, or that is under way when another one failed.
@pytest.mark.parametrize("seed", [374, 418, 498, 629, 730, 807, 320, 229, 426, 5010, 10234, 11486, 11791])
def test_lives_that_once_went_wrong(seed: int) -> None:
    play(seed)
