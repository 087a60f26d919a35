"""Which module may import which: the layers of the core, read from the sources without running them."""

import ast
from pathlib import Path

import kvledger

PACKAGE = Path(kvledger.__file__).parent
LAYERS = {
    0: ["errors", "units"],
    1: ["spec"],
    2: ["tokens", "block_hash", "request"],
    3: [
        "block",
        "prefix_index",
        "block_residency",
        "block_pool",
        "block_copies",
        "outside_holds",
        "observer",
        "cache_changes",
        "slot_ranges",
        "kv_cache_blocks",
        "new_blocks",
        "ghost_index",
        "content_twins",
    ],
    4: ["managers"],
    5: [
        "ledger_rules",
        "coordinator",
        "hybrid_coordinator",
        "prompt_split",
        "miss_explainer",
        "prefix_cache_stats",
        "allocation_checks",
        "kv_cache_manager",
    ],
    6: ["scheduler"],
    # The tables of the workers. The rest of worker/ is interpreted, works with torch, and is a tool as far as rules go.
    7: ["worker.block_table", "worker.slots", "worker.block_tables"],
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}
TOOLS = {
    "bench",
    "cli",
    "engine",
    "replay",
    "sizing",
    "models",
    "events",
    "metrics",
    "integrations",
    "viewer",
    "worker",
    "__main__",
}
# Clock, randomness, environment, input and output come in as arguments; numpy and torch stay with the workers.
FORBIDDEN = {"argparse", "json", "logging", "os", "time", "random", "msgspec", "numpy", "torch", "typer", "rich"}


def module_name(path: Path) -> str:
    """kvledger/scheduler/queues.py -> scheduler.queues"""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def sources() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def layer_of(name: str) -> int | None:
    """A module's layer, its own or its package's; None for tools."""
    return LAYER_OF.get(name, LAYER_OF.get(name.split(".")[0]))


def core_sources() -> dict[str, Path]:
    return {name: path for name, path in sources().items() if layer_of(name) is not None}


def imports(path: Path) -> set[str]:
    """Full names of everything the file imports, also inside functions; `from kvledger import x` is kvledger.x."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "kvledger" else {node.module}
            )
    return names


def own_imports(path: Path) -> set[str]:
    return {name.removeprefix("kvledger.") for name in imports(path) if name.startswith("kvledger")}


def test_every_module_has_its_place() -> None:
    known = LAYER_OF.keys() | TOOLS
    homeless = {name for name in sources() if name.split(".")[0] not in known} - {"__init__"}
    assert not homeless, "give them a layer here and in the design"


def test_modules_import_only_lower_layers_or_their_own() -> None:
    for name, path in core_sources().items():
        layer = layer_of(name)
        assert layer is not None
        for imported in own_imports(path):
            above = layer_of(imported)
            assert above is not None, f"{name} (layer {layer}) imports {imported}, a tool"
            assert above <= layer, f"{name} (layer {layer}) imports {imported} (layer {above})"


def test_no_circle_of_imports() -> None:
    graph = {name: own_imports(path) & core_sources().keys() for name, path in core_sources().items()}
    while graph:
        leaves = {name for name, imported in graph.items() if not imported & graph.keys() - {name}}
        assert leaves, f"a circle among {sorted(graph)}"
        graph = {name: imported for name, imported in graph.items() if name not in leaves}


def test_the_core_uses_no_clock_no_environment_no_input_or_output() -> None:
    for name, path in core_sources().items():
        found = {imported.split(".")[0] for imported in imports(path)} & FORBIDDEN
        assert not found, f"{name} imports {found}"


def test_the_package_itself_exports_the_core_only() -> None:
    for imported in own_imports(PACKAGE / "__init__.py"):
        assert layer_of(imported) is not None, imported


def test_all_public_names_exist_and_are_sorted() -> None:
    assert kvledger.__all__ == sorted(kvledger.__all__)
    for name in kvledger.__all__:
        assert hasattr(kvledger, name), name
