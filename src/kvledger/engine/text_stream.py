"""TextStream: the text of a request, piece by piece, as its tokens come."""

from collections.abc import Sequence
from typing import Any, Final

from tokenizers.decoders import DecodeStream

from kvledger.errors import ConfigError


class TextStream:
    """A character can take several tokens: none of it comes out before it is whole, and at the end the pieces are
    together what the tokenizer makes of all tokens at once, special ones left out.

    `tokenizer`: a fast one of transformers. `prompt_token_ids` say how the first piece begins (with a space or not).
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int] = ()) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"tokenizer={type(tokenizer).__name__}: cannot decode piece by piece; use a fast one")
        self._tokenizer: Final = tokenizer
        self._backend: Final = backend
        self._stream: Final = DecodeStream(ids=list(prompt_token_ids), skip_special_tokens=True)
        # Tokens of a character that is not whole yet, and special ones.
        self._held: list[int] = []

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; "" while a character is not whole."""
        pieces: list[str] = []
        for token_id in token_ids:
            piece = self._stream.step(self._backend, token_id)
            if piece is None:
                self._held.append(token_id)
            else:
                pieces.append(piece)
                self._held.clear()
        return "".join(pieces)

    def end(self) -> str:
        """What is left when no more tokens come: a character that never became whole, as replacement characters."""
        held, self._held = self._held, []
        rest: str = self._tokenizer.decode(held, skip_special_tokens=True) if held else ""
        return rest
