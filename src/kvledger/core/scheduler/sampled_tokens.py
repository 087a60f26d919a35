"""Whether the tokens that workers return fit their step: every row is looked at before any request is changed.

A request that is through with what it knows gets a token; without one it would wait for ever. A prompt that is not
through gets none; one would stand in the middle of it. Rows of requests that ended meanwhile, or were preempted, may
have either, because what they say counts for nothing or for later.
"""

from collections.abc import Sequence
from typing import Final

from kvledger.core.requests.request import Request, RequestStatus
from kvledger.core.scheduler.output import SchedulerOutput
from kvledger.errors import RequestError


def goes_on(request: Request) -> bool:
    """Whether what a step brings this request counts: it runs, and was not preempted since."""
    return request.status is RequestStatus.RUNNING and request.num_stale_tokens == 0


def require_sound_rows(output: SchedulerOutput, sampled_token_ids: Sequence[object]) -> None:
    """RequestError, naming the row, when a row has no list of token ids, too many of them, or some where none are due
    or none where some are."""
    for row in range(len(sampled_token_ids)):
        sampled = sampled_token_ids[row]
        if not isinstance(sampled, list):
            raise RequestError(f"sampled_token_ids[{row}]: no list of token ids; give [] for none{_REST}")
        for token_id in sampled:
            if not _is_token(token_id):
                raise _no_token(output, f"sampled_token_ids[{row}]", row, token_id)
        _require_due(output, f"sampled_token_ids[{row}]", row, len(sampled))


def require_sound_tokens(output: SchedulerOutput, token_ids: Sequence[object]) -> None:
    """The same for one token a row, or -1."""
    for row in range(len(token_ids)):
        require_sound_token(output, token_ids, row)


def require_sound_token(output: SchedulerOutput, token_ids: Sequence[object], row: int) -> None:
    """The same for one row."""
    token_id = token_ids[row]
    field = f"token_ids[{row}]"
    if _is_token(token_id):
        _require_due(output, field, row, 1)
    elif isinstance(token_id, int) and token_id == -1:
        _require_due(output, field, row, 0)
    else:
        raise _no_token(output, field, row, token_id)


def take_back_plain(output: SchedulerOutput, token_ids: list[int], num_rows: int, are_awaited: bool) -> None:
    """Undoes what the first num_rows rows of a step have brought their requests, the last of them perhaps in part.

    `are_awaited`: steps overlap, so tokens are counted before they come. REQUIRES the oldest step in flight, without
    drafts, and sound rows: then a request that got a token had just those that the step computed, and every later step
    computes one more.
    """
    for row in range(num_rows):
        request = output.requests[row]
        if token_ids[row] >= 0 and goes_on(request):
            start = int(output.num_computed_tokens[row])
            end = start + int(output.num_scheduled_tokens[row])
            request.num_in_flight_tokens = request.num_computed_tokens - start
            if are_awaited:
                request.num_output_placeholders = 1 + request.num_computed_tokens - end
            request.num_tokens = end
            request.tokens.truncate(end)


_REST: Final = "; nothing was changed, and the step is still in flight"


def _require_due(output: SchedulerOutput, field: str, row: int, num_sampled: int) -> None:
    request = output.requests[row]
    drafts = output.draft_token_ids.get(request.request_id)
    num_drafts = 0 if drafts is None else len(drafts)
    if num_sampled > 1 + num_drafts:
        raise RequestError(
            f"{field}: {num_sampled} tokens for request {request.request_id!r}, which verified {num_drafts} drafts; at "
            f"most one more than that can come back{_REST}"
        )
    if request.is_finished or request.num_stale_tokens > 0:
        return
    end = int(output.num_computed_tokens[row]) + int(output.num_scheduled_tokens[row])
    if end >= request.num_tokens and num_sampled == 0:
        raise RequestError(
            f"{field}: no token for request {request.request_id!r}, which is through with all that it knows and would "
            f"never go on; give the token that was sampled{_REST}"
        )
    if end < request.num_tokens and num_sampled > 0:
        raise RequestError(
            f"{field}: a token for request {request.request_id!r}, whose prompt is computed up to {end} of "
            f"{request.num_tokens} tokens; give none until it is through{_REST}"
        )


def _no_token(output: SchedulerOutput, field: str, row: int, token_id: object) -> RequestError:
    return RequestError(
        f"{field}: {token_id!r} for request {output.request_ids[row]!r} is no token id; ids are ints from 0 to "
        f"2**32 - 1{_REST}"
    )


def _is_token(token_id: object) -> bool:
    return isinstance(token_id, int) and 0 <= token_id < 1 << 32
