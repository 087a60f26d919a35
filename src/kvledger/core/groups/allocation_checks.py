"""What an allocation may ask for: each check raises a RequestError before anything is changed, or passes."""

from kvledger.core.blocks.kv_cache_blocks import PrefixHit
from kvledger.core.groups.slot_ranges import SlotRanges
from kvledger.core.requests.request import Request
from kvledger.core.units import IS_COMPILED, MAX_COUNT
from kvledger.errors import RequestError


def too_long(request: Request, num_tokens: int, max_model_len: int) -> RequestError:
    """The error of a sequence that would outgrow the model's length."""
    return RequestError(
        f"request {request.request_id!r}: {num_tokens} tokens are more than max_model_len={max_model_len}; "
        "nothing was changed"
    )


def wrong_position(request: Request) -> RequestError:
    """The error of a request whose num_computed_tokens, which the caller may set, is no position in a sequence."""
    return RequestError(
        f"request {request.request_id!r}: num_computed_tokens={request.num_computed_tokens!r}: not an integer from 0 "
        f"to {MAX_COUNT}; nothing was changed"
    )


def require_sound_position(request: Request) -> None:
    """num_computed_tokens, which the caller may set, is a position in a sequence."""
    if not 0 <= request.num_computed_tokens <= MAX_COUNT or not (IS_COMPILED or _is_int(request.num_computed_tokens)):
        raise wrong_position(request)


def _is_int(value: object) -> bool:
    return isinstance(value, int)


def require_sound_growth(request: Request, num_new_tokens: int, max_model_len: int) -> None:
    """A running request computes at least one token, and stays within the model's length."""
    require_sound_position(request)
    if num_new_tokens <= 0:
        raise RequestError(
            f"num_new_tokens={num_new_tokens}: a step of request {request.request_id!r} needs a token to compute"
        )
    # As Python's integers: what is asked for may be more than 64 bits hold.
    new_end = int(request.num_computed_tokens) + num_new_tokens
    if new_end > max_model_len:
        raise too_long(request, new_end, max_model_len)


def require_sound_start(
    request: Request, hit: PrefixHit, ranges: SlotRanges, holds_blocks: bool, max_model_len: int
) -> None:
    """A request that starts, resumes or comes back from a load: its ranges are sound, and only a request without blocks
    takes a hit or external tokens."""
    request_id = request.request_id
    num_new = ranges.new_end - min(ranges.computed_end, max_model_len)
    num_external = ranges.num_external
    if ranges.new_end > max_model_len:
        raise too_long(request, ranges.new_end, max_model_len)
    if ranges.slots_end < ranges.new_end:
        raise RequestError(f"request {request_id!r}: num_lookahead_tokens is negative; give 0 or more")
    if num_new < 0 or num_external < 0 or (num_new == 0 and num_external == 0 and hit.num_tokens == 0):
        raise RequestError(
            f"num_new_tokens={num_new}: a step of request {request_id!r} needs a token to compute, unless it "
            "adopts computed ones (a prefix hit or external tokens)"
        )
    if holds_blocks:
        if hit.num_tokens > 0 or num_external > 0:
            raise RequestError(
                f"request {request_id!r} holds blocks already: a prefix hit or external tokens can only start one"
            )
    elif request.num_computed_tokens > 0:
        raise RequestError(
            f"request {request_id!r} counts {request.num_computed_tokens} computed tokens but holds no blocks: "
            "set num_computed_tokens to 0 when you free it"
        )


def require_sound_fork(parent: Request, child: Request, child_holds_blocks: bool, num_forkable_tokens: int) -> None:
    """The child has no blocks yet and starts with the tokens that the parent's workers have computed, into blocks that
    the parent holds."""
    num_tokens = parent.num_processed_tokens
    if child_holds_blocks:
        raise RequestError(f"request {child.request_id!r} holds blocks already; a fork starts without any")
    if not 0 < num_tokens <= child.num_tokens or child.tokens.pack(0, num_tokens) != parent.tokens.pack(0, num_tokens):
        raise RequestError(
            f"request {child.request_id!r} is no fork of {parent.request_id!r}: their first {num_tokens} computed "
            "tokens differ, or there are none"
        )
    if num_tokens > num_forkable_tokens:
        raise RequestError(
            f"request {parent.request_id!r} counts {num_tokens} computed tokens and holds blocks for "
            f"{num_forkable_tokens}: num_computed_tokens is wrong; nothing was changed"
        )
