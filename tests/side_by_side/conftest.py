"""The side-by-side suite needs the reference: a Python environment with vLLM 0.32 (scripts/make_reference.sh)."""

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HAS_REFERENCE = find_spec("vllm") is not None

# Without it there is nothing to compare with, and importing these modules would fail.
collect_ignore_glob = [] if HAS_REFERENCE else ["test_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not HAS_REFERENCE:
        terminalreporter.write_line("side-by-side suite skipped: no vLLM here; build it with scripts/make_reference.sh")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--calls", type=int, default=200_000, help="manager calls compared, over all seeds")
    parser.addoption("--first-seed", type=int, default=0, help="first random seed")
