"""A tokenizer whose tokens are words, in a file."""

from pathlib import Path

import pytest


def tokenizer_file(folder: Path) -> Path:
    """Every letter a to z, the roles and line ends are one token each; whatever else is unknown."""
    tokenizers = pytest.importorskip("tokenizers")
    path = folder / "tokenizer.json"
    if not path.exists():
        words = ["[UNK]", *"abcdefghijklmnopqrstuvwxyz", "user", "assistant", "system"]
        model = tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(path))
    return path
