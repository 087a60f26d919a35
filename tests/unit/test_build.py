"""What is installed: the compiled core where it is expected, and nothing heavy on import."""

import os
import subprocess
import sys
from importlib import import_module

import pytest

import kvledger
from tests.unit.test_architecture import core_sources

EXPECT_COMPILED = os.environ.get("KVLEDGER_EXPECT_COMPILED") == "1"


@pytest.mark.skipif(not EXPECT_COMPILED, reason="KVLEDGER_EXPECT_COMPILED is not 1")
def test_every_core_module_that_is_loaded_is_compiled() -> None:
    for name, path in core_sources().items():
        if path.name != "__init__.py":
            loaded = import_module(f"kvledger.{name}").__file__
            assert loaded is not None
            assert loaded.endswith((".so", ".pyd")), loaded


def test_the_version_line_says_which_build_runs() -> None:
    from kvledger import block_pool

    build = "pure Python" if str(block_pool.__file__).endswith(".py") else "compiled"
    assert kvledger.build_info() == f"kvledger {kvledger.__version__} ({build})"
    assert build == "compiled" or not EXPECT_COMPILED


def test_importing_the_library_pulls_in_nothing_heavy() -> None:
    program = (
        "import sys, kvledger, kvledger.scheduler;"
        "print({'typer', 'rich', 'numpy', 'torch', 'msgspec', 'xxhash', 'click'} & sys.modules.keys())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
