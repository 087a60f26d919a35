"""Bug reports about sizing that this planner must survive, by their number in the collection of field cases."""

import pytest

from kvledger.core.groups.spec import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from kvledger.plan.granularity import common_step, reuse_step
from kvledger.plan.groups import equal_pages, group_layers
from kvledger.plan.layout import compare_layouts
from kvledger.plan.memory import MeasuredMemory
from kvledger.plan.plan import make_plan
from kvledger.plan.pool import RequestLimits
from kvledger.plan.refusal import NO_PROMOTION, RefusedError
from tests.unit.plan.planning import facts, gib, made_up, plan, request


def test_b53_blocks_that_do_not_meet_leave_no_common_prefix() -> None:
    assert common_step([6, 16]) == 48


def test_b53_enlarged_block_is_announced() -> None:
    step = reuse_step(plan("Qwen/Qwen3.5-27B", kv_cache_memory_bytes=gib(40)))
    assert step is not None
    assert step.tokens == 832
    assert "shorter prompts never hit" in step.warning


def test_b53_small_blocks_need_no_warning() -> None:
    step = reuse_step(plan("Qwen/Qwen3-8B"))
    assert step is not None
    assert (step.tokens, step.warning) == (16, "")


def test_b55_hybrid_manager_off_charges_all_as_full_and_keeps_the_window() -> None:
    hybrid = plan("google/gemma-2-9b", kv_cache_memory_bytes=gib(40))
    off = plan("google/gemma-2-9b", kv_cache_memory_bytes=gib(40), disable_hybrid_kv_cache_manager=True)
    (group,) = off.layout.groups
    assert isinstance(group.spec, FullAttentionSpec)
    assert group.spec.sliding_window == 4096
    assert len(group.layer_names) == 42
    # Which layers are windowed stays known: the layers' own caches say it.
    windowed = [
        layer for layer in off.facts.layers if isinstance(layer.cache.spec(off.settings.cache), SlidingWindowSpec)
    ]
    assert len(windowed) == 21
    assert off.blocks_per_request * off.bytes_per_block >= 8192 // 16 * 42 * 131_072
    assert len(hybrid.layout.groups) == 2


def specs_of(full: int, window: int) -> dict[str, KVCacheSpec]:
    specs: dict[str, KVCacheSpec] = {f"full.{index}": FullAttentionSpec(16, 8, 128) for index in range(full)}
    for index in range(window):
        specs[f"window.{index}"] = SlidingWindowSpec(16, 8, 128, sliding_window=1024)
    return specs


@pytest.mark.parametrize(
    ("full", "window", "group_size", "padding"),
    [(19, 18, 19, 1), (20, 30, 20, 10), (10, 16, 10, 4), (17, 48, 17, 3)],
)
def test_b56_group_size_and_padding_of_vllm(full: int, window: int, group_size: int, padding: int) -> None:
    layout = group_layers(specs_of(full, window))
    assert (layout.group_size, layout.padding_layers()) == (group_size, padding)
    assert sum(len(group.layer_names) for group in layout.groups) == full + window


@pytest.mark.parametrize(("full", "window", "best", "padding"), [(20, 30, 10, 0), (10, 16, 2, 0)])
def test_b56_best_group_size_wastes_nothing(full: int, window: int, best: int, padding: int) -> None:
    compared = compare_layouts(specs_of(full, window), RequestLimits(8192, 16384))
    assert compared is not None
    assert (compared.best.group_size, compared.best.padding_layers) == (best, padding)
    assert compared.best.waste == pytest.approx(0)
    assert compared.vllm.waste > 0.05
    assert compared.extra_requests > 0.05


@pytest.mark.parametrize(("full", "window"), [(19, 18), (17, 48)])
def test_b56_vllm_is_right_where_padding_is_cheap(full: int, window: int) -> None:
    compared = compare_layouts(specs_of(full, window), RequestLimits(131_072, 4096))
    assert compared is not None
    assert compared.best == compared.vllm


def test_b56_fixed_page_is_padded_and_token_page_grows() -> None:
    state = MambaSpec(16, ((1000,),), ("float32",))
    unified = equal_pages({"a": FullAttentionSpec(16, 4, 64), "b": FullAttentionSpec(16, 2, 64), "c": state})
    assert {spec.page_size_bytes for spec in unified.values()} == {16_384}
    assert unified["b"].block_size == 32
    padded = unified["c"]
    assert isinstance(padded, MambaSpec)
    assert (padded.content_bytes, padded.page_size_padded) == (4_000, 16_384)


def test_b56_page_that_does_not_divide_is_padded() -> None:
    unified = equal_pages({"wide": FullAttentionSpec(16, 8, 96), "narrow": FullAttentionSpec(16, 8, 64)})
    narrow = unified["narrow"]
    assert isinstance(narrow, FullAttentionSpec)
    assert (narrow.block_size, narrow.page_size_padded) == (16, 8 * 16 * 192 * 2)


def test_b70_each_stage_is_compared_with_its_own_need() -> None:
    """16 and 32 layers on 3.18 and 15 GiB: neither all layers against the poorest rank, nor more blocks than it has."""
    stages = (MeasuredMemory(available_bytes=gib(3.18)), MeasuredMemory(available_bytes=gib(15)))
    made = plan(
        facts("Qwen/Qwen3-30B-A3B", quantized=False),
        stages=stages,
        pipeline_parallel_size=2,
        pipeline_layers=(16, 32),
        max_model_len=40_960,
    )
    first, second = made.workers
    assert (first.num_layers, second.num_layers) == (16, 32)
    assert first.bytes_per_block * 2 == second.bytes_per_block
    assert first.num_blocks == gib(3.18) // (16 * 32_768)
    assert made.num_blocks == min(first.num_blocks, second.num_blocks) == 6_512
    assert made.error is None


