"""What drafts tokens beside a model: its own layers, which are cached with the model's, and its weights.

MTP modules are a decoder layer of the model's kind and a projection; EAGLE heads, DFlash drafts and draft models have a
config of their own; Gemma 4 assistants, Medusa heads and n-gram lookup keep nothing. Embeddings, and output heads where
the draft has none, are the model's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvledger.core.units import round_up
from kvledger.errors import ConfigError
from kvledger.models.config import ModelConfig, integer
from kvledger.models.facts import ModelFacts
from kvledger.models.families import attention
from kvledger.models.layers import Layer
from kvledger.models.patterns import SLIDING, attention_kinds
from kvledger.models.quantization import OUTPUT_HEAD, weight_scheme
from kvledger.models.shards import ANY, WHOLE, Ranks, Weight, linear
from kvledger.models.weights import VOCAB_STEP, model_weights, weight_bytes

# Where configs say how many MTP modules there are.
MODULE_FIELDS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules")
# Families that have one module where their config says nothing.
DEFAULT_MODULES = {"qwen3_next": 1, "longcat_flash": 1}
# Families with a number of modules that vLLM fixes.
FIXED_MODULES = {"mimo_v2_flash": 1, "mimo_v2": 1}
# Families whose MTP modules vLLM loads; others have them in their checkpoints and nothing that runs them.
MTP_FAMILIES = (
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_ref", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "glm_ocr",
    "mimo", "mimo_v2", "mimo_v2_flash", "ernie4_5_moe", "nemotron_h", "qwen3_next", "qwen3_5_text",
    "qwen3_5_moe_text", "exaone_moe", "exaone4_5", "longcat_flash", "step3p5", "step3p7", "bailing_hybrid",
    "bailing_moe_linear", "minimax_m3", "minimax_m3_text", "kimi_k3", "kimi_linear", "pangu_ultra_moe", "hy_v3",
)  # fmt: skip
# Families whose modules attend to a window.
WINDOWED_MODULES = ("mimo_v2", "mimo_v2_flash", "step3p5", "step3p7")
# Families whose checkpoints name their modules mtp.*, not by a layer behind the last; ranks share their projection.
NAMED_MTP = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h")
# Layers of the target whose hidden states EAGLE-3 reads.
EAGLE3_STATES = 3
EMBEDDINGS = "embed_tokens"
# Drafts of Gemma 4, and what their class has where the config says nothing.
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
ASSISTED_WIDTH, CENTROIDS = 1536, 2048
# What vLLM's class of Medusa configs has where a config says nothing.
MEDUSA_HIDDEN, MEDUSA_VOCAB, MEDUSA_HEADS = 4096, 32001, 5


@dataclass(frozen=True)
class Draft:
    """What drafts. `layers`: behind the model's own, from its number of layers on. `weights`: what the last pipeline
    stage holds of it, with `config`'s quantization; `num_tokens`: drafted in a step.
    """

    method: str
    num_tokens: int
    config: ModelConfig
    layers: tuple[Layer, ...] = ()
    weights: tuple[Weight, ...] = ()

    def rank_bytes(self, dtype_bytes: int, ranks: Ranks, quantization: str = "") -> tuple[int, int]:
        """Parameters and bytes on one rank."""
        scheme = weight_scheme(self.config, quantization)
        params, total = 0, 0.0
        for weight in self.weights:
            padded = scheme is not None and scheme.pads_experts
            count = weight.padded_on_rank(ranks) if padded else weight.on_rank(ranks)
            params += count
            total += count * weight_bytes(weight, scheme, dtype_bytes)
        return params, int(total)


def num_modules(config: ModelConfig) -> int:
    """MTP modules of a model."""
    if config.model_type in FIXED_MODULES:
        return FIXED_MODULES[config.model_type]
    stated = (count for name in MODULE_FIELDS if (count := config.number(name)) is not None)
    return next(stated, DEFAULT_MODULES.get(config.model_type, 0))


def mtp_draft(facts: ModelFacts, num_tokens: int | None, *, own_embeddings: bool) -> Draft:
    """The model's own modules. ConfigError where it has none that vLLM runs, or a number that does not fit them."""
    config = facts.config
    count = num_modules(config)
    if config.model_type not in MTP_FAMILIES or not count:
        has = f"has {count} in its config, and vLLM no class for them" if count else "has none in its config"
        raise ConfigError(f"speculative method 'mtp': {facts.name} {has}; use another method")
    tokens = count if num_tokens is None else num_tokens
    if tokens > count and tokens % count:
        raise ConfigError(f"num_speculative_tokens:{tokens} must be divisible by n_predict={count}")
    layers: list[Layer] = []
    weights: list[Weight] = []
    for place in range(count):
        index = facts.num_layers + place
        layers += module_layers(facts, index)
        weights += module_weights(facts, index, place)
    if own_embeddings:
        weights.append(embedding(config))
    return Draft("mtp", tokens, config, tuple(layers), tuple(weights))


