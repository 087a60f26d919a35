"""What vLLM's parser makes of the words after `vllm serve`: abbreviations, aliases, values, errors.

The options are a table that scripts/vllm_options.py writes from vLLM itself; the parser is argparse, as vLLM's is, so a
prefix of a name, `--name=value` and a repeated option mean what they mean there. On top of argparse vLLM takes
underscores for dashes, `-O2`, fields of JSON values as `--name.field value`, and a file of options.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NoReturn

from kvledger.errors import ConfigError, wrong_value
from kvledger.plan.counts import SUFFIXES

TABLE: Final = "data/vllm_options.tsv"
EFFECTS: Final = "data/option_effects.txt"


@dataclass(frozen=True)
class ServeOption:
    """One option of `vllm serve`.

    `dest`: the name that its value is stored under. `takes`: switch (on and off names), flag, text, json, either of the
    two, float, int, count (2k is 2000) or length (a count or auto). `times`: "", "+" or "?" as in argparse.
    """

    dest: str
    takes: str
    times: str
    names: tuple[str, ...]
    off_names: tuple[str, ...]
    choices: tuple[str, ...]


@cache
def serve_options(release: str) -> tuple[ServeOption, ...]:
    """The options of one release."""
    options = []
    for line in (files("kvledger.plan") / TABLE).read_text().splitlines()[1:]:
        releases, dest, takes, times, names, off_names, choices = line.split("\t")
        if release in releases.split():
            texts = (names, off_names, choices)
            options.append(ServeOption(dest, takes, times, *(tuple(text.split()) for text in texts)))
    return tuple(options)


@dataclass(frozen=True)
class Effect:
    """What an option does to a plan. `kind`: modelled, none or matters; `words`: why not, or what is left out."""

    kind: str
    words: str = ""


@cache
def option_effects() -> dict[str, Effect]:
    """Every option's effect, by its dest."""
    effects: dict[str, Effect] = {}
    section = Effect("modelled")
    for line in (files("kvledger.plan") / EFFECTS).read_text().splitlines():
        if line.startswith("["):
            kind, _, words = line.strip("[]").partition(": ")
            section = Effect({"no effect": "none"}.get(kind, kind), words)
        elif section.kind == "matters" and ": " in line:
            dest, _, words = line.partition(": ")
            effects[dest] = Effect("matters", words)
        elif line and not line.startswith("#"):
            effects |= dict.fromkeys(line.split(), section)
    return effects


@dataclass(frozen=True)
class ServeArguments:
    """`values`: dest -> value of every option that was given; `used`: dest -> the name that was written; `others`:
    words that are no options of an engine, where those are allowed.
    """

    model: str | None
    values: Mapping[str, Any]
    used: Mapping[str, str]
    others: tuple[str, ...] = ()


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would end the program."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"vLLM would refuse this command line: {message}")


class _Switch(argparse.Action):
    """True for its names, False for its other names."""

    def __call__(self, parser: object, namespace: object, values: object, option_string: str | None = None) -> None:
        _note(namespace, self.dest, option_string)
        assert isinstance(self.const, tuple)
        setattr(namespace, self.dest, option_string not in self.const)


class _Value(argparse.Action):
    """Stores the value, and the name that it was given by."""

    def __call__(self, parser: object, namespace: object, values: object, option_string: str | None = None) -> None:
        _note(namespace, self.dest, option_string)
        setattr(namespace, self.dest, values)


def _note(namespace: object, dest: str, name: str | None) -> None:
    used = getattr(namespace, "names_used", {})
    used[dest] = name or dest
    setattr(namespace, "names_used", used)  # noqa: B010


