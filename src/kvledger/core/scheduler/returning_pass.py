"""ReturningPass: what a step that came back means for its requests. Tokens are taken up to a stop, drafts accepted or
taken back, and who is done frees its blocks.
"""

from typing import Final

from mypy_extensions import i64

from kvledger.core.change import UPDATING
from kvledger.core.requests.request import Request, RequestStatus
from kvledger.core.scheduler.output import RequestOutput, SchedulerOutput, StepEnd
from kvledger.core.scheduler.sampled_tokens import (
    require_sound_row,
    require_sound_rows,
    require_sound_token,
    require_sound_tokens,
)
from kvledger.core.scheduler.state import SchedulerState
from kvledger.core.units import IS_COMPILED
from kvledger.errors import RequestError


class ReturningPass:
    """The way back of schedule(): in the order of the step's rows."""

    def __init__(self, state: SchedulerState) -> None:
        self._state: Final = state
        self._manager: Final = state.manager
        self._accounting: Final = state.accounting
        self._fence: Final = state.fence
        self._steps_overlap: Final = state.config.max_steps_in_flight > 1
        self._verifies_drafts: Final = state.config.num_speculative_tokens > 0
        self._table: Final = state.rows.table
        self._max_model_len: Final[i64] = state.manager.max_model_len

    def take(self, output: SchedulerOutput, sampled_token_ids: list[list[int]]) -> list[RequestOutput]:
        """Closes the step with any number of tokens a row; returns what requests gained."""
        self.require_oldest(output)
        self._require_one_a_row(output, len(sampled_token_ids))
        due = self._put_down_rows(output, sampled_token_ids)
        self._close(output)
        outputs: list[RequestOutput] = []
        any_finished = False
        num_rows: i64 = len(sampled_token_ids)
        next_due: i64 = 0
        row: i64 = 0
        while row < num_rows:
            sampled = sampled_token_ids[row]
            if next_due < len(due) and due[next_due] == row:
                next_due += 1
                gained = self._settle(output, row, output.requests[row], sampled)
                if gained is not None:
                    outputs.append(gained)
                    any_finished = any_finished or gained.finish is not None
            else:
                outputs.append(RequestOutput(output.request_ids[row], sampled, None))
            row += 1
        if any_finished:
            self._state.rows.sweep()
        return outputs

    def take_one_a_row(self, output: SchedulerOutput, token_ids: list[int]) -> StepEnd:
        """Closes the step with one token a row, or -1."""
        self.require_oldest(output)
        self._require_one_a_row(output, len(token_ids))
        due = self._put_down_tokens(output, token_ids)
        self._close(output)
        end = StepEnd()
        for row in due:
            self._settle_one(output, row, token_ids[row], end)
        if end.finished:
            self._state.rows.sweep()
        return end

    def _put_down_tokens(self, output: SchedulerOutput, token_ids: list[int]) -> list[int]:
        """Notes the token of every request whose row counts for it. Returns all other rows, in order: what they have is
        sound, and their requests count for themselves.

        RequestError where a row cannot be right. Nothing is changed then: a token counts when its step is back.
        """
        if not IS_COMPILED:
            # Compiled, reading them finds out.
            require_sound_tokens(output, token_ids)
        table, rows_are_same = self._table, output.rows_version == self._state.rows.version
        requests, starts = output.requests, output.num_computed_tokens
        due: list[int] = []
        num_rows: i64 = len(token_ids)
        row: i64 = 0
        try:
            while row < num_rows:
                if rows_are_same:
                    row = table.put_run(row, starts, token_ids)
                    if row == num_rows:
                        break
                else:
                    place = requests[row].row_in(table)
                    if place >= 0 and table.put(place, i64(starts[row]) + 1, token_ids[row]):
                        row += 1
                        continue
                require_sound_token(output, token_ids, row)
                requests[row].leave()
                due.append(row)
                row += 1
        except (TypeError, ValueError, OverflowError):
            require_sound_tokens(output, token_ids)
            raise
        return due

    def _put_down_rows(self, output: SchedulerOutput, sampled_token_ids: list[list[int]]) -> list[int]:
        """The same for a list of tokens a row."""
        if not IS_COMPILED:
            require_sound_rows(output, sampled_token_ids)
        table, rows_are_same = self._table, output.rows_version == self._state.rows.version
        requests, starts = output.requests, output.num_computed_tokens
        due: list[int] = []
        num_rows: i64 = len(sampled_token_ids)
        row: i64 = 0
        try:
            while row < num_rows:
                sampled = sampled_token_ids[row]
                place = row if rows_are_same else requests[row].row_in(table)
                if place < 0 or len(sampled) != 1 or not table.put(place, i64(starts[row]) + 1, i64(sampled[0])):
                    require_sound_row(output, sampled_token_ids, row)
                    requests[row].leave()
                    due.append(row)
                row += 1
        except (TypeError, ValueError, OverflowError):
            require_sound_row(output, sampled_token_ids, row)
            raise
        return due

    def _settle_one(self, output: SchedulerOutput, row: int, token_id: int, end: StepEnd) -> None:
        """_settle for at most one token."""
        gained = self._settle(output, row, output.requests[row], [token_id] if token_id >= 0 else [])
        if gained is None and token_id >= 0:
            end.dropped_rows.append(row)
        if gained is not None and gained.finish is not None:
            end.finished.append(gained)

    def drop(self, output: SchedulerOutput) -> None:
        """Closes the step without a token for anybody."""
        self.require_oldest(output)
        for request in output.requests:
            request.leave()
        self._close(output)
        for row, request in enumerate(output.requests):
            self._settle(output, row, request, [])

    def require_oldest(self, output: SchedulerOutput) -> None:
        in_flight = self._state.in_flight
        if not in_flight or in_flight[0] is not output:
            raise RequestError(f"step {output.step} is not the oldest step in flight; steps come back in order")

    def _close(self, output: SchedulerOutput) -> None:
        """The step is no longer in flight, and its copies are made. From here on nothing is refused any more."""
        self._state.change.under_way = UPDATING
        self._manager.hold_errors()
        del self._state.in_flight[0]
        self._table.num_in_flight -= 1
        if output.block_copies:
            self._manager.release_block_copies(output.block_copies)
        if self._fence is not None:
            self._fence.back(output.step)

    def _settle(self, output: SchedulerOutput, row: int, request: Request, sampled: list[int]) -> RequestOutput | None:
        """What one row of a step that came back means for its request; None when it gains nothing."""
        is_stale = not request.count_returned(i64(output.num_scheduled_tokens[row]))
        if not sampled or request.is_finished or (is_stale and request.drops_stale_output):
            return None
        if output.draft_token_ids and self._accounting is not None:
            self._accounting.verify_drafts(request, output.draft_token_ids.get(request.request_id), len(sampled))
        if output.draft_token_ids and not is_stale:
            self._take_back_rejected(output, request, len(sampled))
        return self._take_tokens(request, sampled, is_stale)

    def _take_back_rejected(self, output: SchedulerOutput, request: Request, num_sampled: int) -> None:
        drafts = output.draft_token_ids.get(request.request_id)
        if drafts is None:
            return
        request.take_back(len(drafts) - (num_sampled - 1))

    def _take_tokens(self, request: Request, sampled: list[int], is_stale: bool) -> RequestOutput:
        """Appends sampled tokens up to a stop; caches what became certain by them."""
        rules = self._manager.decisions
        was_awaited = request.num_output_placeholders > 0
        finish: RequestStatus | None = None
        num_taken = 0
        for token_id in sampled:
            request.append_token(token_id)
            num_taken += 1
            finish = self._finish_status(request, token_id)
            if finish is not None:
                break
        if rules.trims_stops and finish is not None and not is_stale:
            request.num_computed_tokens -= len(sampled) - num_taken
        if was_awaited and not is_stale:
            request.num_output_placeholders -= len(sampled) if rules.trims_stops else num_taken
        if request.status is RequestStatus.RUNNING:
            num_certain = -1
            if rules.caches_verified_drafts:
                if not is_stale and (was_awaited or self._verifies_drafts):
                    num_certain = request.num_computed_tokens - request.num_in_flight_tokens
            elif self._steps_overlap:
                num_certain = request.num_computed_tokens - request.num_output_placeholders
            if num_certain >= 0 and not self._cache(request, num_certain):
                finish = RequestStatus.FINISHED_ERROR
        if finish is not None and finish is not RequestStatus.FINISHED_ERROR:
            self._state.finish(request, finish)
        taken = sampled if num_taken == len(sampled) else sampled[:num_taken]
        return RequestOutput(request.request_id, taken, finish)

    def _cache(self, request: Request, num_tokens: int) -> bool:
        """False when its hashes are wrong: then it has ended."""
        try:
            self._manager.cache_blocks(request, num_tokens)
        except RequestError as error:
            self._state.fail(request, error)
            return False
        return True

    def _finish_status(self, request: Request, token_id: int) -> RequestStatus | None:
        if request.stop_token_ids and token_id in request.stop_token_ids:
            return RequestStatus.FINISHED_STOPPED
        num_tokens = request.num_tokens
        if num_tokens >= self._max_model_len or num_tokens - request.num_prompt_tokens >= request.max_tokens:
            return RequestStatus.FINISHED_LENGTH
        return None

    def _require_one_a_row(self, output: SchedulerOutput, num_given: int) -> None:
        if num_given != len(output.requests):
            raise RequestError(
                f"step {output.step}: sampled tokens for {num_given} requests, but {len(output.requests)} were "
                "scheduled; give one entry for each of output.request_ids"
            )
