"""Replay of recorded traffic through the real ledger: a simulated clock, meters and a report.

    trace file -> TraceReader -> Arrivals -> ScheduledReplay or SequentialReplay -> ReplayResult -> report

Interpreted, and imported by nothing below.
"""

from kvledger.replay.api import replay
from kvledger.replay.records import ReplayListener, RequestRecord, StepRecord
from kvledger.replay.request_log import RequestTable

__all__ = ["ReplayListener", "RequestRecord", "RequestTable", "StepRecord", "replay"]