def test_b70_poorest_stage_limits_the_length() -> None:
    stages = (MeasuredMemory(available_bytes=gib(0.5)), MeasuredMemory(available_bytes=gib(15)))
    made = plan("Qwen/Qwen3-30B-A3B", stages=stages, pipeline_parallel_size=2, pipeline_layers=(16, 32))
    assert made.error is not None
    assert "pipeline stage 0" in made.error.message
    assert made.estimated_max_len == (1_024 - 1) * 16


def test_b72_specs_that_cannot_be_stored_alike_give_a_clear_error() -> None:
    asked = request(facts("Qwen/Qwen3.5-27B"), kv_cache_memory_bytes=gib(40), disable_hybrid_kv_cache_manager=True)
    with pytest.raises(RefusedError, match="Failed to promote local KV cache specs") as refused:
        make_plan(asked)
    assert refused.value.refusal.kind == NO_PROMOTION
    assert "MambaSpec" in str(refused.value)


def test_b73_prefix_caching_costs_state_blocks() -> None:
    model = "ibm-granite/granite-4.0-h-micro"
    aligned = plan(model, kv_cache_memory_bytes=gib(40))
    plain = plan(model, kv_cache_memory_bytes=gib(40), enable_prefix_caching=False)
    states = [group for group in aligned.layout.groups if isinstance(group.spec, MambaSpec)]
    assert len(states) == 9
    assert aligned.blocks_per_request == plain.blocks_per_request + 2 * len(states)
    just_enough = (plain.blocks_per_request + 1) * plain.bytes_per_block
    assert plan(model, kv_cache_memory_bytes=just_enough, enable_prefix_caching=False).error is None
    assert plan(model, kv_cache_memory_bytes=just_enough).error is not None


def test_b75_layers_count_by_what_each_keeps() -> None:
    """Six layers of 52 attend, 23 keep a state and the rest nothing: layers times one formula is wrong by 7 times."""
    made = plan("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", kv_cache_memory_bytes=gib(40))
    # Blocks of 2,096 tokens, because a state takes 3 * 6144 * 2 + 64 * 64 * 128 * 4 = 2,134,016 bytes and a token
    # 2 * 2 heads * 128 * 2 bytes = 1,024. A block is one page of six layers.
    assert made.bytes_per_block == 6 * 2_096 * 1_024 == 12_877_824
    # 126 blocks hold 262,144 tokens; four groups of states hold three each.
    assert made.blocks_per_request == 126 + 4 * 3
    assert made.num_blocks == 40 * 1024**3 // 12_877_824
    naive = 52 * 1_024 * 262_144
    assert naive // (made.blocks_per_request * made.bytes_per_block) == 7


def test_b75_latent_and_windowed_layers_to_the_byte() -> None:
    latent = plan(facts("deepseek-ai/DeepSeek-V3", quantized=False), kv_cache_memory_bytes=gib(40))
    # 512 latent and 64 rotary values of 2 bytes a token and layer, instead of 128 heads with 128 + 128.
    assert (latent.bytes_per_block, latent.blocks_per_request) == (61 * 16 * 576 * 2, 163_840 // 16)
    windowed = plan("google/gemma-2-9b", kv_cache_memory_bytes=gib(40))
    # 21 layers attend to everything and 21 to 4,096 tokens: a block is a page of 21 layers, 2 * 8 heads * 256 values.
    assert windowed.bytes_per_block == 21 * 16 * 2 * 8 * 256 * 2
    # 8,192 tokens are 512 blocks. The window keeps no fewer: 4,095 tokens before the 8,192 that may be in flight, cut
    # to the length of the model, and a block more where it begins inside one.
    assert windowed.blocks_per_request == 512 + 513


def test_b75_shared_and_missing_caches_are_not_counted() -> None:
    assert len(facts("google/gemma-3n-E4B").layers) == 20
    assert len(facts("nvidia/Llama-3_3-Nemotron-Super-49B-v1").layers) == 49


def test_b80_blocks_follow_the_graph_term() -> None:
    model = made_up()
    blocks = [
        plan(model, gpu="L4", stages=(MeasuredMemory(graph_bytes=size),)).num_blocks for size in (0, gib(1), gib(4))
    ]
    assert blocks == sorted(blocks, reverse=True)
    assert blocks[0] > blocks[-1]


def test_b80_estimates_come_with_a_range_and_measurements_without() -> None:
    estimated = plan("Qwen/Qwen3-8B").budgets[0].cache
    assert estimated.low < estimated.bytes < estimated.high
    sizes = MeasuredMemory(gib(79.18), None, gib(15.27), gib(2.21), gib(0.96), gib(0.25))
    measured = plan("Qwen/Qwen3-8B", stages=(sizes,)).budgets[0].cache
    assert measured.low == measured.bytes == measured.high


def test_b80_suggested_bytes_fed_back_give_the_same_blocks() -> None:
    made = plan("Qwen/Qwen3-8B")
    again = plan("Qwen/Qwen3-8B", kv_cache_memory_bytes=made.workers[0].available_bytes)
    assert again.num_blocks == made.num_blocks
