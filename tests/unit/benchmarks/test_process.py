"""A contestant in a process of its own, asked over the pipe."""

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.case import QUESTIONS
from benchmarks.peers.process import ContestantError, ContestantProcess

DIRECTORY = Path(__file__).parents[3] / "benchmarks" / "peers"
# What peers import in their interpreters, where kvledger is not installed.
SHARED = {"operation", "operations", "parts", "process", "workload"}


def test_ours_does_a_case_of_every_question_that_needs_no_trace() -> None:
    with ContestantProcess("ours") as ours:
        assert ours.version.startswith("kvledger ")
        for name, question in QUESTIONS.items():
            if name == "replay":
                continue
            first = question.cases[0]
            num_blocks, num_running = min(first.num_blocks, 1000), min(first.num_running, 16)
            case = replace(first, num_blocks=num_blocks, num_cached=0, num_running=num_running, decides_as="0.33")
            assert ours.open(case.as_dict()) is None
            values = ours.burst(2)
            assert len(values) == 2, name
            assert min(values) > 0, name
            ours.close()


def test_a_contestant_that_does_not_start_says_why() -> None:
    with pytest.raises(ContestantError, match=r"^nobody: ModuleNotFoundError: .*benchmarks.peers.contestants.nobody"):
        ContestantProcess("nobody", sys.executable)


def test_an_interpreter_that_is_not_there() -> None:
    with pytest.raises(ContestantError, match=r"^vllm: .*No such file"):
        ContestantProcess("vllm", "/nowhere/python")


def test_what_peers_import_needs_the_standard_library_alone() -> None:
    for name in SHARED:
        for node in ast.walk(ast.parse((DIRECTORY / f"{name}.py").read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            else:
                continue
            for module in modules:
                own = module.removeprefix("benchmarks.peers.") in SHARED
                assert own or module.split(".")[0] in sys.stdlib_module_names, f"{name} imports {module}"
