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
