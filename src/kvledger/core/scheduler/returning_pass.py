"""ReturningPass: what a step that came back means for its requests. Tokens are taken up to a stop, drafts accepted or
taken back, and who is done frees its blocks.
"""

from typing import Final

from mypy_extensions import i64

from kvledger.core.change import AT_REST, UPDATING
from kvledger.core.requests.request import Request, RequestStatus
from kvledger.core.scheduler.output import RequestOutput, SchedulerOutput, StepEnd
from kvledger.core.scheduler.sampled_tokens import (
    goes_on,
    require_sound_rows,
    require_sound_token,
    require_sound_tokens,
    take_back_plain,
)
from kvledger.core.scheduler.state import SchedulerState
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
        # What a step fills is indexed when it is scheduled, or when its token is back: not when drafts are verified.
        self._is_plain: Final = not self._verifies_drafts or not (
            self._steps_overlap or state.manager.decisions.caches_verified_drafts
        )

    def take(self, output: SchedulerOutput, sampled_token_ids: list[list[int]]) -> list[RequestOutput]:
        """Closes the step with any number of tokens a row; returns what requests gained."""
        self.require_oldest(output)
        self._require_one_a_row(output, len(sampled_token_ids))
        require_sound_rows(output, sampled_token_ids)
        self._close(output)
        outputs: list[RequestOutput] = []
        any_finished = False
        for row, request in enumerate(output.requests):
            gained = self._settle(output, row, request, sampled_token_ids[row])
            if gained is not None:
                outputs.append(gained)
                any_finished = any_finished or gained.finish is not None
        if any_finished:
            self._state.sweep_running()
        return outputs

    def take_one_a_row(self, output: SchedulerOutput, token_ids: list[int]) -> StepEnd:
        """Closes the step with one token a row, or -1."""
        self.require_oldest(output)
        self._require_one_a_row(output, len(token_ids))
        end = StepEnd()
        # Nothing was drafted: a token that comes back is only appended.
        if self._is_plain and not output.draft_token_ids:
            rows = self._append_plain(output, token_ids)
            self._close(output)
            for row in rows:
                self._settle_plain(output, row, token_ids[row], end)
        else:
            require_sound_tokens(output, token_ids)
            self._close(output)
            for row in range(len(token_ids)):
                self._settle_one(output, row, token_ids[row], end)
        if end.finished:
            self._state.sweep_running()
        return end

    def _append_plain(self, output: SchedulerOutput, token_ids: list[int]) -> list[int]:
        """Appends each token whose request simply goes on. Returns the rows of all others, in order: their tokens are
        sound, and where they end a request or fill a block they are appended too.

        One loop for checking and appending, because it is most of what a step's way back costs; so what was appended
        before a wrong token is taken back. RequestError then.
        """
        num_scheduled, num_computed = output.num_scheduled_tokens, output.num_computed_tokens
        max_model_len: i64 = self._manager.max_model_len
        rows: list[int] = []
        row: i64 = 0
        is_due = False
        change = self._state.change
        try:
            change.under_way = UPDATING
            for request in output.requests:
                token_id = token_ids[row]
                num_new = i64(num_scheduled[row])
                num_tokens = request.num_tokens
                is_due = token_id >= 0 and goes_on(request) and i64(num_computed[row]) + num_new >= num_tokens
                if is_due:
                    request.append_token(token_id)
                    num_tokens += 1
                    num_in_flight = request.num_in_flight_tokens - num_new
                    request.num_in_flight_tokens = num_in_flight
                    num_awaited = request.num_output_placeholders
                    if num_awaited > 0:
                        request.num_output_placeholders = num_awaited - 1
                    if (
                        num_tokens >= max_model_len
                        or num_tokens - request.num_prompt_tokens >= request.max_tokens
                        or (request.stop_token_ids and token_id in request.stop_token_ids)
                        # Steps that overlap have what a block holds indexed when it is certain.
                        or (num_awaited > 0 and request.num_computed_tokens - num_in_flight > request.quiet_end)
                    ):
                        rows.append(row)
                else:
                    require_sound_token(output, token_ids, row)
                    rows.append(row)
                # At once: between them an interrupt would take back one row too few, or too many.
                row, is_due = row + 1, False
        except BaseException as error:
            take_back_plain(output, token_ids, row + i64(is_due), self._steps_overlap)
            change.under_way = AT_REST
            if isinstance(error, (RequestError, TypeError)):
                # It says which row, or the token is none.
                require_sound_token(output, token_ids, row)
            raise
        return rows

    def _settle_plain(self, output: SchedulerOutput, row: int, token_id: int, end: StepEnd) -> None:
        """The rest of a row that _append_plain returned."""
        request = output.requests[row]
        if token_id < 0 or not goes_on(request):
            self._settle_one(output, row, token_id, end)
            return
        finish = self._finish_status(request, token_id)
        if self._steps_overlap and not self._cache(request, request.num_computed_tokens - request.num_in_flight_tokens):
            finish = RequestStatus.FINISHED_ERROR
        elif finish is not None:
            self._state.finish(request, finish)
        if finish is not None:
            end.finished.append(RequestOutput(request.request_id, [token_id], finish))

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
        if output.block_copies:
            self._manager.release_block_copies(output.block_copies)
        if self._fence is not None:
            self._fence.back(output.step)

    def _settle(self, output: SchedulerOutput, row: int, request: Request, sampled: list[int]) -> RequestOutput | None:
        """What one row of a step that came back means for its request; None when it gains nothing."""
        num_tokens = int(output.num_scheduled_tokens[row])
        request.num_in_flight_tokens -= num_tokens
        is_stale = request.num_stale_tokens > 0
        if is_stale:
            request.num_stale_tokens -= num_tokens
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
        num_rejected = len(drafts) - (num_sampled - 1)
        if request.num_computed_tokens > 0:
            request.num_computed_tokens -= num_rejected
        if request.num_output_placeholders > 0:
            request.num_output_placeholders -= num_rejected

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
        if request.num_tokens >= self._manager.max_model_len or request.num_output_tokens >= request.max_tokens:
            return RequestStatus.FINISHED_LENGTH
        return None

    def _require_one_a_row(self, output: SchedulerOutput, num_given: int) -> None:
        if num_given != len(output.requests):
            raise RequestError(
                f"step {output.step}: sampled tokens for {num_given} requests, but {len(output.requests)} were "
                "scheduled; give one entry for each of output.request_ids"
            )