def module_layers(facts: ModelFacts, index: int) -> list[Layer]:
    """The caches of one module: those of the last layer that keeps every token, or a window."""
    config = facts.config
    if config.model_type in WINDOWED_MODULES:
        return [Layer(index, "self_attn", attention(config, SLIDING))]
    if facts.is_compressed:
        return [next(replace(layer, index=index) for layer in facts.layers if layer.role == "swa_cache")]
    return [replace(layer, index=index) for layer in facts.layers if layer.index == last_full_layer(facts)]


def last_full_layer(facts: ModelFacts) -> int:
    """The last decoder layer that keeps something for every token."""
    return max(
        layer.index for layer in facts.layers if not layer.cache.is_state and not getattr(layer.cache, "window", 0)
    )


def module_weights(facts: ModelFacts, index: int, place: int) -> Iterator[Weight]:
    """A projection of hidden state and embedding, attention, and a feed-forward part like the last."""
    config = facts.config
    hidden = config.need("hidden_size")
    name = f"layers.{index}"
    if config.model_type in NAMED_MTP:
        name = f"mtp.layers.{place}"
        yield Weight("mtp.fc", 2 * hidden * hidden, index, ANY, True)
    else:
        # As it is trained, on every rank.
        yield Weight(f"{name}.eh_proj", 2 * hidden * hidden, index, WHOLE)
    yield Weight(f"{name}.norms", 3 * hidden, index, WHOLE)
    by_layer: dict[int, list[Weight]] = {}
    for weight in model_weights(config, facts.layers):
        by_layer.setdefault(weight.layer, []).append(weight)
    attends = last_attending(facts)
    fed = max(layer for layer, weights in by_layer.items() if layer >= 0 and any(is_fed(weight) for weight in weights))
    chosen = [weight for weight in by_layer[attends] if not is_fed(weight)]
    for weight in (*chosen, *(weight for weight in by_layer[fed] if is_fed(weight))):
        yield replace(weight, path=f"{name}.{weight.path.split('.', 2)[-1]}", layer=index)


def last_attending(facts: ModelFacts) -> int:
    return max(layer.index for layer in facts.layers) if facts.is_compressed else last_full_layer(facts)


def is_fed(weight: Weight) -> bool:
    """Part of a feed-forward block."""
    return weight.expert or ".mlp" in weight.path or ".feed_forward" in weight.path or "experts" in weight.path


def embedding(config: ModelConfig) -> Weight:
    size = round_up(config.need("vocab_size"), VOCAB_STEP) * config.need("hidden_size")
    return Weight(EMBEDDINGS, size, 0, ANY)


def behind(facts: ModelFacts, target: ModelFacts) -> tuple[Layer, ...]:
    """A draft's layers behind those of its target."""
    return tuple(replace(layer, index=target.num_layers + layer.index) for layer in facts.layers)


def head_draft(target: ModelFacts, draft: ModelFacts, method: str, num_tokens: int, *, own_embeddings: bool) -> Draft:
    """EAGLE, EAGLE-3, DFlash or DSpark: layers of their own on the target's hidden states."""
    config = draft.config
    hidden, width = config.need("hidden_size"), target.config.need("hidden_size")
    weights = [
        weight
        for weight in model_weights(config, draft.layers)
        if weight.path not in (EMBEDDINGS, OUTPUT_HEAD) and weight.layer >= 0
    ]
    if method == "eagle":
        weights.append(linear(0, "fc", (width + hidden) * hidden, WHOLE))
    elif method == "eagle3":
        weights.append(linear(0, "fc", EAGLE3_STATES * width * hidden, WHOLE))
        # Its attention reads the embedding beside the hidden state, and it has an output head of its own vocabulary.
        weights += [replace(weight) for weight in weights if is_input_projection(weight)]
        vocab = config.number("draft_vocab_size") or config.need("vocab_size")
        weights.append(Weight(OUTPUT_HEAD, round_up(vocab, VOCAB_STEP) * hidden, 0, ANY, True))
    else:
        states = len(dflash_layers(config)) or config.need("num_hidden_layers")
        weights.append(linear(0, "fc", states * width * hidden, WHOLE))
    if method == "dspark":
        weights += markov_head(config)
    if own_embeddings:
        weights.append(embedding(config))
    return Draft(method, num_tokens, config, behind(draft, target), tuple(weights))


