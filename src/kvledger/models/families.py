"""Config -> layers: one small function for each kind of architecture, chosen by the fields that the config has.

To add a family, write a function that returns its layers and put it into FAMILIES with the field that marks it; if
only its pattern of windows is new, one row in patterns.PERIODS is enough (docs/plan.md).
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files

from kvledger.errors import ConfigError, wrong_value
from kvledger.models.config import ModelConfig, integer
from kvledger.models.layers import (
    AttentionCache,
    CrossCache,
    GatedDeltaNetState,
    KimiDeltaState,
    LatentCache,
    Layer,
    LayerCache,
    LinearAttentionState,
    Mamba1State,
    Mamba2State,
    ShortConvState,
    StateCache,
)
from kvledger.models.patterns import (
    CHUNKED,
    FULL,
    NOTHING,
    SLIDING,
    STATE,
    attention_kinds,
    chunk_of,
    has_two_blocks,
    window_of,
)

# Families that have kv_lora_rank but cache expanded keys and values, not the latent vector.
EXPANDED_LATENTS = ("minicpm3",)
# Bidirectional encoders, which have no class that decodes.
ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert", "new")
# Layers behind the last ones of their kind reuse those caches (Gemma 3n, Gemma 4).
SHARED_TAIL = "num_kv_shared_layers"
# Parts of field names that mark a cache which this version cannot size; an unknown family that has one is refused.
UNKNOWN_CACHE_SIGNS = (
    "compress",
    "_ssm",
    "ssm_",
    "mamba",
    "kda",
    "lightning",
    "rwkv",
    "retention",
    "index_kpool",
    "_cycles",
    "param_sink",
)


def decoder(config: ModelConfig) -> list[Layer]:
    """Keys and values in every layer: MHA, GQA or MQA, full, windowed or chunked, some layers sharing their cache."""
    kinds = attention_kinds(config)
    if STATE in kinds:
        return hybrid(config)
    shared = config.number(SHARED_TAIL, 0) or 0
    own = [(index, kind) for index, kind in enumerate(kinds[: len(kinds) - shared]) if kind != NOTHING]
    return [Layer(index, "self_attn", attention(config.for_layer(index), kind)) for index, kind in own]


def attention(config: ModelConfig, kind: str) -> AttentionCache:
    """One attention layer's cache, with the sizes that its kind of layer has in this family."""
    window = window_of(config) if kind == SLIDING else 0
    chunk = chunk_of(config) if kind == CHUNKED else 0
    if kind == SLIDING and not window:
        raise wrong_value("sliding_window", None, "layers are windowed and the size is missing", "give it")
    heads, size, size_v = attention_sizes(config, kind)
    return AttentionCache(heads, size, size_v, window, chunk)


def attention_sizes(config: ModelConfig, kind: str) -> tuple[int, int, int]:
    """Key/value heads, key size and value size (0: as the key) of a kind of layer."""
    if config.model_type in EXPANDED_LATENTS:
        return config.need("num_attention_heads"), config.need("qk_nope_head_dim") + config.need("qk_rope_head_dim"), 0
    heads, size, size_v = config.num_key_value_heads, config.head_dim, config.number("v_head_dim", 0) or 0
    if kind == SLIDING and config.has("swa_head_dim"):
        heads = config.number("swa_num_key_value_heads") or heads
        return heads, config.need("swa_head_dim"), config.number("swa_v_head_dim", 0) or 0
    if kind == FULL and config.has("global_head_dim"):
        return config.number("num_global_key_value_heads") or heads, config.need("global_head_dim"), 0
    other = config.section("attention_other_setting")
    if kind == SLIDING and other.get("attention_type") == "sliding_attention":
        return integer(other, "num_attention_groups", heads), integer(other, "head_dim", size), 0
    return heads, size, 0 if size_v == size else size_v


def latent(config: ModelConfig) -> list[Layer]:
    """Multi-head latent attention, with index keys where attention is sparse (DeepSeek-V2, V3, V3.2, GLM-5, Kimi)."""
    size = config.need("kv_lora_rank") + config.need("qk_rope_head_dim")
    layers = []
    for index in range(config.need("num_hidden_layers")):
        if config.has("index_topk") and has_indexer(config, index):
            layers.append(Layer(index, "indexer", index_keys(config)))
        layers.append(Layer(index, "self_attn", LatentCache(size)))
    if has_two_blocks(config):
        layers = [Layer(layer.index, f"self_attn.{part}", layer.cache) for layer in layers for part in (0, 1)]
    return layers


