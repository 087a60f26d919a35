"""The notebooks of the documents run, and print what they show."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs").glob("*.ipynb"))


def test_there_is_a_notebook() -> None:
    assert [path.name for path in NOTEBOOKS] == ["replay.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_every_cell_prints_what_stands_below_it(path: Path) -> None:
    names: dict[str, Any] = {}
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("".join(cell["source"]), path.name, "exec"), names)
        assert printed.getvalue() == "".join("".join(output["text"]) for output in cell["outputs"])