def is_input_projection(weight: Weight) -> bool:
    return weight.layer == 0 and weight.path.endswith(("q_proj", "k_proj", "v_proj"))


def dflash_layers(config: ModelConfig) -> list[object]:
    """Layers of the target whose hidden states a DFlash draft reads."""
    section = config.section("dflash_config")
    listed: object = section.get("target_layer_ids")
    return listed if isinstance(listed, list) else config.items("target_layer_ids")


def markov_head(config: ModelConfig) -> Iterator[Weight]:
    """What a DSpark draft has besides a DFlash one: a token's row and the bias that it gives to the next, whole on
    every rank, and an output head where its vocabulary is a part of the model's.
    """
    vocab, hidden = config.need("vocab_size"), config.need("hidden_size")
    drafted = config.number("draft_vocab_size") or vocab
    yield Weight("markov_head", (vocab + round_up(drafted, VOCAB_STEP)) * config.need("markov_rank"), 0, WHOLE)
    if drafted < vocab:
        yield Weight(OUTPUT_HEAD, round_up(drafted, VOCAB_STEP) * hidden, 0, ANY, True)


def dspark_tokens(config: ModelConfig) -> int | None:
    """Tokens that it drafts at once: its whole block."""
    return config.number("block_size") or config.number("dspark_block_size")


def dflash_tokens(config: ModelConfig) -> int:
    """Tokens that it drafts at once, the anchor not counted."""
    return max(1, (config.number("block_size") or integer(config.section("dflash_config"), "block_size", 16)) - 1)


def model_draft(target: ModelFacts, draft: ModelFacts, num_tokens: int) -> Draft:
    """A model of its own, whole."""
    weights = [replace(weight, layer=0) for weight in model_weights(draft.config, draft.layers)]
    return Draft("draft_model", num_tokens, draft.config, behind(draft, target), tuple(weights))


def assistant_draft(config: ModelConfig, num_tokens: int | None) -> Draft:
    """A Gemma 4 assistant: layers with queries alone, which read what the target's last layers keep. It keeps nothing.

    The target embeds tokens; the output head is the assistant's own, in its narrower width.
    """
    hidden, width = config.need("hidden_size"), config.number("backbone_hidden_size", ASSISTED_WIDTH) or ASSISTED_WIDTH
    weights = [
        linear(0, "pre_projection", 2 * width * hidden),
        linear(0, "post_projection", hidden * width),
        Weight(OUTPUT_HEAD, round_up(config.need("vocab_size"), VOCAB_STEP) * hidden, 0, ANY, True),
    ]
    if config.flag("use_ordered_embeddings"):
        weights.append(Weight("centroids", hidden * (config.number("num_centroids") or CENTROIDS), 0, WHOLE))
    head = config.need("head_dim")
    for index, kind in enumerate(attention_kinds(config)):
        size = head if kind == SLIDING else config.number("global_head_dim") or head
        attended = config.need("num_attention_heads") * size * hidden
        weights += [linear(index, f"self_attn.{name}", attended) for name in ("q_proj", "o_proj")]
        weights.append(linear(index, "mlp", 3 * hidden * config.need("intermediate_size")))
        weights.append(Weight(f"layers.{index}.norms", 4 * hidden + size, index, WHOLE))
    return Draft("mtp", num_tokens or 1, config, (), tuple(weights))


def medusa_draft(config: ModelConfig, num_tokens: int) -> Draft:
    """Medusa heads: blocks of the hidden size on every rank, and an output head each or one for all; they keep nothing.

    What the config leaves out is the default of vLLM's class for it, not the target's.
    """
    hidden = config.number("hidden_size") or MEDUSA_HIDDEN
    vocab = config.number("vocab_size") or MEDUSA_VOCAB
    count = config.number("num_heads") or config.number("medusa_num_heads") or MEDUSA_HEADS
    blocks = config.number("num_hidden_layers") or config.number("medusa_num_layers") or 1
    bias = hidden if config.flag("medusa_fc_bias") else 0
    if config.flag("original_lm_head"):
        outputs = round_up(config.number("truncated_vocab_size") or vocab, VOCAB_STEP)
    else:
        outputs = count * round_up(vocab, VOCAB_STEP)
    heads = [
        Weight("blocks", count * blocks * (hidden * hidden + bias), 0, WHOLE, True),
        Weight(OUTPUT_HEAD, outputs * hidden, 0, ANY, True),
    ]
    return Draft("medusa", num_tokens, config, (), tuple(heads))


def keyless_draft(target: ModelFacts, method: str, num_tokens: int) -> Draft:
    """What looks tokens up instead of computing them."""
    return Draft(method, num_tokens, target.config)
