"""Engines that vLLM would not start, and options that change one: each against what vLLM's own code does."""

from typing import Any

import pytest

from kvledger.plan.backends import FLASH_ATTN, FLASHINFER, TRITON_ATTN, TRITON_MLA
from kvledger.plan.refusal import CONTEXT_RANKS, HEADS, NO_BACKEND, STATE_BLOCKS, RefusedError
from kvledger.plan.versions import VERSIONS, unknown_class_note, version_rules
from tests.unit.plan.planning import CACHE_40_GIB, LLAMA_8B, made_up, plan

GIVEN: dict[str, Any] = {"kv_cache_memory_bytes": CACHE_40_GIB}


def refused(model: Any, **options: Any) -> tuple[str, str]:
    with pytest.raises(RefusedError) as raised:
        plan(model, **GIVEN | options)
    return raised.value.refusal.kind, raised.value.refusal.message


# Heads


@pytest.mark.parametrize(("kv_heads", "ranks"), [(10, 4), (10, 8), (6, 4), (3, 2)])
def test_kv_heads_and_ranks_are_multiples_of_each_other(kv_heads: int, ranks: int) -> None:
    model = made_up(num_attention_heads=8 * kv_heads, num_key_value_heads=kv_heads, head_dim=64)
    kind, message = refused(model, tensor_parallel_size=ranks)
    assert kind == HEADS
    assert f"{kv_heads} KV heads cannot be shared by tensor parallel size ({ranks})" in message


@pytest.mark.parametrize(("kv_heads", "ranks", "own"), [(10, 2, 5), (10, 5, 2), (2, 8, 1), (1, 4, 1)])
def test_ranks_share_heads_or_copy_them(kv_heads: int, ranks: int, own: int) -> None:
    model = made_up(num_attention_heads=8 * kv_heads, num_key_value_heads=kv_heads, head_dim=64)
    (group,) = plan(model, **GIVEN, tensor_parallel_size=ranks).layout.groups
    assert group.spec.num_kv_heads == own  # type: ignore[attr-defined]


# Context ranks: 8 query heads and 2 KV heads.


@pytest.mark.parametrize(
    ("tensor", "decode", "words"),
    [
        (2, 2, "to be greater than the model's total number of KV heads (2)"),
        (4, 4, "exceeds the maximum supported value (2)"),
        (8, 8, "exceeds the maximum supported value (4)"),
    ],
)
def test_context_ranks_are_copies_of_kv_heads(tensor: int, decode: int, words: str) -> None:
    model = made_up(num_attention_heads=8, num_key_value_heads=2)
    kind, message = refused(model, tensor_parallel_size=tensor, decode_context_parallel_size=decode)
    assert kind == CONTEXT_RANKS
    assert words in message


def test_query_heads_of_a_kv_head_are_shared_over_context_ranks() -> None:
    # 12 query heads, 4 of them for each of 3 KV heads: 3 context ranks do not divide 4.
    model = made_up(num_attention_heads=36, num_key_value_heads=9, head_dim=64)
    kind, message = refused(model, tensor_parallel_size=36, decode_context_parallel_size=3)
    assert kind == CONTEXT_RANKS
    assert "query heads per KV head (4) must be divisible" in message


def test_latents_may_have_any_context_ranks() -> None:
    two = plan("deepseek-ai/DeepSeek-V2-Lite", **GIVEN, tensor_parallel_size=2, decode_context_parallel_size=2)
    one = plan("deepseek-ai/DeepSeek-V2-Lite", **GIVEN, tensor_parallel_size=2)
    assert two.blocks_per_request * 2 == one.blocks_per_request


def test_prefill_context_ranks_are_more_cards_with_the_same_cache() -> None:
    four = plan(LLAMA_8B, **GIVEN, prefill_context_parallel_size=2, tensor_parallel_size=2)
    two = plan(LLAMA_8B, **GIVEN, tensor_parallel_size=2)
    assert (four.num_blocks, four.max_concurrency) == (two.num_blocks, two.max_concurrency)
    assert four.request.options.world_size == 4


# Kernels


@pytest.mark.parametrize(
    ("gpu", "dtype", "backend"),
    [
        ("H100", "fp8", FLASH_ATTN),
        ("H100", "fp8_e5m2", FLASHINFER),
        ("A100", "fp8", FLASHINFER),
        ("L4", "fp8_e4m3", FLASHINFER),
        ("Tesla T4", "fp8", TRITON_ATTN),
        ("Tesla T4", "auto", TRITON_ATTN),
        ("B200", "fp8_e5m2", FLASHINFER),
        ("L4", "bfloat16", FLASH_ATTN),
    ],
)
def test_the_first_kernel_that_takes_the_type_on_the_card(gpu: str, dtype: str, backend: Any) -> None:
    assert plan(LLAMA_8B, **GIVEN, gpu=gpu, kv_cache_dtype=dtype).settings.backend == backend


