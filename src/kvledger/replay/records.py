"""What a replay tells of single requests and steps while it runs, to whoever listens: files, traces, tables."""

from abc import ABC, abstractmethod
from typing import Final

import msgspec

# How a request ended, besides the reasons why it was refused.
FINISHED: Final = "finished"
CUT_SHORT: Final = "cut_at_max_model_len"


class RequestRecord(msgspec.Struct):
    """One request that is done. Times are simulated seconds; None: it did not come so far, or no time passes.

    `admitted`: when the first step began that computed some of it. `num_hit_tokens`: of its prompt, found cached then.
    `away`: from when to when it was preempted, each time. `outcome`: finished, cut_at_max_model_len, or why it was
    refused.
    """

    number: int
    session: int
    priority: int
    arrival: float
    end: float
    num_prompt_tokens: int
    num_output_tokens: int
    outcome: str
    admitted: float | None = None
    first_token: float | None = None
    num_hit_tokens: int = 0
    away: list[tuple[float, float]] = []

    @property
    def is_served(self) -> bool:
        return self.outcome in (FINISHED, CUT_SHORT)

    @property
    def ttft(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def itl(self) -> float | None:
        """Mean seconds between its tokens; None for fewer than two."""
        if self.first_token is None or self.num_output_tokens < 2:
            return None
        return (self.end - self.first_token) / (self.num_output_tokens - 1)

    @property
    def e2e(self) -> float | None:
        """Seconds from its arrival to its last token."""
        return self.end - self.arrival if self.is_served else None


class StepRecord(msgspec.Struct):
    """One step of the engine, from `start` on. Counts of requests and tokens, and the blocks of the pool at its end."""

    number: int
    start: float
    seconds: float
    num_requests: int
    num_tokens: int
    num_prefill_tokens: int
    num_running: int
    num_waiting: int
    num_live_blocks: int
    num_cached_blocks: int
    num_preempted: int


class ReplayListener(ABC):
    """Is told of every request when it is done, in the order of the ends, and of every step."""

    # Whether it wants to hear of steps, each of which costs.
    hears_steps: bool = False

    @abstractmethod
    def ended(self, record: RequestRecord) -> None:
        """A request is done."""

    def stepped(self, record: StepRecord) -> None:
        """A step is over."""
        return

    def close(self) -> None:
        """The replay is over, or has failed."""
        return
