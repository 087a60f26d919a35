"""Parameters and weight bytes of a model, counted from its config: what each rank and pipeline stage holds.

Every linear layer is a Weight with its path, so a checkpoint's own quantization (and its exceptions) can be applied.
Biases and most norms are left out: they are under 0.1 % of any model here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvledger.core.units import round_up
from kvledger.models.config import ModelConfig, integer
from kvledger.models.experts import feed_forward
from kvledger.models.families import ENCODERS
from kvledger.models.layers import (
    AttentionCache,
    CrossCache,
    GatedDeltaNetState,
    KimiDeltaState,
    LatentCache,
    Layer,
    LinearAttentionState,
    Mamba1State,
    Mamba2State,
    ShortConvState,
)
from kvledger.models.patterns import SLIDING, attention_kinds
from kvledger.models.quantization import OUTPUT_HEAD, WeightScheme, checkpoint_method, weight_scheme
from kvledger.models.shards import ANY, FIRST_STAGE, LAST_STAGE, WHOLE, Ranks, Weight, heads, linear
from kvledger.models.towers import tower_weights

# vLLM pads the vocabulary to a multiple of this before it is shared out.
VOCAB_STEP = 64
# Families whose embeddings every rank keeps whole.
WHOLE_EMBEDDINGS = ("whisper",)
# Families that tie input and output embeddings unless the config says otherwise.
TIED_BY_DEFAULT = (
    "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "cohere", "cohere2", "gpt2", "opt", "whisper",
    "bloom", "falcon", "minicpm", "minicpm3", "starcoder2", "granitemoehybrid", "lfm2", "lfm2_moe", "mpt", "phi3small",
)  # fmt: skip

# Families whose positions are learned.
LEARNED_POSITIONS = ("gpt2", "opt", "gpt_bigcode", "whisper", "bert", "roberta", "xlm-roberta")

# Families whose attention output has a gate where the config does not say.
GATED_ATTENTION = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "afmoe")


@dataclass(frozen=True)
class WeightBytes:
    """Weights of one rank. `exact`: from the checkpoint's index, not counted."""

    params: int
    bytes: int
    source: str


def model_weights(config: ModelConfig, layers: tuple[Layer, ...]) -> list[Weight]:
    """Every weight of a model."""
    return [*embeddings(config), *decoder_weights(config, layers), *tower_weights(config)]


def rank_weight_bytes(
    config: ModelConfig,
    layers: tuple[Layer, ...],
    dtype_bytes: int,
    ranks: Ranks,
    stages: list[range],
    quantization: str = "",
) -> list[WeightBytes]:
    """Parameters and bytes on one rank of each pipeline stage. `quantization`: what `--quantization` asks for, if any.

    A checkpoint's index gives the exact total; the count from the config then only says how it is shared out.
    """
    scheme = weight_scheme(config, quantization)
    weights = model_weights(config, layers)
    counted = [stage_bytes(weights, scheme, dtype_bytes, ranks, stage, stages) for stage in stages]
    is_changed = scheme is not None and checkpoint_method(config) == ""
    if config.index_bytes is None or is_changed:
        stored = f" as {scheme.method}" if scheme else ""
        return [WeightBytes(params, int(size), f"counted from the config{stored}") for params, size in counted]
    whole = sum(weight.params * weight_bytes(weight, scheme, dtype_bytes) for weight in weights)
    scale = config.index_bytes / whole if whole else 1.0
    return [WeightBytes(params, int(size * scale), "the checkpoint's index") for params, size in counted]


def layer_bytes(
    config: ModelConfig,
    layers: tuple[Layer, ...],
    dtype_bytes: int,
    ranks: Ranks,
    stage: range,
    quantization: str = "",
) -> int:
    """Bytes of a stage's decoder layers on one rank, without embeddings, output head and towers."""
    weights = [weight for weight in model_weights(config, layers) if weight.layer >= 0]
    return int(stage_bytes(weights, weight_scheme(config, quantization), dtype_bytes, ranks, stage, [stage])[1])


