"""The feed-forward part of a decoder layer: dense, routed experts, shared experts, or none."""

from collections.abc import Iterator, Mapping

from kvledger.core.units import round_up
from kvledger.errors import wrong_value
from kvledger.models.config import ModelConfig, integer
from kvledger.models.patterns import NOTHING, attention_kinds, has_two_blocks
from kvledger.models.shards import WHOLE, Weight, linear

# Families whose feed-forward part has two matrices instead of three (no gate).
UNGATED = (
    "gpt2", "opt", "whisper", "falcon", "bloom", "mpt", "gpt_neox", "gptj", "starcoder2", "gpt_bigcode", "phi",
    "nemotron", "nemotron_h", "bert", "roberta", "xlm-roberta",
)  # fmt: skip
# Activations that stand alone: a layer with one of them has no gate, whatever its family.
UNGATED_ACTIVATIONS = ("relu2", "xielu")
# Families whose experts have biases.
BIASED_EXPERTS = ("gpt_oss",)


def feed_forward(config: ModelConfig, index: int) -> Iterator[Weight]:
    """Weights of the feed-forward part of one decoder layer."""
    if config.items("layers_block_type") or config.string("hybrid_override_pattern"):
        yield from pattern_feed_forward(config, index)
        return
    if config.items("block_configs"):
        yield from searched_feed_forward(config, index)
        return
    if config.items("hybrid_layer_ids") or config.raw("num_attention_heads") is None:
        return
    if is_sparse_layer(config, index):
        yield from experts(config, index)
        if has_two_blocks(config):
            yield from mlp(config, index, "mlps", 2 * config.need("intermediate_size"))
        if not config.flag("enable_moe_block"):
            return
    inter = dense_size(config, index)
    if inter and config.flag("use_double_wide_mlp") and reuses_cache(config, index):
        inter *= 2
    if inter:
        yield from mlp(config, index, "mlp", inter)


def reuses_cache(config: ModelConfig, index: int) -> bool:
    """Whether the layer is one of the last ones, which read the cache of an earlier layer (Gemma 3n, Gemma 4)."""
    return index >= config.need("num_hidden_layers") - (config.number("num_kv_shared_layers", 0) or 0)


def mlp(config: ModelConfig, index: int, name: str, inter: int, parts: int = 0) -> Iterator[Weight]:
    hidden = config.need("hidden_size")
    up = 2 if is_gated(config) else 1
    kwargs = (parts,) if parts else ()
    yield linear(index, f"{name}.gate_up_proj" if up == 2 else f"{name}.up_proj", up * hidden * inter, *kwargs)
    yield linear(index, f"{name}.down_proj", hidden * inter, *kwargs)


def is_gated(config: ModelConfig) -> bool:
    """Whether feed-forward parts multiply by a gate, which is a third matrix."""
    return config.model_type not in UNGATED and config.string("hidden_act") not in UNGATED_ACTIVATIONS


def dense_size(config: ModelConfig, index: int) -> int:
    """Width of a dense feed-forward part; four times the hidden size where the config does not say."""
    widths = config.items("intermediate_size")
    if widths:
        if index >= len(widths):
            problem = f"{len(widths)} widths, and there is a layer {index}"
            raise wrong_value("intermediate_size", widths, problem, f"correct it in the config of {config.name}")
        width = widths[index]
        return width if isinstance(width, int) else 0
    if (
        config.number("num_local_experts", 0) == 0
        and config.has("shared_intermediate_size")
        and not config.has("moe_layer_freq")
    ):
        return config.need("shared_intermediate_size")
    for name in ("dense_intermediate_size", "intermediate_size_mlp"):
        given = config.number(name)
        if given:
            return given
    if config.flag("block_auto_adjust_ff_dim"):
        return adjusted_size(config)
    given = config.number("intermediate_size")
    if given is not None:
        return given
    return 4 * config.need("hidden_size") if not config.has("num_experts") and not config.has("state_size") else 0


