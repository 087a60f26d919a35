"""Each number that a start-up log prints, against what a plan gives for it.

Numbers are rounded in the log (memory to 0.01 GiB), so a plan agrees when it lies in the range that this allows.
"""

import math
from dataclasses import dataclass, replace

from kvledger.plan.gpus import GIB
from kvledger.plan.logs import LogFacts
from kvledger.plan.plan import Plan, PlanRequest, make_plan
from kvledger.plan.versions import tokens_by_concurrency


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
        return plan_of_memory(request, -HALF_GIB), plan_of_memory(request, HALF_GIB)
    if facts.num_gpu_blocks is not None:
        plan = plan_of_blocks(request, facts.num_gpu_blocks)
        return plan, plan
    if facts.kv_cache_tokens is None:
        return None
    fewest, most = blocks_of_tokens(plan_of_blocks(request, 2), facts)
    if fewest < 2 or most < fewest:
        return None
    return plan_of_blocks(request, fewest), plan_of_blocks(request, most)


def plan_of_memory(request: PlanRequest, more_gib: float) -> Plan:
    """The plan where every stage has so much more than the log prints."""
    measured = tuple(
        replace(stage, available_bytes=(stage.available_bytes or 0) + int(more_gib * GIB)) for stage in request.measured
    )
    return make_plan(replace(request, measured=measured))


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
