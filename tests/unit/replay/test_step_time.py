"""The roofline, by hand."""

from math import inf

import pytest

from kvledger.errors import ConfigError
from kvledger.replay.layout import num_blocks_in
from kvledger.replay.step_time import Gpu, ModelShape, StepTimeModel, find_gpu, gpu_names, kv_memory_bytes, num_pairs

# Round numbers: after the efficiencies 0.6 and 0.8 a GPU does 6e12 flops and reads 8e9 bytes a second.
GPU = Gpu("round", 10 * 2**30, 1e10, 1e13)
SHAPE = ModelShape(num_parameters=1_000_000_000, num_layers=10, num_heads=5, num_kv_heads=1, head_size=30)


def model(num_gpus: int = 1, overhead: float = 0.0) -> StepTimeModel:
    return StepTimeModel(SHAPE.work(), GPU, num_gpus, overhead)


def test_the_default_shape_keeps_128_kib_a_token() -> None:
    # 2 (keys and values) x 32 layers x 8 heads x 128 values x 2 bytes.
    assert ModelShape().kv_bytes_per_token == 131_072
    assert ModelShape().weight_bytes == 16_060_000_000


def test_a_small_decode_reads_the_weights() -> None:
    # 2e9 weight bytes / 8e9 bytes a second; one token costs 2e9 flops, a three-thousandth of a second.
    assert model().seconds(1, 0, 0.0) == pytest.approx(0.25)


def test_context_is_read_once_a_step() -> None:
    # 1200 bytes a token: 10 layers x 1 head x (30 + 30) values x 2 bytes. 1e6 tokens: 0.15 s.
    assert SHAPE.kv_bytes_per_token == 1200
    assert model().seconds(1, 1_000_000, 0.0) == pytest.approx(0.25 + 0.15)


def test_a_large_prefill_is_bound_by_flops() -> None:
    # 2 x 1e9 x 3000 / 6e12 = 1 s; attention 4 x 10 x 5 x 30 = 6000 flops a pair, 1e9 pairs: 1 s.
    assert model().seconds(3000, 3000, 0.0) == pytest.approx(1.0)
    assert model().seconds(3000, 3000, 1e9) == pytest.approx(2.0)


def test_gpus_share_the_work_and_the_overhead_stays() -> None:
    assert model(num_gpus=4, overhead=0.01).seconds(3000, 3000, 0.0) == pytest.approx(0.26)


def test_pairs_of_a_causal_chunk() -> None:
    # After 10 tokens, 3 new ones look at 11, 12 and 13.
    assert num_pairs(3, 10) == 36.0


def test_memory_for_kv_is_what_the_weights_leave_of_ninety_percent() -> None:
    assert kv_memory_bytes(SHAPE, GPU, 2) == int(0.9 * 20 * 2**30) - 2_000_000_000
    assert num_blocks_in(1_000_000, 16 * 1200) == 52
    with pytest.raises(ConfigError, match="memory=30000: holds 1 blocks of 19200 bytes, and 2 are the least"):
        num_blocks_in(30_000, 16 * 1200)


def test_gpus_are_found_by_name() -> None:
    assert find_gpu("H100").peak_flops == 989e12
    assert all(0 < find_gpu(name).bandwidth_bytes_s < inf for name in gpu_names())
    with pytest.raises(ConfigError, match="gpu='gtx': not in the table of GPUs; use one of a30, l4"):
        find_gpu("gtx")


def test_a_shape_says_which_number_is_wrong() -> None:
    with pytest.raises(ConfigError, match="num_kv_heads=0"):
        ModelShape(num_kv_heads=0)
