"""Checks every explanation of every step against the step itself, and its "since" against a count of its own."""

from collections import Counter

from kvledger import RequestStatus
from kvledger.scheduler import Scheduler, SchedulerOutput, WaitExplanation, WaitReason

R = WaitReason


class WaitChecker:
    """For Engine.schedule(): to be called with each step, before anything else happens."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        # Request id -> (is it running, first step in a row that gave it nothing).
        self.since: dict[str, tuple[bool, int]] = {}

    def check(self, output: SchedulerOutput) -> None:
        scheduler = self.scheduler
        explanations = {explanation.request_id: explanation for explanation in scheduler.explain_all()}
        for request_id in output.request_ids:
            assert scheduler.explain(request_id) is None
        without = {each.request_id for each in scheduler.running_requests() + scheduler.waiting_requests()}
        assert explanations.keys() == without - set(output.request_ids)
        counts = Counter(explanation.reason for explanation in explanations.values())
        del counts[R.OUTPUT_IN_FLIGHT]
        assert counts == scheduler.wait_counts()
        for explanation in explanations.values():
            assert explanation == scheduler.explain(explanation.request_id)
            assert str(explanation).startswith(f"'{explanation.request_id}' waits")
            assert explanation.step == output.step
            self.check_reason(explanation, output)
        self.check_since(explanations, output.step)
        for request_id, error in output.errors.items():
            ended = scheduler.explain(request_id)
            assert ended is not None
            assert (ended.reason, ended.error) == (R.NEVER_FITS, str(error))

    def check_reason(self, told: WaitExplanation, output: SchedulerOutput) -> None:
        """The facts that the reason claims, as far as the step and the ledger still show them."""
        scheduler = self.scheduler
        request = scheduler.get_request(told.request_id)
        config = scheduler.config
        if told.reason is R.EXTERNAL_LOAD:
            assert request.status is RequestStatus.WAITING_FOR_EXTERNAL_KV
            assert 0 < told.load_since_step <= output.step
        elif told.reason is R.TOKEN_BUDGET:
            assert output.total_num_scheduled_tokens == config.max_num_batched_tokens == told.limit
        elif told.reason is R.MAX_NUM_SEQS:
            assert scheduler.num_running == config.max_num_seqs == told.limit
        elif told.reason is R.BLOCKS:
            shortage = told.shortage
            assert shortage is not None
            assert shortage.request_id == told.request_id
            if shortage.is_host_pool:
                return  # its numbers are the device's
            assert shortage.is_beside_loads or shortage.num_free == scheduler.manager.num_free_blocks
            assert shortage.num_needed + shortage.num_watermark > shortage.num_free - shortage.num_reserved
        elif told.reason is R.BLOCKS_IN_FLIGHT:
            assert told.shortage is not None
            assert told.shortage.request_id == told.request_id
            assert any(each.num_in_flight_tokens > 0 for each in scheduler.running_requests())
        elif told.reason is R.BEHIND:
            blocker = scheduler.explain(told.other_id)
            assert blocker is not None
            assert (blocker.reason, blocker.shortage) == (told.other_reason, told.shortage)
            assert blocker.num_ahead < told.num_ahead
        elif told.reason is R.STALE_OUTPUT:
            assert request.num_stale_tokens > 0
        elif told.reason is R.PREEMPTED:
            assert told.request_id in output.preempted_request_ids
            assert told.shortage is not None
            assert told.shortage.request_id == told.other_id
        elif told.reason is R.STEP_PREEMPTED:
            assert told.other_id in output.preempted_request_ids
        elif told.reason is R.OUTPUT_IN_FLIGHT:
            assert request.num_in_flight_tokens > 0
        elif told.reason in (R.CHUNK_CLIPPED, R.WHOLE_PROMPT, R.PADDED_DECODE):
            assert output.total_num_scheduled_tokens + told.limit <= config.max_num_batched_tokens

    def check_since(self, explanations: dict[str, WaitExplanation], step: int) -> None:
        before, self.since = self.since, {}
        for request_id, explanation in explanations.items():
            runs = self.scheduler.get_request(request_id).status is RequestStatus.RUNNING
            ran, since = before.get(request_id, (runs, step))
            if ran is not runs:
                since = step
            assert explanation.since_step == since, explanation
            self.since[request_id] = (runs, since)
