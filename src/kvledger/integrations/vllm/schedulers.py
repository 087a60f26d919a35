"""vLLM's schedulers on the ledger, for `scheduler_cls`."""

from typing import Any

from vllm.v1.core.sched import async_scheduler, scheduler

from kvledger.integrations.vllm.plugin import ledger_in_place


class Scheduler(scheduler.Scheduler):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with ledger_in_place():
            super().__init__(vllm_config, *args, **kwargs)


class AsyncScheduler(async_scheduler.AsyncScheduler):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with ledger_in_place():
            super().__init__(vllm_config, *args, **kwargs)
