"""A pasted command line that starts vLLM -> the arguments of a plan, and what the plan makes of each of its options.

vllm serve MODEL ..., in any dress: uv run, sudo, env, nohup; python -m vllm.entrypoints.openai.api_server; docker or
podman run with any image; bash -c "..."; line breaks, prompts, redirections. Settings of the environment that decide
something are read wherever they stand.
"""

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from kvledger.errors import ConfigError, wrong_value
from kvledger.plan.serve_parser import ServeArguments, option_effects, parse_serve

PASTE_WHOLE: Final = "paste it whole, from vllm serve on"
# Subcommands of vllm that start an engine -> the entry point whose defaults they have.
SUBCOMMANDS: Final = {"serve": "server", "bench": "llm", "run-batch": "llm"}
CONTAINER_PROGRAMS: Final = ("docker", "podman", "nerdctl")
# `docker run` options that take no value; all others do.
DOCKER_FLAGS: Final = (
    "-d", "-i", "-t", "-P", "-q", "--detach", "--init", "--interactive", "--no-healthcheck", "--oom-kill-disable",
    "--privileged", "--publish-all", "--quiet", "--read-only", "--rm", "--sig-proxy", "--tty",
)  # fmt: skip
SHELL_ENDS: Final = re.compile(r"(?:\d?>{1,2}.*|\d?<.*|\|\|?|&&?|;|2>&1|#.*)")
SETTING: Final = re.compile(r"(?:export\s+)?([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)


def _when_true(argument: str) -> Callable[[str], list[str]]:
    return lambda value: [argument] if value.lower() in ("1", "true") else []


# Setting of the environment -> arguments of the plan.
SETTINGS: Final[dict[str, Callable[[str], list[str]]]] = {
    "VLLM_PP_LAYER_PARTITION": lambda value: [f"--pp-layer-partition={value}"],
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": _when_true("--allow-long-max-model-len"),
}
# Those that matter and are not modelled.
UNREAD_SETTINGS: Final = {
    "VLLM_MLA_DISABLE": "latents are planned as latents",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "CUDA graphs are taken off the cache as by default",
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "chunked layers are planned as by default",
    "VLLM_CPU_KVCACHE_SPACE": "give it as --kv-cache-memory-bytes",
    "VLLM_BATCH_INVARIANT": "its buffers are not counted",
}


@dataclass(frozen=True)
class PastedCommand:
    """Arguments for the plan; `remarks` on options that do not concern it; `unmodelled`: those that do, and that the
    plan does not know how to count.
    """

    arguments: tuple[str, ...]
    remarks: tuple[str, ...]
    unmodelled: tuple[str, ...] = ()


def parse_pasted(pasted: Sequence[str], release: str = "0.33") -> PastedCommand:
    """Arguments of a pasted command line. ConfigError when it starts no engine, names no model, or is one that vLLM of
    that release would refuse.
    """
    words = split_words(pasted)
    found_settings = (SETTING.fullmatch(word) for word in words)
    settings: dict[str, str] = {match[1]: match[2] for match in found_settings if match is not None}
    rest, entry_point = program_arguments(words)
    found = parse_serve(rest, release, others_allowed=entry_point == "llm")
    if not found.model:
        raise ConfigError(f"the pasted command line names no model; {PASTE_WHOLE}")
    arguments = [found.model, f"--entry-point={entry_point}"]
    for name, value in settings.items():
        if name in SETTINGS:
            arguments += SETTINGS[name](value)
    unmodelled = [f"{name}: {words}" for name, words in UNREAD_SETTINGS.items() if name in settings]
    without_effect: dict[str, list[str]] = {}
    for dest, value in found.values.items():
        effect = option_effects()[dest]
        name = found.used[dest]
        if effect.kind == "modelled":
            arguments.append(argument_of(dest, value))
        elif effect.kind == "none":
            without_effect.setdefault(effect.words, []).append(name)
        elif not is_off(found, dest):
            unmodelled.append(f"{name} is not modelled: {effect.words}")
    remarks = [f"{', '.join(names)}: no change to the plan ({reason})" for reason, names in without_effect.items()]
    remarks += [f"{name} is no option of an engine" for name in found.others]
    return PastedCommand(tuple(arguments), tuple(remarks), tuple(unmodelled))


def is_off(found: ServeArguments, dest: str) -> bool:
    """A switch that is off, or nothing: as if it was not given."""
    return found.values[dest] in (False, {}, [], "", 0, "auto", "none")


def argument_of(dest: str, value: Any) -> str:
    """One option as the plan's own command line has it."""
    name = dest.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    if isinstance(value, list):
        return f"--{name}=" + ",".join(map(str, value))
    return f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"


def split_words(pasted: Sequence[str]) -> list[str]:
    """Words as a shell would have them, without the line breaks and prompts that come along with a paste."""
    words: list[str] = []
    for argument in pasted:
        is_line = "\n" in argument or (len(pasted) == 1 and " " in argument)
        words += shell_words(argument) if is_line else [argument]
    return [word for word in words if word.strip() not in ("\\", "$", "#", "")]


def shell_words(line: str) -> list[str]:
    try:
        return shlex.split(line.replace("\\\n", " "), comments=False)
    except ValueError:
        # A quote without its partner: blanks are all that is left to go by.
        return line.split()


def program_arguments(words: list[str]) -> tuple[list[str], str]:
    """What follows the program's name, and the entry point: server, or llm for offline commands."""
    words = whole_commands(words)
    for place, word in enumerate(words):
        name = PurePosixPath(word).name
        if name == "vllm" or word == "vllm.entrypoints.cli.main":
            command = words[place + 1 : place + 2]
            if command and command[0] in SUBCOMMANDS:
                return engine_words(words[place + 2 :], command[0])
            if name == "vllm" and place == 0:
                problem = "not a command that starts an engine"
                fix = "paste a line with " + ", ".join(f"vllm {known}" for known in SUBCOMMANDS)
                raise wrong_value("command", " ".join(words[:2]), problem, fix)
        if word.endswith(("api_server", "api_server.py")):
            return engine_words(words[place + 1 :], "serve")
    image = image_place(words)
    if image is not None:
        rest = words[image + 1 :]
        return engine_words(rest[1:] if rest[:1] == ["serve"] else rest, "serve")
    raise wrong_value(
        "command", " ".join(words[:2]), "not a vllm command", f"paste a line with vllm serve; {PASTE_WHOLE}"
    )


def whole_commands(words: list[str]) -> list[str]:
    """bash -c "vllm serve ..." as the words in the quotes."""
    whole: list[str] = []
    for word in words:
        whole += shell_words(word) if " " in word and re.search(r"\bvllm\b.*\bserve\b|api_server", word) else [word]
    return whole


def engine_words(words: list[str], command: str) -> tuple[list[str], str]:
    """The words up to where the shell's own begin."""
    for place, word in enumerate(words):
        if SHELL_ENDS.fullmatch(word):
            words = words[:place]
            break
        if word.endswith(";"):
            words = [*words[:place], word[:-1]]
            break
    if command == "bench" and words and not words[0].startswith("-"):
        words = words[1:]
    return words, SUBCOMMANDS[command]


def image_place(words: list[str]) -> int | None:
    """Where the image stands in a `docker run` line."""
    place = next(
        (i for i, word in enumerate(words) if PurePosixPath(word).name in ("docker", "podman", "nerdctl")), None
    )
    if place is None or "run" not in words[place:]:
        return None
    place = words.index("run", place) + 1
    while place < len(words):
        word = words[place]
        if not word.startswith("-"):
            return place
        # -it, --rm and --name=x are whole; --name x is two words.
        alone = word in DOCKER_FLAGS or "=" in word or (re.fullmatch(r"-[ditP]+", word) is not None)
        place += 1 if alone else 2
    return None
