"""What every trace format is read into: requests, and sessions of requests that wait for one another."""

from typing import Annotated, Final

import msgspec

from kvledger.errors import KVLedgerError

# The longest prompts of today's models have 10 million tokens.
MAX_TOKENS: Final = 1 << 25
# 3,000 years: no time of any clock in seconds.
MAX_SECONDS: Final = 1e11
_MAX_PRIORITY: Final = (1 << 31) - 1

# Fields as records have them.
PromptTokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
OutputTokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
BlockTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1000 * MAX_SECONDS)]
Priority = Annotated[int, msgspec.Meta(ge=-_MAX_PRIORITY, le=_MAX_PRIORITY)]


class TraceError(KVLedgerError):
    """A trace cannot be read, or one of its lines is broken: says which line, which field, what was expected."""


class TraceRequest(msgspec.Struct, gc=False):
    """One recorded request.

    Its prompt is len(hash_ids) blocks of `block_size` tokens, cut to num_prompt_tokens; tokens beyond the last id
    belong to this request alone. Equal ids within one `scope` mean equal blocks; scope 0 is the whole trace.
    `arrival_time`: seconds since the trace began. `think_time`: seconds between the end of the session's request before
    and this one, for the closed loop. `session` 0: the request belongs to none. `output_ids`: of whole blocks that the
    answer filled, behind those of whole prompt blocks; what it filled beyond them is this request's alone. `step`: of
    the recorded server, the first that could schedule it; 0: not known.
    """

    arrival_time: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: list[int]
    block_size: int
    scope: int = 0
    session: int = 0
    priority: int = 0
    think_time: float = 0.0
    output_ids: list[int] = []
    step: int = 0


class TraceSession(msgspec.Struct):
    """One or more requests in the order in which the closed loop sends them; times count from the session's start.

    `start`: of the session in the trace's time, in seconds; None where the trace has no common clock.
    """

    session: int
    requests: list[TraceRequest]
    start: float | None = None
