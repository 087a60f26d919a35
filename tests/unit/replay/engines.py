"""Engines for tests: a layout, a clock and a card in round numbers."""

from math import inf

from kvledger.core.groups.spec import FullAttentionSpec, KVCacheGroupSpec
from kvledger.models.layers import CacheSettings
from kvledger.plan.gpus import Gpu
from kvledger.replay.layout import KVLayout
from kvledger.replay.layout_file import ReplacedModel
from kvledger.replay.step_time import StepTimeModel, StepWork

# The layers of Llama 3.1 8B, on one rank.
LLAMA = ReplacedModel(CacheSettings(16), num_heads=32, num_kv_heads=8, head_size=128)
LLAMA_WORK = StepWork(8_030_000_000, 8_030_000_000, 16_060_000_000)


def card(name: str, bandwidth_bytes_s: float = inf, peak_flops: float = inf) -> Gpu:
    """A card of which only the speed matters."""
    return Gpu(name, 1, 1, 1, 9.0, "a test", sourced=True, bandwidth_bytes_s=bandwidth_bytes_s, peak_flops=peak_flops)


def steps_of(seconds: float) -> StepTimeModel:
    """A clock on which every step takes that long."""
    return StepTimeModel(LLAMA_WORK, card("infinite"), 1, seconds)


ONE_SECOND = steps_of(1.0)


def one_group(block_size: int = 16) -> KVLayout:
    """One group of full attention over all layers of a plain decoder."""
    group = KVCacheGroupSpec(tuple(f"layer.{index}" for index in range(32)), FullAttentionSpec(block_size, 8, 128))
    return KVLayout((group,), group.page_size_bytes, (group.page_size_bytes,))
