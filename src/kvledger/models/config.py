"""A model's config.json: the language model's fields, wherever they are nested, and what had to be assumed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvledger.errors import ConfigError, wrong_value
from kvledger.models.defaults import CLASS_DEFAULTS

JSON = Mapping[str, object]

# Where multimodal configs keep their language model, outermost first.
NESTS = ("thinker_config", "text_config", "llm_config", "language_config", "language_model_config")
# Where a language model's config keeps the fields of its blocks (DBRX, MPT).
PARTS = ("attn_config", "ffn_config")
# The same field under the names of different families; the first that is present wins.
ALIASES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"),
    "num_key_value_heads": (
        "n_head_kv",
        "kv_n_heads",
        "num_kv_heads",
        "num_key_value_heads",
        "multi_query_group_num",
        "num_attention_groups",
        "num_query_groups",
    ),
    "head_dim": ("attention_head_dim", "head_dim", "hidden_size_per_head", "kv_channels"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim"),
    "num_experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
    "first_k_dense_replace": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "num_shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "dtype": ("dtype", "torch_dtype"),
}
# Fields that may be lists with one value for each layer.
# Counts of what is planned one by one, and the most of it. No model has a tenth of that.
MAX_LAYERS = 2_000
MOST = dict.fromkeys(("num_hidden_layers", "depth", "vt_num_hidden_layers", "encoder_layers"), MAX_LAYERS) | {
    "loop_num": 32,
}
PER_LAYER_LISTS = ("num_key_value_heads", "num_key_value_heads_per_layer", "num_kv_heads")


@dataclass
class ModelConfig:
    """One config.json. `text` are the language model's own fields; `notes` collects what was assumed, for the user."""

    name: str
    source: str
    root: JSON
    text: JSON
    hf_quant: JSON | None = None
    index_bytes: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def model_type(self) -> str:
        """The language model's model_type; the outer one where the nested config has none."""
        return self.string("model_type") or ""

    @property
    def outer_type(self) -> str:
        value = self.root.get("model_type")
        return value if isinstance(value, str) else ""

    @property
    def architecture(self) -> str:
        listed = self.root.get("architectures") or self.text.get("architectures")
        return str(listed[0]) if isinstance(listed, list) and listed else ""

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def raw(self, name: str) -> object:
        """The field under any of its names: the language model's, else the outer one's, else the class default."""
        for where in (self.text, self.root):
            for alias in ALIASES.get(name, (name,)):
                if where.get(alias) is not None:
                    return where[alias]
        default = CLASS_DEFAULTS.get(self.model_type, {}).get(name)
        if default is not None:
            self.note(f"{name}={default} is not in the config: taken from the {self.model_type} class default")
        return default

    def for_layer(self, index: int) -> "ModelConfig":
        """The config as one decoder layer sees it. Notes of both go to the same list.

        per_layer_config overrides fields for single layers, under layer numbers with leading zeros or not; heads may
        also be lists with one number for each layer.
        """
        own: dict[str, object] = {}
        for name in PER_LAYER_LISTS:
            listed = self.items(name)
            if index < len(listed):
                own[name.removesuffix("_per_layer")] = listed[index]
        for key, fields in self.section("per_layer_config").items():
            if key.isdecimal() and int(key) == index and isinstance(fields, Mapping):
                own.update(fields)
        return replace(self, text={**self.text, **own}) if own else self

    def has(self, name: str) -> bool:
        return any(
            where.get(alias) is not None for where in (self.text, self.root) for alias in ALIASES.get(name, (name,))
        )

    def number(self, name: str, default: int | None = None) -> int | None:
        """An integer field, or the default where it is missing. ConfigError when it is something else.

        A list with one value for every layer counts as that value while the layers agree.
        """
        value = self.raw(name)
        if isinstance(value, list) and len(set(map(str, value))) == 1:
            value = value[0]
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise wrong_value(name, value, "not a whole number", f"correct it in the config of {self.name}")
        if value > MOST.get(name, value):
            problem = f"more than the {MOST[name]:,} that are planned"
            raise wrong_value(name, value, problem, f"correct it in the config of {self.name}")
        return int(value)

    def need(self, name: str) -> int:
        """A count that the plan cannot do without. ConfigError names it when it is missing or below 1."""
        value = self.number(name)
        if value is None:
            spellings = ", ".join(ALIASES.get(name, (name,)))
            raise ConfigError(
                f"{self.name}: the config has no {name} (looked for {spellings}), which its KV cache depends on; "
                "give a config.json that has it"
            )
        if value < 1:
            raise wrong_value(name, value, "must be at least 1", f"correct it in the config of {self.name}")
        return value

    def fraction(self, name: str, default: float) -> float:
        value = self.raw(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

    def string(self, name: str) -> str | None:
        value = self.raw(name) if name != "model_type" else self.text.get(name) or self.root.get(name)
        return value if isinstance(value, str) else None

    def flag(self, name: str) -> bool | None:
        value = self.raw(name)
        return value if isinstance(value, bool) else None

    def section(self, name: str) -> JSON:
        """A nested object, empty where there is none."""
        value = self.raw(name)
        return value if isinstance(value, Mapping) else {}

    def items(self, name: str) -> list[object]:
        """A list field, empty where there is none."""
        value = self.raw(name)
        return list(value) if isinstance(value, list | tuple) else []

    def integers(self, name: str) -> list[int]:
        return [item for item in self.items(name) if isinstance(item, int) and not isinstance(item, bool)]

    @property
    def head_dim(self) -> int:
        """Size of one attention head: the config's, else hidden size over heads."""
        given = self.number("head_dim")
        return given or self.need("hidden_size") // self.need("num_attention_heads")

    @property
    def num_key_value_heads(self) -> int:
        """Heads with keys and values of their own; as many as query heads where the config does not say."""
        if self.flag("multi_query") and not self.flag("new_decoder_architecture"):
            return 1
        return self.number("num_key_value_heads") or self.need("num_attention_heads")


def integer(values: JSON, name: str, default: int = 0) -> int:
    """An integer of a nested object."""
    value = values.get(name)
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


def language_model(root: JSON) -> JSON:
    """The fields of the language model inside a config, which may nest it twice."""
    text = root
    for nest in NESTS:
        inner = text.get(nest)
        if isinstance(inner, Mapping):
            text = inner
    for part in PARTS:
        inner = text.get(part)
        if isinstance(inner, Mapping):
            text = {**inner, **text}
    if text.get("is_encoder_decoder") is True and "decoder_layers" in text:
        # num_hidden_layers counts those of the encoder there (Whisper turbo decodes with 4 of 32).
        text = {**text, "num_hidden_layers": text["decoder_layers"]}
    return text


def read_config(name: str, source: str, root: JSON) -> ModelConfig:
    """The config of a model. ConfigError when it is not a language model's config at all."""
    if not root:
        raise ConfigError(f"{name}: the config is empty; give the model's config.json")
    return ModelConfig(name, source, root, language_model(root))


def with_overrides(config: ModelConfig, overrides: JSON) -> ModelConfig:
    """The config with fields replaced as --hf-overrides does: nested configs field by field, everything else whole."""
    root = {**config.root}
    for name, value in overrides.items():
        inner = root.get(name)
        is_config = name.endswith("_config") and isinstance(inner, Mapping) and isinstance(value, Mapping)
        root[name] = {**inner, **value} if is_config else value  # type: ignore[dict-item]
    changed = replace(config, root=root, text=language_model(root))
    changed.note("--hf-overrides: " + ", ".join(overrides))
    return changed
