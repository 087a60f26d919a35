"""What a step carries to the workers and back: SchedulerOutput, RequestOutput and StepEnd.

Workers get block ids and nothing else of the ledger. A new or resumed request comes with all its ids (its row is
overwritten); what running ones got is in new_blocks.
"""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64, mypyc_attr

from kvledger.core.blocks.holds import BlockCopy
from kvledger.core.blocks.new_blocks import NewBlocks
from kvledger.core.record import Record
from kvledger.core.requests.request import Request, RequestStatus
from kvledger.core.requests.tokens import TokenBuffer
from kvledger.errors import RequestError


@mypyc_attr(acyclic=True)
class NewRequestData(Record):
    """A request that the workers do not know (any more): first scheduled, resumed after preemption, or forked."""

    def __init__(
        self,
        request_id: str,
        block_ids: tuple[list[int], ...],
        num_computed_tokens: int,
        tokens: TokenBuffer,
        num_tokens: int,
        num_prompt_tokens: int,
        sampling_params: object | None = None,
    ) -> None:
        self.request_id: Final = request_id
        self.block_ids: Final = block_ids
        self.num_computed_tokens: Final = num_computed_tokens
        self.num_tokens: Final = num_tokens
        self.num_prompt_tokens: Final = num_prompt_tokens
        self.sampling_params: Final = sampling_params
        self._tokens: Final = tokens

    def __reduce__(self) -> tuple[object, ...]:
        tokens = self._tokens.pack(0, self.num_tokens)
        return _make_new_request_data, (
            *(self.request_id, self.block_ids, self.num_computed_tokens, tokens),
            *(self.num_prompt_tokens, self.sampling_params),
        )

    def __repr__(self) -> str:
        return (
            f"NewRequestData({self.request_id!r}, block_ids={self.block_ids}, {self.num_tokens} tokens, "
            f"{self.num_computed_tokens} computed)"
        )

    @property
    def token_ids(self) -> list[int]:
        """All token ids known when it was scheduled. Unpacked on demand: a worker in the same process may not care."""
        return self._tokens.token_ids(0, self.num_tokens)


