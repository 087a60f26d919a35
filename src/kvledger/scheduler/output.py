"""What a step carries to the workers and back: SchedulerOutput and RequestOutput.

Workers get block ids and nothing else of the ledger. A new or resumed request comes with all its ids (its row is
overwritten); a running one with only the new ids (they are appended), or None.
"""

from typing import Final

from mypy_extensions import mypyc_attr

from kvledger.block_copies import BlockCopy
from kvledger.errors import RequestTooLargeError
from kvledger.request import Request, RequestStatus


@mypyc_attr(acyclic=True)
class NewRequestData:
    """A request that the workers do not know (any more): first scheduled, resumed after preemption, or forked."""

    def __init__(self, request: Request, block_ids: tuple[list[int], ...], num_computed_tokens: int) -> None:
        self.request_id: Final = request.request_id
        self.block_ids: Final = block_ids
        self.num_computed_tokens: Final = num_computed_tokens
        self.num_tokens: Final = request.num_tokens
        self.num_prompt_tokens: Final = request.num_prompt_tokens
        self.sampling_params: Final = request.sampling_params
        self._tokens: Final = request.tokens

    @property
    def token_ids(self) -> list[int]:
        """All token ids known when it was scheduled. Unpacked on demand: a worker in the same process may not care."""
        return self._tokens.token_ids(0, self.num_tokens)


class SchedulerOutput:
    """One step. Parallel lists over the scheduled requests: first the running ones, then the new and resumed ones.

    request_ids[i] computes num_scheduled_tokens[i] tokens from num_computed_tokens[i] on. new_block_ids[i] is per group
    and None when there is none; for new requests, whose ids are all in new_requests, it is None too.
    """

    def __init__(self, step: int) -> None:
        self.step: Final = step
        self.request_ids: list[str] = []
        self.num_scheduled_tokens: list[int] = []
        self.num_computed_tokens: list[int] = []
        self.new_block_ids: list[tuple[list[int], ...] | None] = []
        self.new_requests: list[NewRequestData] = []
        # Request id -> drafts verified in this step; -1 stands for one that the worker itself still knows best.
        self.draft_token_ids: dict[str, list[int]] = {}
        self.total_num_scheduled_tokens: int = 0
        # Since the last step: rows to drop. A preempted request comes back in new_requests.
        self.preempted_request_ids: list[str] = []
        self.finished_request_ids: list[str] = []
        # Requests that were ended because they outgrew the whole pool.
        self.errors: dict[str, RequestTooLargeError] = {}
        # To be made before the step computes.
        self.block_copies: list[BlockCopy] = []
        # request_ids resolved, for the scheduler when the step comes back.
        self.requests: list[Request] = []

    def num_tokens_by_request(self) -> dict[str, int]:
        """{request id: tokens scheduled}, in order."""
        return dict(zip(self.request_ids, self.num_scheduled_tokens, strict=True))


@mypyc_attr(acyclic=True)
class RequestOutput:
    """Tokens that a step added to a request; `finish` is its final status, or None while it goes on."""

    def __init__(self, request_id: str, new_token_ids: list[int], finish: RequestStatus | None) -> None:
        self.request_id: Final = request_id
        self.new_token_ids: Final = new_token_ids
        self.finish: Final = finish
