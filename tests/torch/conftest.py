"""Tests with real tensors: without torch and transformers they are skipped, all together as one line of the summary.

Nothing is imported from beside this file until a test runs, because that needs torch.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

MISSING = [name for name in ("torch", "transformers") if find_spec(name) is None]


class WithoutTensors(pytest.Module):
    """A module that is not even imported."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(f"{' and '.join(MISSING)} not installed: pip install 'kvledger[torch]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return WithoutTensors.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model, made once."""
    from tests.torch.tiny_directory import make_tiny_directory

    return make_tiny_directory(tmp_path_factory.mktemp("tiny"))
