"""Bounds of the histograms. Where vLLM has the histogram they are vLLM's, or series of both could not be added up."""

from typing import Final

RESIDENCY_SECONDS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
    1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
)  # fmt: skip
PREEMPTIONS: Final = (1, 2, 3, 4, 5, 10, 20)
WAITING_SECONDS: Final = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip


def one_two_five(most: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    bounds: list[int] = []
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power > most:
                return bounds
            bounds.append(factor * power)
        power *= 10
