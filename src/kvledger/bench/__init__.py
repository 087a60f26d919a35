"""The benchmark behind `kvledger bench`: this ledger against its peers, on the same workloads, in one run.

    case.py          what is measured: questions and their cases, the same for every contestant
    operation.py     how it is measured: bursts of CPU time of the thread
    contestants/     one file a contestant: how each does what a case asks for
    process.py       both ends of the pipe to a contestant, which runs in an interpreter of its own
    contest.py       two contestants in turns; medians, spreads and ratios
    report.py        the results as a table and as JSON

Contestants run where kvledger is not installed, so what they import (case, operation, process, workload) needs the
standard library alone.
"""
