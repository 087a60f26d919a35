"""Adapters and offloading: what a GPU holds more, or less, than the model."""

from dataclasses import replace
from typing import Any

import pytest

from kvledger.errors import ConfigError
from kvledger.models.adapters import Adapters
from kvledger.models.shards import Ranks
from kvledger.models.weights import model_weights
from kvledger.plan.ask import Asked, build_request
from kvledger.plan.offloading import host_cache
from kvledger.plan.options import EngineOptions
from kvledger.plan.plan import Plan, make_plan
from tests.unit.plan.planning import LLAMA_8B, facts, made_up, plan

GIB = 1 << 30


def weights(model: str, **options: Any) -> int:
    return plan(model, **options).budgets[0].weight_bytes


def extra(model: str, tp: int = 1, **options: Any) -> int:
    return weights(model, tensor_parallel_size=tp, enable_lora=True, **options) - weights(
        model, tensor_parallel_size=tp
    )


def test_a_slot_of_rank_16_in_every_layer_of_llama() -> None:
    # A layer: q, k, v, o, gate and up, down; in + out of each, times the rank.
    ins_and_outs = (4096 + 4096) + 2 * (4096 + 1024) + (4096 + 4096) + 2 * (4096 + 14336) + (14336 + 4096)
    layers = 32 * 16 * ins_and_outs
    assert layers == 41_943_040
    ends = 2 * 16 * (4096 + 128_256)
    assert extra(LLAMA_8B) == (layers + ends) * 2
    assert extra(LLAMA_8B, max_loras=4, max_lora_rank=64) == (layers + ends) * 2 * 4 * 4


def test_ranks_share_one_of_the_two_matrices_or_both() -> None:
    ends = 2 * 16 * (4096 + 128_256)
    # On four ranks: what is whole is 4,096 in every matrix, what is divided the other size.
    one = (4096 + 1024) + 2 * (4096 + 256) + (4096 + 1024) + (2 * 4096 + 7168) + (4096 + 3584)
    both = (1024 + 1024) + 2 * (1024 + 256) + (1024 + 1024) + (2 * 1024 + 7168) + (1024 + 3584)
    assert extra(LLAMA_8B, 4) == (32 * 16 * one + ends) * 2
    assert extra(LLAMA_8B, 4, fully_sharded_loras=True) == (32 * 16 * both + ends) * 2


def test_every_expert_has_room_too() -> None:
    # 48 layers of 128 experts, of three matrices between 2,048 and 768.
    experts = 48 * 128 * 3 * 16 * (2048 + 768) * 2
    assert experts < extra("Qwen/Qwen3-30B-A3B") < experts * 1.05


def test_adapters_double_the_graphs() -> None:
    assert plan(LLAMA_8B, enable_lora=True).budgets[0].terms[2].detail == "102 + 102 graphs of 32 layers"


def test_offloaded_weights_leave_room_for_the_cache() -> None:
    bare, moved = plan(LLAMA_8B, gpu="RTX 4090"), plan(LLAMA_8B, gpu="RTX 4090", cpu_offload_gb=4)
    assert moved.budgets[0].cache.bytes - bare.budgets[0].cache.bytes == 4 * GIB
    assert "4.00 GiB in the host's memory" in moved.budgets[0].terms[0].detail


def test_no_more_is_offloaded_than_the_layers_have() -> None:
    # 32 layers of 218,103,808 parameters and two norms; embeddings and head stay.
    assert weights(LLAMA_8B, cpu_offload_gb=100) == 2 * 128_256 * 4096 * 2
    assert weights(LLAMA_8B) - weights(LLAMA_8B, cpu_offload_gb=100) == 32 * (218_103_808 + 2 * 4096) * 2


def test_each_rank_offloads_as_much() -> None:
    assert (
        weights(LLAMA_8B, tensor_parallel_size=2) - weights(LLAMA_8B, tensor_parallel_size=2, cpu_offload_gb=2)
        == 2 * GIB
    )


