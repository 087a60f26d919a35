"""Which of a model's layers read everything, a window, a chunk or a recurrent state.

layer_types in the config decides; older configs leave it out and their family's pattern is used. A family is one row.
Source of the rows: the configuration classes of transformers 5 and the model classes of vLLM 0.33 (facts).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvledger.errors import wrong_value
from kvledger.models.config import ModelConfig

FULL, SLIDING, CHUNKED, STATE, NOTHING = "full", "sliding", "chunked", "state", "nothing"

# The names that configs use in layer_types and layers_block_type.
LAYER_KINDS = {
    "full_attention": FULL,
    "attention": FULL,
    "global_attention": FULL,
    "full": FULL,
    "deepseek_sparse_attention": FULL,
    "indexed_attention": FULL,
    "minimax_m3_sparse": FULL,
    "hybrid": FULL,
    "sliding_attention": SLIDING,
    "window_attention": SLIDING,
    "local_attention": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": STATE,
    "mamba": STATE,
    "mamba2": STATE,
    "conv": STATE,
    "kda": STATE,
    "moe": NOTHING,
    "mlp": NOTHING,
}


@dataclass(frozen=True)
class Period:
    """Every `every`-th layer is full and the others are `other`; `field` of the config overrides `every`.

    `full_at`: position of the full layer inside a period, counted from 0; -1 is its last layer.
    """

    every: int
    field: str = ""
    full_at: int = -1
    other: str = SLIDING
    last_is_full: bool = False
    first_is_full: bool = False


# model_type -> its pattern where the config has no layer_types.
PERIODS: dict[str, Period] = {
    "gemma2": Period(2),
    "gemma3_text": Period(6, "sliding_window_pattern"),
    "gemma3": Period(6, "sliding_window_pattern"),
    "gemma3n_text": Period(5),
    "gemma4_text": Period(6, "sliding_window_pattern", last_is_full=True),
    "cohere2": Period(4, "sliding_window_pattern"),
    "exaone4": Period(4, "sliding_window_pattern", last_is_full=True),
    "exaone_moe": Period(4, "sliding_window_pattern", last_is_full=True),
    "cohere2_moe": Period(4, "sliding_window_pattern"),
    "olmo3": Period(4),
    "gpt_oss": Period(2),
    "afmoe": Period(4, "global_attn_every_n_layers"),
    "cwm": Period(4, "window_pattern", full_at=0),
    "granite_swa": Period(4, full_at=0),
    "granitemoe_swa": Period(4, full_at=0),
    "mimo_v2_flash": Period(6, first_is_full=True),
    "step3p5": Period(2),
    "llama4_text": Period(4, "no_rope_layer_interval", other=CHUNKED),
    "qwen3_next": Period(4, "full_attention_interval", other=STATE),
    "qwen3_5_text": Period(4, "full_attention_interval", other=STATE),
    "qwen3_5_moe_text": Period(4, "full_attention_interval", other=STATE),
    "olmo_hybrid": Period(4, other=STATE),
}

# Families whose window counts only for the layers that layer_types lists as windowed.
LISTED_WINDOWS = ("laguna",)

# Families whose layers with rotary positions are the windowed ones (no_rope_layers: 1 has them, 0 has not).
ROPE_WINDOWS = ("muse_glimmer",)

# Families whose window covers the stated number of tokens and the current one as well.
WINDOW_EXTRA = {"cohere2": 1, "cohere2_moe": 1}

# Families whose use_sliding_window and max_window_layers decide: layers from max_window_layers on are windowed.
QWEN_WINDOWS = ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "mimo", "dots1")


def period_kinds(count: int, period: Period, every: int) -> list[str]:
    full_at = period.full_at % every
    kinds = [FULL if index % every == full_at else period.other for index in range(count)]
    if period.last_is_full:
        kinds[-1] = FULL
    if period.first_is_full:
        kinds[0] = FULL
    return kinds


def named_kinds(field: str, names: Sequence[object]) -> list[str]:
    """Kinds of layers that the config names one by one. ConfigError for a name that is not known."""
    kinds = []
    for name in names:
        kind = LAYER_KINDS.get(str(name))
        if kind is None:
            known = ", ".join(LAYER_KINDS)
            raise wrong_value(field, name, "a kind of layer that is not known, so its cache is not", f"known: {known}")
        kinds.append(kind)
    return kinds


def letter_kinds(field: str, pattern: str, letters: dict[str, str]) -> list[str]:
    """Kinds of layers from a pattern with one letter a layer."""
    unknown = sorted(set(pattern) - set(letters))
    if unknown:
        raise wrong_value(field, pattern, f"letters {unknown} are not known", f"known: {', '.join(letters)}")
    return [letters[letter] for letter in pattern]


def attention_kinds(config: ModelConfig) -> list[str]:
    """The kind of each decoder layer, in order."""
    for field in ("layer_types", "layers_block_type"):
        names = config.items(field)
        if names:
            return named_kinds(field, names)
    count = config.need("num_hidden_layers")
    explicit = explicit_kinds(config, count)
    if explicit is not None:
        return explicit
    period = PERIODS.get(config.model_type)
    if period is None:
        everywhere = window_of(config) and config.model_type not in LISTED_WINDOWS
        return [SLIDING if everywhere else FULL] * count
    every = period.every
    if period.field and isinstance(config.raw(period.field), int):
        every = config.need(period.field)
    elif period.field and isinstance(config.raw(period.field), str):
        return repeated_letters(config, period.field, count)
    else:
        config.note(f"layer_types is not in the config: one full layer in every {every}, as {config.model_type} has it")
    if period.other == SLIDING and not window_of(config):
        return [FULL] * count
    return period_kinds(count, period, max(every, 1))


def repeated_letters(config: ModelConfig, field: str, count: int) -> list[str]:
    """A pattern like "LLLG", repeated over the layers; the last layer is global."""
    unit = letter_kinds(field, str(config.raw(field)), {"L": SLIDING, "G": FULL})
    kinds = [unit[index % len(unit)] for index in range(count)]
    kinds[-1] = FULL
    return kinds


def explicit_kinds(config: ModelConfig, count: int) -> list[str] | None:
    """Kinds from the lists that single families use instead of layer_types; None where there is none."""
    pattern = config.string("hybrid_override_pattern")
    if pattern:
        return letter_kinds("hybrid_override_pattern", pattern, {"M": STATE, "*": FULL, "E": NOTHING, "-": NOTHING})
    for field, marked, other in (("hybrid_layer_pattern", SLIDING, FULL), ("attn_type_list", FULL, STATE)):
        flags = config.integers(field)
        if flags:
            return [marked if flag else other for flag in flags]
    with_rope = config.integers("no_rope_layers")
    if with_rope and config.raw("attention_chunk_size"):
        return [CHUNKED if flag else FULL for flag in with_rope]
    if with_rope and config.model_type in ROPE_WINDOWS:
        return [SLIDING if flag else FULL for flag in with_rope]
    windows = config.items("interleaved_sliding_window")
    if windows:
        return [SLIDING if windows[index % len(windows)] else FULL for index in range(count)]
    for field in ("attn_layer_indices", "full_attn_idxs", "full_attention_layers"):
        indices = config.integers(field)
        if indices:
            return [FULL if index in indices else STATE for index in range(count)]
    every = config.number("attn_layer_period")
    if every:
        offset = config.number("attn_layer_offset", 0)
        return [FULL if index % every == offset else STATE for index in range(count)]
    group = config.number("layer_group_size")
    if group:
        # With Kimi delta attention (Ling 3), what is left over behind the last whole group is full as well.
        whole = count // group * group if config.has("short_conv_kernel_size") else count
        return [FULL if (index + 1) % group == 0 or index >= whole else STATE for index in range(count)]
    # Without attn_layer_indices no layer of it attends.
    return [STATE] * count if config.model_type == "bamba" else None


def has_two_blocks(config: ModelConfig) -> bool:
    """Whether a decoder layer holds two attention blocks and two dense parts around its experts (LongCat)."""
    return config.has("expert_ffn_hidden_size") and config.has("ffn_hidden_size")


def window_of(config: ModelConfig) -> int:
    """Tokens of the sliding window, 0 where there is none or it is switched off."""
    listed = [window for window in config.integers("interleaved_sliding_window") if window > 0]
    window = config.number("sliding_window") or config.number("sliding_window_size") or max(listed, default=0)
    if window <= 0 or config.flag("use_sliding_window") is False:
        return 0
    if config.model_type in QWEN_WINDOWS:
        first = config.number("max_window_layers", 0) or 0
        if not config.flag("use_sliding_window") or first >= config.need("num_hidden_layers"):
            return 0
    return window + WINDOW_EXTRA.get(config.model_type, 0)


def chunk_of(config: ModelConfig) -> int:
    """Tokens of one chunk of chunked local attention."""
    chunk = config.number("attention_chunk_size") or 0
    if chunk < 1:
        raise wrong_value("attention_chunk_size", chunk, "layers are chunked and the size is missing", "give it")
    return chunk
