"""What a scheduled replay drives: the library's scheduler on its ledger, or the same decisions in runs of blocks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Protocol

from kvledger.core.extents.extent_request import ExtentRequest, ExtentStep, QuietSteps
from kvledger.core.extents.extent_scheduler import ExtentScheduler
from kvledger.core.extents.step_clock import StepClock
from kvledger.replay.config import ReplayConfig
from kvledger.replay.extent_ledger import ExtentLedger
from kvledger.replay.ledger import BlockLedger, ReplayLedger
from kvledger.replay.step_time import StepTimeModel
from kvledger.scheduler import (
    RequestAccounting,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SchedulingPolicy,
    WaitReason,
)
from kvledger.traces.prompts import PromptMaker
from kvledger.traces.trace_request import TraceRequest

# Most steps that are taken at once: their numbers are kept until they are counted.
_MOST_QUIET: Final = 1 << 16


def why_scheduled_by_blocks(config: ReplayConfig, step_time: StepTimeModel, *, has_log: bool) -> str:
    """Why what could be counted in extents cannot be scheduled on them; nothing where it can."""
    scheduler = config.scheduler
    if has_log:
        return "an engine's log lines are those of its scheduler"
    if scheduler.policy is not SchedulingPolicy.FCFS:
        return f"--policy {scheduler.policy.value}"
    if scheduler != SchedulerConfig(scheduler.max_num_seqs, scheduler.max_num_batched_tokens):
        return "a scheduler with rules of its own"
    if step_time.reaches:
        return "layers that read a part of what they keep"
    return ""


class ServedRequest(Protocol):
    """A request as the scheduler has it."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def is_prefill_chunk(self) -> bool: ...


class Started(Protocol):
    """A request that starts, behind what was hit of it."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_computed_tokens(self) -> int: ...


class ServedStep(Protocol):
    """A step that is put together."""

    @property
    def step(self) -> int: ...
    @property
    def request_ids(self) -> list[str]: ...
    @property
    def new_requests(self) -> Sequence[Started]: ...
    @property
    def preempted_request_ids(self) -> list[str]: ...
    @property
    def total_num_scheduled_tokens(self) -> int: ...
    @property
    def total_num_computed_tokens(self) -> int: ...


class Serving(ABC):
    """A scheduler on its ledger, one step out at a time."""

    ledger: ReplayLedger

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Requests that run."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Requests that wait in it."""

    @property
    @abstractmethod
    def has_unfinished_requests(self) -> bool:
        """Whether anybody is there."""

    @property
    @abstractmethod
    def num_preemptions(self) -> int:
        """Preemptions so far."""

    @property
    @abstractmethod
    def num_recomputed_tokens(self) -> int:
        """Tokens that were computed again after preemptions, of all requests that have ended."""

    @abstractmethod
    def running_requests(self) -> Sequence[ServedRequest]:
        """In the order of scheduling."""

    @abstractmethod
    def add(self, recorded: TraceRequest, serial: int) -> tuple[ServedRequest, list[int] | None]:
        """Queues a request under that number. Returns it, and what it generates where that is not one token over and
        over."""

    @abstractmethod
    def schedule(self) -> ServedStep:
        """Puts the next step together."""

    @abstractmethod
    def outgrown(self) -> list[str]:
        """Who ended in that step because they outgrew the pool."""

    @abstractmethod
    def update(self, sampled: list[int]) -> list[str]:
        """The step is back with a token for each of its requests, or -1. Returns who ended by that."""

    @abstractmethod
    def wait_counts(self, num_more: int) -> dict[WaitReason, int]:
        """How many requests the last step gave nothing, by reason; num_more stand behind all others."""

    @abstractmethod
    def check(self) -> None:
        """Proves the invariants of every layer."""

    def quiet(self, clock: StepClock, now: float, until: float) -> QuietSteps | None:
        """Takes the steps together in which nothing happens, up to the first that ends at `until` or behind it. None
        when the next is none."""
        return None


class ServingByBlocks(Serving):
    """The library's own."""

    def __init__(self, config: ReplayConfig, maker: PromptMaker) -> None:
        ledger = BlockLedger(config, maker)
        self.ledger = ledger
        self._maker: Final = maker
        self._accounting: Final = RequestAccounting(ledger.manager)
        self.scheduler: Final = Scheduler(ledger.manager, config.scheduler, accounting=self._accounting)
        self._output: SchedulerOutput

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.num_preemptions

    @property
    def num_recomputed_tokens(self) -> int:
        return self._accounting.totals().num_recomputed_tokens

    def running_requests(self) -> Sequence[ServedRequest]:
        return self.scheduler.running_requests()

    def add(self, recorded: TraceRequest, serial: int) -> tuple[ServedRequest, list[int] | None]:
        request = self._maker.make(recorded, serial)
        self.scheduler.add_request(request)
        return request, self._maker.answer(recorded, serial)

    def schedule(self) -> ServedStep:
        self._output = output = self.scheduler.schedule()
        return output

    def outgrown(self) -> list[str]:
        return list(self._output.errors)

    def update(self, sampled: list[int]) -> list[str]:
        return [output.request_id for output in self.scheduler.update_from_tokens(self._output, sampled).finished]

    def wait_counts(self, num_more: int) -> dict[WaitReason, int]:
        return self.scheduler.wait_counts(num_more)

    def check(self) -> None:
        self.scheduler.check()


class ServingByExtents(Serving):
    """In runs of blocks. REQUIRES a config that need not be replayed by blocks."""

    def __init__(self, config: ReplayConfig) -> None:
        ledger = ExtentLedger(config)
        self.ledger = ledger
        self._extents: Final = ledger
        self.scheduler: Final = ExtentScheduler(
            ledger.admissions, config.scheduler, config.longest, int(config.watermark * config.num_blocks)
        )
        self._step: ExtentStep

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.num_preemptions

    @property
    def num_recomputed_tokens(self) -> int:
        return self.scheduler.num_recomputed_tokens

    def running_requests(self) -> Sequence[ServedRequest]:
        return self.scheduler.running_requests()

    def add(self, recorded: TraceRequest, serial: int) -> tuple[ServedRequest, list[int] | None]:
        holding = self._extents.enter(recorded)
        request = ExtentRequest(str(serial), recorded.num_prompt_tokens, recorded.num_output_tokens, holding)
        self.scheduler.add_request(request)
        return request, None

    def schedule(self) -> ServedStep:
        self._step = step = self.scheduler.schedule()
        return step

    def outgrown(self) -> list[str]:
        return self._step.outgrown_ids

    def update(self, sampled: list[int]) -> list[str]:
        return self.scheduler.update(self._step)

    def wait_counts(self, num_more: int) -> dict[WaitReason, int]:
        return self.scheduler.wait_counts(num_more)

    def check(self) -> None:
        self.scheduler.check()

    def quiet(self, clock: StepClock, now: float, until: float) -> QuietSteps | None:
        return self.scheduler.quiet(clock, now, until, _MOST_QUIET)
