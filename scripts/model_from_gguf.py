"""Turns a llama-family GGUF file into a Hugging Face model directory with bfloat16 weights.

usage: model_from_gguf.py FILE.gguf OUT_DIR        needs torch, transformers, gguf and accelerate; no network
"""

import os
import sys
from pathlib import Path

# Everything needed is in the file; without this the tokenizer asks the hub first and waits for a time-out.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

# What loading adds to the configuration and a plain model directory does not have.
LOADING_KEYS = {"quantization_config", "_name_or_path", "_model_name_or_path", "dtype", "transformers_version"}


def convert(gguf: Path, out: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = {name: value for name, value in loaded.config.to_dict().items() if name not in LOADING_KEYS}
    settings.pop("architectures", None)
    # A model that came from GGUF counts as quantized and cannot be saved, so its weights move into a new one.
    model = LlamaForCausalLM(LlamaConfig(**settings))
    result = model.load_state_dict(loaded.state_dict(), strict=False)
    if result.unexpected_keys or set(result.missing_keys) - {"lm_head.weight"}:
        sys.exit(f"{gguf}: not the weights of a llama model: {result}")
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
