"""Random command lines through vLLM's own parser of `vllm serve` and the plan's: refused or taken alike."""

import contextlib
import io
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from kvledger.errors import ConfigError
from kvledger.plan.serve_parser import ServeArguments, ServeOption, parse_serve, serve_options
from scripts.vllm_options import TABLE, rows_of, server_parser
from tests.side_by_side.reference import RELEASE

VALUES = {
    "int": ("1", "2", "16", "x", "1.5", "2k", "-1"),
    "float": ("0.5", "1", "x", "1e-3"),
    "count": ("1", "2k", "2K", "1.5k", "1.5K", "40G", "2GiB", "x", "0"),
    "length": ("auto", "-1", "32k", "32K", "x", "1.5"),
    "text": ("auto", "abc", "x.y", "7"),
    # Fields that no configuration has; what vLLM makes of real ones is its configurations' work.
    "json": ("x", "{", "5x"),
    "either": ("x", "{", "{x}", '{"a": {"b": 1}}'),
}
# Read while they are parsed, or checked beyond the parser.
LEFT_OUT = {"config", "log_config_file", "reasoning_parser", "quantization", "lora_modules", "log_level"}
# vLLM converts these to something of its own, or collects them.
OWN_VALUES = {"middleware", "attention_backend", "mamba_backend", "device_ids", "moe_backend", "linear_backend"}


@pytest.fixture(scope="module")
def parser() -> Any:
    return server_parser()


def test_the_table_of_options_is_what_this_release_has(parser: Any) -> None:
    lines = [tuple(line.split("\t")) for line in TABLE.read_text().splitlines()[1:]]
    committed = {line[1:] for line in lines if RELEASE in line[0].split()}
    assert committed == {row[1:] for row in rows_of(RELEASE, parser)}


def spelled(rng: random.Random, name: str) -> str:
    """A name as people write it: in full, cut short, with underscores."""
    if name.startswith("--") and rng.random() < 0.4:
        name = name[: rng.randint(min(len(name), 5), len(name))]
    return "--" + name[2:].replace("-", "_") if name.startswith("--") and rng.random() < 0.3 else name


def option_words(rng: random.Random, option: ServeOption) -> list[str]:
    name = spelled(rng, rng.choice((*option.names, *option.off_names)))
    if option.takes in ("switch", "flag"):
        return [name]
    pool = (*VALUES[option.takes], *option.choices[:3])
    count = rng.randint(1, 3) if option.times == "+" else 1
    chosen = [rng.choice(pool) for _ in range(count)]
    if option.takes == "text" and option.choices and rng.random() < 0.8:
        chosen = [rng.choice(option.choices) for _ in range(count)]
    if count == 1 and name.startswith("--") and rng.random() < 0.5:
        return [f"{name}={chosen[0]}"]
    return [name, *chosen]


def command_lines(seed: int, number: int) -> Iterator[list[str]]:
    rng = random.Random(seed)
    options = [option for option in serve_options(RELEASE) if option.dest not in LEFT_OUT]
    for _ in range(number):
        chosen = rng.sample(options, rng.randint(1, 3))
        words = [word for option in chosen for word in option_words(rng, option)]
        if rng.random() < 0.1:
            words.append(rng.choice(["-O1", "-O=2", "-O0", "--no-such-option"]))
        # With a model beside --model vLLM looks at more than its parser does.
        if not any(word.partition("=")[0] == "--model" for word in words):
            yield ["m", *words]


def of_vllm(parser: Any, words: list[str]) -> dict[str, Any] | None:
    """The values; None when it refuses the line."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return dict(vars(parser.parse_args([*words])))
        except (SystemExit, ValueError):
            return None


def of_ours(words: list[str]) -> ServeArguments | None:
    try:
        return parse_serve(words, RELEASE)
    except ConfigError:
        return None


@pytest.mark.parametrize("seed", range(8))
def test_random_command_lines_are_taken_and_refused_alike(seed: int, parser: Any) -> None:
    num_taken = 0
    for words in command_lines(seed, 250):
        theirs = of_vllm(parser, words)
        ours = of_ours(words)
        assert (ours is None) == (theirs is None), f"{words}: refused {'here' if ours is None else 'there'} only"
        if ours is None or theirs is None:
            continue
        num_taken += 1
        assert ours.model == theirs["model_tag"] == "m"
        for dest, value in ours.values.items():
            if dest not in OWN_VALUES:
                assert theirs[dest] == value or str(theirs[dest]) == str(value), (words, dest)
    assert num_taken > 40


def test_fields_of_json_values(parser: Any) -> None:
    words = ["m", "--hf-overrides.a.b", "2k", "--hf-overrides.c=x", "--hf-overrides.d+", "1,2"]
    ours, theirs = parse_serve(words, RELEASE).values, of_vllm(parser, words)
    assert theirs is not None
    assert ours["hf_overrides"] == theirs["hf_overrides"] == {"a": {"b": 2000}, "c": "x", "d": ["1", "2"]}
    assert json.dumps(ours["hf_overrides"])
