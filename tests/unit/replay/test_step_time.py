"""The roofline, by hand."""

from collections.abc import Callable

import pytest

from kvledger.errors import ConfigError
from kvledger.plan.gpus import find_gpu
from kvledger.replay.layout import num_blocks_in
from kvledger.replay.step_time import (
    AttentionWork,
    ChunkReach,
    LocalReach,
    StepTimeModel,
    StepWork,
    WindowReach,
    num_pairs,
)
from tests.unit.replay.engines import card

# Round numbers: after the efficiencies 0.6 and 0.8 a GPU does 6e12 flops and reads 8e9 bytes a second.
GPU = card("round", 1e10, 1e13)
# 10 layers of 5 query heads and 1 KV head of 30 values: 4 x 10 x 5 x 30 flops a pair, 10 x (30 + 30) x 2 bytes a token.
SMALL = StepWork(1_000_000_000, 1_000_000_000, 2_000_000_000, attention=(AttentionWork(6000, 1200),))


def model(num_gpus: int = 1, overhead: float = 0.0) -> StepTimeModel:
    return StepTimeModel(SMALL, GPU, num_gpus, overhead)


def test_a_small_decode_reads_the_weights() -> None:
    # 2e9 weight bytes / 8e9 bytes a second; one token costs 2e9 flops, a three-thousandth of a second.
    assert model().seconds(1, 0, 0.0) == pytest.approx(0.25)


def test_context_is_read_once_a_step() -> None:
    # 1e6 tokens of 1200 bytes: 0.15 s.
    assert model().seconds(1, 1_000_000, 0.0) == pytest.approx(0.25 + 0.15)


def test_a_large_prefill_is_bound_by_flops() -> None:
    # 2 x 1e9 x 3000 / 6e12 = 1 s; attention 6000 flops a pair, 1e9 pairs: 1 s.
    assert model().seconds(3000, 3000, 0.0) == pytest.approx(1.0)
    assert model().seconds(3000, 3000, 1e9) == pytest.approx(2.0)


def test_gpus_share_the_work_and_the_overhead_stays() -> None:
    assert model(num_gpus=4, overhead=0.01).seconds(3000, 3000, 0.0) == pytest.approx(0.26)


def test_pairs_of_a_causal_chunk() -> None:
    # After 10 tokens, 3 new ones look at 11, 12 and 13.
    assert num_pairs(3, 10) == 36.0


def test_a_pool_has_at_least_two_blocks() -> None:
    assert num_blocks_in(1_000_000, 16 * 1200) == 52
    with pytest.raises(ConfigError, match="memory=30000: holds 1 blocks of 19200 bytes, and 2 are the least"):
        num_blocks_in(30_000, 16 * 1200)


# Models that are not one group of full attention


def seen(num_new: int, num_computed: int, first_seen: Callable[[int], int]) -> tuple[int, float]:
    """Context and pairs by counting: token t sees first_seen(t) to t."""
    tokens = range(num_computed, num_computed + num_new)
    return num_computed + num_new - first_seen(num_computed), float(sum(t - first_seen(t) + 1 for t in tokens))


@pytest.mark.parametrize("num_computed", [0, 1, 5, 6, 7, 8, 14, 100])
@pytest.mark.parametrize("num_new", [1, 2, 6, 7, 20])
def test_windows_and_chunks_against_counting(num_new: int, num_computed: int) -> None:
    reaches: list[tuple[LocalReach, Callable[[int], int]]] = [
        (WindowReach(7), lambda t: max(0, t - 6)),
        (ChunkReach(7), lambda t: t // 7 * 7),
    ]
    for reach, first_seen in reaches:
        context, pairs = seen(num_new, num_computed, first_seen)
        assert reach.context(num_new, num_computed) == context
        assert reach.pairs(num_new, num_computed) == pairs


def test_layers_with_a_window_read_less() -> None:
    # 8e9 bytes a second: no weights, 1000 bytes a token in a window of 100.
    work = StepWork(1, 1, 0, attention=(AttentionWork(6000, 1000, window=100),))
    step_time = StepTimeModel(work, GPU, 1, 0.0)
    (reach,) = step_time.reaches
    local = [(reach.context(1, 5000), reach.pairs(1, 5000))]
    assert local == [(100, 100.0)]
    assert step_time.seconds(1, 5001, 5001.0, 1, local) == pytest.approx(100 * 1000 / 8e9)


def test_a_step_reads_the_experts_that_its_tokens_are_sent_to() -> None:
    # 4e9 bytes, 3e9 of them experts, a quarter for each token: 1 + 3 x (1 - 0.75 ** n) GB.
    work = StepWork(2_000_000_000, 1_000_000_000, 4_000_000_000, 3_000_000_000, 0.25)
    step_time = StepTimeModel(work, GPU, 1, 0.0)
    assert step_time.seconds(1, 0, 0.0) == pytest.approx(1.75 / 8)
    assert step_time.seconds(2, 0, 0.0) == pytest.approx((1 + 3 * (1 - 0.75**2)) / 8)
    # Compute is bound by the active parameters: 2 x 1e9 x 30,000 / 6e12.
    assert step_time.seconds(30_000, 0, 0.0) == pytest.approx(10.0)


def test_a_state_is_read_and_written_once_a_request() -> None:
    work = StepWork(1, 1, 0, state_bytes=1_000_000)
    assert StepTimeModel(work, GPU, 1, 0.0).seconds(4, 400, 0.0, 4) == pytest.approx(2 * 4e6 / 8e9)


# Card -> GB/s and dense TFLOP/s of 16-bit numbers.
SPEEDS = {
    "a30": (933, 165),
    "l4": (300, 121),
    "l40s": (864, 362),
    "a100": (2039, 312),
    "a100-80gb": (2039, 312),
    "a100-40gb": (1555, 312),
    "h100-pcie": (2000, 756.5),
    "h100": (3350, 989),
    "NVIDIA H100 80GB HBM3 (SXM)": (3350, 989),
    "h200": (4800, 989),
    "H20": (4000, 148),
    "b200": (7700, 2250),
}


@pytest.mark.parametrize("name", SPEEDS)
def test_cards_have_the_speeds_of_their_data_sheets(name: str) -> None:
    gpu = find_gpu(name)
    assert (gpu.bandwidth_bytes_s / 1e9, gpu.peak_flops / 1e12) == SPEEDS[name]
