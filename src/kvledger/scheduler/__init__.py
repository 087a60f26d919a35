"""A scheduler that drives the ledger, as vLLM's does."""

from kvledger.scheduler.config import SchedulerConfig, SchedulingPolicy
from kvledger.scheduler.external import ExternalHit, ExternalKVSource
from kvledger.scheduler.output import NewRequestData, RequestOutput, SchedulerOutput
from kvledger.scheduler.scheduler import Scheduler

__all__ = [
    "ExternalHit",
    "ExternalKVSource",
    "NewRequestData",
    "RequestOutput",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulingPolicy",
]
