"""What each way of storing weights costs, against what vLLM loads, and what it would not load."""

from typing import Any

import pytest

from kvledger.errors import ConfigError
from kvledger.models.config import ModelConfig, read_config
from kvledger.models.facts import model_facts
from kvledger.models.quantization import UnknownQuantizationError, weight_scheme
from kvledger.models.shards import Ranks, Weight
from kvledger.models.sources import find_in_catalogue, from_catalogue
from kvledger.models.weights import rank_weight_bytes
from kvledger.plan.gpus import GIB
from kvledger.plan.refusal import QUANTIZATION, RefusedError
from tests.unit.plan.planning import made_up, plan

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 640,
    "torch_dtype": "bfloat16",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}


def config(**fields: Any) -> ModelConfig:
    return read_config("test", "test", {**MOE, **fields})


def bytes_of(section: dict[str, Any], path: str, *, expert: bool = False, asked: str = "") -> float:
    scheme = weight_scheme(config(quantization_config=section) if section else config(), asked)
    assert scheme is not None
    return scheme.bytes_of(f"layers.1.{path}", 2, expert=expert)


def rank_gib(name: str, ranks: int, quantization: str = "") -> float:
    row = find_in_catalogue(name)
    assert row is not None, name
    facts = model_facts(from_catalogue(row))
    shared = Ranks(ranks, ranks)
    stages = [range(facts.num_layers)]
    return rank_weight_bytes(facts.config, facts.layers, 2, shared, stages, quantization)[0].bytes / GIB


# GiB of one rank that vLLM's own loader allocated for the checkpoint with all its side files.
LOADED = [
    ("nvidia/MiniMax-M3-NVFP4", 4, 58.3),
    ("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4", 1, 17.6),
    ("openai/gpt-oss-20b", 1, 13.67),
    ("openai/gpt-oss-120b", 1, 65.90),
    ("openai/gpt-oss-120b", 2, 34.32),
    ("openai/gpt-oss-120b", 4, 17.19),
    ("openai/gpt-oss-120b", 8, 8.62),
]


@pytest.mark.parametrize(("name", "ranks", "gib"), LOADED)
def test_weights_of_quantized_checkpoints(name: str, ranks: int, gib: float) -> None:
    assert rank_gib(name, ranks) == pytest.approx(gib, rel=0.005)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4", 4.6),
        ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8", 8.1),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", 4.7),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 8.1),
    ],
)
def test_nemotron_is_counted_in_its_format(name: str, bits: float) -> None:
    """Not in two bytes a weight, which is what a side file without its producer made of it."""
    row = find_in_catalogue(name)
    assert row is not None
    facts = model_facts(from_catalogue(row))
    counted = rank_weight_bytes(facts.config, facts.layers, 2, Ranks(), [range(facts.num_layers)])[0]
    assert counted.bytes * 8 / counted.params == pytest.approx(bits, abs=0.1)
    assert not any("producer" in note for note in facts.config.notes)


def test_bundled_models_are_loadable() -> None:
    """No bundled checkpoint is counted in the model's own type because its format was not understood."""
    for name in ("nvidia/Kimi-K2.5-NVFP4", "nvidia/Gemma-4-31B-IT-NVFP4", "Qwen/Qwen3-32B-FP8-Static-PerTensor"):
        row = find_in_catalogue(name)
        assert row is not None
        assert weight_scheme(from_catalogue(row)) is not None


@pytest.mark.parametrize(
    ("asked", "linear", "expert"),
    [
        ("fp8", 1.0, 1.0),
        ("fp8_per_block", 1 + 4 / 128**2, 1 + 4 / 128**2),
        ("mxfp8", 1 + 1 / 32, 1 + 1 / 32),
        ("int8_per_channel_weight_only", 2.0, 1.0),
        ("nvfp4_per_token", 2.0, 0.5625),
    ],
)
def test_quantized_while_loading(asked: str, linear: float, expert: float) -> None:
    assert bytes_of({}, "self_attn.q_proj", asked=asked) == linear
    assert bytes_of({}, "mlp.experts", expert=True, asked=asked) == expert


def test_fp8_while_loading_is_what_vllm_logs() -> None:
    """vLLM 0.19 on an H100: 8.49 GiB for Llama 3.1 8B, whose embeddings and head stay in bfloat16."""
    assert rank_gib("meta-llama/Llama-3.1-8B", 1, "fp8") == pytest.approx(8.49, rel=0.005)


@pytest.mark.parametrize("method", ["gguf", "hqq", "exl3", "bitsandbytes", "mystery"])
def test_what_vllm_does_not_load_is_refused(method: str) -> None:
    made = config(quantization_config={"quant_method": method})
    with pytest.raises(UnknownQuantizationError, match=f"Unknown quantization method: {method}.*--weights-gib"):
        weight_scheme(made)
    with pytest.raises(ConfigError, match=f"--quantization='{method}': Unknown quantization method.*fp8_per_tensor"):
        weight_scheme(config(), method)


