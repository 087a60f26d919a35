"""Weights of the encoders beside a language model: images, video, speech.

A tower is a stack of transformer layers whose sizes its own config gives under one of a few sets of names; what joins
it to the language model is counted for the families that are known. A tower without sizes is noted, not guessed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from kvledger.models.config import JSON, ModelConfig, integer
from kvledger.models.shards import ANY, FIRST_STAGE, WHOLE, Weight

# Names of depth, width and feed-forward width in the configs of towers.
DEPTHS = ("num_hidden_layers", "depth", "vt_num_hidden_layers", "encoder_layers")
WIDTHS = ("embed_dim", "hidden_size", "vt_hidden_size", "d_model")
INNER = ("intermediate_size", "vt_intermediate_size", "encoder_ffn_dim")
TOWERS = ("vision_config", "vision_tower_config", "audio_config")
# Sizes that a tower's Hugging Face class fills in when its config is empty.
CLASS_TOWERS: dict[str, dict[str, int]] = {
    "llama4": {"num_hidden_layers": 34, "hidden_size": 1408, "intermediate_size": 5632, "projector": 74_646_528},
}
# Towers that are no transformer stacks, by their published sizes (MobileNet-V5 300M; a conformer of 0.68 billion).
COUNTED_TOWERS: dict[str, int] = {
    "gemma3n_vision": 294_284_096,
    "gemma3n_audio": 681_000_000,
}
# Towers with a gate in their feed-forward part.
GATED = (
    "qwen2_5_vl", "qwen2_5_omni_vision_encoder", "gemma4_vision", "glm4v_vision", "glm4v_moe_vision", "pixtral",
)  # fmt: skip
# Towers that every rank holds whole: their classes are those of transformers, which know nothing of ranks.
REPLICATED = ("gemma4_vision", "gemma4_audio")
# Towers whose feed-forward parts are as wide as their output, and whose merger is a feed-forward part.
WIDE_MERGERS = ("glm4v_vision", "glm4v_moe_vision")


def first(values: JSON, names: tuple[str, ...]) -> int:
    return next((size for name in names if (size := integer(values, name))), 0)


def tower_weights(config: ModelConfig) -> Iterator[Weight]:
    """Weights of every tower of a multimodal model, and of an encoder-decoder's encoder."""
    if config.flag("is_encoder_decoder") and config.has("encoder_layers"):
        yield from stack("encoder", config.root, gated=False)
        return
    if config.has("embd_layer"):
        config.note("embd_layer does not give the sizes of its image and speech parts: their weights are not counted")
    outer = config.root.get("thinker_config", config.root)
    for name in TOWERS:
        section = outer.get(name) if isinstance(outer, Mapping) else None
        if isinstance(section, Mapping):
            yield from tower(config, name.removesuffix("_config"), section)


def without_towers(config: ModelConfig) -> ModelConfig:
    """The config of the language model alone, which --language-model-only loads."""
    outer = config.root.get("thinker_config")
    kept: dict[str, object] = {name: value for name, value in config.root.items() if name not in TOWERS}
    if isinstance(outer, Mapping):
        kept["thinker_config"] = {name: value for name, value in outer.items() if name not in TOWERS}
    return replace(config, root=kept)


def tower(config: ModelConfig, name: str, section: JSON) -> Iterator[Weight]:
    kind = str(section.get("model_type") or config.outer_type)
    if kind in COUNTED_TOWERS:
        yield Weight(name, COUNTED_TOWERS[kind], FIRST_STAGE, WHOLE)
        return
    sizes: JSON = section if first(section, DEPTHS) else CLASS_TOWERS.get(config.outer_type, {})
    if not first(sizes, DEPTHS) or not first(sizes, WIDTHS):
        config.note(f"{name}_config has no sizes that are understood: its weights are not counted")
        return
    if kind in WIDE_MERGERS:
        sizes = {**sizes, "intermediate_size": integer(sizes, "out_hidden_size"), "merger": first(sizes, INNER)}
    parts = WHOLE if kind in REPLICATED else ANY
    yield from stack(name, sizes, gated=kind in GATED or config.outer_type in GATED, parts=parts)
    joined = integer(sizes, "projector") or projector(config, sizes)
    yield Weight(f"{name}.projector", joined, FIRST_STAGE, parts)


def stack(name: str, sizes: JSON, *, gated: bool, parts: int = ANY) -> Iterator[Weight]:
    """A stack of transformer layers, with its patch embedding. `parts`: into how many it can be divided."""
    width, depth = first(sizes, WIDTHS), first(sizes, DEPTHS)
    inner = first(sizes, INNER) or width * (integer(sizes, "mlp_ratio") or 4)
    attention = integer(sizes, "qkv_hidden_size") or width
    layer = 4 * width * attention + (3 if gated else 2) * width * inner
    yield Weight(f"{name}.layers", depth * layer, FIRST_STAGE, parts)
    patch = integer(sizes, "patch_size")
    frames = integer(sizes, "temporal_patch_size") or 1
    table = integer(sizes, "num_position_embeddings") or integer(sizes, "max_source_positions")
    table = table or 2 * integer(sizes, "position_embedding_size")
    mel = integer(sizes, "num_mel_bins")
    if mel:
        # Speech enters through two convolutions over three frames.
        yield Weight(f"{name}.conv", 3 * (mel + width) * width, FIRST_STAGE, WHOLE)
    yield Weight(f"{name}.embeddings", (3 * patch * patch * frames + table) * width, FIRST_STAGE, WHOLE)


def projector(config: ModelConfig, sizes: JSON) -> int:
    """What joins the tower to the language model: a merger of patches, or a small MLP."""
    hidden, width = config.need("hidden_size"), first(sizes, WIDTHS)
    merged = integer(sizes, "spatial_merge_size")
    if integer(sizes, "merger"):
        return width * merged * merged * hidden + hidden * hidden + 3 * hidden * integer(sizes, "merger")
    kernel = sizes.get("merge_kernel_size")
    if isinstance(kernel, list) and kernel:
        merged = int(kernel[0])
    if merged:
        patches = width * merged * merged
        mergers = 1 + len(listed) if isinstance(listed := sizes.get("deepstack_visual_indexes"), list) else 1
        return mergers * (patches * patches + patches * hidden)
    ratio = config.root.get("downsample_ratio")
    if isinstance(ratio, float) and 0 < ratio < 1:
        return int(width / ratio**2) * hidden + hidden * hidden
    if config.outer_type == "llava":
        return width * hidden + hidden * hidden
    return width * hidden
