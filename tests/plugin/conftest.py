"""The plugin's tests need vLLM itself: the Python environment of scripts/make_reference.sh."""

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HAS_VLLM = find_spec("vllm") is not None

# Without it there is nothing to plug into, and importing these modules would fail.
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not HAS_VLLM:
        terminalreporter.write_line("plugin tests skipped: no vLLM here; build it with scripts/make_reference.sh")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            # They are vLLM's and its libraries' own.
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Lines that the plugin logs, whatever level vLLM is set to."""
    lines: list[str] = []
    logger = logging.getLogger("vllm.plugins.kvledger")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=2, help="of the random traffic (test_decode_steps.py)")
    parser.addoption("--steps", type=int, default=150, help="steps of random traffic a case (test_decode_steps.py)")


@pytest.fixture
def num_traffic_steps(request: pytest.FixtureRequest) -> int:
    num_steps: int = request.config.getoption("--steps")
    return num_steps


@pytest.fixture
def traffic_seed(request: pytest.FixtureRequest) -> int:
    seed: int = request.config.getoption("--seed")
    return seed
