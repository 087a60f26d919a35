"""What an ExtentScheduler knows of a request, and what it says of a step: the same words as Request and SchedulerOutput
where both have them."""

from typing import Final

from mypy_extensions import i64

from kvledger.core.extents.holding import Holding


class ExtentRequest:
    """A request without tokens: how many it has, and how many are computed."""

    def __init__(self, request_id: str, num_prompt_tokens: int, max_tokens: int, holding: Holding) -> None:
        self.request_id: Final = request_id
        self.holding: Final = holding
        self.num_prompt_tokens: Final[i64] = num_prompt_tokens
        self.max_tokens: Final[i64] = max_tokens
        self.num_tokens: i64 = num_prompt_tokens
        self.num_computed_tokens: i64 = 0
        self.num_preemptions: i64 = 0
        self.is_prefill_chunk: bool = False
        self.is_finished: bool = False
        # Most tokens that it had when it was preempted, and where its present life began to compute.
        self.num_computed_before: i64 = 0
        self.start: i64 = 0

    @property
    def num_output_tokens(self) -> int:
        return int(self.num_tokens - self.num_prompt_tokens)

    @property
    def num_recomputed(self) -> i64:
        """Tokens of its present life that it had before a preemption."""
        again = min(self.num_computed_tokens, self.num_computed_before) - self.start
        return again if again > 0 else 0


class StartedRequest:
    """A request that starts in a step, behind num_computed_tokens tokens that were hit."""

    def __init__(self, request_id: str, num_computed_tokens: int) -> None:
        self.request_id: Final = request_id
        self.num_computed_tokens: Final = num_computed_tokens


class ExtentStep:
    """A step: who computes something in it, who starts, who was preempted, and who ended as it outgrew the pool."""

    def __init__(self, step: int) -> None:
        self.step: Final = step
        self.requests: Final[list[ExtentRequest]] = []
        self.request_ids: Final[list[str]] = []
        self.new_requests: Final[list[StartedRequest]] = []
        self.preempted_request_ids: Final[list[str]] = []
        self.outgrown_ids: Final[list[str]] = []
        self.total_num_scheduled_tokens: int = 0
        self.total_num_computed_tokens: int = 0


class QuietSteps:
    """Steps that were taken together: the seconds of each, the usage of the pool in each, and the time at their end."""

    def __init__(self, seconds: list[float], usages: list[float], end: float) -> None:
        self.seconds: Final = seconds
        self.usages: Final = usages
        self.end: Final = end
