"""A vLLM start-up log -> the numbers that it prints, and a check of each against a plan.

Numbers are rounded in the log (memory to 0.01 GiB), so a plan agrees when it lies in the range that this allows.
"""

import math
import re
from dataclasses import dataclass, replace

import msgspec

from kvledger.errors import ConfigError
from kvledger.plan.gpus import GIB
from kvledger.plan.plan import Plan, PlanRequest, make_plan
from kvledger.plan.versions import tokens_by_concurrency


@dataclass(frozen=True)
class LogFacts:
    """What a log says; None where it does not. Sizes in GiB are as printed, with two decimals."""

    version: str | None = None
    model: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool | None = None
    available_gib: float | None = None
    weights_gib: float | None = None
    activation_gib: float | None = None
    graphs_gib: float | None = None
    other_gib: float | None = None
    num_gpu_blocks: int | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    needed_gib: float | None = None
    estimated_max_len: int | None = None
    attention_block_size: int | None = None
    mamba_padding_percent: float | None = None
    padding_layers: int | None = None


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
    "gpu_memory_utilization": (r"gpu_memory_utilization['=: ]+([\d.]+)",),
    "max_num_batched_tokens": (r"max_num_batched_tokens['=: ]+(\d+)",),
    "max_num_seqs": (r"max_num_seqs['=: ]+(\d+)",),
    "enable_prefix_caching": (r"enable_prefix_caching['=: ]+(True|False)",),
    "enforce_eager": (r"enforce_eager['=: ]+(True|False)",),
    "available_gib": (r"Available KV cache memory: (-?[\d.]+) GiB", r"available KV cache memory \((-?[\d.]+) GiB\)"),
    "weights_gib": (
        r"[Mm]odel loading took ([\d.]+) ?GiB",
        r"model weights take ([\d.]+)GiB",
        r"weights[^\n]{0,40}?([\d.]+) GiB",
    ),
    "activation_gib": (r"activation peak memory takes ([\d.]+)GiB", r"torch peak memory increase: ([\d.]+)"),
    "other_gib": (r"non_torch_memory takes ([\d.]+)GiB", r"non-torch forward increase memory: ([\d.]+)"),
    "graphs_gib": (
        r"[Ee]stimated CUDA graph memory[: ]+([\d.]+) GiB",
        r"Graph capturing finished in \d+ secs, took (-?[\d.]+) GiB",
    ),
    "num_gpu_blocks": (r"(?:# GPU blocks|num_gpu_blocks)[:= ]+([\d,]+)", r"# cuda blocks: ([\d,]+)"),
    "kv_cache_tokens": (r"KV cache size: ([\d,]+) tokens",),
    "max_concurrency": (r"tokens per request: ([\d.]+)x",),
    "needed_gib": (r"\(([\d.]+) GiB KV cache is needed",),
    "estimated_max_len": (r"estimated maximum model length is ([\d,]+)",),
    "attention_block_size": (r"Setting attention block size to (\d+) tokens",),
    "mamba_padding_percent": (r"Padding mamba page size by ([\d.]+)%",),
    "padding_layers": (r"Add (\d+) padding layers",),
}
TEXTS = ("version", "model", "dtype", "kv_cache_dtype")


def read_log(text: str) -> LogFacts:
    """The numbers of a start-up log. ConfigError when it has none of those that a plan explains."""
    found: dict[str, str] = {}
    for name, patterns in PATTERNS.items():
        for pattern in patterns:
            match = re.search(pattern, text)
            if match is not None:
                found[name] = match.group(1).rstrip(".,")
                break
    facts = facts_of(found)
    if facts.available_gib is None and facts.kv_cache_tokens is None and facts.num_gpu_blocks is None:
        raise ConfigError(
            "the log has none of the lines that a plan explains (Available KV cache memory, GPU KV cache size, # GPU "
            "blocks); give the part of the log where the engine starts"
        )
    return facts


