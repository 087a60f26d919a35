"""KV types whose scales stand in the page, and where no kernel reads them."""

import pytest

from kvledger.errors import ConfigError
from kvledger.plan.options import EngineOptions
from kvledger.plan.plan import make_plan
from tests.unit.plan.planning import CACHE_40_GIB, LLAMA_8B, facts, plan, request

# Type -> bytes of a key of 128 elements: one or half a byte each, and a float32 scale, or a byte for each 16.
KEY_BYTES = {
    "int8_per_token_head": 128 + 4,
    "fp8_per_token_head": 128 + 4,
    "int4_per_token_head": 64 + 4,
    "nvfp4": 64 + 8,
}


@pytest.mark.parametrize(("dtype", "key"), KEY_BYTES.items())
def test_a_page_holds_elements_and_scales(dtype: str, key: int) -> None:
    found = plan(LLAMA_8B, kv_cache_dtype=dtype, kv_cache_memory_bytes=CACHE_40_GIB)
    # 32 layers of 8 heads, 16 tokens, a key and a value.
    assert found.bytes_per_block == 32 * 8 * 16 * 2 * key
    assert found.num_blocks == CACHE_40_GIB // found.bytes_per_block


def test_the_kernel_is_the_one_that_reads_the_type() -> None:
    assert plan(LLAMA_8B, kv_cache_dtype="int8_per_token_head").settings.backend.name == "TRITON_ATTN"
    assert plan(LLAMA_8B, kv_cache_dtype="nvfp4").settings.backend.name == "FLASHINFER"
    assert plan(LLAMA_8B, kv_cache_dtype="nvfp4_4over6", gpu="B200").settings.cache.cache_dtype == "nvfp4"


def test_states_are_held_by_blocks_of_smaller_tokens() -> None:
    wide, narrow = (plan("Qwen/Qwen3.5-27B", kv_cache_dtype=dtype) for dtype in ("auto", "nvfp4"))
    # A token of 4 heads of 256 takes 4,096 bytes in bfloat16 and 4 * 2 * (128 + 16) in nvfp4.
    assert narrow.block_size > 3 * wide.block_size
    page = {group.spec.page_size_bytes for group in narrow.layout.groups}
    assert page == {narrow.block_size * 4 * 2 * 144}


@pytest.mark.parametrize(
    ("model", "gpu", "dtype", "words"),
    [
        ("deepseek-ai/DeepSeek-V3", "H200", "nvfp4", "not supported with MLA"),
        ("deepseek-ai/DeepSeek-V3", "H200", "int8_per_token_head", "No valid attention backend"),
        ("openai/gpt-oss-20b", "H100", "nvfp4", "heads of 64 off compute capability 10"),
        (LLAMA_8B, "H100", "nvfp4_4over6", "No valid attention backend"),
        (LLAMA_8B, "T4", "nvfp4", "No valid attention backend"),
    ],
)
def test_where_no_kernel_reads_it_vllm_refuses(model: str, gpu: str, dtype: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(request(facts(model), gpu=gpu, kv_cache_dtype=dtype))


def test_a_type_of_no_release_is_no_option() -> None:
    with pytest.raises(ConfigError, match=r"use one of auto, .*int4_per_token_head"):
        EngineOptions(kv_cache_dtype="int3")


# Layers that keep the model's type beside quantized ones. Blocks and pages are what vLLM's own rule gives for them.


def test_layers_that_keep_the_models_type_make_blocks_of_all_larger() -> None:
    found = plan("Qwen/Qwen3-8B", kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("0", "35"))
    # A token of 8 heads of 128 takes 2,048 bytes in fp8: 32 of them hold 16 tokens of 4,096 bytes.
    assert found.block_size == 32
    (group,) = found.layout.groups
    pages = [spec.page_size_bytes for spec in group.layer_specs]
    assert pages == [131072, *[65536] * 34, 131072]
    assert found.bytes_per_block == sum(pages)


def test_windows_that_keep_it_take_the_tokens_that_a_page_holds() -> None:
    options = {"kv_cache_dtype": "fp8", "max_model_len": 8192}
    found = plan("google/gemma-3-27b-it", kv_cache_dtype_skip_layers=("sliding_window",), **options)
    # 16 heads of 128: a page of 131,072 bytes is 32 tokens in fp8 or 16 in bfloat16.
    blocks = {type(group.spec).__name__: group.spec.block_size for group in found.layout.groups}
    assert blocks == {"SlidingWindowSpec": 16, "FullAttentionSpec": 32}
    assert {group.spec.page_size_bytes for group in found.layout.groups} == {131072}


def test_beside_larger_blocks_no_more_is_needed() -> None:
    found = plan("Qwen/Qwen3-8B", kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("0",), block_size=64)
    assert found.block_size == 64


def test_where_all_layers_have_the_models_type_none_is_left_out() -> None:
    assert plan("Qwen/Qwen3-8B", kv_cache_dtype_skip_layers=("0",)).block_size == 16


def test_a_layer_that_is_not_there_is_said() -> None:
    found = plan("Qwen/Qwen3-8B", kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("36",))
    assert "--kv-cache-dtype-skip-layers 36: no layer is called so" in found.facts.config.notes
