"""Decoding: what does not change of a request of vLLM's while it decodes, gathered once.

vLLM's requests are large: what a step reads of one lies in a dozen places of memory. A step in one pass reads this
instead, and of the request itself only its counters.
"""

from typing import Any, Final

_NOTHING: Final[frozenset[int]] = frozenset()


def is_plain(request: Any) -> bool:
    """Whether a request of vLLM's only ever decodes token by token, once its prompt is computed."""
    params = request.sampling_params
    return (
        params is not None
        and params.repetition_detection is None
        and request.pooling_params is None
        and request.structured_output_request is None
        and not request.mm_features
        and not request.resumable
    )


class Decoding:
    """One plain request. `tokens`, `output_tokens`: vLLM's own lists. `end`: tokens at which max_tokens is reached;
    `last`: tokens at which it ends, whatever they are. `stops`: EOS is one of them.
    """

    __slots__ = (
        "client",
        "end",
        "last",
        "num_prompt",
        "output_tokens",
        "request",
        "request_id",
        "stops",
        "tokens",
        "trace_headers",
    )

    def __init__(self, request: Any, max_model_len: int) -> None:
        params = request.sampling_params
        self.request: Final = request
        self.request_id: Final[str] = request.request_id
        self.trace_headers: Final = request.trace_headers
        self.client: Final[int] = request.client_index
        self.tokens: Final[list[int]] = request._all_token_ids
        self.output_tokens: Final[list[int]] = request._output_token_ids
        self.num_prompt: Final[int] = request.num_prompt_tokens
        self.end: Final[int] = request.num_prompt_tokens + request.max_tokens
        self.last: Final[int] = min(self.end, max_model_len)
        stops = {*(params.stop_token_ids or ()), params.eos_token_id} - {None}
        self.stops: Final = frozenset(stops) if stops else _NOTHING


class Decodings:
    """Those of one scheduler, by request id. Requests that were aborted stay a while: nobody says so."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler: Final = scheduler
        self._max_model_len: Final[int] = scheduler.max_model_len
        self._known: dict[str, Decoding] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, request_id: str, request: Any) -> Decoding | None:
        """The one of a request with that id; None for a request that is not plain."""
        known = self._known.get(request_id)
        if known is not None and known.request is request:
            return known
        if not is_plain(request):
            return None
        if len(self._known) > 2 * len(self._scheduler.requests) + 16:
            self._forget_gone()
        made = self._known[request_id] = Decoding(request, self._max_model_len)
        return made

    def forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)

    def _forget_gone(self) -> None:
        live = self._scheduler.requests
        self._known = {
            request_id: known for request_id, known in self._known.items() if live.get(request_id) is known.request
        }
