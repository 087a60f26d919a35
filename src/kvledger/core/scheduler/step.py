"""StepBuilder: one step while it is being put together. It lives for one call of schedule()."""

from typing import Final

from librt.vecs import append, pop, vec
from mypy_extensions import i32, i64

from kvledger.core.blocks.kv_cache_blocks import KVCacheBlocks
from kvledger.core.requests.request import Request
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.core.scheduler.output import NewRequestData, SchedulerOutput
from kvledger.core.scheduler.running_rows import RunningRows


class StepBuilder:
    """The token budget that is left, and the output with what was scheduled so far: new blocks and drafts. Its rows are
    filled in when all of them are known.

    Nearly always row r of the step is running request r, so that nobody needs to list them; `requests` is None then.
    """

    def __init__(self, step: int, num_groups: int, config: SchedulerConfig, rows: RunningRows) -> None:
        self.output: Final = SchedulerOutput(step, num_groups)
        self.token_budget: int = config.max_num_batched_tokens
        self.num_rows: int = 0
        # Requests that were running before are in this step; one of them is still in its prompt.
        self.has_running: bool = False
        self.has_prefill: bool = False
        self.has_preempted: bool = False
        self._max_in_flight: Final[i64] = config.max_steps_in_flight
        self._num_drafts: Final = config.num_speculative_tokens
        self._rows: Final = rows
        # Of the rows so far, and one each of those that may still come.
        self._num_scheduled: vec[i32] = rows.ones()
        self._requests: list[Request] | None = None

    def add_quiet(self, place: int, end: int) -> None:
        """Schedules one token each for the running requests from that place on, which only count."""
        num_added = end - place
        if self._requests is None and place != self.num_rows:
            self._requests = self._rows.requests[: self.num_rows]
        if self._requests is not None:
            self._requests.extend(self._rows.requests[place:end])
        self.num_rows += num_added
        self.token_budget -= num_added
        self.has_running = True

    def add(self, request: Request, num_tokens: int) -> None:
        """Schedules a request. What the step brought it stands in output.new_blocks, as blocks of the next row."""
        row = self.num_rows
        if self._requests is None and self._rows.requests[row] is not request:
            self._requests = self._rows.requests[:row]
        if self._requests is not None:
            self._requests.append(request)
        if row < len(self._num_scheduled):
            self._num_scheduled[row] = i32(num_tokens)
        else:
            self._num_scheduled = append(self._num_scheduled, i32(num_tokens))
        self.num_rows = row + 1
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
        """Takes back a running request that is preempted next; True if it was scheduled in this step."""
        output = self.output
        row = self._row_of(request)
        if row < 0:
            return False
        self._num_scheduled, num_tokens = pop(self._num_scheduled, row)
        self.token_budget += num_tokens
        self.num_rows -= 1
        if self._requests is not None:
            del self._requests[row]
        output.new_blocks.remove_row(row)
        output.draft_token_ids.pop(request.request_id, None)
        output.new_requests = [data for data in output.new_requests if data.request_id != request.request_id]
        return True

    def requests(self) -> list[Request]:
        """Who is in the step so far, in a list that must not be changed."""
        return self._rows.first(self.num_rows) if self._requests is None else self._requests

    def fill_rows(self) -> None:
        """Fills in what the output says of each request, and counts the step as computed, so that the next one can be
        scheduled before it is back."""
        output, rows, table = self.output, self._rows, self._rows.table
        num_rows: i64 = self.num_rows
        is_in_place = self._requests is None
        requests = self.requests()
        output.requests = requests
        if is_in_place:
            output.rows_version = rows.version
            output.request_ids = rows.first_ids(self.num_rows)
            rows.leave_from(self.num_rows)
        else:
            output.request_ids = [request.request_id for request in requests]
            rows.leave_from(0)
        scheduled = self._num_scheduled[:num_rows]
        computed = table.computed[:num_rows]
        counts, event_at = table.computed, table.event_at
        table.num_in_flight += 1
        total: i64 = 0
        row: i64 = 0
        while row < num_rows:
            num_computed = counts[row]
            if event_at[row] > 0:
                counts[row] = num_computed + 1
            else:
                request = requests[row]
                num_computed = i32(request.num_computed_tokens)
                computed[row] = num_computed
                self._count(request, i64(scheduled[row]))
                if is_in_place and scheduled[row] == 1:
                    rows.try_enter(request, row)
            total += i64(num_computed)
            row += 1
        output.num_scheduled_tokens = scheduled
        output.num_computed_tokens = computed
        output.total_num_computed_tokens = total

    def _count(self, request: Request, num_tokens: i64) -> None:
        request.count_scheduled(num_tokens)
        if self._max_in_flight == 1 or request.is_prefill_chunk:
            return
        # Steps overlap: the next one counts on the tokens that this one will sample, without knowing them.
        drafts = self.output.draft_token_ids.get(request.request_id) if self.output.draft_token_ids else None
        request.num_output_placeholders += 1 + (0 if drafts is None else len(drafts))
        if self._num_drafts > 0:
            request.draft_token_ids = [-1] * self._num_drafts

    def _row_of(self, request: Request) -> int:
        """Its row in this step, or -1. O(1) for the running request that was added last."""
        if self._requests is None:
            place = self._rows.place_of(request)
            return place if place < self.num_rows else -1
        return self._requests.index(request) if request in self._requests else -1
