"""The scheduler's public names; the code is in core/scheduler, which is compiled."""

from kvledger.core.scheduler.accounting import AccountTotals, RequestAccount, RequestAccounting
from kvledger.core.scheduler.config import SchedulerConfig, SchedulingPolicy
from kvledger.core.scheduler.external import ExternalHit, ExternalKVSource
from kvledger.core.scheduler.output import NewRequestData, RequestOutput, SchedulerOutput, StepEnd
from kvledger.core.scheduler.scheduler import Scheduler
from kvledger.core.scheduler.stall import StallDetector, StallReport
from kvledger.core.scheduler.wait_reason import WaitExplanation, WaitReason

__all__ = [
    "AccountTotals",
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
