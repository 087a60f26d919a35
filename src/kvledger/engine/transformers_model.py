"""transformers' own model classes on the ledger's blocks, unchanged: only their attention function is another one.

transformers looks attention functions up by name, and hands what a forward call gets in addition on to them. So a
model that is switched to "kvledger" and called with a PagedAttention keeps no cache of its own: its layers write keys
and values to the ledger's slots and read them over its block tables. Masks are made here as well, from positions and
windows; transformers makes none for a function that it does not know.

    model = AutoModelForCausalLM.from_pretrained(directory)
    layout = kv_cache_layout(model.config, block_size=16, dtype="float32")
    config = KVCacheConfig(num_blocks, layout.groups)
    worker = TorchWorker(TransformersModel(model), config, max_num_reqs=..., max_model_len=...)
"""

from typing import Any, Final

import torch
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from kvledger.core.groups.spec import AttentionSpec, SlidingWindowSpec
from kvledger.engine.paged_attention import AttentionRule, PagedAttention
from kvledger.engine.paged_model import PagedModel
from kvledger.errors import ConfigError, wrong_value
from kvledger.models.config import read_config
from kvledger.models.facts import ModelFacts, model_facts
from kvledger.models.layers import AttentionCache, CacheSettings
from kvledger.plan.groups import GroupLayout, group_layers

ATTENTION: Final = "kvledger"
# Under this name a model's forward call takes the PagedAttention and hands it on to every layer.
ARGUMENT: Final = "paged_attention"
# Further inputs of attention that change its result and are not computed here.
UNSUPPORTED_INPUTS: Final = ("attention_mask", "position_bias")


def facts_of(config: PretrainedConfig) -> ModelFacts:
    """What a model keeps, its longest sequence and so on, from its config as loaded. ConfigError as model_facts."""
    name = config.name_or_path or type(config).__name__
    return model_facts(read_config(name, "the loaded model", config.to_dict()))


def kv_cache_layout(
    config: PretrainedConfig, *, block_size: int = 16, dtype: str = "float32", hybrid_manager: bool = True
) -> GroupLayout:
    """The KV cache groups of a model, as `kvledger plan` would form them, for KVCacheConfig and TorchWorker.

    `dtype` is what keys and values are stored in. ConfigError when a layer keeps something else than keys and values
    of all tokens or of a window.
    """
    facts = facts_of(config)
    for layer in facts.layers:
        if not isinstance(layer.cache, AttentionCache) or layer.cache.chunk or layer.role != "self_attn":
            problem = f"{layer.name} keeps {type(layer.cache).__name__}, which this attention function does not serve"
            fix = "use a model with full and sliding window attention only"
            raise wrong_value("model_type", facts.config.model_type, problem, fix)
    settings = CacheSettings(block_size, cache_dtype=dtype, model_dtype=dtype)
    specs = {layer.name: layer.spec(settings) for layer in facts.layers}
    return group_layers(specs, hybrid_manager=hybrid_manager)


class TransformersModel(PagedModel):
    """A causal language model of transformers. Switches it to attention over the ledger's blocks, for good.

    ConfigError when its class does not look attention functions up by name.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        AttentionInterface.register(ATTENTION, paged_attention_forward)
        model.train(False)
        model.set_attn_implementation(ATTENTION)
        if model.config.get_text_config()._attn_implementation != ATTENTION:
            raise own_attention_error(type(model).__name__)
        self._model: Final = model

    @property
    def device(self) -> torch.device:
        return torch.device(self._model.device)

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor:
        outputs = self._model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=wanted,
            **{ARGUMENT: attention},
        )
        if attention.silent_layers():
            raise own_attention_error(f"{type(self._model).__name__}, {', '.join(attention.silent_layers())}")
        logits: torch.Tensor = outputs.logits
        return logits.squeeze(0)


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **inputs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, heads, tokens, head size], key and value [1, KV heads, tokens, ...].

    Returns [1, tokens, heads, value size], and no weights.
    """
    attention = inputs.get(ARGUMENT)
    if not isinstance(attention, PagedAttention):
        raise ConfigError(
            f"{ARGUMENT}={attention!r}: {type(module).__name__} was switched to {ATTENTION!r} and got no block tables; "
            "run its model through a TorchWorker only, or, if that is the case, use another model: this one does not "
            "hand arguments on to its layers"
        )
    layer_name = f"layers.{getattr(module, 'layer_idx', None)}.self_attn"
    layer = attention.layers.get(layer_name)
    if layer is None:
        raise wrong_value("layer", layer_name, "no KV cache group has it", "make the groups from this model's config")
    inputs["attention_mask"] = attention_mask
    require_supported(module, layer_name, inputs)
    require_shape(layer_name, layer.spec, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    read = attention.attend(
        layer_name,
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        AttentionRule(scale, window_of(layer_name, layer.spec, sliding_window), softcap or 0.0, s_aux),
    )
    return read.unsqueeze(0), None


def window_of(layer_name: str, spec: AttentionSpec, asked: int | None) -> int:
    """The window that a layer reads, 0 for all tokens, from what its module says.

    ConfigError when the ledger keeps less than that: it would hand blocks on that are still read.
    """
    if not isinstance(spec, SlidingWindowSpec):
        return asked or 0
    if asked is None or asked > spec.sliding_window:
        reads = "all tokens" if asked is None else f"{asked} tokens"
        problem = f"layer {layer_name} reads {reads}, and its group keeps less"
        raise wrong_value("sliding_window", spec.sliding_window, problem, "make the groups from this model's config")
    return asked


def require_supported(module: torch.nn.Module, layer_name: str, inputs: dict[str, Any]) -> None:
    """ConfigError for attention that this function would get wrong."""
    given = [name for name in UNSUPPORTED_INPUTS if inputs.get(name) is not None]
    if not getattr(module, "is_causal", True):
        given.append("is_causal=False")
    if given:
        raise ConfigError(f"layer {layer_name} attends with {', '.join(given)}: not supported; use another model")


def require_shape(layer_name: str, spec: AttentionSpec, key: torch.Tensor, value: torch.Tensor) -> None:
    """ConfigError when the layer's keys and values are not those that its group has room for."""
    found = (key.shape[1], key.shape[3], value.shape[3])
    if found != (spec.num_kv_heads, spec.head_size, spec.head_size_v or spec.head_size):
        raise wrong_value(
            "spec",
            spec,
            f"layer {layer_name} has KV heads, key size and value size {found}",
            "make the groups from this model's config",
        )


def own_attention_error(what: str) -> ConfigError:
    return ConfigError(
        f"{what}: does not look its attention function up by name, so its keys and values cannot go to the ledger's "
        "blocks; use a model whose class does (transformers' AttentionInterface)"
    )
