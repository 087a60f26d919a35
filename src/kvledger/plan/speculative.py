"""Drafted tokens as the user asks for them, and what drafts them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvledger.errors import ConfigError, wrong_value
from kvledger.models.config import ModelConfig
from kvledger.models.drafts import (
    ASSISTANTS,
    Draft,
    assistant_draft,
    dflash_tokens,
    dspark_tokens,
    head_draft,
    keyless_draft,
    medusa_draft,
    model_draft,
    mtp_draft,
)
from kvledger.models.facts import ModelFacts, model_facts
from kvledger.models.sources import load_config

NGRAM, OWN_MODEL = ("ngram", "ngram_gpu", "suffix"), "draft_model"
HEADS = ("eagle", "eagle3", "dflash", "dspark")
# Classes of DSpark drafts whose layers are those of a DFlash draft.
DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel")
# Methods that older releases have.
MEDUSA = "medusa"
METHODS = ("mtp", *HEADS, OWN_MODEL, *NGRAM, MEDUSA)
# Methods that read the target's hidden states, before whose hits the last block is computed again.
EAGLE_LIKE = ("mtp", *HEADS)
# Methods that the older model runner has alone, which prepares no step in advance with them.
WITHOUT_ASYNC = ("suffix", MEDUSA)
# Parts of a draft's name that say its method.
NAMED = (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark"), ("-assistant", "mtp"))


@dataclass(frozen=True)
class SpeculativeConfig:
    """vLLM's speculative_config, as far as it decides memory. `method` "": by the draft's name."""

    method: str = ""
    num_speculative_tokens: int | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if self.method and self.kind not in METHODS:
            known = "use one of " + ", ".join(METHODS)
            raise wrong_value("--spec-method", self.method, "not one that is modelled", known)
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 1:
            problem = "must be at least 1"
            raise wrong_value("--spec-tokens", self.num_speculative_tokens, problem, "give tokens to draft")

    @property
    def kind(self) -> str:
        """The method that is meant."""
        name = (self.model or "").lower()
        if self.method in ("", OWN_MODEL):
            if name.strip("[]") in NGRAM:
                return name.strip("[]")
            return next((kind for part, kind in NAMED if part in name), OWN_MODEL)
        if self.method.endswith("_mtp"):
            return "mtp"
        return self.method.strip("[]")

    def __str__(self) -> str:
        tokens = "" if self.num_speculative_tokens is None else f" {self.num_speculative_tokens}"
        return f"{self.kind}{tokens}" + (f" by {self.model}" if self.model and self.kind not in NGRAM else "")


def speculative_config(values: Mapping[str, object]) -> SpeculativeConfig:
    """The fields that are read. ConfigError for one of another type."""
    method, tokens, model = (values.get(name) for name in ("method", "num_speculative_tokens", "model"))
    for name, value, kind in (("method", method, str), ("num_speculative_tokens", tokens, int), ("model", model, str)):
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise wrong_value(f"--speculative-config {name}", value, f"not {kind.__name__}", "see vllm serve --help")
    assert method is None or isinstance(method, str)
    assert tokens is None or isinstance(tokens, int)
    assert model is None or isinstance(model, str)
    return SpeculativeConfig(method or "", tokens, model)


def draft_of(facts: ModelFacts, asked: SpeculativeConfig, *, stages: int, release: str) -> Draft:
    """What drafts for a model. ConfigError where vLLM would not load it, or the draft's config is not found.

    Embeddings are the target's where both are on one pipeline stage.
    """
    kind, tokens, own = asked.kind, asked.num_speculative_tokens, stages > 1
    if kind == MEDUSA and release != "0.32":
        raise ConfigError(f"speculative method 'medusa': vLLM {release} has it no more; use another method")
    if kind == "mtp" and asked.model is None:
        return mtp_draft(facts, tokens, own_embeddings=own)
    if kind in NGRAM:
        return keyless_draft(facts, kind, needed_tokens(asked))
    if asked.model is None and kind == "dspark":
        problem = "stages that ship in the model's own checkpoint are not modelled"
        raise wrong_value("--speculative-config", kind, problem, 'give a draft of its own: "model": "owner/name"')
    if asked.model is None:
        problem = "the method has a model of its own"
        raise wrong_value("--speculative-config", kind, problem, 'add its config: "model": "owner/name"')
    try:
        config = load_config(asked.model)
    except ConfigError as error:
        raise ConfigError(f"--spec-model: {error}") from None
    if kind == MEDUSA:
        return medusa_draft(config, needed_tokens(asked))
    if config.outer_type in ASSISTANTS:
        return assistant_draft(assistant_of(facts, config), tokens)
    config = own_layers(config)
    if kind == "dspark" and not (config.architecture in DSPARK and config.model_type == "qwen3"):
        problem = f"a DSpark draft of class {config.architecture or 'unknown'}, which is not modelled"
        raise wrong_value("--spec-model", asked.model, problem, f"modelled: {DSPARK[0]}")
    draft = model_facts(config)
    for note in config.notes:
        facts.config.note(f"draft: {note}")
    if kind == "mtp":
        return mtp_draft(draft, tokens, own_embeddings=own)
    if kind == OWN_MODEL:
        return model_draft(facts, draft, needed_tokens(asked))
    if kind == "dflash" and tokens is None:
        tokens = dflash_tokens(config)
    if kind == "dspark":
        tokens = tokens or dspark_tokens(config)
    return head_draft(facts, draft, kind, tokens or needed_tokens(asked), own_embeddings=own)


def assistant_of(facts: ModelFacts, assistant: ModelConfig) -> ModelConfig:
    """The assistant. ConfigError where it reads hidden states of another width than the model has."""
    width, hidden = assistant.number("backbone_hidden_size"), facts.config.need("hidden_size")
    if width is not None and width != hidden:
        problem = f"reads hidden states of {width:,}, and {facts.name} has {hidden:,}"
        raise wrong_value("--spec-model", assistant.name, problem, "use the assistant of this model")
    return assistant


def own_layers(config: ModelConfig) -> ModelConfig:
    """The draft's layers, which the speculators format nests in its config."""
    section = config.section("transformer_layer_config")
    if not section:
        return config
    outer = {name: value for name, value in config.root.items() if name in ("draft_vocab_size", "architectures")}
    return replace(config, root={**section, **outer}, text={**section, **outer})


def needed_tokens(asked: SpeculativeConfig) -> int:
    if asked.num_speculative_tokens is None:
        problem = "num_speculative_tokens is missing"
        raise wrong_value("--speculative-config", asked.kind, problem, 'add "num_speculative_tokens": 3')
    return asked.num_speculative_tokens


def lookahead_slots(draft: Draft | None) -> int:
    """KV slots that a request has reserved behind its tokens."""
    if draft is None or draft.method in (*NGRAM, MEDUSA):
        return 0
    fills_in = draft.method == "dspark" and draft.config.flag("sample_from_anchor") is False
    return draft.num_tokens + (draft.method == "dflash" or fills_in)
