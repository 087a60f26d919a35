"""SchedulerConfig: the limits and choices of a scheduler."""

from dataclasses import dataclass
from enum import Enum

from kvledger.core.record import Record
from kvledger.core.units import MAX_COUNT, require_not_negative, require_positive
from kvledger.errors import wrong_value


class SchedulingPolicy(Enum):
    FCFS = "fcfs"
    PRIORITY = "priority"


@dataclass(frozen=True, eq=False, repr=False)
class SchedulerConfig(Record):
    """Names and meanings are vLLM's.

    `max_num_seqs`: requests that run at a time. `max_num_batched_tokens`: tokens of one step. `policy`: FCFS, or
    PRIORITY (lower value first, then earlier arrival). `long_prefill_token_threshold`: most prompt tokens that one
    request gets in a step while others are there (0: no such limit). `reserve_full_sequence`: admit a request only when
    all its tokens fit, not only its first chunk (vLLM: scheduler_reserve_full_isl). `num_speculative_tokens`: drafts a
    step; `num_lookahead_tokens`: slots that a drafter writes beyond them. `max_steps_in_flight`: 1, or 2 to schedule a
    step while the one before still computes (vLLM: async scheduling). `external_lease_steps`: steps after which the
    blocks of an aborted request are taken back although its external load never reported (0: never).
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    reserve_full_sequence: bool = True
    num_speculative_tokens: int = 0
    num_lookahead_tokens: int = 0
    max_steps_in_flight: int = 1
    external_lease_steps: int = 0

    def __post_init__(self) -> None:
        require_positive("max_num_seqs", self.max_num_seqs, MAX_COUNT)
        require_positive("max_num_batched_tokens", self.max_num_batched_tokens, MAX_COUNT)
        require_not_negative("long_prefill_token_threshold", self.long_prefill_token_threshold, MAX_COUNT)
        require_not_negative("num_speculative_tokens", self.num_speculative_tokens, MAX_COUNT)
        require_not_negative("num_lookahead_tokens", self.num_lookahead_tokens, MAX_COUNT)
        require_not_negative("external_lease_steps", self.external_lease_steps, MAX_COUNT)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise wrong_value(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"less than max_num_seqs={self.max_num_seqs}, so a full batch could not decode in one step",
                "raise it or lower max_num_seqs",
            )
        if self.max_steps_in_flight not in (1, 2):
            raise wrong_value("max_steps_in_flight", self.max_steps_in_flight, "not supported", "give 1 or 2")

    @property
    def max_prefill_chunk(self) -> int:
        """Most prompt tokens that one request can get in a step."""
        threshold = self.long_prefill_token_threshold
        return min(threshold, self.max_num_batched_tokens) if threshold > 0 else self.max_num_batched_tokens
