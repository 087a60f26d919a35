"""A vLLM start-up log -> the numbers that it prints.

A log of several ranks, replicas or nodes prints its memory once for each of them: the poorest rank of the poorest
replica counts, because the pool is the least of all. Of several starts in one file the last one counts.
"""

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from kvledger.errors import ConfigError


@dataclass(frozen=True)
class LogFacts:
    """What a log says; None where it does not. Sizes in GiB are as printed, with two decimals.

    `args`: the options that were not defaults, by the names that vLLM stores them under; None where that line is
    missing. `is_server`: vllm serve, not the LLM class. `memory_is_given`: the KV cache's memory was an option.
    `platform`: cuda, rocm, cpu, xpu. `stage_gib`: available memory of each pipeline stage, where the ranks are
    named. `consumed_gib`: weights and what is outside the framework, in one. `graphs_gib`: what was set aside for
    CUDA graphs.
    """

    version: str | None = None
    model: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool | None = None
    platform: str | None = None
    speculative_method: str | None = None
    speculative_model: str | None = None
    speculative_tokens: int | None = None
    total_gib: float | None = None
    requested_gib: float | None = None
    available_gib: float | None = None
    weights_gib: float | None = None
    activation_gib: float | None = None
    graphs_gib: float | None = None
    consumed_gib: float | None = None
    other_gib: float | None = None
    num_gpu_blocks: int | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    needed_gib: float | None = None
    estimated_max_len: int | None = None
    attention_block_size: int | None = None
    mamba_padding_percent: float | None = None
    padding_layers: int | None = None
    args: Mapping[str, object] | None = None
    stage_gib: tuple[float, ...] = field(default=())
    is_server: bool = True
    memory_is_given: bool = False


