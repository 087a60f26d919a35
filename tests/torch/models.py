"""Tiny random models of several families, and what transformers itself makes of a prompt.

tiny_model("gemma3")                  a fresh model; the same weights each time
prompt(20, seed=1)                    20 random tokens; equal seeds give equal beginnings
continuation("gemma3", prompt, 8)     the tokens that transformers' own generate adds to it, greedily
cached_values("gemma3", token_ids)    per layer what transformers' own cache holds after these tokens
"""

from functools import cache
from inspect import signature
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

VOCABULARY = 97
WINDOW = 9
FULL, WINDOWED = "full_attention", "sliding_attention"
# Two requests differ only by rounding where kernels differ; a choice closer than this would prove nothing.
MIN_MARGIN = 1e-4

torch.set_num_threads(1)


def tiny_config(family: str) -> PretrainedConfig:
    """Two key/value heads for four query heads, so that both are told apart."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    match family:
        case "llama":
            return LlamaConfig(**sizes)
        case "qwen3":
            return Qwen3Config(**sizes)
        case "mistral":
            return MistralConfig(**sizes, sliding_window=WINDOW)
        case "gemma2":
            # Scores are bounded by a tanh, tightly here, so that leaving it out would show.
            kinds = [WINDOWED, FULL]
            return Gemma2Config(**sizes, sliding_window=WINDOW, layer_types=kinds, attn_logit_softcapping=2.0)
        case "gemma3":
            # Three windowed and two full layers: groups of two, one of them with a layer missing.
            kinds = [WINDOWED, FULL, WINDOWED, WINDOWED, FULL]
            return Gemma3TextConfig(**{**sizes, "num_hidden_layers": 5}, sliding_window=WINDOW, layer_types=kinds)
        case "gpt_oss":
            kinds = [WINDOWED, FULL]
            return GptOssConfig(**sizes, sliding_window=WINDOW, layer_types=kinds, num_local_experts=4)
    raise AssertionError(family)


FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss")


def tiny_model(family: str) -> PreTrainedModel:
    """Weights are far larger than at the start of a training, so that every token changes what follows.

    Attention is transformers' eager one, the only one that does all that each family asks for.
    """
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1 or family == "gpt_oss":
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval().float()


@cache
def reference_model(family: str) -> PreTrainedModel:
    return tiny_model(family)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    # One by one: a longer prompt of the same seed begins with the shorter one.
    return [int(torch.randint(2, VOCABULARY, (), generator=generator)) for _ in range(num_tokens)]


def continuation(family: str, prompt_ids: list[int], num_tokens: int) -> list[int]:
    return list(_generated(family, tuple(prompt_ids), max(16, num_tokens))[:num_tokens])


@cache
def _generated(family: str, prompt_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    return tuple(generated(reference_model(family), list(prompt_ids), num_tokens, MIN_MARGIN))


def generated(model: PreTrainedModel, prompt_ids: list[int], num_tokens: int, min_margin: float) -> list[int]:
    """What transformers' own generate adds, greedily; no choice in it is closer than min_margin."""
    found = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    for logits in found.logits:
        best, second = logits[0].topk(2).values.tolist()
        assert best - second > min_margin, "a near tie: choose another prompt"
    token_ids: list[int] = found.sequences[0, len(prompt_ids) :].tolist()
    return token_ids


def cached_values(family: str, token_ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer: [tokens, KV heads, head size]."""
    kept = DynamicCache()
    model = reference_model(family)
    # Newer releases of transformers have another name for it.
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        model(torch.tensor([token_ids]), use_cache=True, **{name: kept})
    return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in kept.layers]