def test_groups_of_layers_stay_behind_buffers_of_those_that_are_fetched() -> None:
    layer = (218_103_808 + 2 * 4096) * 2
    # The last two of every eight of 32 layers are eight; one is always on the card.
    options = {"offload_group_size": 8, "offload_num_in_group": 2}
    assert weights(LLAMA_8B) - weights(LLAMA_8B, **options) == (8 - 1) * layer
    assert weights(LLAMA_8B) - weights(LLAMA_8B, **options, offload_prefetch_step=3) == (8 - 3) * layer


def test_the_host_keeps_blocks_of_all_ranks() -> None:
    def kept(found: Plan) -> int:
        cache = host_cache(found.request.options, found.workers)
        assert cache is not None
        return cache.num_blocks

    # 2 MiB a block, on one rank or over two.
    assert kept(plan(LLAMA_8B, kv_offloading_size=10)) == 5120
    assert kept(plan(LLAMA_8B, kv_offloading_size=10, tensor_parallel_size=2)) == 5120
    assert kept(plan(LLAMA_8B, kv_offloading_size=10, pipeline_parallel_size=2)) == 5120
    assert host_cache(EngineOptions(), plan(LLAMA_8B).workers) is None


def graphs_of(**options: Any) -> str:
    return plan(LLAMA_8B, **options).budgets[0].terms[2].detail


def test_graphs_are_those_of_the_sizes_that_are_captured() -> None:
    assert graphs_of(cudagraph_capture_sizes=(1, 2, 4)) == "3 + 3 graphs of 32 layers"
    # 1, 2, 4 and every 8 up to 64.
    assert graphs_of(max_cudagraph_capture_size=64) == "11 + 11 graphs of 32 layers"
    # Of four sequences, batches up to 4 only decode, and up to 8 are captured.
    assert graphs_of(max_num_seqs=4) == "4 + 3 graphs of 32 layers"
    fewer, usual = plan(LLAMA_8B, cudagraph_capture_sizes=(8,)), plan(LLAMA_8B)
    assert fewer.num_blocks > usual.num_blocks


def test_the_language_model_alone_has_no_towers() -> None:
    name = "Qwen/Qwen3-VL-8B-Instruct"
    asked = Asked(name, "H100", None, EngineOptions(max_model_len=8192))
    whole = make_plan(build_request(asked))
    alone = make_plan(build_request(replace(asked, options=replace(asked.options, language_model_only=True))))
    # The vision tower has 0.58 billion parameters, and its largest image is the peak no more.
    assert whole.budgets[0].weight_bytes - alone.budgets[0].weight_bytes == pytest.approx(0.576e9 * 2, rel=0.02)
    assert "image" not in alone.budgets[0].terms[1].detail
    assert alone.budgets[0].cache.bytes > whole.budgets[0].cache.bytes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_lora_rank": 12}, "use one of 1, 8, 16, 32"),
        ({"max_loras": 0}, "must be at least 1"),
        ({"cpu_offload_gb": -1.0}, "less than nothing"),
        ({"offload_group_size": 2, "offload_num_in_group": 3}, "more than --offload-group-size 2"),
    ],
)
def test_sizes_that_no_engine_takes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineOptions(**options)


SMALL: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, 229_376),
        # The router is adapted, too.
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8,
          "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}, 434_688),
        # Its class takes no adapters of embeddings.
        ({"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "sliding_window": 64,
          "sliding_window_pattern": 2, "tie_word_embeddings": True}, 155_648),
    ],
)  # fmt: skip
def test_slots_have_the_elements_that_vllm_lays_out(fields: dict[str, Any], params: int) -> None:
    """Two slots of rank 16: the sizes of the tensors that vLLM 0.32 held after it had started with such a model."""
    model = made_up(**{**SMALL, **fields})
    found = model_weights(model.config, model.layers)
    assert Adapters(2, 16).params(model.config, found, Ranks()) == params


def test_slots_of_a_real_model() -> None:
    model = facts("HuggingFaceTB/SmolLM2-135M-Instruct")
    found = model_weights(model.config, model.layers)
    assert Adapters(2, 16).params(model.config, found, Ranks()) == 12_951_552
