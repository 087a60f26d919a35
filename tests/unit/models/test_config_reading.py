"""Reading configs: nesting, other names of fields, missing fields, and where configs come from."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvledger.core.groups.spec import MambaSpec, MLAAttentionSpec
from kvledger.errors import ConfigError
from kvledger.models.config import read_config
from kvledger.models.facts import ModelFacts, model_facts
from kvledger.models.layers import (
    AttentionCache,
    CacheSettings,
    GatedDeltaNetState,
    LatentCache,
    LinearAttentionState,
    Mamba1State,
    ShortConvState,
)
from kvledger.models.sources import catalogue, find_in_catalogue, load_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def read(**fields: Any) -> ModelFacts:
    config = {**BASE, **fields}
    return model_facts(
        read_config("test", "test", {name: value for name, value in config.items() if value is not None})
    )


def attention(made: ModelFacts, index: int = 0) -> AttentionCache:
    cache = made.layers[index].cache
    assert isinstance(cache, AttentionCache)
    return cache


def test_heads_and_head_size_default_to_the_query_heads() -> None:
    cache = attention(read())
    assert (cache.num_kv_heads, cache.head_size) == (8, 128)


def test_head_dim_of_the_config_counts_even_when_odd() -> None:
    assert attention(read(head_dim=80)).head_size == 80


def test_nested_text_config_is_found() -> None:
    text = {**BASE, "num_hidden_layers": 7}
    made = model_facts(read_config("vl", "test", {"model_type": "vl", "architectures": ["X"], "text_config": text}))
    assert len(made.layers) == 7


def test_twice_nested_config_is_found() -> None:
    text = {"thinker_config": {"text_config": {**BASE, "num_hidden_layers": 5}}}
    assert len(model_facts(read_config("omni", "test", text)).layers) == 5


@pytest.mark.parametrize(("name", "value"), [("n_layer", 3), ("num_layers", 3)])
def test_other_names_of_a_field(name: str, value: int) -> None:
    assert len(read(num_hidden_layers=None, **{name: value}).layers) == 3


def test_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        read(model_type="qwen3", num_hidden_layers=None)


def test_class_default_is_noted() -> None:
    made = read(num_hidden_layers=None)
    assert len(made.layers) == 32
    assert any("class default" in note for note in made.config.notes)


def test_wrong_type_names_field_and_value() -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers='many'"):
        read(num_hidden_layers="many")


def test_window_that_is_switched_off_is_no_window() -> None:
    assert attention(read(model_type="qwen2", sliding_window=1024, use_sliding_window=False)).window == 0


def test_window_on_applies_from_max_window_layers_on() -> None:
    made = read(model_type="qwen2", sliding_window=1024, use_sliding_window=True, max_window_layers=0)
    assert attention(made).window == 1024
    made = read(model_type="qwen2", sliding_window=1024, use_sliding_window=True, max_window_layers=4)
    assert attention(made).window == 0


def test_layer_types_decide_over_the_family() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    made = read(model_type="gemma2", sliding_window=512, layer_types=kinds)
    assert [attention(made, index).window for index in range(4)] == [0, 512, 0, 512]


def test_family_pattern_where_layer_types_are_missing() -> None:
    made = read(model_type="gemma3_text", sliding_window=512, num_hidden_layers=12)
    assert [index for index in range(12) if not attention(made, index).window] == [5, 11]


def test_cohere_windows_count_the_current_token() -> None:
    assert attention(read(model_type="cohere2", sliding_window=4096)).window == 4097


def test_unknown_kind_of_layer_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="warp_attention"):
        read(layer_types=["warp_attention"] * 4)


def test_unknown_family_says_what_it_assumed() -> None:
    made = read(model_type="brandnew")
    assert len(made.layers) == 4
    assert any("brandnew is not a known family" in note for note in made.config.notes)


def test_unknown_family_with_another_cache_is_refused_by_field() -> None:
    with pytest.raises(ConfigError, match="ssm_window"):
        read(model_type="brandnew", ssm_window=5)


def test_multi_query_attention_has_one_head() -> None:
    assert attention(read(model_type="falcon", multi_query=True)).num_kv_heads == 1


def test_keys_and_values_of_different_size() -> None:
    made = read(
        model_type="mimo_v2_flash",
        head_dim=192,
        v_head_dim=128,
        num_key_value_heads=4,
        hybrid_layer_pattern=[0, 1, 1, 1],
        sliding_window_size=128,
        swa_head_dim=192,
        swa_v_head_dim=128,
        swa_num_key_value_heads=8,
        swa_num_attention_heads=8,
    )
    full, windowed = attention(made), attention(made, 1)
    assert (full.num_kv_heads, full.head_size, full.head_size_v, full.window) == (4, 192, 128, 0)
    assert (windowed.num_kv_heads, windowed.head_size_v, windowed.window) == (8, 128, 128)


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


def test_latent_attention_by_its_field() -> None:
    made = read(model_type="deepseek_v3", **LATENT)
    assert made.layers[0].cache == LatentCache(576)


def test_sparse_attention_has_index_keys_where_it_selects() -> None:
    sparse = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 4, "q_lora_rank": 512}
    made = read(model_type="deepseek_v32", **LATENT, **sparse)
    assert [layer.role for layer in made.layers[:2]] == ["indexer", "self_attn"]
    keys = made.layers[0].cache.spec(CacheSettings(64))
    assert isinstance(keys, MLAAttentionSpec)
    assert keys.page_size_bytes == 64 * 132
    some = read(model_type="glm_moe_dsa", **LATENT, **sparse, index_topk_freq=2, index_skip_topk_offset=2)
    assert [layer.index for layer in some.layers if layer.role == "indexer"] == [0, 1, 3]


def test_jamba_has_mamba_1_states_around_its_attention() -> None:
    made = read(
        model_type="jamba",
        attn_layer_period=4,
        attn_layer_offset=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
    )
    assert [layer.role for layer in made.layers] == ["mixer", "mixer", "self_attn", "mixer"]
    state = made.layers[0].cache
    assert isinstance(state, Mamba1State)
    assert state.shapes(2) == ((3, 1024), (1024, 16))


def test_gated_delta_net_by_its_fields() -> None:
    made = read(
        model_type="qwen3_next",
        full_attention_interval=2,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
    )
    state = made.layers[0].cache
    assert isinstance(state, GatedDeltaNetState)
    assert state.shapes(1) == ((3, 512), (4, 64, 64))
    spec = state.spec(CacheSettings(16, checkpointing=frozenset({"gdn"}), cache_mode="align"))
    assert isinstance(spec, MambaSpec)
    assert spec.max_admission_blocks(1000, 0) == 3


def test_short_convolutions_keep_their_last_inputs() -> None:
    kinds = ["conv", "full_attention", "conv", "conv"]
    made = read(model_type="lfm2", layer_types=kinds, conv_L_cache=3, conv_dim=1024)
    assert isinstance(made.layers[0].cache, ShortConvState)
    assert made.layers[0].cache.shapes(1) == ((2, 1024),)


def test_lightning_attention_keeps_one_matrix_a_head() -> None:
    made = read(model_type="minimax_text_01", attn_type_list=[0, 0, 0, 1])
    assert made.layers[0].cache == LinearAttentionState("auto", 8, 128)
    assert isinstance(made.layers[3].cache, AttentionCache)


def test_state_without_sizes_names_the_fields_it_needs() -> None:
    with pytest.raises(ConfigError, match="ssm_state_size"):
        read(layer_types=["mamba"] * 4)


def test_rope_scaling_multiplies_the_length_unless_it_is_in_it() -> None:
    assert read(rope_scaling={"type": "linear", "factor": 4.0}).context.default == 16_384
    assert read(rope_scaling={"rope_type": "yarn", "factor": 4.0}).context.default == 4096
    long = read(rope_scaling={"type": "longrope"}, original_max_position_embeddings=1024)
    assert (long.context.default, long.context.longest) == (1024, 4096)


def test_kv_type_of_the_checkpoint() -> None:
    scheme = {"num_bits": 8, "type": "float"}
    made = read(quantization_config={"quant_method": "modelopt", "kv_cache_scheme": scheme})
    assert made.kv_scheme is not None
    assert made.kv_scheme.dtype == "fp8_e4m3"
    assert read(quantization_config={"quant_method": "fp8"}).kv_scheme is None


def test_file_directory_and_side_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps(
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
        )
    )
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 12345}}))
    config = load_config(str(tmp_path))
    assert config.index_bytes == 12345
    made = model_facts(config)
    assert made.kv_scheme is not None
    assert made.kv_scheme.dtype == "fp8_e4m3"
    assert load_config(str(tmp_path / "config.json")).source.endswith("config.json")


@pytest.mark.parametrize("text", ["", "[1]", "{", "{}"])
def test_broken_file_says_what_it_needs(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(str(tmp_path))


def test_unknown_name_says_what_is_accepted_and_what_is_near() -> None:
    with pytest.raises(ConfigError, match=r"no such file.*Qwen3"):
        load_config("Qwen3-99B")
    with pytest.raises(ConfigError, match="not in the bundled catalogue"):
        load_config("nobody/Nothing-1B", offline=True)


def test_catalogue_rows_have_a_source_and_a_grade() -> None:
    rows = list(catalogue())
    assert len(rows) >= 197
    assert all(row.source and row.grade for row in rows)


def test_catalogue_finds_names_in_either_spelling() -> None:
    for name in ("meta-llama/Llama-3.1-8B", "META-LLAMA/meta-llama-3.1-8b", "Meta-Llama-3.1-8B"):
        row = find_in_catalogue(name)
        assert row is not None
        assert row.name == "meta-llama/Meta-Llama-3.1-8B"


def test_row_that_is_no_copy_is_marked() -> None:
    assert any("not a copy" in note for note in load_config("openai-community/gpt2").notes)


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("qwen3-8c", "Qwen/Qwen3-8B"),
        ("meta-lama/Llama-3.1-70B", "meta-llama/Meta-Llama-3.1-70B"),
        ("deepsek-v3", "deepseek-ai/DeepSeek-V3"),
    ],
)
def test_similar_names_are_those_that_are_spelled_alike(asked: str, near: str) -> None:
    with pytest.raises(ConfigError, match=near):
        load_config(asked, offline=True)


def test_a_name_like_no_other_has_no_similar_ones() -> None:
    with pytest.raises(ConfigError) as error:
        load_config("zzzz", offline=True)
    assert "similar" not in str(error.value)


@pytest.mark.parametrize("name", ["ibm-fms/Bamba-9.8b-2.2T-hf", "ibm-ai-platform/Bamba-9B-v2"])
def test_bamba_attends_in_three_layers(name: str) -> None:
    layers = model_facts(load_config(name)).layers
    assert [layer.index for layer in layers if not layer.cache.is_state] == [9, 18, 27]
    assert sum(layer.cache.is_state for layer in layers) == 29