def test_no_kernel_of_latents_takes_e5m2() -> None:
    for gpu in ("H100", "A100", "B200"):
        kind, message = refused("deepseek-ai/DeepSeek-V2-Lite", gpu=gpu, kv_cache_dtype="fp8_e5m2")
        assert kind == NO_BACKEND
        assert "kv_cache_dtype=fp8_e5m2" in message
    assert (
        plan("deepseek-ai/DeepSeek-V2-Lite", **GIVEN, gpu="A100", kv_cache_dtype="fp8").settings.backend == TRITON_MLA
    )


@pytest.mark.parametrize(
    ("gpu", "dtype", "asked", "words"),
    [
        ("H100", "fp8_e5m2", "FLASH_ATTN", "kv_cache_dtype not supported; use one of FLASHINFER, TRITON_ATTN"),
        ("A100", "fp8", "flash_attn", "kv_cache_dtype not supported"),
        ("Tesla T4", "auto", "FLASHINFER", "compute capability not supported"),
        ("H100", "auto", "FLASHMLA", "not one for this kind of attention"),
    ],
)
def test_kernels_that_were_asked_for_and_cannot(gpu: str, dtype: str, asked: str, words: str) -> None:
    kind, message = refused(LLAMA_8B, gpu=gpu, kv_cache_dtype=dtype, attention_backend=asked)
    assert kind == NO_BACKEND
    assert f"Selected backend {asked} is not valid for this configuration: {words}" in message


def test_kernels_that_were_asked_for_decide_the_block() -> None:
    model = "deepseek-ai/DeepSeek-V2-Lite"
    assert plan(model, **GIVEN).block_size == 16
    assert plan(model, **GIVEN, attention_backend="FLASHMLA").block_size == 64
    assert plan(model, **GIVEN, gpu="B200", attention_backend="CUTLASS_MLA").block_size == 128


def test_falcon_keeps_its_type_whatever_is_asked() -> None:
    falcon = made_up(model_type="falcon", architectures=["FalconForCausalLM"], multi_query=True)
    asked = plan(falcon, **GIVEN, kv_cache_dtype="fp8")
    assert asked.bytes_per_block == plan(falcon, **GIVEN).bytes_per_block
    assert "whatever is asked" in asked.settings.origins["kv_cache_dtype"]


# States


def test_blocks_of_states_need_prefix_caching() -> None:
    kind, _ = refused("Qwen/Qwen3.5-27B", mamba_block_size=64, enable_prefix_caching=False)
    assert kind == STATE_BLOCKS
    # Hybrid models align states to the attention block, whatever is asked.
    asked = plan("Qwen/Qwen3.5-27B", **GIVEN, mamba_block_size=64)
    assert asked.layout == plan("Qwen/Qwen3.5-27B", **GIVEN).layout


def test_convolution_windows_have_a_type_of_their_own() -> None:
    # 3 x 10240 values of the window: 2 bytes each, or 4.
    def state(**options: Any) -> int:
        planned = plan("Qwen/Qwen3.5-27B", **GIVEN, **options)
        cache = planned.settings.cache
        return next(
            layer.cache.spec(cache).content_bytes  # type: ignore[attr-defined]
            for layer in planned.facts.layers
            if layer.cache.is_state
        )

    assert state(mamba_cache_dtype="float32") - state() == 3 * 10240 * 2


# Batches


def test_throughput_mode_doubles_what_is_not_given() -> None:
    usual, doubled = plan(LLAMA_8B, **GIVEN), plan(LLAMA_8B, **GIVEN, performance_mode="throughput")
    assert (usual.settings.max_num_batched_tokens, usual.settings.max_num_seqs) == (8192, 1024)
    assert (doubled.settings.max_num_batched_tokens, doubled.settings.max_num_seqs) == (16384, 2048)
    given = plan(LLAMA_8B, **GIVEN, performance_mode="throughput", max_num_seqs=8)
    assert (given.settings.max_num_batched_tokens, given.settings.max_num_seqs) == (16384, 8)


def test_without_chunks_a_step_holds_the_longest_prompt() -> None:
    whole = plan(LLAMA_8B, **GIVEN, enable_chunked_prefill=False).settings
    assert whole.max_num_batched_tokens == 131_072
    short = plan(LLAMA_8B, **GIVEN, enable_chunked_prefill=False, max_model_len=2048).settings
    assert short.max_num_batched_tokens == 8192


# Classes


def test_an_encoder_has_one_block_and_weights_of_two_bytes() -> None:
    model = made_up(model_type="bert", architectures=["BertModel"], torch_dtype="float32", type_vocab_size=2)
    planned = plan(model, gpu="L4")
    assert planned.keeps_nothing
    assert planned.num_blocks == 1
    assert planned.settings.dtype == "float16"
    assert any("keeps no KV cache" in note for note in planned.facts.config.notes)


@pytest.mark.parametrize("release", VERSIONS)
def test_a_class_that_the_release_lacks_is_said(release: str) -> None:
    rules = version_rules(release)
    assert "has no class DbrxXForCausalLM" in unknown_class_note(rules, "DbrxXForCausalLM")
    assert unknown_class_note(rules, "LlamaForCausalLM") == ""
    # Come with 0.33.
    assert ("has no class" in unknown_class_note(rules, "AliceAIForCausalLM")) == (release == "0.32")
