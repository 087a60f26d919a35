"""Texts as tokens, and tokens as blocks with ids."""

from collections import defaultdict
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec

from kvledger.errors import ConfigError, wrong_value


class Tokenizer:
    """Text to token ids. `path`: a tokenizer.json, or a directory with one."""

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError:
            raise ConfigError("texts need the tokenizers package: pip install 'kvledger[traces]'") from None
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        try:
            self._tokenizer: Any = Loaded.from_file(str(file))
        except Exception as failed:  # the package raises nothing narrower
            problem = f"no tokenizer can be read from it ({failed})"
            raise wrong_value("tokenizer", path, problem, "give a tokenizer.json or a directory with one") from None

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def message(self, role: str, text: str) -> list[int]:
        """A message as it is rendered: its role, a line end, its text and a line end, whatever the model's own template
        would make of it."""
        return self.tokens(f"{role}\n{text}\n")


class TokenBlocks:
    """Numbers blocks of tokens: equal ones with all before them have equal numbers."""

    def __init__(self) -> None:
        # (block before, its tokens) -> a number of the block and all before it.
        self._numbers: Final[defaultdict[tuple[int, tuple[int, ...]], int]] = defaultdict(count(1).__next__)

    def ids(self, tokens: list[int], block_size: int) -> list[int]:
        """Of the whole blocks of a sequence."""
        ids: list[int] = []
        block = 0
        for end in range(block_size, len(tokens) + 1, block_size):
            block = self._numbers[block, tuple(tokens[end - block_size : end])]
            ids.append(block)
        return ids


class Part(msgspec.Struct):
    """Of a message; what is no text has none."""

    text: str | None = None


class Message(msgspec.Struct):
    """As OpenAI's interface has it."""

    role: str
    content: str | list[Part] | None = None

    @property
    def text(self) -> str:
        """The text in it; images and the like count for nothing."""
        if isinstance(self.content, str):
            return self.content
        return "".join([part.text or "" for part in self.content or []])