def count(text: str) -> int:
    """A whole number, with a letter or without, as vLLM takes it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip())
    if match is None:
        return int(text)
    number, letter = match.groups()
    return int(float(number) * SUFFIXES[letter]) if letter.islower() else int(number) * SUFFIXES[letter]


def length(text: str) -> int:
    """A count, or -1 for auto."""
    return -1 if text.strip().lower() in ("-1", "auto") else count(text)


def either(text: str) -> Any:
    """A JSON object, or what does not look like one as it stands."""
    return json.loads(text) if re.fullmatch(r"(?s)\s*\{.*\}\s*", text) else text


_CONVERTERS: Final[dict[str, Callable[[str], Any]]] = {
    "int": int, "float": float, "count": count, "length": length, "json": json.loads, "either": either, "text": str,
}  # fmt: skip


@cache
def _parser(release: str) -> _Parser:
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for option in serve_options(release):
        if option.takes in ("switch", "flag"):
            names = (*option.names, *option.off_names)
            parser.add_argument(*names, dest=option.dest, action=_Switch, nargs=0, const=option.off_names)
            continue
        convert = _CONVERTERS[option.takes]
        choices = tuple(convert(choice) for choice in option.choices) or None
        parser.add_argument(
            *option.names, dest=option.dest, action=_Value, nargs=option.times or None, type=convert, choices=choices
        )
    return parser


def parse_serve(words: Sequence[str], release: str, *, others_allowed: bool = False) -> ServeArguments:
    """What vLLM of that release makes of these words. ConfigError where it would not start, with the nearest name of an
    option that it does not have. `others_allowed`: options of other commands (vllm bench) are passed over.
    """
    ready = _with_dashes(_with_file(words, release))
    namespace, rest = _parser(release).parse_known_args(_with_fields(ready))
    values = vars(namespace)
    used = values.pop("names_used", {})
    unknown = [word for word in rest if word.startswith("-")]
    if unknown and not others_allowed:
        raise _unknown(unknown[0].partition("=")[0], release)
    models = [word for word in rest if not word.startswith("-")] if not unknown else rest[:1]
    models = [word for word in models if not word.startswith("-")]
    model = values.pop("model", None)
    if model is None and models:
        model = models.pop(0)
    if models and not others_allowed:
        fix = "put what belongs together in quotes, and give one model"
        raise wrong_value("command", " ".join(models), "vLLM would refuse these words", fix)
    return ServeArguments(model, values, used, tuple(unknown))


# Options of older releases, as guides still have them -> what to write now.
REPLACED: Final = {
    "--rope-scaling": """write --hf-overrides '{"rope_parameters": {...}}'""",
    "--rope-theta": """write --hf-overrides '{"rope_parameters": {...}}'""",
    "--task": "write --runner or --convert, or leave it out",
    "--guided-decoding-backend": "write --structured-outputs-config.backend",
    "--speculative-model": "write --speculative-config.model",
    "--cuda-graph-sizes": "write --cudagraph-capture-sizes",
    "--max-seq-len-to-capture": "write --max-cudagraph-capture-size",
    "--worker-use-ray": "write --distributed-executor-backend ray",
    "--swap-space": "leave it out: preempted requests are computed again",
    "--preemption-mode": "leave it out: preempted requests are computed again",
    "--calculate-kv-scales": "leave it out: scales are the checkpoint's",
    "--disable-log-requests": "leave it out: it is the default",
    "--num-scheduler-steps": "leave it out",
    "--use-v2-block-manager": "leave it out",
    "--device": "leave it out: the build decides",
}


def _unknown(name: str, release: str) -> ConfigError:
    names = [name for option in serve_options(release) for name in (*option.names, *option.off_names)]
    written = name.replace("_", "-")
    near = get_close_matches(written, names, 3, 0.75)
    fix = REPLACED.get(written) or ("did you mean " + " or ".join(near) if near else "see vllm serve --help=all")
    return ConfigError(f"{name}: vllm serve of release {release} has no such option; {fix}")


def _with_dashes(words: Sequence[str]) -> list[str]:
    """Dashes for underscores in names (up to the first dot), and -O2 written out."""
    ready: list[str] = []
    for place, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            head, dot, fields = name.partition(".")
            ready.append(head.replace("_", "-") + dot + fields + equals + value)
        elif word.startswith("-O") and word != "-O":
            ready += ["--optimization-level", word[2:].removeprefix("=")]
        elif word == "-O" and words[place + 1 : place + 2]:
            ready.append("--optimization-level")
        else:
            ready.append(word)
    return ready


def _with_fields(words: list[str]) -> list[str]:
    """--name.field value as parts of one JSON value of --name, behind all others."""
    ready: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        name, equals, value = word.partition("=")
        if not (name.startswith("-") and "." in name) or re.fullmatch(r"-\d*\.\d+", name):
            ready.append(word)
            continue
        if not equals:
            if place >= len(words):
                raise ConfigError(f"{name}: no value follows; give one")
            value = words[place]
            place += 1
        option, *fields = name.removesuffix("+").split(".")
        parsed = value.split(",") if name.endswith("+") else _field_value(value)
        inner = objects.setdefault(option, {})
        for field in fields[:-1]:
            inner = inner.setdefault(field, {})
        last = fields[-1]
        inner[last] = inner[last] + parsed if isinstance(inner.get(last), list) and isinstance(parsed, list) else parsed
    for option, fields_of in objects.items():
        ready += [option, json.dumps(fields_of)]
    return ready


def _field_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return count(text)
    except ValueError:
        return text


def _with_file(words: Sequence[str], release: str) -> list[str]:
    """--config FILE replaced by the options in it, which those on the command line go before."""
    ready = list(words)
    if "--config" not in ready:
        return ready
    place = ready.index("--config")
    if place + 1 >= len(ready):
        raise ConfigError("--config: no file follows; give one")
    return [*_file_words(ready[place + 1], release), *ready[:place], *ready[place + 2 :]]


def _file_words(path: str, release: str) -> list[str]:
    try:
        yaml = import_module("yaml")
    except ImportError:
        fix = "pip install pyyaml, or put its options on the command line"
        raise wrong_value("--config", path, "YAML cannot be read here", fix) from None
    try:
        settings = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as failed:
        raise wrong_value("--config", path, f"cannot be read ({failed})", "give a YAML file of options") from None
    if not isinstance(settings, Mapping):
        raise wrong_value("--config", path, "not a mapping of options", "give a YAML file of options")
    words: list[str] = []
    off_names = {name for option in serve_options(release) for name in option.off_names}
    for name, value in settings.items():
        option = f"--{name}"
        if isinstance(value, bool):
            off = f"--no-{name}".replace("_", "-")
            words += [option] if value else [off] if off in off_names else []
        elif isinstance(value, list):
            words += [option, *map(str, value)] if value else []
        else:
            words += [option, json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return words
