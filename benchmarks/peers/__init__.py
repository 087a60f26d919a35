"""This ledger against its peers, on the same workloads, in one run: python -m benchmarks.peers, from a clone.

    case.py          what is measured: questions and their cases, the same for every contestant
    operation.py     how it is measured: bursts of CPU time of the thread
    operations.py    what is done for each question, of the parts that a contestant brings
    parts.py         these parts: ledger, scheduler, table
    contestants/     one file a contestant: its parts
    process.py       both ends of the pipe to a contestant, which runs in an interpreter of its own
    contest.py       two contestants in turns; medians, spreads and ratios
    report.py        the results as a table and as JSON
    command.py       the command line

Contestants run where kvledger is not installed, so what they import (all but the last two and contest.py) needs the
standard library alone.
"""