class SchedulerOutput(Record):
    """One step. Parallel rows over the scheduled requests: first the running ones, then the new and resumed ones.

    request_ids[i] computes num_scheduled_tokens[i] tokens from num_computed_tokens[i] on; both are int32 arrays that
    numpy sees without a copy: numpy.asarray(output.num_computed_tokens). The *_by_request methods say the same in
    dictionaries, for tests and tools. Read only.

    A copy has all that workers need. It is not the step itself: update_from_output takes the one that schedule() gave.
    """

    def __init__(self, step: int, num_groups: int) -> None:
        self.step: Final = step
        self.num_groups: Final = num_groups
        self.request_ids: list[str] = []
        self.num_scheduled_tokens: vec[i32] = vec[i32]()
        self.num_computed_tokens: vec[i32] = vec[i32]()
        # Of requests that the workers know already.
        self.new_blocks: NewBlocks = NewBlocks()
        self.new_requests: list[NewRequestData] = []
        # Request id -> drafts verified in this step; -1 stands for one that the worker itself still knows best.
        self.draft_token_ids: dict[str, list[int]] = {}
        self.total_num_scheduled_tokens: int = 0
        self.total_num_computed_tokens: int = 0
        # Since the last step: rows to drop. A preempted request comes back in new_requests.
        self.preempted_request_ids: list[str] = []
        self.finished_request_ids: list[str] = []
        # Requests that ended by an error of their own since the last step: they outgrew the whole pool, or their hasher
        # failed.
        self.errors: dict[str, RequestError] = {}
        # To be made before the step computes.
        self.block_copies: list[BlockCopy] = []
        # request_ids resolved, for the scheduler when the step comes back. Copies have none.
        self.requests: list[Request] = []
        # Of the running rows that are the rows of this step, in their order; -1: they never were.
        self.rows_version: i64 = -1

    def __reduce__(self) -> tuple[object, ...]:
        rows = (self.request_ids, list(self.num_scheduled_tokens), list(self.num_computed_tokens))
        # Errors are told apart by identity, their texts are not.
        errors = {request_id: (type(error), str(error)) for request_id, error in self.errors.items()}
        state = {
            "new_blocks": self.new_blocks,
            "new_requests": self.new_requests,
            "draft_token_ids": self.draft_token_ids,
            "total_num_scheduled_tokens": self.total_num_scheduled_tokens,
            "total_num_computed_tokens": self.total_num_computed_tokens,
            "preempted_request_ids": self.preempted_request_ids,
            "finished_request_ids": self.finished_request_ids,
            "block_copies": self.block_copies,
        }
        return _make_output, (self.step, self.num_groups, *rows, errors), state

    def __repr__(self) -> str:
        return (
            f"SchedulerOutput(step={self.step}, scheduled={self.num_tokens_by_request()}, new={self.new_requests!r}, "
            f"preempted={self.preempted_request_ids}, finished={self.finished_request_ids})"
        )

    def count_prompt_tokens(self) -> int:
        """Tokens of prompts that the step computes, for the first time or again. O(requests)."""
        num_tokens = 0
        for row, request in enumerate(self.requests):
            start = int(self.num_computed_tokens[row])
            if start < request.num_prompt_tokens:
                end = start + int(self.num_scheduled_tokens[row])
                num_tokens += min(end, int(request.num_prompt_tokens)) - start
        return num_tokens

    def num_tokens_by_request(self) -> dict[str, int]:
        """{request id: tokens scheduled}, in order."""
        return {request_id: end - start for request_id, (start, end) in self.ranges_by_request().items()}

    def ranges_by_request(self) -> dict[str, tuple[int, int]]:
        """{request id: (first position that it computes, position behind the last)}, in order."""
        ranges: dict[str, tuple[int, int]] = {}
        for row, request_id in enumerate(self.request_ids):
            start = int(self.num_computed_tokens[row])
            ranges[request_id] = (start, start + int(self.num_scheduled_tokens[row]))
        return ranges

    def new_block_ids_by_request(self) -> dict[str, tuple[list[int], ...]]:
        """{request id: new block ids per group}: new_blocks, of the requests that got any."""
        by_row = self.new_blocks.ids_by_row(self.num_groups)
        return {self.request_ids[row]: ids for row, ids in by_row.items()}


@mypyc_attr(acyclic=True)
class RequestOutput(Record):
    """Tokens that a step added to a request; `finish` is its final status, or None while it goes on."""

    __match_args__ = ("request_id", "new_token_ids", "finish")

    def __init__(self, request_id: str, new_token_ids: list[int], finish: RequestStatus | None) -> None:
        self.request_id: Final = request_id
        self.new_token_ids: Final = new_token_ids
        self.finish: Final = finish


@mypyc_attr(acyclic=True)
class StepEnd(Record):
    """What became of a step that came back with one token a row, as update_from_tokens does.

    `finished`: the requests that it ended. `dropped_rows`: rows whose token counts for nothing, because the request had
    ended meanwhile, or was preempted and computes it again. All other requests have gained the token of their row.
    """

    def __init__(self) -> None:
        self.finished: list[RequestOutput] = []
        self.dropped_rows: list[int] = []


def _make_new_request_data(
    request_id: str,
    block_ids: tuple[list[int], ...],
    num_computed_tokens: int,
    packed_tokens: bytes,
    num_prompt_tokens: int,
    sampling_params: object | None,
) -> NewRequestData:
    tokens = TokenBuffer(packed_tokens)
    num_tokens = len(tokens)
    return NewRequestData(
        request_id, block_ids, num_computed_tokens, tokens, num_tokens, num_prompt_tokens, sampling_params
    )


def _make_output(
    step: int,
    num_groups: int,
    request_ids: list[str],
    num_scheduled_tokens: list[i32],
    num_computed_tokens: list[i32],
    errors: dict[str, tuple[type[RequestError], str]],
) -> SchedulerOutput:
    output = SchedulerOutput(step, num_groups)
    output.request_ids = request_ids
    output.num_scheduled_tokens = vec[i32](num_scheduled_tokens)
    output.num_computed_tokens = vec[i32](num_computed_tokens)
    output.errors = {request_id: kind(text) for request_id, (kind, text) in errors.items()}
    return output
