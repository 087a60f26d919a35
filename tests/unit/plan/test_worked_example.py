"""The example of the specification, and its error and configuration tables, to the digit."""

import pytest

from kvledger.plan.gpus import GIB, MIB
from kvledger.plan.refusal import DOES_NOT_FIT, NO_MEMORY
from kvledger.plan.request import request_holding
from tests.unit.plan.planning import LLAMA_8B, gib, plan

AVAILABLE = 55_910 * MIB  # 54.6 GiB


def test_worked_example_to_the_digit() -> None:
    made = plan(LLAMA_8B, kv_cache_memory_bytes=AVAILABLE)
    (group,) = made.layout.groups
    assert group.spec.page_size_bytes == 65_536
    assert made.bytes_per_block == 2 * MIB
    assert made.num_blocks == 27_955
    assert made.kv_cache_tokens == 447_280
    assert made.blocks_per_request == 8_192
    assert f"{made.max_concurrency:.2f}x" == "3.41x"
    assert made.error is None


def test_chat_request_of_the_example() -> None:
    holding = request_holding(plan(LLAMA_8B, kv_cache_memory_bytes=AVAILABLE), 2000, 500)
    assert (holding.blocks, holding.peak_blocks) == (157, 157)
    assert holding.bytes == 314 * MIB
    assert f"{holding.share_of_pool:.2%}" == "0.56%"
    assert holding.fixed_bytes == 0
    assert holding.bytes_per_token == 128 * 1024


def test_no_memory_is_an_error() -> None:
    made = plan(LLAMA_8B, gpu="T4")
    assert made.error is not None
    assert made.error.kind == NO_MEMORY
    assert "No available memory for the cache blocks" in made.error.message


def test_request_that_does_not_fit_names_the_length_that_does() -> None:
    made = plan(LLAMA_8B, kv_cache_memory_bytes=gib(8))
    assert made.error is not None
    assert made.error.kind == DOES_NOT_FIT
    # 8 GiB are 4,096 blocks; the null block is none of a request's.
    assert made.estimated_max_len == 4_095 * 16
    assert "65,520" in made.error.message


def test_null_block_counts_in_num_blocks_and_not_for_the_check() -> None:
    exactly = 8_192 * 2 * MIB
    assert plan(LLAMA_8B, kv_cache_memory_bytes=exactly).error is not None
    assert plan(LLAMA_8B, kv_cache_memory_bytes=exactly + 2 * MIB).error is None


def test_utilization_is_a_share_of_the_whole_card() -> None:
    made = plan(LLAMA_8B)
    budget = made.budgets[0]
    assert budget.requested_bytes == int(budget.total_bytes * 0.92)
    lower = plan(LLAMA_8B, gpu_memory_utilization=0.5)
    assert budget.available_bytes - lower.budgets[0].available_bytes == pytest.approx(0.42 * budget.total_bytes, abs=2)


def test_memory_bytes_replace_the_share() -> None:
    first = plan(LLAMA_8B, kv_cache_memory_bytes=GIB * 20, gpu_memory_utilization=0.5)
    assert first.num_blocks == 10_240


def test_block_override_replaces_the_blocks() -> None:
    made = plan(LLAMA_8B, kv_cache_memory_bytes=GIB * 20, num_gpu_blocks_override=9_000)
    assert made.num_blocks == 9_000
    assert made.workers[0].available_bytes == 9_000 * 2 * MIB


def test_block_size_scales_the_page() -> None:
    made = plan(LLAMA_8B, kv_cache_memory_bytes=AVAILABLE, block_size=32)
    assert (made.block_size, made.bytes_per_block, made.num_blocks) == (32, 4 * MIB, 13_977)


def test_prefix_caching_is_on_for_decoders() -> None:
    assert plan(LLAMA_8B).settings.prefix_caching
    assert not plan("openai/whisper-large-v3").settings.prefix_caching
    assert not plan("mistralai/Mamba-Codestral-7B-v0.1").settings.prefix_caching


def test_auto_length_takes_the_longest_that_fits() -> None:
    made = plan(LLAMA_8B, kv_cache_memory_bytes=gib(8), max_model_len=-1)
    assert made.error is None
    assert made.max_model_len == 65_520
    assert made.max_concurrency == pytest.approx(4_096 / 4_095)


def test_gated_delta_net_by_hand() -> None:
    """Qwen3-Next on 40 GiB: the figures that the two releases differ in."""
    new = plan("Qwen/Qwen3-Next-80B-A3B-Instruct", kv_cache_memory_bytes=gib(40))
    old = plan("Qwen/Qwen3-Next-80B-A3B-Instruct", kv_cache_memory_bytes=gib(40), version="0.32")
    assert (old.block_size, old.num_blocks, old.blocks_per_request) == (544, 3_212, 482 + 3 * 2)
    assert (new.block_size, new.num_blocks, new.blocks_per_request) == (576, 3_034, 456 + 3 * 3)
    assert new.max_concurrency == pytest.approx(6.5247, abs=5e-5)


def test_a_decoding_request_has_left_the_tokens_outside_its_windows() -> None:
    """A window of 128 needs 9 blocks of 16 and one more where it starts inside a block; the prompt's keep 125."""
    holding = request_holding(plan("openai/gpt-oss-120b", kv_cache_memory_bytes=AVAILABLE), 2000, 500)
    assert holding.blocks == 157 + 10
    assert holding.peak_blocks == 125 + 126
    assert holding.fixed_bytes == 10 * holding.bytes // holding.blocks
