"""A request as the ledger and the scheduler see it: its tokens, how far they are computed, and who it is to the cache.

The engine builds it; the scheduler moves the counters; the ledger only reads them (and keeps block_hashes and quiet_end
current).

    | prompt ............................ | output ........ | drafts (not in num_tokens) |
    0                     num_prompt_tokens       num_tokens
    | computed .................. | in flight: counted as computed, not back from the worker yet |
"""

from collections.abc import Iterable
from enum import Enum
from typing import Any, Final, SupportsIndex

from mypy_extensions import i32, i64

from kvledger.core.record import Record
from kvledger.core.requests.running_table import NO_STOP, NUM_OPEN, SEVERAL_STOPS, RunningTable
from kvledger.core.requests.tokens import TokenBuffer, pack_tokens
from kvledger.core.units import whole_number
from kvledger.errors import RequestError

# To add the prompt's length to it must stay within 64 bits.
_MOST_TOKENS: Final = 2**62


class RequestStatus(Enum):
    WAITING = "waiting"
    WAITING_FOR_EXTERNAL_KV = "waiting for external KV"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "finished: stop token"
    FINISHED_LENGTH = "finished: length"
    FINISHED_ABORTED = "finished: aborted"
    FINISHED_ERROR = "finished: error"


class Adapter(Record):
    """Identity of a LoRA adapter as loaded. `generation` counts reloads in place: new weights, new identity."""

    __match_args__ = ("name", "adapter_id", "generation")

    def __init__(self, name: str, adapter_id: int, generation: int = 0) -> None:
        self.name: Final = name
        self.adapter_id: Final = adapter_id
        self.generation: Final = generation


class MultiModalItem(Record):
    """An image, audio clip, ... whose embeddings stand in for placeholder tokens [start, start + num_tokens)."""

    __match_args__ = ("content_hash", "start", "num_tokens")

    def __init__(self, content_hash: str, start: int, num_tokens: int) -> None:
        if not content_hash:
            raise RequestError("content_hash='': the cache cannot tell items apart; give a hash of the content")
        if start < 0 or num_tokens < 1:
            raise RequestError(f"multimodal item at start={start} with num_tokens={num_tokens}: not a range of tokens")
        self.content_hash: Final = content_hash
        self.start: Final = start
        self.num_tokens: Final = num_tokens

    @property
    def end(self) -> int:
        """Where it ends, one behind its last token."""
        return self.start + self.num_tokens


def _place(item: MultiModalItem) -> tuple[int, int, str]:
    """Sorts items as the prompt shows them: in which order a caller lists them means nothing."""
    return item.start, item.end, item.content_hash


