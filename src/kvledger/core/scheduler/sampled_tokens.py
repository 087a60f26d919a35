"""Whether the tokens that workers return fit their step: every row is looked at before any request is changed.

A request that is through with what it knows gets a token; without one it would wait for ever. A prompt that is not
through gets none; one would stand in the middle of it. Rows of requests that ended meanwhile, or were preempted, may
have either, because what they say counts for nothing or for later.
"""

from collections.abc import Sequence
from typing import Final

from kvledger.core.scheduler.output import SchedulerOutput
from kvledger.errors import RequestError

# The arguments that errors name.
_ROWS: Final = "sampled_token_ids"
_TOKENS: Final = "token_ids"


def require_sound_rows(output: SchedulerOutput, sampled_token_ids: Sequence[object]) -> None:
    """RequestError, naming the row, when a row has no list of token ids, too many of them, or some where none are due
    or none where some are."""
    for row in range(len(sampled_token_ids)):
        require_sound_row(output, sampled_token_ids, row)


def require_sound_row(output: SchedulerOutput, sampled_token_ids: Sequence[object], row: int) -> None:
    """The same for one row."""
    sampled = sampled_token_ids[row]
    if not isinstance(sampled, list):
        raise RequestError(f"{_ROWS}[{row}]: no list of token ids; give [] for none{_REST}")
    for token_id in sampled:
        if not _is_token(token_id):
            raise _no_token(output, _ROWS, row, token_id)
    _require_due(output, _ROWS, row, len(sampled))


def require_sound_tokens(output: SchedulerOutput, token_ids: Sequence[object]) -> None:
    """The same for one token a row, or -1."""
    for row in range(len(token_ids)):
        require_sound_token(output, token_ids, row)


def require_sound_token(output: SchedulerOutput, token_ids: Sequence[object], row: int) -> None:
    """The same for one row."""
    token_id = token_ids[row]
    if _is_token(token_id):
        _require_due(output, _TOKENS, row, 1)
    elif isinstance(token_id, int) and token_id == -1:
        _require_due(output, _TOKENS, row, 0)
    else:
        raise _no_token(output, _TOKENS, row, token_id)


_REST: Final = "; nothing was changed, and the step is still in flight"


def _require_due(output: SchedulerOutput, field: str, row: int, num_sampled: int) -> None:
    request = output.requests[row]
    drafts = output.draft_token_ids.get(request.request_id)
    num_drafts = 0 if drafts is None else len(drafts)
    if num_sampled > 1 + num_drafts:
        raise RequestError(
            f"{field}[{row}]: {num_sampled} tokens for request {request.request_id!r}, which verified {num_drafts} "
            f"drafts; at most one more than that can come back{_REST}"
        )
    if request.is_finished or request.num_stale_tokens > 0:
        return
    end = int(output.num_computed_tokens[row]) + int(output.num_scheduled_tokens[row])
    if end >= request.num_tokens and num_sampled == 0:
        raise RequestError(
            f"{field}[{row}]: no token for request {request.request_id!r}, which is through with all that it knows and "
            f"would never go on; give the token that was sampled{_REST}"
        )
    if end < request.num_tokens and num_sampled > 0:
        raise RequestError(
            f"{field}[{row}]: a token for request {request.request_id!r}, whose prompt is computed up to {end} of "
            f"{request.num_tokens} tokens; give none until it is through{_REST}"
        )


def _no_token(output: SchedulerOutput, field: str, row: int, token_id: object) -> RequestError:
    return RequestError(
        f"{field}[{row}]: {token_id!r} for request {output.request_ids[row]!r} is no token id; ids are ints from 0 to "
        f"2**32 - 1{_REST}"
    )


def _is_token(token_id: object) -> bool:
    return isinstance(token_id, int) and 0 <= token_id < 1 << 32
