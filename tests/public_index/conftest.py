"""This suite needs a public index of KV events: NVIDIA Dynamo's, in Rust (scripts/test_public_index.sh installs it)."""

from importlib.util import find_spec

import pytest

HAS_INDEX = find_spec("dynamo") is not None

# Without it there is nothing to compare with, and importing these modules would fail.
collect_ignore_glob = [] if HAS_INDEX else ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--operations", type=int, default=5_000, help="random operations of each test")
