"""Recorded traffic: one reader a format, recognised from the first record, and what they make of it.

trace file -> TraceReader -> TraceRequest -> Arrivals
"""
