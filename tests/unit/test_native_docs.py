"""help(), signatures and type errors say the same in both builds."""

import ast
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

from kvledger import FullAttentionSpec, GroupOccupancy, KVCacheManager
from kvledger.core.blocks import block_pool
from tests.helpers import ledger, request
from tests.unit.test_architecture import core_sources

IS_COMPILED = not (block_pool.__file__ or "").endswith(".py")


def documented() -> Iterator[tuple[str, Any, ast.ClassDef | ast.FunctionDef]]:
    """Every public class, function, method and property of the core: its name, itself, its source."""
    for module_name, path in core_sources().items():
        module = import_module(f"kvledger.{module_name}")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                yield f"{module_name}.{node.name}", getattr(module, node.name), node
                if isinstance(node, ast.ClassDef):
                    for part in node.body:
                        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
                            yield f"{module_name}.{node.name}.{part.name}", getattr(module, node.name), part


def test_docstrings_are_those_of_the_sources() -> None:
    num_found = 0
    for name, value, node in documented():
        doc = ast.get_docstring(node)
        what = value if value.__name__ == node.name else vars(value)[node.name]
        if doc is not None:
            num_found += 1
            what = getattr(what, "__func__", what)
            assert inspect.cleandoc(what.__doc__ or "") == doc, name
    assert num_found > 500


def test_signatures_name_the_arguments_of_the_sources() -> None:
    for name, value, node in documented():
        if isinstance(node, ast.ClassDef) or any(
            ast.unparse(decorator) not in {"staticmethod", "classmethod", "abstractmethod"}
            for decorator in node.decorator_list
        ):
            continue
        arguments = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
        what = value if value.__name__ == node.name else inspect.getattr_static(value, node.name)
        what = getattr(what, "__func__", what)
        if not isinstance(what, classmethod | staticmethod):
            assert list(inspect.signature(what).parameters) == arguments, name


def test_help_shows_arguments_and_text() -> None:
    assert KVCacheManager.allocate_slots.__doc__ is not None
    assert inspect.signature(KVCacheManager.allocate_slots).parameters["admission"].default is None
    manager = inspect.signature(KVCacheManager)
    assert list(manager.parameters)[:2] == ["config", "max_model_len"]
    assert list(inspect.signature(FullAttentionSpec).parameters)[:3] == ["block_size", "num_kv_heads", "head_size"]
    bound = inspect.signature(GroupOccupancy).bind(1, num_null=2, num_cached=3)
    assert GroupOccupancy(*bound.args, **bound.kwargs).num_null == 2


def test_signatures_bind_by_name() -> None:
    manager, a = ledger(8), request("a", 6)
    bound = inspect.signature(manager.allocate_slots).bind(request=a, num_new_tokens=6)
    assert manager.allocate_slots(*bound.args, **bound.kwargs) is not None


@pytest.mark.skipif(not IS_COMPILED, reason="interpreted, nothing looks at types")
def test_errors_of_wrong_types_name_the_argument() -> None:
    manager, a = ledger(8), request("a", 6)
    untyped: Any = manager
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("config: KVCacheConfig object expected; got int", lambda: type(untyped)(7, 8)),
        ("request: Request object expected; got str", lambda: untyped.allocate_slots("a", 1)),
        ("hit: PrefixHit or None object expected; got int", lambda: untyped.allocate_slots(a, 6, 0)),
        (
            "delay_cache_blocks: bool object expected; got str",
            lambda: untyped.allocate_slots(a, 6, delay_cache_blocks=""),
        ),
        ("block_ids: list object expected; got int", lambda: untyped.evict_blocks(3)),
    ]
    for message, call in wrong:
        with pytest.raises(TypeError, match=message):
            call()
    with pytest.raises(TypeError, match="status: RequestStatus object expected; got str"):
        setattr(a, "status", "running")  # noqa: B010
    manager.check()