def stage_bytes(
    weights: list[Weight],
    scheme: WeightScheme | None,
    dtype_bytes: int,
    ranks: Ranks,
    stage: range,
    stages: list[range],
) -> tuple[int, float]:
    params, total = 0, 0.0
    for weight in weights:
        at_end = weight.layer == LAST_STAGE and stage == stages[-1]
        if not (weight.layer in stage or (weight.layer == FIRST_STAGE and stage == stages[0]) or at_end):
            continue
        padded = scheme is not None and scheme.pads_experts
        count = weight.padded_on_rank(ranks) if padded else weight.on_rank(ranks)
        params += count
        total += count * weight_bytes(weight, scheme, dtype_bytes)
    return params, total


def weight_bytes(weight: Weight, scheme: WeightScheme | None, dtype_bytes: int) -> float:
    if scheme is None or not weight.linear:
        return dtype_bytes
    return scheme.bytes_of(weight.path, dtype_bytes, expert=weight.expert)


def is_tied(config: ModelConfig) -> bool:
    """Whether the output embedding is the input embedding; the outer config of a multimodal model decides."""
    if config.model_type in ENCODERS:
        # What it makes of a text is a vector, so there is no output embedding at all.
        return True
    outer = config.root.get("tie_word_embeddings")
    tied = outer if isinstance(outer, bool) else config.flag("tie_word_embeddings")
    return config.model_type in TIED_BY_DEFAULT if tied is None else tied


def embeddings(config: ModelConfig) -> Iterator[Weight]:
    """Token embeddings, positions where they are learned, and the output head unless it is tied."""
    hidden = config.need("hidden_size")
    size = round_up(config.need("vocab_size"), VOCAB_STEP) * hidden
    yield Weight("embed_tokens", size, FIRST_STAGE, WHOLE if config.model_type in WHOLE_EMBEDDINGS else ANY)
    if not is_tied(config):
        yield Weight(OUTPUT_HEAD, size, LAST_STAGE, linear=True)
    kinds = config.number("type_vocab_size", 0) or 0
    if config.model_type in ENCODERS and kinds:
        yield Weight("token_type_embeddings", kinds * hidden, FIRST_STAGE, WHOLE)
    if config.model_type in LEARNED_POSITIONS:
        positions = config.number("max_position_embeddings") or config.number("n_positions") or 0
        positions = positions or config.number("max_target_positions") or 0
        yield Weight("embed_positions", positions * hidden, FIRST_STAGE, WHOLE)
    per_layer = config.number("hidden_size_per_layer_input", 0) or 0
    if per_layer:
        vocab = config.number("vocab_size_per_layer_input") or config.need("vocab_size")
        width = per_layer * config.need("num_hidden_layers")
        yield Weight("embed_tokens_per_layer", vocab * width, FIRST_STAGE)
        yield Weight("per_layer_model_projection", hidden * width, FIRST_STAGE)


def decoder_weights(config: ModelConfig, layers: tuple[Layer, ...]) -> Iterator[Weight]:
    """Attention or states, and the feed-forward part, of every decoder layer."""
    hidden = config.need("hidden_size")
    seen_shared = False
    cached = layers or tuple(bare_layers(config))
    for layer in cached:
        if layer.role == "shared_attn":
            yield from zamba_shared(config, layer, seen_shared)
            seen_shared = True
            continue
        if config.has("loop_num") and layer.role != "self_attn.0":
            continue  # The same weights run again.
        yield from mixer_weights(config, layer)
    for layer in reusing_layers(config, layers):
        yield from attention_weights(config, layer.index, "self_attn", query_only(config, layer))
    for index in range(config.need("num_hidden_layers") if not config.items("layers_block_type") else 0):
        yield from feed_forward(config, index)
    if config.items("layers_block_type"):
        for index in range(len(config.items("layers_block_type"))):
            yield from feed_forward(config, index)
    yield from extra_weights(config, hidden)


def bare_layers(config: ModelConfig) -> Iterator[Layer]:
    """Attention layers of an encoder, which caches nothing and still has weights."""
    cache = AttentionCache(config.num_key_value_heads, config.head_dim)
    for index in range(config.need("num_hidden_layers")):
        yield Layer(index, "self_attn", cache)


def reusing_layers(config: ModelConfig, layers: tuple[Layer, ...]) -> list[Layer]:
    """Layers that read the cache of an earlier layer: they have queries and outputs of their own."""
    shared = config.number("num_kv_shared_layers", 0) or 0
    count = config.number("num_hidden_layers", 0) or 0
    return [Layer(index, "self_attn", layers[0].cache) for index in range(count - shared, count)] if shared else []