def test_a_plan_refuses_unless_the_weights_were_measured() -> None:
    made = made_up(quantization_config={"quant_method": "gguf"})
    with pytest.raises(RefusedError, match="gguf") as refused:
        plan(made)
    assert refused.value.refusal.kind == QUANTIZATION
    given = plan(made, kv_cache_memory_bytes=GIB)
    assert given.error is None
    assert any("gguf" in note for note in made.config.notes)


@pytest.mark.parametrize(("asked", "fits"), [("gptq_marlin", True), ("gptq", True), ("fp8", False), ("awq", False)])
def test_asked_method_must_be_the_checkpoints(asked: str, fits: bool) -> None:
    made = config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    if fits:
        assert weight_scheme(made, asked) is not None
        return
    with pytest.raises(UnknownQuantizationError, match="does not match"):
        weight_scheme(made, asked)


def test_format_of_checkpoints_is_refused_for_plain_weights() -> None:
    with pytest.raises(ConfigError, match="format of checkpoints"):
        weight_scheme(config(), "gptq")


def test_integers_have_scales_and_maybe_zero_points() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    assert bytes_of(gptq, "self_attn.q_proj") == 0.5 + 2 / 128
    assert bytes_of({**gptq, "sym": False}, "self_attn.q_proj") == 0.5 + 2.5 / 128
    assert bytes_of({"quant_method": "awq", "bits": 4, "group_size": 128}, "self_attn.q_proj") == 0.5 + 2.5 / 128


def test_gptq_and_autoround_have_exceptions_by_module() -> None:
    gptq = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "dynamic": {"-:.*self_attn.*": {}, "+:.*mlp.*": {"bits": 8}},
    }
    assert bytes_of(gptq, "self_attn.q_proj") == 2
    assert bytes_of(gptq, "mlp.experts", expert=True) == 1 + 2 / 128
    rounded = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 128,
        "extra_config": {"model.layers.1.self_attn.q_proj": {"bits": 16}},
    }
    assert bytes_of(rounded, "self_attn.q_proj") == 2
    assert bytes_of(rounded, "self_attn.o_proj") < 1


def test_compressed_tensors_may_have_a_format_for_each_group_of_modules() -> None:
    section = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}},
            "1": {"targets": ["re:.*experts.*"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}},
        },
        "ignore": ["re:.*o_proj"],
    }
    assert bytes_of(section, "self_attn.q_proj") == 1
    assert bytes_of(section, "mlp.experts", expert=True) == 0.5625
    assert bytes_of(section, "self_attn.o_proj") == 2


def test_quark_and_torchao_say_their_types() -> None:
    quark = {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}},
        "layer_quant_config": {"*experts*": {"weight": {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0"}}},
        "exclude": ["lm_head"],
    }
    assert bytes_of(quark, "self_attn.q_proj") == 1
    assert bytes_of(quark, "mlp.experts", expert=True) == 0.5 + 1 / 32
    torchao = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig", "_data": {}}}}
    assert bytes_of(torchao, "self_attn.q_proj") == 1
    int4 = {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 64}}}}
    assert bytes_of({"quant_method": "torchao", **int4}, "self_attn.q_proj") == 0.5 + 4 / 64


def test_experts_of_every_spelling_are_found() -> None:
    listed = {
        "language_model.model.layers.1.block_sparse_moe.experts.*.w1": {"quant_algo": "NVFP4"},
        "backbone.layers.2.mixer.experts.17.down_proj": {"quant_algo": "NVFP4"},
        "model.layers.3.mlp.experts": {"quant_algo": "NVFP4"},
    }
    made = config(quantization_config={"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"})
    made.hf_quant = {"quantization": {"quantized_layers": listed}}
    scheme = weight_scheme(made)
    assert scheme is not None
    assert [scheme.bytes_of(f"layers.{index}.mlp.experts", 2, expert=True) for index in (1, 2, 3, 4)] == [
        0.5625,
        0.5625,
        0.5625,
        2,
    ]


def test_padding_of_sliced_and_of_whole_experts() -> None:
    """2,880 in 2 ranks: 1,440 -> 1,536 of each of 4 experts, or 2,944 of 2 whole ones; the hidden size -> 3,072."""
    weight = Weight("layers.0.mlp.experts", 4 * 3 * 2880 * 2880, 0, linear=True, expert=True, inner=2880, outer=2880)
    assert weight.padded_on_rank(Ranks(2, 2)) == 4 * 3 * 1536 * 3072
    assert weight.padded_on_rank(Ranks(2, 2, whole_experts=True)) == 2 * 3 * 2944 * 3072
