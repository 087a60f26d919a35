"""vLLM's schedulers on the ledger: for `scheduler_cls`, and what an engine's own becomes with the plugin switched on.

Each asks its DecodeSteps first; what those leave goes to vLLM's own code.
"""

from typing import Any

from vllm.v1.core.sched import async_scheduler, scheduler

from kvledger.integrations.vllm.decode_steps import DecodeSteps
from kvledger.integrations.vllm.plugin import ledger_in_place


def _decodes_first(theirs: Any) -> Any:
    """A scheduler class of vLLM's with DecodeSteps in front.

    A subclass of it alone, and not of a second class: an object of vLLM's class can only then become one of ours.
    """

    class Ours(theirs):  # type: ignore[misc]
        # None where vLLM's code takes every step.
        decode_steps: DecodeSteps | None

        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            with ledger_in_place():
                super().__init__(vllm_config, *args, **kwargs)
            self.decode_steps = DecodeSteps.of(self)

        def schedule(self, throttle_prefills: bool = False) -> Any:
            steps = self.decode_steps
            output = None if steps is None else steps.schedule(throttle_prefills)
            return super().schedule(throttle_prefills) if output is None else output

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            steps = self.decode_steps
            outputs = None if steps is None else steps.update_from_output(scheduler_output, model_runner_output)
            return super().update_from_output(scheduler_output, model_runner_output) if outputs is None else outputs

    Ours.__name__ = Ours.__qualname__ = theirs.__name__
    return Ours


Scheduler = _decodes_first(scheduler.Scheduler)
AsyncScheduler = _decodes_first(async_scheduler.AsyncScheduler)
_OURS = {scheduler.Scheduler: Scheduler, async_scheduler.AsyncScheduler: AsyncScheduler}


def take_decode_steps(made: Any) -> None:
    """Makes a scheduler of vLLM's own class, which has served nobody yet, one of ours. Any other class stays."""
    ours = _OURS.get(type(made))
    if ours is None:
        return
    steps = DecodeSteps.of(made)
    if steps is not None:
        made.__class__ = ours
        made.decode_steps = steps
