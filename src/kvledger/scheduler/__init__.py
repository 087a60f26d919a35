"""A scheduler that drives the ledger, as vLLM's does."""

from kvledger.scheduler.accounting import RequestAccount, RequestAccounting
from kvledger.scheduler.config import SchedulerConfig, SchedulingPolicy
from kvledger.scheduler.external import ExternalHit, ExternalKVSource
from kvledger.scheduler.output import NewRequestData, RequestOutput, SchedulerOutput, StepEnd
from kvledger.scheduler.scheduler import Scheduler
from kvledger.scheduler.stall import StallDetector, StallReport
from kvledger.scheduler.wait_reason import WaitExplanation, WaitReason

__all__ = [
    "ExternalHit",
    "ExternalKVSource",
    "NewRequestData",
    "RequestAccount",
    "RequestAccounting",
    "RequestOutput",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulingPolicy",
    "StallDetector",
    "StallReport",
    "StepEnd",
    "WaitExplanation",
    "WaitReason",
]
