"""What holds the project together: which build is loaded, and which module may import which."""

import ast
import importlib
import os
from pathlib import Path

import pytest

import kvledger
from kvledger.cli import main

# The installed package: the compiled build ships its sources too.
PACKAGE = Path(kvledger.__file__).parent
# Interpreted, and imported by nobody below them.
TOOLS = {"cli", "replay", "sizing", "models", "events", "metrics", "integrations", "viewer"}

# Path in the package -> layer. A module imports only lower layers, and its own.
LAYERS = {
    "errors": 0,
    "units": 0,
    "spec": 1,
    "tokens": 2,
    "block_hash": 2,
    "request": 2,
    "slot_ranges": 2,
    "block": 3,
    "prefix_index": 3,
    "block_pool": 3,
    "block_copies": 3,
    "observer": 3,
    "managers": 4,
    "kv_cache_blocks": 5,
    "prefix_cache_stats": 5,
    "ledger_rules": 5,
    "coordinator": 5,
    "hybrid_coordinator": 5,
    "kv_cache_manager": 5,
    "scheduler": 6,
    "worker": 7,
}
# Clock, randomness, environment and wire formats come in as arguments; arrays of numbers belong to the workers.
FORBIDDEN = {"argparse", "json", "logging", "os", "time", "random", "msgspec", "numpy", "torch"}


def core_modules() -> list[str]:
    """Dotted names of layers 1 to 6, without the package's own."""
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    core = [path for path in files if path.parts[0] not in TOOLS and path.name not in ("__init__.py", "__main__.py")]
    return sorted(".".join(path.with_suffix("").parts) for path in core)


def imported_names(module: str) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names.append(node.module or "")
    return names


def test_one_build_is_loaded_and_it_is_the_expected_one() -> None:
    files = {name: importlib.import_module(f"kvledger.{name}").__file__ or "" for name in core_modules()}
    pure = sorted(name for name, file in files.items() if file.endswith(".py"))
    assert pure in ([], sorted(files)), f"part of the core is compiled and part is not: {pure}"
    expected = os.environ.get("KVLEDGER_EXPECT_COMPILED")
    if expected is not None:
        assert bool(pure) == (expected == "0"), f"KVLEDGER_EXPECT_COMPILED={expected}, loaded: {kvledger.build_info()}"


def test_build_info_names_the_loaded_build() -> None:
    is_pure = (importlib.import_module("kvledger.block_pool").__file__ or "").endswith(".py")
    assert kvledger.build_info() == f"kvledger {kvledger.__version__} ({'pure Python' if is_pure else 'compiled'})"


def test_the_version_option_names_the_loaded_build(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == kvledger.build_info() + "\n"


@pytest.mark.parametrize("module", core_modules())
def test_a_module_imports_only_its_own_and_lower_layers(module: str) -> None:
    own_layer = LAYERS.get(module.split(".")[0])
    assert own_layer is not None, f"{module} has no layer: give it one in LAYERS, or name it in TOOLS"
    for name in imported_names(module):
        root, *rest = name.split(".")
        assert root not in FORBIDDEN, f"{module} imports {name}; layers 1 to 6 get such things as arguments"
        if root == "kvledger":
            assert rest, f"{module} imports kvledger itself; import the module that has the name"
            layer = LAYERS.get(rest[0], 8)
            assert layer <= own_layer, f"{module} (layer {own_layer}) imports {name} (layer {layer})"
