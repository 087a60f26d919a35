"""Everything about a model that a plan needs, read from its config once."""

from dataclasses import dataclass

from kvledger.errors import ConfigError
from kvledger.models.config import JSON, ModelConfig
from kvledger.models.families import ENCODERS, is_encoder, model_layers
from kvledger.models.layers import Layer
from kvledger.models.quantization import KVScheme, checkpoint_kv_scheme

# Fields that hold the longest sequence, in the order in which vLLM looks; the smallest of those present counts.
LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Kinds of rotary scaling whose max_position_embeddings is the scaled length already.
SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default", "mrope")
DEFAULT_LENGTH = 2048
# Families that overflow in float16, which vLLM therefore loads as bfloat16.
NO_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4", "plamo2")
# Architectures that compute an embedding or a score instead of text.
POOLING_SUFFIXES = ("Model", "ForSequenceClassification", "ForRewardModel", "ForTokenClassification")


@dataclass(frozen=True)
class ContextLength:
    """The longest sequence: what an engine takes by default, the most it accepts, and the field that says so."""

    default: int
    longest: int
    field: str


@dataclass(frozen=True)
class ModelFacts:
    """One model. `layers`: its caches in order; `num_layers`: decoder layers, which pipeline stages share."""

    config: ModelConfig
    layers: tuple[Layer, ...]
    num_layers: int
    num_attention_heads: int
    context: ContextLength
    checkpoint_dtype: str
    kv_scheme: KVScheme | None

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def has_states(self) -> bool:
        return any(layer.cache.is_state for layer in self.layers)

    @property
    def is_hybrid(self) -> bool:
        """States in some layers and something for each token in others."""
        return self.has_states and not all(layer.cache.is_state for layer in self.layers)

    @property
    def is_encoder_decoder(self) -> bool:
        return self.config.flag("is_encoder_decoder") is True

    @property
    def is_pooling(self) -> bool:
        """Loaded for embeddings or scores."""
        return self.config.architecture.endswith(POOLING_SUFFIXES) or is_encoder(self.config)

    @property
    def is_compressed(self) -> bool:
        return bool(self.config.integers("compress_ratios"))

    @property
    def attends_both_ways_to_images(self) -> bool:
        """Image tokens see each other in both directions, which needs other attention kernels."""
        kind = self.config.raw("use_bidirectional_attention")
        return kind == "vision" or self.config.outer_type in ("gemma3", "paligemma", "bagel", "molmo2", "moondream3")


def model_facts(config: ModelConfig) -> ModelFacts:
    """Facts of a config. ConfigError names the field that is missing or not understood."""
    layers = tuple(model_layers(config))
    listed = len(config.items("layers_block_type")) or len(config.string("hybrid_override_pattern") or "")
    decoder_layers = max(listed, 1 + max((layer.index for layer in layers), default=-1))
    return ModelFacts(
        config,
        layers,
        config.number("num_hidden_layers") or decoder_layers,
        config.number("num_attention_heads") or 0,
        context_length(config),
        checkpoint_dtype(config),
        checkpoint_kv_scheme(config),
    )


def context_length(config: ModelConfig) -> ContextLength:
    """The longest sequence by the config. Rotary scaling that is not in the stated length yet multiplies it."""
    stated = {field: value for field in LENGTH_FIELDS if (value := config.number(field))}
    if not stated:
        config.note(f"no field gives the longest sequence: {DEFAULT_LENGTH} is assumed, as vLLM does")
        return ContextLength(DEFAULT_LENGTH, 1 << 62, "none")
    field = min(stated, key=lambda name: stated[name])
    if "model_max_length" in stated:
        field = "model_max_length"
    longest = stated[field]
    kinds = rope_kinds(config)
    if "gemma3" not in config.model_type:
        for kind, factor in kinds:
            if kind not in SCALED_ALREADY:
                longest = int(longest * factor)
    default = longest
    if any(kind == "longrope" for kind, _ in kinds):
        default = config.number("original_max_position_embeddings") or longest
    return ContextLength(default, longest, field)


def rope_kinds(config: ModelConfig) -> list[tuple[str, float]]:
    """Kind and factor of each rotary scaling, which newer configs nest by kind of layer."""
    kinds: list[tuple[str, float]] = []
    for name in ("rope_scaling", "rope_parameters"):
        section = config.section(name)
        nested: list[JSON] = [value for value in section.values() if isinstance(value, dict)]
        kinds.extend(rope_kind(parameters) for parameters in nested or ([section] if section else []))
    return kinds[:1]


def rope_kind(parameters: JSON) -> tuple[str, float]:
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if kind == "su":
        kind = "longrope"
    factor = parameters.get("factor", 1.0)
    return kind, float(factor) if isinstance(factor, int | float) else 1.0


def checkpoint_dtype(config: ModelConfig) -> str:
    """The element type that the config states, float32 where it states none."""
    value = config.raw("dtype")
    if value is None:
        return "float32"
    name = str(value).removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise ConfigError(
            f"torch_dtype={value!r}: not a model type; the config of {config.name} needs float32, float16 or bfloat16"
        )
    return name


def engine_dtype(facts: ModelFacts, asked: str, compute_capability: float) -> str:
    """The element type that an engine computes in: as asked, else the checkpoint's, narrowed where it must be."""
    if asked not in ("auto", "half", "float", "float16", "bfloat16", "float32"):
        raise ConfigError(f"dtype={asked!r}: not a model type; use auto, bfloat16, float16 or float32")
    if asked != "auto":
        return {"half": "float16", "float": "float32"}.get(asked, asked)
    dtype = facts.checkpoint_dtype
    is_pooled = facts.config.model_type in ENCODERS or (
        facts.is_pooling and facts.config.architecture.endswith("Model")
    )
    if dtype == "float32":
        dtype = "float16" if is_pooled else "bfloat16"
    if dtype == "float16" and facts.config.model_type in NO_FLOAT16:
        dtype = "bfloat16"
    # bfloat16 needs compute capability 8.0.
    return "float16" if dtype == "bfloat16" and 0 < compute_capability < 8 else dtype
