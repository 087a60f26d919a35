"""The tables of rotary positions that a model keeps beside its weights: sine and cosine for every position."""

from collections.abc import Mapping

from kvledger.models.config import JSON, ModelConfig
from kvledger.models.facts import rope_kinds

# Kinds of scaling whose table is as long as the stated length times the factor; the others state the scaled length.
STRETCHED = ("linear",)
# Families with learned positions, biases by distance, or none.
OTHER_POSITIONS = (
    "gpt2",
    "opt",
    "gpt_bigcode",
    "whisper",
    "bloom",
    "mpt",
    "bert",
    "roberta",
    "xlm-roberta",
    "nemotron_h",
)


def rotary_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """Bytes on each rank. Layers with the same base share a table; windowed layers of some families have their own."""
    length = config.number("max_position_embeddings") or 0
    if not length or config.model_type in OTHER_POSITIONS or config.raw("num_attention_heads") is None:
        return 0
    share = config.fraction("partial_rotary_factor", 1.0)
    size = config.number("qk_rope_head_dim") or int(config.head_dim * share)
    kinds = rope_kinds(config)
    factor = kinds[0][1] if kinds and kinds[0][0] in STRETCHED else 1.0
    tables = 2 if kinds and kinds[0][0] == "longrope" else 1
    bases = factor * tables + (1 if has_own_base(config) else 0)
    return int(length * size * dtype_bytes * bases)


def has_own_base(config: ModelConfig) -> bool:
    """Windowed layers that rotate by another base than full ones."""
    nested: list[JSON] = [value for value in config.section("rope_parameters").values() if isinstance(value, Mapping)]
    return config.has("rope_local_base_freq") or len(nested) > 1
