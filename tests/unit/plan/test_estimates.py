"""Estimates of the profile run: graphs by their number, activations by what is largest, buffers by the card."""

from typing import Any

import pytest

from kvledger.errors import ConfigError
from kvledger.plan.estimates import activations, graph_counts, graphs, outside
from kvledger.plan.gpus import GIB, find_gpu
from kvledger.plan.options import EngineOptions
from tests.unit.plan.planning import LLAMA_8B, facts, made_up, plan, request

EVERY_CARD_GIB = 40 * GIB


@pytest.mark.parametrize(
    ("seqs", "counts"),
    # As vLLM prints them: "Profiling CUDA graph memory: PIECEWISE=51 (largest=512), FULL=35 (largest=256)".
    [(1024, (51, 51)), (256, (51, 35)), (128, (35, 19)), (40, (13, 8)), (32, (11, 7)), (4, (4, 3)), (2, (3, 2))],
)
def test_graphs_are_counted_as_vllm_prints_them(seqs: int, counts: tuple[int, int]) -> None:
    settings = plan(LLAMA_8B, max_num_seqs=seqs, kv_cache_memory_bytes=EVERY_CARD_GIB).settings
    assert graph_counts(settings, find_gpu("H100")) == counts


@pytest.mark.parametrize(
    ("asked", "counts"),
    [
        ({}, (51, 35)), ({"optimization_level": 1}, (51, 0)), ({"optimization_level": 0}, (0, 0)),
        ({"cudagraph_mode": "piecewise"}, (51, 0)), ({"cudagraph_mode": "FULL"}, (51, 0)),
        ({"cudagraph_mode": "FULL_DECODE_ONLY"}, (0, 35)), ({"cudagraph_mode": "FULL_AND_PIECEWISE"}, (51, 35)),
        ({"cudagraph_mode": "FULL", "enforce_eager": True}, (0, 0)),
    ],
)  # fmt: skip
def test_a_mode_captures_what_vllm_captures_in_it(asked: dict[str, Any], counts: tuple[int, int]) -> None:
    """Only two modes have graphs of their own for batches that only decode."""
    settings = plan(LLAMA_8B, max_num_seqs=256, kv_cache_memory_bytes=EVERY_CARD_GIB).settings
    assert graph_counts(settings, find_gpu("H100"), options=EngineOptions(**asked)) == counts


def test_a_mode_of_no_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cudagraph_mode='FULLL'.*use one of .*FULL_DECODE_ONLY"):
        EngineOptions(cudagraph_mode="fulll")


def test_newest_cards_capture_larger_batches() -> None:
    settings = plan(LLAMA_8B, gpu="B200", kv_cache_memory_bytes=EVERY_CARD_GIB).settings
    # 512 to 1,024 in steps of 16 are 32 more of each.
    assert graph_counts(settings, find_gpu("B200")) == (51 + 32, 51 + 32)


def test_drafts_widen_a_decode_step() -> None:
    settings = plan(LLAMA_8B, max_num_seqs=8, kv_cache_memory_bytes=EVERY_CARD_GIB).settings
    # 8 requests of 4 tokens: graphs of 1, 2, 4, 8, ... 64 tokens; those of 4 to 32 only decode.
    assert graph_counts(settings, find_gpu("H100"), decode_tokens=4) == (3 + 8, 5)


def test_graphs_grow_with_layers_and_with_experts() -> None:
    dense = made_up(num_hidden_layers=32)
    routed = made_up(num_hidden_layers=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
    settings = plan(dense, kv_cache_memory_bytes=EVERY_CARD_GIB).settings
    gpu = find_gpu("H100")
    one = graphs(dense.config, settings, gpu, 32)
    assert one.bytes == 102 * 32 * 0.25 * (1 << 20)
    assert graphs(dense.config, settings, gpu, 64).bytes == 2 * one.bytes
    assert graphs(routed.config, settings, gpu, 32).bytes == 2 * one.bytes


def test_peak_is_what_is_largest() -> None:
    settings = plan(LLAMA_8B, kv_cache_memory_bytes=EVERY_CARD_GIB).settings
    model = facts(LLAMA_8B)
    few = plan(LLAMA_8B, max_num_seqs=8, kv_cache_memory_bytes=EVERY_CARD_GIB).settings
    assert activations(model.config, settings, EngineOptions()).detail == "sampling 1,024 sequences"
    assert activations(model.config, few, EngineOptions()).detail == "a pass over 8,192 tokens"


def test_buffers_of_several_ranks_depend_on_what_joins_the_cards() -> None:
    two = EngineOptions(tensor_parallel_size=2)
    assert outside(find_gpu("H100"), EngineOptions()).bytes == 0.25 * GIB
    assert outside(find_gpu("H100"), two).bytes == int(2.1 * GIB)
    assert outside(find_gpu("RTX 3090"), two).bytes == int(0.6 * GIB)
    assert outside(find_gpu("RTX 5090"), two).bytes == int(0.6 * GIB)


def test_shared_memory_is_wide_and_says_why() -> None:
    spark = outside(find_gpu("GB10"), EngineOptions())
    assert spark.high - spark.low > 5 * GIB
    assert "whole machine" in spark.detail


def test_video_of_gemma_4_must_fit_in_a_step() -> None:
    model = facts("google/gemma-4-26B-A4B")
    small = plan(model, gpu="L40S", kv_cache_memory_bytes=EVERY_CARD_GIB)
    large = plan(model, gpu="H100", kv_cache_memory_bytes=EVERY_CARD_GIB)
    asked = plan(model, gpu="L40S", kv_cache_memory_bytes=EVERY_CARD_GIB, max_num_batched_tokens=1024)
    batches = [made.settings.max_num_batched_tokens for made in (small, large, asked)]
    assert batches == [32 * (70 + 2 + 6), 8192, 1024]


def test_rotary_tables_are_loaded_with_the_weights() -> None:
    """131,072 positions * 128 values of two bytes are 32 MiB; scaled linearly by 8, as many times that."""
    plain = made_up(head_dim=128, max_position_embeddings=131072)
    longer = made_up(head_dim=128, max_position_embeddings=131072, rope_scaling={"rope_type": "linear", "factor": 8.0})
    base, scaled = (plan(model, gpu="H100", max_model_len=1024).budgets[0].terms[0].bytes for model in (plain, longer))
    assert scaled - base == 7 * 32 * (1 << 20)


def test_request_of_two_cards_has_the_buffers_of_its_card() -> None:
    for name, low, high in (("H100", 1.0, 2.8), ("RTX 3090", 0.15, 1.8)):
        made = plan(request(facts(LLAMA_8B)).facts, gpu=name, tensor_parallel_size=2, max_model_len=1024)
        term = made.budgets[0].terms[3]
        assert (term.low, term.high) == (int(low * GIB), int(high * GIB))
