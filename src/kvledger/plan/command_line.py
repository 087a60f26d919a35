"""A pasted `vllm serve ...` command line -> the arguments of a plan.

Option names are the same, so this only drops what does not concern memory and says what it dropped.
"""

import re
from dataclasses import dataclass

from kvledger.errors import ConfigError, wrong_value

# Short names -> the option.
ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
}
VALUES = (
    "--max-model-len", "--dtype", "--kv-cache-dtype", "--block-size", "--gpu-memory-utilization",
    "--kv-cache-memory-bytes", "--num-gpu-blocks-override", "--max-num-batched-tokens", "--max-num-seqs",
    "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--decode-context-parallel-size",
    "--mamba-ssm-cache-dtype", "--quantization",
)  # fmt: skip
SWITCHES = (
    "--enable-prefix-caching", "--no-enable-prefix-caching", "--async-scheduling", "--no-async-scheduling",
    "--disable-hybrid-kv-cache-manager", "--no-disable-hybrid-kv-cache-manager", "--enforce-eager",
    "--no-enforce-eager", "--enable-expert-parallel", "--no-enable-expert-parallel",
)  # fmt: skip
# Options that change memory in a way that is not modelled: the plan says so instead of staying silent.
NOT_MODELLED = {
    "--speculative-config": "the draft model's weights and cache are not counted",
    "--enable-lora": "adapters are not counted",
    "--cpu-offload-gb": "offloaded weights are counted as if they stayed",
    "--kv-transfer-config": "a connector may turn the hybrid manager off; add --disable-hybrid-kv-cache-manager if so",
    "--load-format": "weights are counted as the checkpoint stores them",
    "--limit-mm-per-prompt": "encoder memory is part of the activation estimate",
    "--hf-overrides": "the config is taken as it is",
}


PARTITION = "VLLM_PP_LAYER_PARTITION="


@dataclass(frozen=True)
class PastedCommand:
    """Arguments for the plan, and remarks on options that do not concern it or are not modelled."""

    arguments: tuple[str, ...]
    remarks: tuple[str, ...]


def parse_pasted(pasted: list[str]) -> PastedCommand:
    """Arguments of a pasted command line. ConfigError when it is no vllm command or names no model."""
    words, entry_point = program_arguments(clean_words(pasted))
    arguments: list[str] = ["--entry-point", entry_point, *partition_setting(pasted)]
    models: list[str] = []
    remarks: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("-"):
            models.append(word)
            continue
        option, equals, inline = word.partition("=")
        option = ALIASES.get(option, option.replace("_", "-"))
        if option in SWITCHES:
            arguments.append(option)
            continue
        value = inline
        if not equals and position < len(words) and not is_option(words[position]):
            value = words[position]
            position += 1
        if option == "--model":
            models.insert(0, value)
        elif option in VALUES:
            if not value:
                raise ConfigError(f"{option}: no value follows in the pasted command line; give one")
            arguments += [option, value]
        else:
            remarks.append(remark(option))
    if not models:
        raise ConfigError("the pasted command line names no model; paste it whole, from vllm serve on")
    return PastedCommand((models[0], *arguments), tuple(dict.fromkeys(remarks)))


def partition_setting(pasted: list[str]) -> list[str]:
    """The environment setting that divides layers over pipeline stages."""
    for word in pasted:
        if word.startswith(PARTITION):
            return ["--pp-layer-partition", word.removeprefix(PARTITION)]
    return []


def is_option(word: str) -> bool:
    return word.startswith("-") and re.fullmatch(r"-\d+", word) is None


def clean_words(pasted: list[str]) -> list[str]:
    """Words without the line breaks, prompts and environment settings that come along with a paste."""
    words = [word for argument in pasted for word in (argument.split() if "\n" in argument else [argument])]
    words = [word for word in words if word not in ("\\", "$", "#", "sudo", "nohup", "env", "&")]
    while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0]):
        words = words[1:]
    return words


def program_arguments(words: list[str]) -> tuple[list[str], str]:
    """What follows the program's name, and the entry point: server, or llm for offline commands."""
    if words[:1] == ["vllm"]:
        if words[1:2] not in (["serve"], ["bench"], ["run-batch"]):
            problem = "not a command that starts an engine"
            raise wrong_value("command", " ".join(words[:2]), problem, "paste a line that starts with vllm serve")
        return words[2:], "server" if words[1] == "serve" else "llm"
    for index, word in enumerate(words):
        if word.endswith(("api_server", "api_server.py")) or word.startswith("vllm/vllm-openai"):
            return words[index + 1 :], "server"
    raise wrong_value("command", " ".join(words[:2]), "not a vllm command", "paste a line that starts with vllm serve")


def remark(option: str) -> str:
    known = NOT_MODELLED.get(option)
    return f"{option} is not modelled: {known}" if known else f"{option} does not change the plan"
