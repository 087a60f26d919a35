"""What an endless prefix cache hits when it keeps answers as well as prompts, as an engine's does."""

from collections import defaultdict
from itertools import count
from typing import Final

from kvledger.traces.trace_request import TraceRequest


class AnswerCeiling:
    """Hit tokens of requests one after another, in blocks of `block_size` tokens. Its memory grows with content."""

    def __init__(self, block_size: int) -> None:
        self._block_size: Final = block_size
        self.num_hit_tokens: int = 0
        # Whether any request's answer had ids.
        self.has_answers: bool = False
        # (path before, or the scope and size of its blocks at the start; id) -> path
        self._paths: Final[defaultdict[tuple[object, int], int]] = defaultdict(count(1).__next__)
        # Path -> tokens from the start on that are cached of it.
        self._cached: Final[dict[int, int]] = {}

    def add(self, request: TraceRequest) -> None:
        """The next request. Its hit ends in front of the last token of its prompt."""
        size = request.block_size
        if not request.hash_ids and not request.output_ids:
            return
        num_prompt = request.num_prompt_tokens
        num_hit = 0
        is_known = True
        path: object = (request.scope, size)
        for depth, x in enumerate(request.hash_ids, 1):
            number = self._paths[path, x]
            path = number
            # Of the last one the prompt may have a part.
            end = min(depth * size, num_prompt)
            cached = self._cached.get(number, 0)
            if is_known:
                num_hit = max(num_hit, min(cached, end))
                is_known = cached >= depth * size
            self._cached[number] = max(cached, end)
        usable = min(num_hit, num_prompt - 1)
        self.num_hit_tokens += usable - usable % self._block_size
        if request.output_ids:
            self._add_answer(request, path)

    def _add_answer(self, request: TraceRequest, path: object) -> None:
        """Of the last token that is generated nothing is computed, so nothing is cached."""
        self.has_answers = True
        size = request.block_size
        num_computed = request.num_prompt_tokens + request.num_output_tokens - 1
        for depth, x in enumerate(request.output_ids, len(request.hash_ids) + 1):
            number = self._paths[path, x]
            path = number
            self._cached[number] = max(self._cached.get(number, 0), min(depth * size, num_computed))
