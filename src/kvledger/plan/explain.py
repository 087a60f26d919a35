"""Every step of a plan with its formula and its numbers, in the order in which an engine takes them."""

from dataclasses import dataclass

from kvledger.core.groups.spec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvledger.core.units import DTYPE_BYTES, dtype_bytes, vector_bytes
from kvledger.plan.gpus import GIB
from kvledger.plan.memory import MemoryBudget
from kvledger.plan.plan import Plan
from kvledger.plan.pool import blocks_of_group


@dataclass(frozen=True)
class Step:
    """One step: what it gives, how, and the value."""

    title: str
    formula: str
    value: str


def explain(plan: Plan) -> list[Step]:
    """The steps of a plan."""
    steps = [Step(name, origin, setting(plan, name)) for name, origin in plan.settings.origins.items()]
    for number, group in enumerate(plan.layout.groups):
        steps.extend(group_steps(plan, number, group))
    if plan.layout.groups:
        steps += [*memory_steps(plan), *pool_steps(plan)]
    return steps


def setting(plan: Plan, name: str) -> str:
    """A setting's value as text, under vLLM's name."""
    settings = plan.settings
    values: dict[str, int | str | bool] = {
        "max_model_len": settings.max_model_len,
        "dtype": settings.dtype,
        "kv_cache_dtype": settings.cache.cache_dtype,
        "prefix_caching": settings.prefix_caching,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_in_flight_tokens": settings.max_in_flight_tokens,
        "block_size": settings.block_size,
    }
    value = values[name]
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).lower()


def group_steps(plan: Plan, number: int, group: KVCacheGroupSpec) -> list[Step]:
    title = f"group {number}"
    specs = dict.fromkeys(group.layer_specs or (group.spec,))
    steps = [Step(f"{title} page", page_formula(spec), f"{spec.page_size_bytes:,} bytes") for spec in specs]
    layers = len(group.layer_names)
    steps.append(Step(f"{title} block", f"pages of {layers} layers", f"{group.page_size_bytes:,} bytes"))
    blocks = blocks_of_group(group, plan.limits)
    steps.append(Step(f"{title} blocks a request", blocks_formula(plan, group.spec), f"{blocks:,}"))
    return steps


def page_formula(spec: KVCacheSpec) -> str:
    """How the bytes of one block of one layer come about."""
    match spec:
        case MambaSpec():
            tensors = " + ".join(
                f"{'*'.join(map(str, shape))}*{dtype_bytes(dtype)}"
                for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
            )
            padded = f", padded from {spec.content_bytes:,}" if spec.page_size_padded else ""
            return f"state {tensors}{padded}"
        case MLAAttentionSpec():
            size = spec.state_bytes or spec.head_size * dtype_bytes(spec.dtype)
            tokens = f"{spec.block_size}" + (f"/{spec.tokens_per_state}" if spec.tokens_per_state > 1 else "")
            padded = f", to a multiple of {spec.alignment}" if spec.alignment > 1 else ""
            return f"{tokens} tokens * {size} bytes of latent{padded}"
        case AttentionSpec():
            value = spec.head_size_v or spec.head_size
            padded = f", padded from {spec.content_bytes:,}" if spec.page_size_padded else ""
            if spec.dtype not in DTYPE_BYTES:
                sides = " + ".join(str(vector_bytes(spec.dtype, size)) for size in (spec.head_size, value))
                return f"{spec.num_kv_heads} heads * {spec.block_size} tokens * ({sides}) bytes with scales{padded}"
            return (
                f"{spec.num_kv_heads} heads * {spec.block_size} tokens * ({spec.head_size} + {value}) * "
                f"{dtype_bytes(spec.dtype)} bytes{padded}"
            )
    return "its own"


def blocks_formula(plan: Plan, spec: KVCacheSpec) -> str:
    """How many blocks one request of full length holds, and why."""
    length, in_flight = plan.max_model_len, plan.settings.max_in_flight_tokens
    match spec:
        case SlidingWindowSpec() | SlidingWindowMLASpec():
            window = spec.sliding_window
            return f"ceil(min({window:,} - 1 + {in_flight:,} in flight, {length:,}) / {spec.block_size}) + 1"
        case ChunkedLocalAttentionSpec():
            chunk = spec.attention_chunk_size
            return f"ceil(min({chunk:,} + {in_flight:,} in flight, {length:,}) / {spec.block_size})"
        case CrossAttentionSpec():
            return f"ceil({spec.max_encoder_tokens:,} encoder tokens / {spec.block_size})"
        case MambaSpec():
            if spec.mamba_cache_mode != "align":
                return "the running state"
            extra = " + a checkpoint of the prefill" if spec.num_prefill_checkpoint_blocks else ""
            return f"the running state + the last block boundary{extra}"
    ranks = plan.request.options.decode_context_parallel_size
    shared = f" / {ranks} ranks" if ranks > 1 and spec.shards_over_context else ""
    return f"ceil({length:,}{shared} / {spec.block_size})"


def memory_steps(plan: Plan) -> list[Step]:
    steps = []
    for stage, budget in enumerate(plan.budgets):
        name = f" of stage {stage}" if len(plan.budgets) > 1 else ""
        steps.append(Step(f"memory{name}", memory_formula(plan, budget), f"{budget.available_bytes:,} bytes"))
    return steps


def memory_formula(plan: Plan, budget: MemoryBudget) -> str:
    if not budget.decides:
        return budget.cache.detail
    share = plan.request.options.gpu_memory_utilization
    terms = " - ".join(f"{term.bytes / GIB:.2f} {term.name}" for term in budget.terms)
    return f"{share} * {budget.total_bytes / GIB:.2f} GiB - {terms}"


def pool_steps(plan: Plan) -> list[Step]:
    steps = []
    for worker in plan.workers:
        name = f" of stage {worker.stage}" if len(plan.workers) > 1 else ""
        formula = f"the largest group of {worker.num_layers} layers"
        steps.append(Step(f"bytes per block{name}", formula, f"{worker.bytes_per_block:,}"))
        if plan.request.options.num_gpu_blocks_override is None:
            formula = f"{worker.available_bytes:,} // {worker.bytes_per_block:,}"
        else:
            formula = "--num-gpu-blocks-override"
        steps.append(Step(f"blocks{name}", formula, f"{worker.num_blocks:,}"))
    request = plan.blocks_per_request
    steps.append(Step("blocks a request", "the sum over groups", f"{request:,}"))
    if plan.num_blocks:
        steps.append(Step("concurrency", f"{plan.num_blocks:,} / {request:,}", f"{plan.max_concurrency:.4f}"))
        formula = f"int({plan.max_concurrency:.4f} * {plan.max_model_len:,})"
        steps.append(Step("KV cache tokens", formula, f"{plan.kv_cache_tokens:,}"))
    needed = plan.workers[0].needed_bytes(request)
    formula = f"{request:,} * {plan.workers[0].bytes_per_block:,} <= memory - one block (the null block)"
    steps.append(Step("one request fits", formula, f"{needed / GIB:.2f} GiB: {'no' if plan.error else 'yes'}"))
    steps.append(
        Step("longest that fits", f"binary search up to {plan.settings.max_model_len:,}", f"{plan.estimated_max_len:,}")
    )
    return steps