class Request:
    """One sequence. `prompt`: token ids in a list, tuple, range or array; or what pack_tokens made of them, as it is.

    `stop_token_ids` end it, as does reaching `max_tokens` generated tokens. Lower `priority` values are served first
    under the priority policy. `cache_salt` keeps tenants apart: only equal salts share blocks (none and "" are equal).
    `skip_prefix_lookup` computes the whole prompt (as prompt log-probabilities need) and still fills the cache.
    `num_encoder_tokens`: what the encoder of an encoder-decoder model leaves for cross attention. `sampling_params`:
    whatever the workers need to choose tokens; it reaches them as it is, with the request's first blocks.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Iterable[SupportsIndex] | bytes,
        *,
        max_tokens: SupportsIndex = 16,
        stop_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        arrival_time: float = 0.0,
        adapter: Adapter | None = None,
        cache_salt: str = "",
        multimodal: tuple[MultiModalItem, ...] = (),
        skip_prefix_lookup: bool = False,
        num_encoder_tokens: SupportsIndex = 0,
        sampling_params: object | None = None,
    ) -> None:
        packed = prompt if isinstance(prompt, bytes) else pack_tokens(prompt)
        if not packed:
            raise RequestError(f"request {request_id!r}: the prompt is empty; give at least one token")
        self.request_id: Final = request_id
        self._tokens: TokenBuffer = TokenBuffer(packed)
        self.num_prompt_tokens: i64 = len(self._tokens)
        self._num_tokens: i64 = self.num_prompt_tokens
        self.max_tokens: Final[i64] = whole_number("max_tokens", max_tokens, 1, _MOST_TOKENS)
        self.stop_token_ids: Final = stop_token_ids
        self.priority: Final = priority
        self.arrival_time: Final = arrival_time
        self.adapter: Final = adapter
        self.cache_salt: Final = cache_salt
        self.multimodal: Final = tuple(sorted(multimodal, key=_place)) if len(multimodal) > 1 else multimodal
        self.skip_prefix_lookup: Final = skip_prefix_lookup
        self.num_encoder_tokens: Final = whole_number("num_encoder_tokens", num_encoder_tokens)
        self.sampling_params: Final = sampling_params

        self.status: RequestStatus = RequestStatus.WAITING
        self._num_computed_tokens: i64 = 0
        # Scheduled but not yet returned by the worker; these may still be taken back (rejected drafts).
        self._num_in_flight_tokens: i64 = 0
        # Output tokens that steps in flight will produce: known in number, not yet in value.
        self._num_output_placeholders: i64 = 0
        # Where a row counts for it, and which; the four counters above and the tokens are of when they were read last.
        self._table: RunningTable | None = None
        self._row: i64 = 0
        # In-flight tokens from before a preemption: their steps' output is delivered, their counts no longer apply.
        self.num_stale_tokens: i64 = 0
        # Their output is thrown away instead, because the positions are computed again at once.
        self.drops_stale_output: bool = False
        # The step it was last scheduled in leaves known tokens to compute, so that step yields no token.
        self.is_prefill_chunk: bool = False
        self.draft_token_ids: list[int] = []
        self.num_preemptions: int = 0
        # Where a prefix ends that others share and a sparse group has not cached yet; 0: not known.
        self.shared_prefix_boundary: int = 0
        # Hash of every full hash block of `tokens`, its size, how many tokens behind it a hash covers, and the hasher's
        # epoch that they belong to.
        self.block_hashes: list[bytes] = []
        self.hash_block_size: int = 0
        self.hash_lookahead: int = 0
        self.hash_epoch: int = 0
        # Of a list of hashes that somebody else's hasher made, so many were looked at.
        self.checked_hashes: list[bytes] | None = None
        self.num_checked_hashes: int = 0
        # A step that ends here or earlier, lookahead included, needs nothing of the ledger: it stays within the blocks
        # that the request holds, fills none and leaves none behind. 0: ask. Only the ledger writes it.
        self._quiet_end: i64 = 0
        # Read and written when it comes and when it is preempted; kept away from what every step reads.
        # Most tokens that it had computed when it was preempted: up to there, computing does not get it further.
        self.num_computed_before: int = 0
        # The first step that could have scheduled it since it came, or since it was preempted.
        self.waiting_since_step: int = 0

    def __reduce__(self) -> tuple[object, ...]:
        """A copy knows no ledger: it says nothing about blocks, and asks the one that it is given to."""
        arguments = {
            "max_tokens": self.max_tokens,
            "stop_token_ids": self.stop_token_ids,
            "priority": self.priority,
            "arrival_time": self.arrival_time,
            "adapter": self.adapter,
            "cache_salt": self.cache_salt,
            "multimodal": self.multimodal,
            "skip_prefix_lookup": self.skip_prefix_lookup,
            "num_encoder_tokens": self.num_encoder_tokens,
            "sampling_params": self.sampling_params,
        }
        state = {
            "num_prompt_tokens": self.num_prompt_tokens,
            "status": self.status,
            "_num_computed_tokens": self.num_computed_tokens,
            "_num_in_flight_tokens": self.num_in_flight_tokens,
            "_num_output_placeholders": self.num_output_placeholders,
            "num_stale_tokens": self.num_stale_tokens,
            "drops_stale_output": self.drops_stale_output,
            "is_prefill_chunk": self.is_prefill_chunk,
            "draft_token_ids": list(self.draft_token_ids),
            "num_preemptions": self.num_preemptions,
            "shared_prefix_boundary": self.shared_prefix_boundary,
            "block_hashes": list(self.block_hashes),
            "hash_block_size": self.hash_block_size,
            "hash_epoch": self.hash_epoch,
            "num_computed_before": self.num_computed_before,
            "waiting_since_step": self.waiting_since_step,
        }
        return _make_request, (self.request_id, self.tokens.packed(), arguments), state

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, {self.num_prompt_tokens} prompt and "
            f"{self.num_output_tokens} output tokens, {self.num_computed_tokens} computed)"
        )

    @property
    def tokens(self) -> TokenBuffer:
        """All that are known, in a buffer that grows with them."""
        if self._table is not None:
            self._catch_up(self._table)
        return self._tokens

    @property
    def num_tokens(self) -> i64:
        if self._table is not None:
            self._catch_up(self._table)
        return self._num_tokens

    @num_tokens.setter
    def num_tokens(self, number: i64) -> None:
        self.leave()
        self._num_tokens = number

    @property
    def num_computed_tokens(self) -> i64:
        """Those of steps in flight included."""
        if self._table is not None:
            self._catch_up(self._table)
        return self._num_computed_tokens

    @num_computed_tokens.setter
    def num_computed_tokens(self, number: i64) -> None:
        self.leave()
        self._num_computed_tokens = number

    @property
    def num_in_flight_tokens(self) -> i64:
        """Scheduled, and not back from the worker."""
        if self._table is not None:
            self._catch_up(self._table)
        return self._num_in_flight_tokens

    @num_in_flight_tokens.setter
    def num_in_flight_tokens(self, number: i64) -> None:
        self.leave()
        self._num_in_flight_tokens = number

    @property
    def num_output_placeholders(self) -> i64:
        """Tokens that steps in flight will bring, when steps overlap."""
        if self._table is not None:
            self._catch_up(self._table)
        return self._num_output_placeholders

    @num_output_placeholders.setter
    def num_output_placeholders(self, number: i64) -> None:
        self.leave()
        self._num_output_placeholders = number

    @property
    def quiet_end(self) -> i64:
        """Up to where steps need nothing of the ledger."""
        return self._quiet_end

    @quiet_end.setter
    def quiet_end(self, end: i64) -> None:
        self.leave()
        self._quiet_end = end

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_processed_tokens(self) -> int:
        """Computed tokens that came back from the workers. Stale ones in flight are not among the computed."""
        return self.num_computed_tokens - (self.num_in_flight_tokens - self.num_stale_tokens)

    @property
    def is_finished(self) -> bool:
        status = self.status
        return (
            status is RequestStatus.FINISHED_STOPPED
            or status is RequestStatus.FINISHED_LENGTH
            or status is RequestStatus.FINISHED_ABORTED
            or status is RequestStatus.FINISHED_ERROR
        )

    def append_token(self, token_id: int) -> None:
        """Adds one generated token."""
        self.leave()
        self._tokens.append(token_id)
        self._num_tokens += 1

    def num_tokens_behind(self) -> i64:
        """Tokens known (drafts and those that steps in flight will yield included) but not computed or scheduled."""
        num_computed, placeholders = self.num_computed_tokens, self._num_output_placeholders
        if placeholders > 0 and num_computed + 2 - placeholders >= self.num_prompt_tokens + self.max_tokens:
            # Even if all drafts in flight are rejected, those steps reach max_tokens: no further step is needed.
            return 0
        return self._num_tokens + len(self.draft_token_ids) + placeholders - num_computed

    def count_scheduled(self, num_tokens: i64) -> None:
        """A step computes so many of its tokens: they count as computed, so that the next one can be scheduled before
        that step is back."""
        self.leave()
        num_computed = self._num_computed_tokens + num_tokens
        self._num_computed_tokens = num_computed
        self._num_in_flight_tokens += num_tokens
        self.is_prefill_chunk = num_computed < self._num_tokens + self._num_output_placeholders

    def count_returned(self, num_tokens: i64) -> bool:
        """A step with so many of its tokens is back. False when it was preempted since, so that they count for nothing
        any more."""
        self.leave()
        self._num_in_flight_tokens -= num_tokens
        if self.num_stale_tokens == 0:
            return True
        self.num_stale_tokens -= num_tokens
        return False

    def take_back(self, num_tokens: i64) -> None:
        """So many drafts of a step that is back were rejected: they are not computed, and bring no token."""
        self.leave()
        if self._num_computed_tokens > 0:
            self._num_computed_tokens -= num_tokens
        if self._num_output_placeholders > 0:
            self._num_output_placeholders -= num_tokens

    def try_enter(self, table: RunningTable, row: i64, max_model_len: i64, num_ahead: i64) -> None:
        """From now on that row counts for it, up to its next event, if all that is known of its next steps is that they
        count: it is in every step in flight, with one token, and behind those only the next token is missing.
        `num_ahead`: slots that its next step needs, with those of a drafter. REQUIRES that no row counts for it."""
        num_computed, num_in_flight, num_tokens = self._num_computed_tokens, table.num_in_flight, self._num_tokens
        quiet_end = self._quiet_end
        limit: i64 = min(max_model_len, self.num_prompt_tokens + self.max_tokens)
        event_at: i64 = min(min(quiet_end - num_ahead + 1, limit - 2), num_tokens + NUM_OPEN - 1)
        if (
            num_computed > quiet_end
            or num_computed + 1 >= limit
            or event_at <= 0
            or num_tokens != num_computed + 1 - num_in_flight
            or self._num_in_flight_tokens != num_in_flight
            or self._num_output_placeholders != (num_in_flight if table.are_awaited else 0)
            or self.num_stale_tokens > 0
            or self.is_prefill_chunk
            or self.draft_token_ids
        ):
            return
        stops = self.stop_token_ids
        stop = NO_STOP if not stops else stops[0] if len(stops) == 1 else SEVERAL_STOPS
        table.computed[row] = i32(num_computed)
        # No token of a row is as large.
        table.stop_token_ids[row] = i32(stop if SEVERAL_STOPS <= stop < 1 << 31 else NO_STOP)
        self._row = row
        self._table = table
        table.event_at[row] = i32(event_at)

    def leave(self) -> None:
        """It counts for itself again."""
        table = self._table
        if table is not None:
            self._catch_up(table)
            table.event_at[self._row] = 0
            self._table = None

    def row_in(self, table: RunningTable) -> i64:
        """The row that counts for it there, or -1."""
        return self._row if self._table is table else -1

    def move_to(self, row: i64) -> None:
        """Its row, if one counts for it, is that one now."""
        self._row = row

    def _catch_up(self, table: RunningTable) -> None:
        """Reads what its row has counted."""
        num_computed = i64(table.computed[self._row])
        num_in_flight = table.num_in_flight
        num_tokens = num_computed + 1 - num_in_flight
        self._num_computed_tokens = num_computed
        self._num_in_flight_tokens = num_in_flight
        if table.are_awaited:
            self._num_output_placeholders = num_in_flight
        if num_tokens > self._num_tokens:
            self._tokens.append_ring(table.open_tokens, self._row * NUM_OPEN, NUM_OPEN, num_tokens)
            self._num_tokens = num_tokens

    def twin(self, request_id: str) -> "Request":
        """A fresh request with the same tokens, limits and identity, under another id. It has computed nothing."""
        twin = Request(
            request_id,
            self.tokens.pack(0, self.num_prompt_tokens),
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            priority=self.priority,
            arrival_time=self.arrival_time,
            adapter=self.adapter,
            cache_salt=self.cache_salt,
            multimodal=self.multimodal,
            skip_prefix_lookup=self.skip_prefix_lookup,
            num_encoder_tokens=self.num_encoder_tokens,
            sampling_params=self.sampling_params,
        )
        twin._tokens = self.tokens.copy()
        twin._num_tokens = self._num_tokens
        twin.block_hashes = self.block_hashes.copy()
        twin.hash_epoch = self.hash_epoch
        twin.hash_block_size = self.hash_block_size
        twin.hash_lookahead = self.hash_lookahead
        return twin

    def output_token_ids(self) -> list[int]:
        return self.tokens.token_ids(self.num_prompt_tokens, self.num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Cuts the sequence to its first num_tokens tokens, as a resumed session does; what remains is its new prompt.

        The hashes go with the tokens that they cover; hashes that the caller gave all go. For a request that no
        scheduler or ledger has (any more): RequestError while it has computed tokens.
        """
        if self.num_computed_tokens > 0 or self.status is RequestStatus.RUNNING:
            raise RequestError(f"request {self.request_id!r} is {self.status.value}: free it before cutting its tokens")
        if not 0 < num_tokens <= self.num_tokens:
            raise RequestError(f"num_tokens={num_tokens}: request {self.request_id!r} has {self.num_tokens} tokens")
        # Fresh ones: whoever noted the old ones down may still read them.
        self._tokens = self.tokens.copy()
        self._tokens.truncate(num_tokens)
        self._num_tokens = num_tokens
        self.num_prompt_tokens = num_tokens
        # A new list: whoever keeps the old one knows hashes of the tokens that were. What the caller's hashes cover is
        # not known here: the caller gives them again.
        num_named = num_tokens - self.hash_lookahead
        num_hashes = num_named // self.hash_block_size if self.hash_block_size > 0 and num_named > 0 else 0
        self.block_hashes = self.block_hashes[:num_hashes]


def _make_request(request_id: str, tokens: bytes, arguments: dict[str, Any]) -> Request:
    """A request with these packed tokens, of which its state then says how many are the prompt's."""
    return Request(request_id, tokens, **arguments)