def facts_of(found: dict[str, str]) -> LogFacts:
    """The strings of a log as numbers. ConfigError for one that is no number."""
    numbers = {name: value if name in TEXTS else value.replace(",", "") for name, value in found.items()}
    try:
        return msgspec.convert(numbers, LogFacts, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the log has a line that cannot be read ({error}); give the log as vLLM wrote it") from None


@dataclass(frozen=True)
class LogCheck:
    """One printed number. `low` to `high`: what the plan gives over the rounding of the memory that the log prints."""

    name: str
    printed: float
    low: float
    high: float
    formula: str

    @property
    def agrees(self) -> bool:
        return self.low <= self.printed <= self.high


# Half of the last digit that the log prints.
HALF_GIB = 0.005
HALF_CONCURRENCY = 0.005


def check_log(request: PlanRequest, facts: LogFacts) -> list[LogCheck]:
    """Every number of the log that a plan gives, with its range. Empty without anything to plan from."""
    plans = bounding_plans(request, facts)
    if plans is None:
        return []
    low, high = plans
    checks = []
    if facts.num_gpu_blocks is not None and facts.available_gib is not None:
        blocks = (low.num_blocks, high.num_blocks)
        checks.append(LogCheck("GPU blocks", facts.num_gpu_blocks, *blocks, "available memory // bytes per block"))
    if facts.max_concurrency is not None:
        formula = f"num_blocks / {low.blocks_per_request} blocks a request"
        bounds = (low.max_concurrency - HALF_CONCURRENCY, high.max_concurrency + HALF_CONCURRENCY)
        checks.append(LogCheck("maximum concurrency", facts.max_concurrency, *bounds, formula))
    if facts.kv_cache_tokens is not None:
        checks.append(tokens_check(low, high, facts))
    if facts.needed_gib is not None:
        needed = low.workers[0].needed_bytes(low.blocks_per_request) / GIB
        formula = "blocks of one request * bytes per block"
        checks.append(LogCheck("needed GiB", facts.needed_gib, needed - HALF_GIB, needed + HALF_GIB, formula))
    if facts.estimated_max_len is not None:
        bounds = (low.estimated_max_len, high.estimated_max_len)
        checks.append(
            LogCheck("estimated maximum length", facts.estimated_max_len, *bounds, "binary search over lengths")
        )
    return [*checks, *exact_checks(low, facts)]


def bounding_plans(request: PlanRequest, facts: LogFacts) -> tuple[Plan, Plan] | None:
    """Plans at both ends of what the log can mean: by its memory, else by its blocks, else by its token figure."""
    if facts.available_gib is not None:
        bounds = (facts.available_gib - HALF_GIB, facts.available_gib + HALF_GIB)
        low, high = ((replace(request.measured[0], available_bytes=int(bound * GIB)),) for bound in bounds)
        return make_plan(replace(request, measured=low)), make_plan(replace(request, measured=high))
    if facts.num_gpu_blocks is not None:
        plan = plan_of_blocks(request, facts.num_gpu_blocks)
        return plan, plan
    if facts.kv_cache_tokens is None:
        return None
    fewest, most = blocks_of_tokens(plan_of_blocks(request, 2), facts)
    if fewest < 2 or most < fewest:
        return None
    return plan_of_blocks(request, fewest), plan_of_blocks(request, most)


def plan_of_blocks(request: PlanRequest, num_blocks: int) -> Plan:
    return make_plan(replace(request, options=replace(request.options, num_gpu_blocks_override=num_blocks)))


def blocks_of_tokens(plan: Plan, facts: LogFacts) -> tuple[int, int]:
    """The fewest and the most blocks that print this token figure."""
    tokens = facts.kv_cache_tokens or 0
    sizes = [group.spec.block_size for group in plan.layout.groups]
    groups, smallest = max(len(sizes), 1), min(sizes, default=1)
    if tokens_by_concurrency(facts.version) is not True and tokens % smallest == 0:
        fewest = tokens // smallest * groups
        return fewest, fewest + groups - 1
    per_token = plan.blocks_per_request / plan.max_model_len
    return math.ceil(tokens * per_token), math.ceil((tokens + 1) * per_token) - 1


def tokens_check(low: Plan, high: Plan, facts: LogFacts) -> LogCheck:
    """The token figure, by the formula of the log's release; without a release, by the one that it agrees with."""
    printed = facts.kv_cache_tokens or 0
    newer = LogCheck(
        "KV cache tokens", printed, low.kv_cache_tokens, high.kv_cache_tokens, "int(concurrency * max_model_len)"
    )
    older = LogCheck(
        "KV cache tokens",
        printed,
        tokens_by_groups(low),
        tokens_by_groups(high),
        "num_blocks // groups * smallest block size (releases before 0.20)",
    )
    by_concurrency = tokens_by_concurrency(facts.version)
    if by_concurrency is None:
        return newer if newer.agrees or not older.agrees else older
    return newer if by_concurrency else older


def tokens_by_groups(plan: Plan) -> int:
    """The token figure of older releases: whole blocks of one group."""
    sizes = [group.spec.block_size for group in plan.layout.groups]
    return plan.num_blocks // max(len(sizes), 1) * min(sizes, default=0)


def exact_checks(plan: Plan, facts: LogFacts) -> list[LogCheck]:
    """Numbers that do not depend on the memory."""
    checks = []
    if facts.attention_block_size is not None:
        size = plan.block_size
        checks.append(
            LogCheck("attention block size", facts.attention_block_size, size, size, "smallest that holds a state")
        )
    if facts.mamba_padding_percent is not None:
        percent = state_padding_percent(plan)
        bounds = (percent - HALF_GIB, percent + HALF_GIB)
        checks.append(LogCheck("Mamba page padding %", facts.mamba_padding_percent, *bounds, "page / state - 1"))
    if facts.padding_layers is not None:
        layers = plan.layout.padding_layers()
        checks.append(LogCheck("padding layers", facts.padding_layers, layers, layers, "group size * groups - layers"))
    return checks


def state_padding_percent(plan: Plan) -> float:
    cache = replace(plan.settings.cache, state_page_padded=0)
    states = [layer.cache.spec(cache).page_size_bytes for layer in plan.facts.layers if layer.cache.is_state]
    page = plan.settings.cache.state_page_padded
    return 100 * (page / states[0] - 1) if states and page else 0.0
