"""Families whose fields decide in a way of their own. The expected layers are by vLLM 0.32's model classes."""

from collections import Counter
from typing import Any

import pytest

from kvledger.errors import ConfigError
from kvledger.models.config import read_config
from kvledger.models.facts import ModelFacts, model_facts
from kvledger.models.layers import AttentionCache, KimiDeltaState, LatentCache, LinearAttentionState
from kvledger.models.shards import Ranks
from kvledger.models.weights import rank_weight_bytes

BASE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 4096,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}


def read(model_type: str, **fields: Any) -> ModelFacts:
    return model_facts(read_config("test", "test", {**BASE, "model_type": model_type, **fields}))


def windows(made: ModelFacts) -> list[int]:
    return [layer.cache.window for layer in made.layers if isinstance(layer.cache, AttentionCache)]


def params(made: ModelFacts) -> int:
    return rank_weight_bytes(made.config, made.layers, 2, Ranks(), [range(made.num_layers)])[0].params


def test_single_layers_override_fields() -> None:
    made = read("llama", head_dim=128, per_layer_config={"03": {"head_dim": 256}, "7": {"num_key_value_heads": 2}})
    shapes = [(c.num_kv_heads, c.head_size) for layer in made.layers if isinstance(c := layer.cache, AttentionCache)]
    assert shapes == [(4, 128)] * 3 + [(4, 256)] + [(4, 128)] * 3 + [(2, 128)]


def test_heads_listed_for_each_layer() -> None:
    made = read("llama", num_key_value_heads=[1, 2, 4, 8, 1, 2, 4, 8])
    heads = [layer.cache.num_kv_heads for layer in made.layers if isinstance(layer.cache, AttentionCache)]
    assert heads == [1, 2, 4, 8] * 2


def test_layers_without_positions_are_chunked_only_where_a_chunk_is_given() -> None:
    flags = [1, 1, 1, 0] * 2
    assert windows(read("smollm3", no_rope_layers=flags)) == [0] * 8
    assert windows(read("muse_glimmer", no_rope_layers=flags, sliding_window=512)) == [512, 512, 512, 0] * 2


def test_windows_in_turn() -> None:
    assert windows(read("plamo3", interleaved_sliding_window=[2048, None])) == [2048, 0] * 4


def test_window_that_counts_only_for_listed_layers() -> None:
    assert windows(read("laguna", sliding_window=512)) == [0] * 8
    assert windows(read("mistral", sliding_window=512)) == [512] * 8


def test_sizes_in_parts_of_the_config() -> None:
    made = read("dbrx", num_key_value_heads=None, attn_config={"kv_n_heads": 2}, ffn_config={"moe_num_experts": 4})
    assert {layer.cache.num_kv_heads for layer in made.layers if isinstance(layer.cache, AttentionCache)} == {2}
    assert params(made) > 8 * 4 * 3 * 1024 * 4096


def test_looped_layers_have_a_cache_for_each_loop_and_weights_once() -> None:
    made = read("iquestloopcoder", loop_num=2, loop_window_size=64)
    assert windows(made) == [0] * 8 + [64] * 8
    assert params(made) == params(read("llama"))


def test_groups_of_layers_with_linear_attention_or_kimi_delta_attention() -> None:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 128, "layer_group_size": 3}
    linear = Counter(type(layer.cache) for layer in read("bailing_hybrid", **latent).layers)
    assert linear == {LinearAttentionState: 6, LatentCache: 2}
    delta = read("bailing_moe_v3", **latent, short_conv_kernel_size=4)
    assert [isinstance(layer.cache, KimiDeltaState) for layer in delta.layers] == [True, True, False] * 2 + [False] * 2


@pytest.mark.parametrize("field", ["H_cycles", "param_sink_number", "mamba_step"])
def test_unknown_families_with_other_caches_are_refused_by_field(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        read("new_family", **{field: 2})


def test_dense_layers_before_the_experts_by_any_name() -> None:
    sizes = [
        params(read("afmoe", num_experts=4, moe_intermediate_size=512, **{field: 2}))
        for field in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    ]
    assert len(set(sizes)) == 1
    assert sizes[0] != params(read("afmoe", num_experts=4, moe_intermediate_size=512))
    listed = ",".join(str(index) for index in range(2, 8))
    assert params(read("afmoe", num_experts=4, moe_intermediate_size=512, moe_layers_enum=listed)) == sizes[0]


def test_an_activation_without_a_gate_drops_a_matrix() -> None:
    gated, plain = params(read("llama")), params(read("llama", hidden_act="relu2"))
    assert gated - plain == 8 * 1024 * 4096


def test_the_outer_config_decides_about_tied_embeddings() -> None:
    text = {**BASE, "model_type": "mistral", "tie_word_embeddings": False}
    sizes = []
    for tied in (True, False):
        root = {"model_type": "vl", "tie_word_embeddings": tied, "text_config": text}
        sizes.append(params(model_facts(read_config("test", "test", root))))
    assert sizes[1] - sizes[0] == 1024 * 1024
