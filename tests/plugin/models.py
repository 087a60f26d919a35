"""Models for real engines: SmolLM2 with its weights, and tiny hybrids: a config.json and dummy weights."""

import json
import os
from pathlib import Path
from typing import Any

REFERENCE = Path(os.environ.get("KVLEDGER_REFERENCE", Path.home() / ".cache/kvledger/reference"))

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}
_DUMMIES: dict[str, dict[str, Any]] = {
    # Five windowed layers to one full: six groups of one layer each.
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_key_value_heads": 1,
        "num_hidden_layers": 6,
        "sliding_window": 64,
        "sliding_window_pattern": 6,
        "torch_dtype": "float32",
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 64,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "sliding_window": 96,
        "torch_dtype": "float32",
        "rms_norm_eps": 1e-5,
    },
    # Three layers with recurrent states to one with attention.
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "full_attention_interval": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
    },
}


def smollm2() -> dict[str, Any]:
    """Arguments of vLLM's LLM for the real model."""
    return {"model": str(REFERENCE / "smollm2")}


def dummy(name: str, directory: Path) -> dict[str, Any]:
    """The same for one of the tiny ones, whose config.json is written below `directory`."""
    home = directory / name
    home.mkdir(exist_ok=True)
    (home / "config.json").write_text(json.dumps({**_COMMON, **_DUMMIES[name]}))
    return {"model": str(home), "load_format": "dummy", "skip_tokenizer_init": True}
