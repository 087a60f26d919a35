"""RequestMetrics: counters and histograms over requests that ended, from their accounts.

requests = RequestMetrics(target, max_model_len)
accounting = RequestAccounting(manager, time.monotonic, on_finish=requests.finished)
"""

from typing import Final

from kvledger.core.requests.request import RequestStatus
from kvledger.metrics.buckets import PREEMPTIONS, WAITING_SECONDS, one_two_five
from kvledger.metrics.target import MetricsTarget
from kvledger.scheduler import RequestAccount

_FINISHED_REASONS: Final = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class RequestMetrics:
    """Everything is counted when a request ends. `max_model_len` bounds the histograms of tokens."""

    def __init__(self, target: MetricsTarget, max_model_len: int) -> None:
        tokens = one_two_five(max_model_len)
        self._success: Final = {
            status: target.counter("request_success", "Requests that ended, by reason.", finished_reason=reason)
            for status, reason in _FINISHED_REASONS.items()
        }
        self._prompt: Final = target.histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self._output: Final = target.histogram("request_generation_tokens", "Tokens that it generated.", tokens)
        self._preemptions: Final = target.histogram(
            "request_num_preemptions", "How often it was preempted.", PREEMPTIONS
        )
        self._recomputed: Final = target.histogram(
            "request_recomputed_tokens", "Tokens that it computed again after preemptions.", tokens
        )
        self._blocks: Final = target.histogram(
            "request_kv_blocks_peak", "Most blocks that it held at a time.", one_two_five(max_model_len)
        )
        self._waiting: Final = target.histogram(
            "request_waiting_seconds", "Time in which it waited, also after preemptions.", WAITING_SECONDS
        )
        self._computed_total: Final = target.counter("request_computed_tokens", "Tokens computed for ended requests.")
        self._cached_total: Final = target.counter(
            "request_cached_tokens", "Tokens that the prefix cache had for them."
        )
        self._external_total: Final = target.counter("request_external_tokens", "Tokens that were loaded for them.")
        self._lost_total: Final = target.counter("request_lost_tokens", "Tokens that preemptions took from them.")
        self._drafted: Final = target.counter("spec_decode_num_draft_tokens", "Drafts verified for ended requests.")
        self._accepted: Final = target.counter("spec_decode_num_accepted_tokens", "Drafts accepted for them.")

    def finished(self, account: RequestAccount) -> None:
        """A request ended."""
        request = account.request
        self._success[request.status].inc()
        self._prompt.observe(int(request.num_prompt_tokens))
        self._output.observe(request.num_output_tokens)
        self._preemptions.observe(account.num_preemptions)
        self._recomputed.observe(account.num_recomputed_tokens)
        self._blocks.observe(account.num_blocks_peak)
        self._waiting.observe(account.seconds_waited)
        self._computed_total.inc(account.num_computed_tokens)
        self._cached_total.inc(account.num_cached_tokens)
        self._external_total.inc(account.num_external_tokens)
        self._lost_total.inc(account.num_lost_tokens)
        self._drafted.inc(account.num_drafts_accepted + account.num_drafts_rejected)
        self._accepted.inc(account.num_drafts_accepted)