# Field -> patterns whose first group is its value; the first that matches anywhere counts.
PATTERNS: dict[str, tuple[str, ...]] = {
    "version": (r"API server version (\S+)", r"LLM engine \(v([^)\s]+)\)", r"vLLM version[: ]+v?([\d.]+\S*)"),
    "model": (r"non-default args: \{[^\n]*?'model': '([^']+)'", r"config: model='([^']+)'", r"vllm serve (\S+)"),
    "dtype": (r"\bdtype=torch\.(\w+)", r"'dtype': '(\w+)'"),
    "kv_cache_dtype": (r"\bkv_cache_dtype=(\w+)", r"'kv_cache_dtype': '(\w+)'"),
    "max_model_len": (
        r"Maximum concurrency for ([\d,]+) tokens per request",
        r"max_seq_len=(\d+)",
        r"'max_model_len': (\d+)",
        r"model's max seq len \((\d+)\)",
    ),
    "tensor_parallel_size": (r"tensor_parallel_size=(\d+)", r"'tensor_parallel_size': (\d+)"),
    "pipeline_parallel_size": (r"pipeline_parallel_size=(\d+)", r"'pipeline_parallel_size': (\d+)"),
    "data_parallel_size": (r"data_parallel_size=(\d+)", r"'data_parallel_size': (\d+)"),
    "decode_context_parallel_size": (r"decode_context_parallel_size['=: ]+(\d+)",),
    "gpu_memory_utilization": (
        r"gpu_memory_utilization['=: (]+([\d.]+)",
        r"current --gpu-memory-utilization=([\d.]+)",
        r"Desired GPU memory utilization is \(([\d.]+),",
        r"--gpu-memory-utilization[= ]([\d.]+)",
    ),
    "max_num_batched_tokens": (r"max_num_batched_tokens['=: ]+(\d+)",),
    "max_num_seqs": (r"max_num_seqs['=: ]+(\d+)",),
    "enable_prefix_caching": (r"enable_prefix_caching['=: ]+(True|False)",),
    "enforce_eager": (r"enforce_eager['=: ]+(True|False)",),
    "platform": (r"Automatically detected platform (\w+)", r"device_config=(\w+)", r"(CPU|XPU) KV cache size"),
    "speculative_method": (r"SpeculativeConfig\(method='(\w+)'",),
    "speculative_model": (r"SpeculativeConfig\([^)]*model='([^']+)'",),
    "speculative_tokens": (r"SpeculativeConfig\([^)]*num_spec_tokens=(\d+)",),
    "total_gib": (
        r"Free memory on device[^(\n]*\([\d.]+/([\d.]+) GiB\)",
        r"Memory of [^\n:]+: [\d.]+ of ([\d.]+) GiB are this worker's",
        r"total_gpu_memory[ =(]+([\d.]+) ?GiB",
        r"(?:Auto|Explicitly) set \(-?[\d.]+/([\d.]+)\) GiB for KV cache",
    ),
    "requested_gib": (
        r"Desired GPU memory utilization is \([\d.]+, ([\d.]+) GiB\)",
        r"Memory of [^\n:]+: ([\d.]+) of [\d.]+ GiB are this worker's",
    ),
    "available_gib": (
        r"Available KV cache memory: (-?[\d.]+) GiB",
        r"available KV cache memory \((-?[\d.]+) GiB\)",
        r"(?:Auto|Explicitly) set \((-?[\d.]+)/[\d.]+\) GiB for KV cache",
        r"reserved for KV Cache is (-?[\d.]+) ?GiB",
        r"reserved (-?[\d.]+) GiB memory for KV Cache",
    ),
    "weights_gib": (
        r"[Mm]odel loading took ([\d.]+) ?GiB",
        r"model weights take ([\d.]+)GiB",
        r"Actual usage is ([\d.]+) GiB for weight",
        r"weights memory: ([\d.]+) ?GiB",
        r"are this worker's: weights ([\d.]+) GiB",
    ),
    "activation_gib": (
        r"activation peak memory takes ([\d.]+)GiB",
        r"torch peak memory increase: ([\d.]+)",
        r"([\d.]+) GiB for peak activation",
        r"this worker's:[^\n]* activation peak ([\d.]+) GiB",
    ),
    "consumed_gib": (r"Actual usage is ([\d.]+) GiB for consumed memory",),
    "other_gib": (
        r"non_torch_memory takes ([\d.]+)GiB",
        r"non-torch forward increase memory: ([\d.]+)",
        r"([\d.]+) GiB for non-torch memory",
        r"this worker's:[^\n]* other ([\d.]+) GiB",
    ),
    "graphs_gib": (r"[Ee]stimated CUDA graph memory[: ]+([\d.]+) GiB",),
    "num_gpu_blocks": (r"(?:# (?:GPU|CPU) blocks|num_gpu_blocks)[:= ]+([\d,]+)", r"# cuda blocks: ([\d,]+)"),
    "kv_cache_tokens": (r"\b[A-Z]+ KV cache size: ([\d,]+) tokens",),
    "max_concurrency": (r"tokens per request: ([\d.]+)x",),
    "needed_gib": (r"\(([\d.]+) GiB KV cache is needed",),
    "estimated_max_len": (r"estimated maximum model length is ([\d,]+)",),
    "attention_block_size": (r"Setting attention block size to (\d+) tokens",),
    "mamba_padding_percent": (r"Padding mamba page size by ([\d.]+)%",),
    "padding_layers": (r"Add (\d+) padding layers",),
}
TEXTS = ("version", "model", "dtype", "kv_cache_dtype", "platform", "speculative_method", "speculative_model")
# Numbers that each rank prints -> which of them counts: the poorest rank has the least memory and the most in it.
OF_RANKS: dict[str, Callable[..., str]] = {
    "available_gib": min, "num_gpu_blocks": min, "weights_gib": max, "activation_gib": max, "consumed_gib": max,
    "other_gib": max, "graphs_gib": max, "total_gib": min, "requested_gib": min,
}  # fmt: skip
# As logs print one, and what follows it there.
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?[.,]*")
# Where a start begins.
START = "API server version"
REPLICA = re.compile(r"^\W*(?:\S+ )?\([^)\n]*DP(\d+)")
STAGE = re.compile(r"PP(\d+)")
ARGS = re.compile(r"non-default args: (\{.*\})\s*$", re.MULTILINE)
GIVEN_MEMORY = re.compile(r"Explicitly set \(|memory for KV Cache as specified by kv_cache_memory_bytes")
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def read_log(text: str) -> LogFacts:
    """The numbers of a start-up log. ConfigError when it has none of those that a plan explains."""
    text = poorest_replica(last_start(ESCAPES.sub("", text)))
    found: dict[str, str] = {}
    for name, patterns in PATTERNS.items():
        for pattern in patterns:
            values = re.findall(pattern, text)
            if values:
                found[name] = chosen(name, values).rstrip(".,")
                break
    facts = facts_of(found)
    if facts.available_gib is None and facts.kv_cache_tokens is None and facts.num_gpu_blocks is None:
        raise ConfigError(
            "the log has none of the lines that a plan explains (Available KV cache memory, GPU KV cache size, # GPU "
            "blocks); give the part of the log where the engine starts"
        )
    return replace(
        facts,
        args=args_of(text),
        stage_gib=memory_of_stages(text),
        is_server="API server" in text or "APIServer" in text,
        memory_is_given=GIVEN_MEMORY.search(text) is not None,
    )