def index_keys(config: ModelConfig) -> LatentCache:
    """Index keys: fp8 values with one float32 scale for 128 of them."""
    size = config.need("index_head_dim")
    return LatentCache(size + size // 128 * 4, dtype="uint8")


def has_indexer(config: ModelConfig, index: int) -> bool:
    """Whether the layer selects tokens itself instead of reusing the selection of an earlier layer."""
    kinds = config.items("indexer_types")
    if kinds:
        return index >= len(kinds) or kinds[index] == "full"
    pattern = config.string("index_topk_pattern")
    if pattern:
        return index >= len(pattern) or pattern[index] != "S"
    every = config.number("index_topk_freq", 1) or 1
    offset = config.number("index_skip_topk_offset", 2) or 0
    return max(index - offset + 1, 0) % every == 0


def sparse_blocks(config: ModelConfig) -> list[Layer]:
    """Keys and values, with index keys in the layers that select blocks (MiniMax-M3)."""
    sparse = config.section("sparse_attention_config")
    frequencies = sparse.get("sparse_attention_freq")
    marked = list(frequencies) if isinstance(frequencies, list) else []
    layers = []
    for layer in decoder(config):
        if layer.index < len(marked) and marked[layer.index]:
            layers.append(Layer(layer.index, "indexer", LatentCache(integer(sparse, "sparse_index_dim", 128))))
        layers.append(layer)
    return layers


def compressed(config: ModelConfig) -> list[Layer]:
    """DeepSeek-V4: a window of latents in every layer, compressed latents and index keys by the layer's ratio.

    A compressor keeps the tokens of the group that is still open as a float32 state, with an overlap of one group at
    ratio 4. Sizes: 448 fp8 values, 64 rotary values in bfloat16 and 8 bytes of scales are 584 bytes a vector.
    """
    head, window = config.need("head_dim"), config.need("sliding_window")
    index_size = config.need("index_head_dim")
    layers = []
    for index, ratio in enumerate(config.integers("compress_ratios")[: config.need("num_hidden_layers")]):
        stored = LatentCache(head, window, "uint8", 584, alignment=576, block_size=64)
        layers.append(Layer(index, "swa_cache", stored))
        if not ratio:
            continue
        if ratio == 4:
            keys = LatentCache(index_size + index_size // 128 * 4, 0, "uint8", 0, ratio, 576)
            layers.append(Layer(index, "indexer.k_cache", keys))
            layers.append(Layer(index, "indexer.compressor.state_cache", compressor(index_size, ratio)))
        layers.append(Layer(index, "attn", LatentCache(head, 0, "uint8", 584, ratio, 576)))
        layers.append(Layer(index, "compressor.state_cache", compressor(head, ratio)))
    return layers


def compressor(head_size: int, ratio: int) -> LatentCache:
    """The open group of a compressor: key and score of each token, twice the window where groups overlap."""
    overlap = 2 if ratio == 4 else 1
    return LatentCache(
        2 * overlap * head_size, ratio * overlap, "float32", alignment=576, block_size=4 if overlap == 2 else 8
    )


def looped(config: ModelConfig) -> list[Layer]:
    """Layers that run several times, with a cache each time; only the first sees everything (IQuest LoopCoder)."""
    window = config.number("loop_window_size", 64) or 64
    layers = []
    for loop in range(config.need("loop_num")):
        for index in range(config.need("num_hidden_layers")):
            heads, size, size_v = attention_sizes(config, FULL)
            layers.append(Layer(index, f"self_attn.{loop}", AttentionCache(heads, size, size_v, window if loop else 0)))
    return layers


def hybrid(config: ModelConfig) -> list[Layer]:
    """Recurrent states in some layers, attention in the others."""
    state = state_cache(config)
    layers = []
    for index, kind in enumerate(attention_kinds(config)):
        if kind == STATE:
            layers.append(Layer(index, "mixer", state))
        elif kind != NOTHING:
            layers.append(Layer(index, "self_attn", hybrid_attention(config, kind)))
    return layers


def hybrid_attention(config: ModelConfig, kind: str) -> LayerCache:
    if config.has("kv_lora_rank") and config.model_type not in EXPANDED_LATENTS:
        return LatentCache(config.need("kv_lora_rank") + config.need("qk_rope_head_dim"))
    return attention(config, kind)


def kimi_linear(config: ModelConfig) -> list[Layer]:
    """Kimi delta attention with MLA layers between; the lists of layers count from 1."""
    linear = config.section("linear_attn_config")
    full = linear.get("full_attn_layers")
    positions = {number - 1 for number in full if isinstance(number, int)} if isinstance(full, list) else set()
    heads, size = integer(linear, "num_heads"), integer(linear, "head_dim")
    state = KimiDeltaState("float32", heads, size, integer(linear, "short_conv_kernel_size", 4))
    return [
        Layer(index, "self_attn", hybrid_attention(config, FULL) if index in positions else state)
        for index in range(config.need("num_hidden_layers"))
    ]


def parallel_heads(config: ModelConfig) -> list[Layer]:
    """Attention and Mamba-2 side by side in every layer (Falcon-H1)."""
    state = state_cache(config)
    layers = []
    for index in range(config.need("num_hidden_layers")):
        layers.append(Layer(index, "self_attn", attention(config, FULL)))
        layers.append(Layer(index, "mamba", state))
    return layers


def shared_attention(config: ModelConfig) -> list[Layer]:
    """Mamba-2 in every layer and one attention block that runs again at some of them, with a cache each (Zamba2)."""
    size = config.number("attention_head_dim") or 2 * config.need("hidden_size") // config.need("num_attention_heads")
    cache = AttentionCache(config.num_key_value_heads, size)
    layers = [Layer(index, "shared_attn", cache) for index in config.integers("hybrid_layer_ids")]
    state = state_cache(config)
    return layers + [Layer(index, "mixer", state) for index in range(config.need("num_hidden_layers"))]


def state_only(config: ModelConfig) -> list[Layer]:
    """Recurrent states in every layer (Mamba, Mamba-2, Falcon-Mamba)."""
    state = state_cache(config)
    return [Layer(index, "mixer", state) for index in range(config.need("num_hidden_layers"))]


def state_cache(config: ModelConfig) -> StateCache:
    """The recurrent state that the config's fields describe. ConfigError when they describe none."""
    dtype = state_dtype(config)
    if config.has("linear_num_value_heads"):
        return GatedDeltaNetState(
            dtype,
            config.need("linear_num_key_heads"),
            config.need("linear_num_value_heads"),
            config.need("linear_key_head_dim"),
            config.need("linear_value_head_dim"),
            config.need("linear_conv_kernel_dim"),
        )
    if config.has("conv_L_cache"):
        channels = config.number("conv_dim") or config.need("hidden_size")
        return ShortConvState(dtype, channels, config.need("conv_L_cache"))
    for names in MAMBA2_FIELDS:
        if config.has(names[0]) and config.has(names[1]):
            return mamba2(config, dtype, names)
    if config.has("mamba_d_state") or config.has("state_size"):
        return mamba1(config, dtype)
    if config.has("layer_group_size") and config.has("short_conv_kernel_size"):
        heads, conv = config.need("num_attention_heads"), config.need("short_conv_kernel_size")
        return KimiDeltaState("float32", heads, config.head_dim, conv)
    if config.has("attn_type_list") or config.has("layer_group_size") or config.model_type == "minimax":
        return LinearAttentionState(dtype, config.need("num_attention_heads"), config.head_dim)
    raise ConfigError(
        f"{config.name}: some layers keep a recurrent state and the config has none of the fields that give its size "
        "(linear_num_value_heads, mamba_d_state, ssm_state_size, state_size, conv_L_cache); give a config that has them"
    )


# Mamba-2 under the names of different families: heads, head size, groups, state size, convolution.
MAMBA2_FIELDS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    ("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"),
    ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
)


def mamba2(config: ModelConfig, dtype: str, names: tuple[str, str, str, str, str]) -> Mamba2State:
    heads, head_dim, groups, state_size, conv = (config.need(name) for name in names)
    inner = config.number("mamba_d_ssm") or heads * head_dim
    return Mamba2State(dtype, inner, groups, heads, head_dim, state_size, conv)


def mamba1(config: ModelConfig, dtype: str) -> Mamba1State:
    if config.has("mamba_d_state"):
        inner = config.need("mamba_expand") * config.need("hidden_size")
        return Mamba1State(dtype, inner, config.need("mamba_d_state"), config.need("mamba_d_conv"))
    inner = config.number("intermediate_size") or config.need("expand") * config.need("hidden_size")
    return Mamba1State(dtype, inner, config.need("state_size"), config.need("conv_kernel"))


def state_dtype(config: ModelConfig) -> str:
    """The element type of the recurrent state: the config's, NemotronH's float32, else the model's."""
    given = config.string("mamba_ssm_cache_dtype") or config.string("mamba_ssm_dtype")
    if given:
        return given
    return "float32" if config.model_type == "nemotron_h" else "auto"


def encoder_decoder(config: ModelConfig) -> list[Layer]:
    """Each decoder layer caches its own tokens and the encoder's (Whisper)."""
    heads = config.need("num_attention_heads")
    size = config.need("hidden_size") // heads
    layers = []
    for index in range(config.need("num_hidden_layers")):
        layers.append(Layer(index, "self_attn", AttentionCache(heads, size)))
        layers.append(Layer(index, "encoder_attn", CrossCache(heads, size)))
    return layers


def cross_layers(config: ModelConfig) -> list[Layer]:
    """Some decoder layers attend to image tokens only, and cache those (Llama 3.2 Vision)."""
    crossed = set(config.integers("cross_attention_layers"))
    heads, size = config.num_key_value_heads, config.head_dim
    return [
        Layer(index, "cross_attn", CrossCache(heads, size))
        if index in crossed
        else Layer(index, "self_attn", AttentionCache(heads, size))
        for index in range(config.need("num_hidden_layers"))
    ]


def searched_blocks(config: ModelConfig) -> list[Layer]:
    """A block for each layer with its own attention, or none (Llama-Nemotron, found by architecture search)."""
    heads, size = config.need("num_attention_heads"), config.head_dim
    layers = []
    for index, block in enumerate(config.items("block_configs")):
        given = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(given, Mapping) or given.get("no_op") or given.get("replace_with_linear"):
            continue
        group = integer(given, "n_heads_in_group", 1)
        cache = AttentionCache(heads // group, size, 0, integer(given, "window_length"))
        layers.append(Layer(index, "self_attn", cache))
    return layers


def no_layers(config: ModelConfig) -> list[Layer]:
    """A bidirectional encoder: nothing is decoded, so nothing is kept."""
    config.note("an encoder: nothing is decoded, so it keeps no KV cache")
    return []


def is_encoder(config: ModelConfig) -> bool:
    """Every token sees every other, so that nothing of one can be kept for the next."""
    return config.model_type in ENCODERS or config.flag("is_causal") is False


Family = Callable[[ModelConfig], list[Layer]]
# The first whose test holds decides; the order matters where a config has the fields of several.
FAMILIES: tuple[tuple[str, Callable[[ModelConfig], bool], Family], ...] = (
    ("bidirectional encoder", is_encoder, no_layers),
    ("encoder-decoder", lambda c: c.flag("is_encoder_decoder") is True and c.has("decoder_layers"), encoder_decoder),
    ("cross-attention layers", lambda c: bool(c.integers("cross_attention_layers")), cross_layers),
    ("compressed latents", lambda c: bool(c.integers("compress_ratios")), compressed),
    ("looped layers", lambda c: c.has("loop_num"), looped),
    ("searched blocks", lambda c: bool(c.items("block_configs")), searched_blocks),
    ("Kimi delta attention", lambda c: bool(c.section("linear_attn_config")), kimi_linear),
    ("parallel attention and Mamba-2", lambda c: c.has("mamba_d_ssm"), parallel_heads),
    ("shared attention", lambda c: bool(c.integers("hybrid_layer_ids")), shared_attention),
    ("recurrent", lambda c: c.has("state_size") and not c.has("num_attention_heads"), state_only),
    ("sparse blocks", lambda c: bool(c.section("sparse_attention_config")), sparse_blocks),
    ("hybrid", lambda c: STATE in attention_kinds(c), hybrid),
    ("latent attention", lambda c: c.has("kv_lora_rank") and c.model_type not in EXPANDED_LATENTS, latent),
    ("decoder", lambda c: True, decoder),
)


def family_of(config: ModelConfig) -> tuple[str, Family]:
    for name, matches, family in FAMILIES:
        if matches(config):
            return name, family
    raise AssertionError("the last family matches everything")


def model_layers(config: ModelConfig) -> list[Layer]:
    """The caches of every decoder layer, in the order in which an engine registers them.

    ConfigError when the config lacks a field that a cache's size depends on, or has an unknown kind of layer.
    """
    name, family = family_of(config)
    if name == "decoder" and config.model_type not in known_decoders():
        refuse_unknown_caches(config)
        config.note(
            f"model_type {config.model_type or 'missing'} is not a known family: taken for a decoder that keeps keys "
            "and values in every layer"
        )
    return family(config)


@cache
def known_decoders() -> frozenset[str]:
    """Families that are known to keep keys and values in every layer and nothing else (data/decoders.txt)."""
    lines = (files("kvledger.models") / "data/decoders.txt").read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def refuse_unknown_caches(config: ModelConfig) -> None:
    """ConfigError when an unknown family has fields of a cache that is more than keys and values."""
    for field_name in config.text:
        if any(sign in field_name for sign in UNKNOWN_CACHE_SIGNS):
            raise ConfigError(
                f"{config.name}: model_type {config.model_type!r} is not a known family, its field {field_name} marks "
                "a cache of another kind, and no layer_types says which layers have it; give a config with "
                "layer_types, add the family to kvledger/models/families.py, or plan from its log with --from-log"
            )
