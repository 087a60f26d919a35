"""NgramDrafter: guesses the next tokens of a text that repeats itself, without a model.

It looks for an earlier place where the last tokens of the text occurred, and proposes what followed there. Where
several lengths match, the longest counts; where the longest occurs several times, the first one does, as in vLLM.

    ... 5 6 7 8 9 ......... 5 6 7   ->  8 9
"""

from typing import Final

from kvledger.core.requests.tokens import TOKEN_BYTES, pack_tokens, unpack_tokens
from kvledger.core.units import require_positive
from kvledger.errors import wrong_value


class NgramDrafter:
    """`prompt_lookup_min`, `prompt_lookup_max`: how many of the last tokens must occur earlier."""

    def __init__(self, num_speculative_tokens: int, prompt_lookup_min: int = 2, prompt_lookup_max: int = 4) -> None:
        require_positive("num_speculative_tokens", num_speculative_tokens)
        require_positive("prompt_lookup_min", prompt_lookup_min)
        if prompt_lookup_max < prompt_lookup_min:
            raise wrong_value(
                "prompt_lookup_max", prompt_lookup_max, f"less than prompt_lookup_min={prompt_lookup_min}", "raise it"
            )
        self.num_speculative_tokens: Final = num_speculative_tokens
        self._min: Final = prompt_lookup_min
        self._max: Final = prompt_lookup_max

    def propose(self, tokens: list[int] | bytes, max_drafts: int | None = None) -> list[int]:
        """Up to num_speculative_tokens drafts (max_drafts, if that is less) to follow the tokens; [] for none.

        tokens: ids, or the same packed by pack_tokens. O(length of the text) for each n-gram length.
        """
        text = tokens if isinstance(tokens, bytes) else pack_tokens(tokens)
        num_drafts = self.num_speculative_tokens
        if max_drafts is not None:
            num_drafts = min(num_drafts, max_drafts)
        if num_drafts < 1:
            return []
        num_tokens = len(text) // TOKEN_BYTES
        for length in range(min(self._max, num_tokens - 1), self._min - 1, -1):
            position = _find(text, text[-length * TOKEN_BYTES :])
            if position is not None:
                start = position + length * TOKEN_BYTES
                return unpack_tokens(text[start : start + num_drafts * TOKEN_BYTES])
        return []


def _find(text: bytes, ngram: bytes) -> int | None:
    """Where the n-gram occurs first, before the end of the text; None when it does not."""
    position = text.find(ngram, 0, -TOKEN_BYTES)
    # Bytes can also match across the borders of tokens, which means nothing.
    while position > 0 and position % TOKEN_BYTES != 0:
        position = text.find(ngram, position + 1, -TOKEN_BYTES)
    return None if position == -1 else position
