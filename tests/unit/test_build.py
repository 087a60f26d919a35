"""What is installed: the compiled core where it is expected, and nothing heavy on import."""

import os
import subprocess
import sys
from importlib import import_module

import pytest

import kvledger
from kvledger.cli import main
from tests.unit.test_architecture import core_sources


def is_pure(module: str) -> bool:
    return (import_module(f"kvledger.{module}").__file__ or "").endswith(".py")


def test_one_build_is_loaded_and_it_is_the_expected_one() -> None:
    modules = [name for name, path in core_sources().items() if path.name != "__init__.py"]
    pure = [name for name in modules if is_pure(name)]
    assert pure in ([], modules), f"part of the core is compiled and part is not: {pure}"
    expected = os.environ.get("KVLEDGER_EXPECT_COMPILED")
    if expected is not None:
        assert bool(pure) == (expected == "0"), f"KVLEDGER_EXPECT_COMPILED={expected}, loaded: {kvledger.build_info()}"


def test_build_info_and_the_version_option_name_the_loaded_build(capsys: pytest.CaptureFixture[str]) -> None:
    build = "pure Python" if is_pure("core.blocks.block_pool") else "compiled"
    assert kvledger.build_info() == f"kvledger {kvledger.__version__} ({build})"
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == kvledger.build_info() + "\n"


def test_importing_the_library_pulls_in_nothing_heavy() -> None:
    program = (
        "import sys, kvledger, kvledger.scheduler;"
        "print({'typer', 'rich', 'numpy', 'torch', 'msgspec', 'xxhash', 'click'} & sys.modules.keys())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
