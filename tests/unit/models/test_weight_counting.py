"""Weights: what is shared by ranks and stages, and what a checkpoint's own quantization stores."""

from typing import Any

import pytest

from kvledger.models.config import ModelConfig, read_config
from kvledger.models.facts import model_facts
from kvledger.models.families import model_layers
from kvledger.models.module_names import ModuleSet
from kvledger.models.quantization import weight_scheme
from kvledger.models.shards import Ranks
from kvledger.models.weights import model_weights, rank_weight_bytes

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 640,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
EMBEDDING = 640 * 256
LAYER = 2 * 256 * 256 + 2 * 256 * 64 + 3 * 256 * 512
NORMS = 2 * 256


def config(**fields: Any) -> ModelConfig:
    return read_config("test", "test", {**BASE, **fields})


def counted(made: ModelConfig, ranks: Ranks, stages: list[range]) -> list[tuple[int, int]]:
    return [(part.params, part.bytes) for part in rank_weight_bytes(made, model_facts(made).layers, 2, ranks, stages)]


def test_one_rank_holds_everything() -> None:
    ((params, size),) = counted(config(), Ranks(), [range(4)])
    assert params == 2 * EMBEDDING + 4 * (LAYER + NORMS)
    assert size == 2 * params


def test_tied_embeddings_count_once() -> None:
    ((params, _),) = counted(config(tie_word_embeddings=True), Ranks(), [range(4)])
    assert params == EMBEDDING + 4 * (LAYER + NORMS)


def test_ranks_share_layers_and_copy_the_last_head() -> None:
    ((params, _),) = counted(config(), Ranks(4, 4), [range(4)])
    # Two key/value heads on four ranks: each rank holds a whole one.
    kv = 2 * 256 * 64
    assert params == (2 * EMBEDDING + 4 * (LAYER - kv)) // 4 + 4 * (kv // 2 + NORMS)


def test_stages_hold_their_layers_and_the_ends_the_embeddings() -> None:
    first, second = counted(config(), Ranks(), [range(1), range(1, 4)])
    assert first[0] == EMBEDDING + LAYER + NORMS
    assert second[0] == EMBEDDING + 3 * (LAYER + NORMS)


def test_experts_may_go_over_more_ranks() -> None:
    made = config(model_type="qwen3_moe", num_experts=8, moe_intermediate_size=64, num_experts_per_tok=2)
    alone, spread = (counted(made, Ranks(2, experts), [range(4)])[0][0] for experts in (2, 8))
    assert alone - spread == 4 * 8 * 3 * 256 * 64 * (1 / 2 - 1 / 8)


def test_index_gives_the_exact_total() -> None:
    made = config()
    made.index_bytes = 1_000_000
    ((_, size),) = counted(made, Ranks(), [range(4)])
    assert size == pytest.approx(1_000_000, abs=1)


def test_fp8_checkpoint_keeps_embeddings_and_what_it_lists() -> None:
    quantized = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn.q_proj", "lm_head"]}
    ((params, size),) = counted(config(quantization_config=quantized), Ranks(), [range(4)])
    assert size == params + 2 * EMBEDDING + 4 * NORMS + 256 * 256


def test_four_bits_with_a_scale_for_each_group() -> None:
    quantized = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    scheme = weight_scheme(config(quantization_config=quantized))
    assert scheme is not None
    assert scheme.bytes_of("layers.0.mlp.down_proj", 2) == 0.5 + 2 / 128


@pytest.mark.parametrize(
    ("listed", "key", "covered"),
    [
        ("model.layers.1*", "1.self_attn.q_proj", True),
        ("model.layers.1*", "10.self_attn.q_proj", False),
        ("model.language_model.layers.3.mlp.shared_expert.up_proj", "3.mlp.shared_experts.gate_up_proj", True),
        ("re:.*self_attn.*", "3.self_attn.o_proj", True),
        ("*.mlp.shared_expert.*", "7.mlp.shared_experts.down_proj", True),
        ("lm_head", "lm_head", True),
        ("gate", "3.mlp.gate", True),
        ("mtp.layers.0*", "0.self_attn.q_proj", False),
    ],
)
def test_listed_modules_cover_ours(listed: str, key: str, covered: bool) -> None:
    assert ModuleSet([listed]).covers(key) is covered


# Config of an encoder, and the parameters that its model card gives, in millions (without a head).
ENCODERS = {
    "bert": (
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
        | {"vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2},
        109.5,
    ),
    "xlm-roberta": (
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        | {"vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1},
        560,
    ),
    "modernbert": (
        {"hidden_size": 768, "num_hidden_layers": 22, "num_attention_heads": 12, "intermediate_size": 1152}
        | {"vocab_size": 50368, "max_position_embeddings": 8192},
        149,
    ),
}


@pytest.mark.parametrize("model_type", ENCODERS)
def test_encoders_keep_nothing_and_have_the_weights_of_their_model_cards(model_type: str) -> None:
    fields, millions = ENCODERS[model_type]
    made = read_config("encoder", "test", {"model_type": model_type, "architectures": ["TheModel"], **fields})
    layers = tuple(model_layers(made))
    assert layers == ()
    params = sum(weight.params for weight in model_weights(made, layers))
    assert params / 1e6 == pytest.approx(millions, rel=0.01)
