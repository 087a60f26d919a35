"""StepClock: seconds of a step of layers that read everything, from a few numbers of it. The one place of the formula,
for steps that are taken one by one and for many at once; what it models is told in replay/step_time.py.
"""

from typing import Final

from mypy_extensions import i64


class StepClock:
    """Speeds as seconds for each of what a step has. `seconds_experts`: to read all routed experts, of which a token
    leaves out the share `experts_missed`."""

    def __init__(
        self,
        overhead: float,
        seconds_per_token: float,
        seconds_per_pair: float,
        seconds_weights: float,
        seconds_per_context_token: float,
        seconds_per_request: float,
        seconds_experts: float,
        experts_missed: float,
    ) -> None:
        self.overhead: Final = overhead
        self._seconds_per_token: Final = seconds_per_token
        self._seconds_per_pair: Final = seconds_per_pair
        self._seconds_weights: Final = seconds_weights
        self._seconds_per_context_token: Final = seconds_per_context_token
        self._seconds_per_request: Final = seconds_per_request
        self._seconds_experts: Final = seconds_experts
        self._experts_missed: Final = experts_missed
        # What a step of that many tokens need not read of the experts.
        self._last_new: i64 = -1
        self._seconds_missed: float = 0.0

    def compute(self, num_new: i64, num_pairs: float) -> float:
        """Seconds of computing num_new tokens that look at num_pairs pairs of a query and a key."""
        return float(num_new) * self._seconds_per_token + num_pairs * self._seconds_per_pair

    def read(self, num_new: i64, num_context: i64, num_requests: i64) -> float:
        """Seconds of reading weights, num_context tokens of context, and the states of num_requests requests."""
        read = self._seconds_weights + float(num_context) * self._seconds_per_context_token
        read += float(num_requests) * self._seconds_per_request
        if self._experts_missed > 0.0:
            if num_new != self._last_new:
                self._last_new = num_new
                self._seconds_missed = self._seconds_experts * self._experts_missed ** float(num_new)
            read -= self._seconds_missed
        return read

    def decode(self, num_requests: i64, num_context: i64) -> float:
        """Seconds of a step in which each request computes one token, num_context tokens in all with those."""
        compute = self.compute(num_requests, float(num_context))
        read = self.read(num_requests, num_context, num_requests)
        return self.overhead + (compute if compute > read else read)