def chosen(name: str, values: list[str]) -> str:
    """The first that is printed, or the poorest rank's. One that is no number is for facts_of to name."""
    if name not in OF_RANKS:
        return values[0]
    for value in values:
        if NUMBER.fullmatch(value) is None:
            return value
    return OF_RANKS[name](values, key=lambda value: float(value.rstrip(".,").replace(",", "")))


def last_start(text: str) -> str:
    """From the banner of the last start that came as far as its memory."""
    places = [match.start() for match in re.finditer(START, text)]
    for place in reversed(places):
        part = text[text.rfind("\n", 0, place) + 1 :]
        if any(re.search(pattern, part) for pattern in (*PATTERNS["available_gib"], *PATTERNS["kv_cache_tokens"])):
            return part
    return text


def poorest_replica(text: str) -> str:
    """Without the lines of the replicas that have more memory than the poorest."""
    least: dict[str, float] = {}
    lines = text.splitlines()
    for line in lines:
        replica = REPLICA.search(line)
        memory = re.search(PATTERNS["available_gib"][0], line)
        if replica and memory:
            least[replica[1]] = min(float(memory[1]), least.get(replica[1], float("inf")))
    if len(least) < 2:
        return text
    poorest = min(least, key=lambda replica: least[replica])
    return "\n".join(line for line in lines if (found := REPLICA.search(line)) is None or found[1] == poorest)


def memory_of_stages(text: str) -> tuple[float, ...]:
    """Available memory of each pipeline stage, the least of its ranks; () where ranks are not named."""
    least: dict[int, float] = {}
    for line in text.splitlines():
        memory = re.search(PATTERNS["available_gib"][0], line)
        stage = STAGE.search(line)
        if memory and stage:
            least[int(stage[1])] = min(float(memory[1]), least.get(int(stage[1]), float("inf")))
    return tuple(least[stage] for stage in sorted(least)) if sorted(least) == list(range(len(least))) else ()


def args_of(text: str) -> Mapping[str, object] | None:
    """The options that were not defaults: {} where their line has other values than literals, None without it."""
    match = ARGS.search(text)
    if match is None:
        return None
    try:
        found: object = ast.literal_eval(match[1])
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {}


def facts_of(found: Mapping[str, str]) -> LogFacts:
    """The strings of a log as numbers. ConfigError for one that is no number."""
    numbers = {name: value if name in TEXTS else value.replace(",", "") for name, value in found.items()}
    try:
        return msgspec.convert(numbers, LogFacts, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the log has a line that cannot be read ({error}); give the log as vLLM wrote it") from None
