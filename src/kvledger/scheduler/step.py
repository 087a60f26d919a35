"""StepBuilder: one step while it is being put together. It lives for one call of schedule()."""

from typing import Final

from kvledger.kv_cache_blocks import KVCacheBlocks
from kvledger.request import Request
from kvledger.scheduler.output import NewRequestData, SchedulerOutput


class StepBuilder:
    """The token budget that is left, and what was scheduled so far."""

    def __init__(self, step: int, token_budget: int) -> None:
        self.output: Final = SchedulerOutput(step)
        self.token_budget: int = token_budget
        # Requests that were running before are in this step; one of them is still in its prompt.
        self.has_running: bool = False
        self.has_prefill: bool = False
        self.has_preempted: bool = False

    def add_running(self, request: Request, num_tokens: int, new_blocks: KVCacheBlocks | None) -> None:
        """Schedules a running request with the blocks that this step brought it, if any."""
        output = self.output
        output.requests.append(request)
        output.request_ids.append(request.request_id)
        output.num_scheduled_tokens.append(num_tokens)
        output.num_computed_tokens.append(request.num_computed_tokens)
        has_new = new_blocks is not None and not new_blocks.is_empty()
        output.new_block_ids.append(new_blocks.get_block_ids() if new_blocks is not None and has_new else None)
        self.token_budget -= num_tokens

    def add_new(self, request: Request, num_tokens: int, blocks: KVCacheBlocks) -> None:
        """Schedules a request that the workers do not know, with all its blocks."""
        data = NewRequestData(request, blocks.get_block_ids(), request.num_computed_tokens)
        self.add_running(request, num_tokens, None)
        self.output.new_requests.append(data)

    def remove(self, request: Request) -> bool:
        """Takes back a request that is preempted; True if it was scheduled in this step. O(scheduled requests)."""
        output = self.output
        if request not in output.requests:
            return False
        index = output.requests.index(request)
        self.token_budget += output.num_scheduled_tokens[index]
        del output.requests[index]
        del output.request_ids[index]
        del output.num_scheduled_tokens[index]
        del output.num_computed_tokens[index]
        del output.new_block_ids[index]
        output.draft_token_ids.pop(request.request_id, None)
        output.new_requests = [data for data in output.new_requests if data.request_id != request.request_id]
        return True