@dataclass(frozen=True)
class AttentionShape:
    """Heads and sizes of one attention block."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    gated: bool = False


def query_only(config: ModelConfig, layer: Layer) -> AttentionShape:
    wide = config.number("global_head_dim")
    kinds = attention_kinds(config)
    size = wide if wide and kinds[layer.index] != SLIDING else config.head_dim
    return AttentionShape(config.need("num_attention_heads"), 0, size, size)


def shape_of(config: ModelConfig, layer: Layer, cache: AttentionCache) -> AttentionShape:
    count = config.need("num_attention_heads")
    other = config.section("attention_other_setting")
    if cache.window and other:
        count = integer(other, "num_attention_heads", count)
    if cache.window:
        count = config.number("swa_num_attention_heads") or count
    gated = config.flag("attn_output_gate")
    gated = config.model_type in GATED_ATTENTION if gated is None else gated
    return AttentionShape(count, cache.num_kv_heads, cache.head_size, cache.head_size_v or cache.head_size, gated)


def mixer_weights(config: ModelConfig, layer: Layer) -> Iterator[Weight]:
    """The weights of the block that a cache belongs to."""
    cache = layer.cache
    match cache:
        case AttentionCache():
            yield from attention_weights(config, layer.index, "self_attn", shape_of(config, layer, cache))
        case CrossCache():
            shape = AttentionShape(
                config.need("num_attention_heads"), cache.num_kv_heads, cache.head_size, cache.head_size
            )
            yield from attention_weights(config, layer.index, "encoder_attn", shape)
        case LatentCache():
            yield from latent_weights(config, layer)
        case Mamba2State():
            yield from mamba2_weights(config, layer.index, cache)
        case GatedDeltaNetState():
            yield from delta_net_weights(config, layer.index, cache)
        case KimiDeltaState():
            yield from kimi_delta_weights(config, layer.index, cache)
        case Mamba1State():
            yield from mamba1_weights(config, layer.index, cache)
        case ShortConvState():
            hidden = config.need("hidden_size")
            yield linear(layer.index, "conv.in_proj", hidden * 3 * cache.channels)
            yield linear(layer.index, "conv.out_proj", cache.channels * hidden)
        case LinearAttentionState():
            hidden, inner = config.need("hidden_size"), cache.num_heads * cache.head_dim
            yield linear(layer.index, "self_attn.qkv_proj", hidden * 3 * inner)
            yield linear(layer.index, "self_attn.output_gate", hidden * inner)
            yield linear(layer.index, "self_attn.out_proj", inner * hidden)


def attention_weights(config: ModelConfig, index: int, name: str, shape: AttentionShape) -> Iterator[Weight]:
    hidden = config.need("hidden_size")
    if config.model_type == "minicpm3":
        yield from expanded_latents(config, index)
        return
    queries = shape.num_heads * shape.head_size
    yield linear(index, f"{name}.q_proj", hidden * queries * (2 if shape.gated else 1))
    kv = shape.num_kv_heads
    if kv:
        yield heads(index, f"{name}.k_proj", hidden * kv * shape.head_size, kv)
        yield heads(index, f"{name}.v_proj", hidden * kv * shape.head_size_v, kv)
    yield linear(index, f"{name}.o_proj", shape.num_heads * shape.head_size_v * hidden)
    if config.flag("attention_bias") or config.model_type in (
        "qwen2",
        "qwen2_moe",
        "qwen2_vl",
        "qwen2_5_vl",
        "gpt2",
        "opt",
    ):
        yield heads(index, f"{name}.bias", queries + 2 * kv * shape.head_size, max(kv, 1))
    yield Weight(f"layers.{index}.norms", 2 * hidden, index, WHOLE)


def expanded_latents(config: ModelConfig, index: int) -> Iterator[Weight]:
    """Latents that are expanded before they are cached (MiniCPM3): the projections are those of MLA."""
    yield from latent_projections(config, index)


def latent_weights(config: ModelConfig, layer: Layer) -> Iterator[Weight]:
    """MLA; the index keys' projections come with the indexer's own layer."""
    if config.integers("compress_ratios"):
        yield from compressed_weights(config, layer)
        return
    if layer.role == "indexer":
        yield from indexer_weights(config, layer.index)
        return
    yield from latent_projections(config, layer.index)


def latent_projections(config: ModelConfig, index: int) -> Iterator[Weight]:
    hidden, count = config.need("hidden_size"), config.need("num_attention_heads")
    nope, rope = config.need("qk_nope_head_dim"), config.need("qk_rope_head_dim")
    value = config.number("v_head_dim") or config.need("hidden_size") // count
    latent, query_latent = config.need("kv_lora_rank"), config.number("q_lora_rank", 0) or 0
    if query_latent:
        yield linear(index, "self_attn.q_a_proj", hidden * query_latent, WHOLE)
        yield linear(index, "self_attn.q_b_proj", query_latent * count * (nope + rope))
    else:
        yield linear(index, "self_attn.q_proj", hidden * count * (nope + rope))
    yield linear(index, "self_attn.kv_a_proj_with_mqa", hidden * (latent + rope), WHOLE)
    yield linear(index, "self_attn.kv_b_proj", latent * count * (nope + value))
    yield linear(index, "self_attn.o_proj", count * value * hidden)
    if config.flag("mla_use_output_gate"):
        yield linear(index, "self_attn.g_proj", hidden * count * value)
    yield Weight(f"layers.{index}.norms", 2 * hidden, index, WHOLE)


def indexer_weights(config: ModelConfig, index: int) -> Iterator[Weight]:
    hidden = config.need("hidden_size")
    sparse = config.section("sparse_attention_config")
    if sparse:
        size = integer(sparse, "sparse_index_dim", 128)
        yield linear(
            index, "self_attn.index_q_proj", hidden * size * integer(sparse, "sparse_num_index_heads", 1), WHOLE
        )
        yield linear(index, "self_attn.index_k_proj", hidden * size, WHOLE)
        return
    size, count = config.need("index_head_dim"), config.need("index_n_heads")
    yield linear(index, "self_attn.indexer.wq_b", config.need("q_lora_rank") * count * size, WHOLE)
    yield linear(index, "self_attn.indexer.wk", hidden * size, WHOLE)
    yield linear(index, "self_attn.indexers_proj", hidden * count, WHOLE)


def compressed_weights(config: ModelConfig, layer: Layer) -> Iterator[Weight]:
    """DeepSeek-V4: low-rank queries and outputs, one key/value head, compressors, hyper-connections in float32."""
    hidden, size, count = config.need("hidden_size"), config.need("head_dim"), config.need("num_attention_heads")
    index, query_latent = layer.index, config.need("q_lora_rank")
    if layer.role == "swa_cache":
        groups, rank = config.need("o_groups"), config.need("o_lora_rank")
        yield linear(index, "attn.wq_a", hidden * query_latent, WHOLE)
        yield linear(index, "attn.wq_b", query_latent * count * size)
        yield linear(index, "attn.wkv", hidden * size, WHOLE)
        yield linear(index, "attn.wo_a", count * size // groups * groups * rank)
        yield linear(index, "attn.wo_b", groups * rank * hidden)
        copies = config.number("hc_mult", 1) or 1
        yield Weight(f"layers.{index}.hc", 2 * 2 * (2 + copies) * copies * copies * hidden, index, WHOLE)
    elif layer.role == "indexer.k_cache":
        index_size = config.need("index_head_dim")
        yield linear(index, "attn.indexer.wq_b", query_latent * config.need("index_n_heads") * index_size, WHOLE)
        yield linear(index, "attn.indexer.weights_proj", hidden * config.need("index_n_heads"), WHOLE)
    elif layer.role.endswith("compressor.state_cache") and isinstance(layer.cache, LatentCache):
        yield linear(index, "attn.compressor.wkv_gate", hidden * layer.cache.head_size, WHOLE)


def mamba2_weights(config: ModelConfig, index: int, state: Mamba2State) -> Iterator[Weight]:
    hidden, inner = config.need("hidden_size"), state.intermediate_size
    groups = 2 * state.n_groups * state.state_size
    yield linear(index, "mixer.in_proj", hidden * (2 * inner + state.num_heads))
    # Groups are copied where there are fewer than ranks.
    yield linear(index, "mixer.in_proj.groups", hidden * groups, state.n_groups)
    yield Weight(f"layers.{index}.mixer.conv1d", (inner + groups) * state.conv_kernel, index)
    yield linear(index, "mixer.out_proj", inner * hidden)


def mamba1_weights(config: ModelConfig, index: int, state: Mamba1State) -> Iterator[Weight]:
    hidden, inner = config.need("hidden_size"), state.intermediate_size
    rank = config.number("mamba_dt_rank") or config.number("time_step_rank") or -(-hidden // 16)
    yield linear(index, "mixer.in_proj", hidden * 2 * inner)
    yield linear(index, "mixer.x_proj", inner * (rank + 2 * state.state_size))
    yield linear(index, "mixer.dt_proj", rank * inner)
    yield Weight(f"layers.{index}.mixer.A", inner * (state.state_size + state.conv_kernel), index)
    yield linear(index, "mixer.out_proj", inner * hidden)


def delta_net_weights(config: ModelConfig, index: int, state: GatedDeltaNetState) -> Iterator[Weight]:
    hidden = config.need("hidden_size")
    keys, values = state.num_k_heads * state.head_k_dim, state.num_v_heads * state.head_v_dim
    yield linear(index, "linear_attn.in_proj_qkv", hidden * (2 * keys + values))
    yield linear(index, "linear_attn.in_proj_z", hidden * values)
    yield linear(index, "linear_attn.in_proj_ba", hidden * 2 * state.num_v_heads)
    yield Weight(f"layers.{index}.linear_attn.conv1d", (2 * keys + values) * state.conv_kernel, index)
    yield linear(index, "linear_attn.out_proj", values * hidden)
    yield Weight(f"layers.{index}.norms", 2 * hidden, index, WHOLE)


def kimi_delta_weights(config: ModelConfig, index: int, state: KimiDeltaState) -> Iterator[Weight]:
    hidden, inner = config.need("hidden_size"), state.num_heads * state.head_dim
    yield linear(index, "self_attn.qkv_proj", hidden * 3 * inner)
    yield linear(index, "self_attn.f_a_proj", hidden * state.head_dim, WHOLE)
    yield linear(index, "self_attn.f_b_proj", state.head_dim * inner)
    if config.section("linear_attn_config").get("use_full_rank_gate"):
        yield linear(index, "self_attn.g_proj", hidden * inner)
    else:
        yield linear(index, "self_attn.g_a_proj", hidden * state.head_dim, WHOLE)
        yield linear(index, "self_attn.g_b_proj", state.head_dim * inner)
    yield linear(index, "self_attn.b_proj", hidden * state.num_heads)
    yield Weight(f"layers.{index}.self_attn.conv1d", 3 * inner * state.conv_kernel, index)
    yield linear(index, "self_attn.o_proj", inner * hidden)


def zamba_shared(config: ModelConfig, layer: Layer, seen: bool) -> Iterator[Weight]:
    """The attention block that Zamba2 runs again: its weights exist once for each of num_mem_blocks."""
    hidden = config.need("hidden_size")
    count = config.need("num_attention_heads") * config.need("attention_head_dim")
    width = config.number("attention_hidden_size") or 2 * hidden
    inter = config.need("intermediate_size")
    yield linear(layer.index, "linear", hidden * hidden, WHOLE)
    if not seen:
        blocks = config.number("num_mem_blocks", 1) or 1
        yield linear(layer.index, "shared_transformer.self_attn", blocks * (3 * width * count + count * hidden))
        yield linear(layer.index, "shared_transformer.feed_forward", blocks * 3 * hidden * inter)
    rank = config.number("adapter_rank", 0) or 0
    yield linear(layer.index, "shared_transformer.feed_forward.adapter_in", rank * hidden, WHOLE)
    yield linear(layer.index, "shared_transformer.feed_forward.adapter_out", rank * 2 * inter)


def extra_weights(config: ModelConfig, hidden: int) -> Iterator[Weight]:
    """Parts that single families add to every layer."""
    rank, altup = config.number("laurel_rank", 0) or 0, config.number("altup_num_inputs", 0) or 0
    per_layer = config.number("hidden_size_per_layer_input", 0) or 0
    for index in range(config.number("num_hidden_layers", 0) or 0):
        if rank:
            yield linear(index, "laurel", 2 * hidden * rank, WHOLE)
        if per_layer:
            yield linear(index, "per_layer", 2 * hidden * per_layer, WHOLE)
    if altup:
        yield linear(FIRST_STAGE, "altup", 2 * (altup - 1) * hidden * hidden, WHOLE)
