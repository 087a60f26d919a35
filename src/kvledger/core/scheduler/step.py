"""StepBuilder: one step while it is being put together. It lives for one call of schedule()."""

from typing import Final

from librt.vecs import append, pop
from mypy_extensions import i32

from kvledger.core.blocks.kv_cache_blocks import KVCacheBlocks
from kvledger.core.requests.request import Request
from kvledger.core.scheduler.output import NewRequestData, SchedulerOutput


class StepBuilder:
    """The token budget that is left, and the output with what was scheduled so far: requests, their numbers of tokens,
    new blocks and drafts. The rest of its rows is filled in when all of them are known."""

    def __init__(self, step: int, token_budget: int, num_groups: int) -> None:
        self.output: Final = SchedulerOutput(step, num_groups)
        self.token_budget: int = token_budget
        # Requests that were running before are in this step; one of them is still in its prompt.
        self.has_running: bool = False
        self.has_prefill: bool = False
        self.has_preempted: bool = False

    def add(self, request: Request, num_tokens: int) -> None:
        """Schedules a request. What the step brought it stands in output.new_blocks, as blocks of the next row."""
        output = self.output
        output.requests.append(request)
        output.num_scheduled_tokens = append(output.num_scheduled_tokens, i32(num_tokens))
        self.token_budget -= num_tokens

    def add_new(self, request: Request, num_tokens: int, blocks: KVCacheBlocks) -> None:
        """Schedules a request that the workers do not know, with all its blocks."""
        data = NewRequestData(
            request.request_id,
            blocks.get_block_ids(),
            request.num_computed_tokens,
            request.tokens,
            request.num_tokens,
            request.num_prompt_tokens,
            request.sampling_params,
        )
        self.output.new_requests.append(data)
        self.add(request, num_tokens)

    def remove(self, request: Request) -> bool:
        """Takes back a request that is preempted; True if it was scheduled in this step. O(scheduled requests)."""
        output = self.output
        if request not in output.requests:
            return False
        row = output.requests.index(request)
        output.num_scheduled_tokens, num_tokens = pop(output.num_scheduled_tokens, row)
        self.token_budget += num_tokens
        del output.requests[row]
        output.new_blocks.remove_row(row)
        output.draft_token_ids.pop(request.request_id, None)
        output.new_requests = [data for data in output.new_requests if data.request_id != request.request_id]
        return True
