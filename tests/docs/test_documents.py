"""What the documents show must work: their code runs, the tests they name exist, their links lead somewhere."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
EXAMPLES = [
    pytest.param(code, id=f"{path.name}-{number}")
    for path in DOCUMENTS
    for number, code in enumerate(
        re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    )
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_prints_what_its_comments_say(code: str) -> None:
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, "example", "exec"), {})
    assert printed.getvalue().splitlines() == re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)


def test_every_test_that_a_document_names_exists() -> None:
    sources = "\n".join(path.read_text("utf-8") for path in ROOT.glob("tests/**/test_*.py"))
    defined = set(re.findall(r"def (test_\w+)", sources))
    named = {name for path in DOCUMENTS for name in re.findall(r"`(test_\w+)`", path.read_text("utf-8"))}
    assert named - defined == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(path: Path) -> None:
    # Pictures are looked at, not linked to.
    targets = re.findall(r"(?<!!)\[[^\]]*\]\((?!https?:)([^)#]+)", path.read_text("utf-8"))
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_the_engine_is_as_long_as_the_documents_say() -> None:
    lines = (ROOT / "src" / "kvledger" / "engine" / "engine.py").read_text("utf-8").splitlines()
    said = f"{round(len(lines), -1)} lines"
    assert [path for path in ("README.md", "docs/engine.md") if said not in (ROOT / path).read_text("utf-8")] == []
