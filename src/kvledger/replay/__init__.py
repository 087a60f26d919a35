"""Replay of recorded traffic through the real ledger: trace readers, a simulated clock, meters and a report.

    trace file -> TraceReader -> Arrivals -> ScheduledReplay or SequentialReplay -> ReplayResult -> report

Interpreted, on top of layers 1 to 6 and imported by none of them.
"""