def adjusted_size(config: ModelConfig) -> int:
    """LFM2's width: two thirds of the stated one, times a factor, rounded up to a multiple."""
    stated = config.number("block_ff_dim") or config.need("intermediate_size")
    width = int(config.fraction("block_ffn_dim_multiplier", 1.0) * (2 * stated // 3))
    return round_up(width, config.number("block_multiple_of", 256) or 256)


def num_experts(config: ModelConfig) -> int:
    return config.number("num_experts", 0) or 0


def is_sparse_layer(config: ModelConfig, index: int) -> bool:
    """Whether the layer has routed experts."""
    if num_experts(config) < 1:
        return False
    kinds = config.items("mlp_layer_types")
    if kinds:
        return str(kinds[index]) not in ("dense",)
    if index < (config.number("first_k_dense_replace", 0) or 0) or index in config.integers("mlp_only_layers"):
        return False
    listed = config.string("moe_layers_enum")
    if listed:
        return str(index) in listed.split(",")
    frequencies = config.integers("moe_layer_freq")
    if frequencies:
        return frequencies[index] != 0
    every = config.number("interleave_moe_layer_step") or config.number("decoder_sparse_step") or 0
    if every:
        return (index + 1) % every == 0
    every = config.number("expert_layer_period") or 0
    if every:
        return index % every == (config.number("expert_layer_offset", 0) or 0)
    step = config.raw("moe_layer_freq")
    return index % step == 0 if isinstance(step, int) and step > 0 else True


def experts(config: ModelConfig, index: int) -> Iterator[Weight]:
    """Routed experts, their router and the shared experts."""
    hidden = config.need("hidden_size")
    inter = config.number("moe_intermediate_size") or config.number("expert_ffn_hidden_size") or 0
    inter = inter or config.need("intermediate_size")
    count = num_experts(config)
    # Experts may work on a narrower hidden state than the rest of the model.
    width = config.number("routed_expert_hidden_size") or config.number("moe_latent_size") or hidden
    matrices = 3 if is_gated(config) else 2
    # Beside a dense part (Gemma 4), experts are a module of their own.
    name = "experts" if config.flag("enable_moe_block") else "mlp.experts"
    params = count * matrices * width * inter
    yield Weight(f"layers.{index}.{name}", params, index, linear=True, expert=True, inner=inter, outer=width)
    if config.model_type in BIASED_EXPERTS:
        yield Weight(f"layers.{index}.{name}.bias", count * ((matrices - 1) * inter + width), index, expert=True)
    yield Weight(f"layers.{index}.mlp.gate", hidden * count, index, WHOLE)
    if width != hidden:
        yield linear(index, "mlp.latent_proj", 2 * hidden * width, WHOLE)
    shared = shared_size(config, inter)
    if shared:
        yield from mlp(config, index, "mlp.shared_experts", shared)


def shared_size(config: ModelConfig, inter: int) -> int:
    """Width of the shared experts together; 0 where there are none."""
    for name in ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim"):
        given = config.number(name)
        if given:
            return given
    count = config.number("num_shared_experts") or 0
    if count:
        return count * (config.number("moe_shared_expert_size") or config.number("shared_intermediate_size") or inter)
    if config.model_type in ("llama4_text", "hunyuan_v1_moe"):
        return config.need("intermediate_size")
    return config.number("shared_intermediate_size", 0) or 0


def pattern_feed_forward(config: ModelConfig, index: int) -> Iterator[Weight]:
    """Models whose feed-forward parts are layers of their own (NemotronH)."""
    kinds = attention_kinds(config)
    if kinds[index] != NOTHING:
        return
    names = config.items("layers_block_type")
    pattern = config.string("hybrid_override_pattern") or ""
    routed = str(names[index]) == "moe" if names else pattern[index] == "E"
    if routed:
        yield from experts(config, index)
    else:
        yield from mlp(config, index, "mixer", config.need("intermediate_size"))


def searched_feed_forward(config: ModelConfig, index: int) -> Iterator[Weight]:
    """A width for each block, found by architecture search: a multiple of the hidden size, rounded to 256."""
    block = config.items("block_configs")[index]
    given = block.get("ffn") if isinstance(block, Mapping) else None
    if not isinstance(given, Mapping) or given.get("no_op"):
        return
    hidden = config.need("hidden_size")
    if given.get("replace_with_linear"):
        yield linear(index, "mlp", hidden * hidden)
        return
    multiple = given.get("ffn_mult")
    inter = integer(given, "intermediate_size")
    if isinstance(multiple, int | float):
        inter = -(-int(2 * multiple * hidden / 3) // 256) * 256
    yield from mlp(config, index, "mlp", inter)
