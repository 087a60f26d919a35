"""Which module may import which: the floors of docs/architecture.md, checked against the sources, which do not run."""

import ast
import re
from pathlib import Path

import kvledger

PACKAGE = Path(kvledger.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
# Clock, randomness, environment, input and output come in as arguments; numpy and torch stay with the workers.
FORBIDDEN = {"argparse", "json", "logging", "os", "time", "random", "msgspec", "numpy", "torch", "typer", "rich"}


def floors_of_the_page() -> dict[str, int]:
    """ "core.blocks" -> 2, from rows such as | 2 | `core/blocks` | ... |"""
    floors: dict[str, int] = {}
    for number, rooms in re.findall(r"^\| (\d+) \| (`[^|]*`) \|", PAGE.read_text(), re.MULTILINE):
        for room in re.findall(r"`([^`]+)`", rooms):
            floors[room.removesuffix(".py").replace("/", ".")] = int(number)
    return floors


FLOORS = floors_of_the_page()


def module_name(path: Path) -> str:
    """kvledger/core/scheduler/queues.py -> core.scheduler.queues"""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def sources() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(name: str) -> str | None:
    """core.scheduler.queues -> core.scheduler; None for what stands on no floor."""
    return next((room for room in FLOORS if name == room or name.startswith(room + ".")), None)


def core_sources() -> dict[str, Path]:
    """What is compiled."""
    return {name: path for name, path in sources().items() if name.startswith("core.") and path.name != "__init__.py"}


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
    return {name.removeprefix("kvledger.") for name in imports(path) if name.startswith("kvledger.")}


def test_the_page_names_every_room_and_no_other() -> None:
    names = sources().keys()
    assert all(room in names for room in FLOORS), "a room of the page that is not in the sources"
    homeless = {name for name in names if room_of(name) is None} - {"", "__init__", "core", "errors"}
    assert not homeless, "give them a floor in docs/architecture.md"


def test_modules_import_only_their_own_floor_or_lower_ones() -> None:
    for name, path in sources().items():
        room = room_of(name)
        for imported in own_imports(path) if room else ():
            below = room_of(imported)
            if below is not None:
                assert FLOORS[below] <= FLOORS[room], (
                    f"{name} (floor {FLOORS[room]}) imports {imported} ({FLOORS[below]})"
                )


def test_the_core_imports_the_core_and_the_errors_only() -> None:
    for name, path in core_sources().items():
        for imported in own_imports(path):
            assert imported == "errors" or imported in core_sources(), f"{name} imports {imported}"


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


def test_tests_stand_where_their_sources_do() -> None:
    """tests/unit/core/blocks has the tests of core/blocks. Whatever crosses rooms stands in tests/unit itself."""
    here = Path(__file__).parent
    folders = {path.relative_to(here) for path in here.rglob("*") if path.is_dir() and any(path.glob("*.py"))}
    assert [folder for folder in folders if not (PACKAGE / folder).is_dir()] == [Path("benchmarks")]


def test_the_package_itself_exports_the_core_only() -> None:
    for imported in own_imports(PACKAGE / "__init__.py"):
        assert imported.startswith("core."), imported


def test_all_public_names_exist_and_are_sorted() -> None:
    assert kvledger.__all__ == sorted(kvledger.__all__)
    for name in kvledger.__all__:
        assert hasattr(kvledger, name), name
