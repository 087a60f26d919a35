"""A plan as numbers and words for any output: JSON, tables, or another program. Knows no terminal."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from kvledger.core.groups.spec import KVCacheGroupSpec, KVCacheSpec
from kvledger.core.units import dtype_bytes
from kvledger.plan.granularity import ReuseStep, reuse_step
from kvledger.plan.layout import LayoutComparison
from kvledger.plan.log_checks import LogCheck
from kvledger.plan.offloading import host_cache
from kvledger.plan.plan import Plan, weight_ranks
from kvledger.plan.pool import blocks_of_group
from kvledger.plan.refusal import Refusal
from kvledger.plan.request import RequestHolding, request_holding
from kvledger.plan.speculative import EAGLE_LIKE, lookahead_slots
from kvledger.plan.terms import Term
from kvledger.plan.work import JSONValue, step_work

KIND_WORDS = {
    "FullAttentionSpec": "full attention",
    "SinkFullAttentionSpec": "full attention with sink",
    "HostResidentSpec": "full attention in host memory",
    "SlidingWindowSpec": "sliding window",
    "ChunkedLocalAttentionSpec": "chunked local attention",
    "CrossAttentionSpec": "cross attention",
    "CircularBufferSpec": "ring",
    "MLAAttentionSpec": "latent (MLA)",
    "SlidingWindowMLASpec": "latent, sliding window",
    "MambaSpec": "recurrent state",
}


@dataclass(frozen=True)
class WhatIf:
    """The plan of a log that another was worked out from, and the options that differ."""

    before: Plan
    changes: tuple[str, ...]


@dataclass(frozen=True)
class PlanView:
    """A plan with what was asked beside it. `unmodelled`: what was asked and is not counted."""

    plan: Plan
    holding: RequestHolding | None
    layouts: LayoutComparison | None = None
    checks: tuple[LogCheck, ...] = ()
    remarks: tuple[str, ...] = ()
    unmodelled: tuple[str, ...] = ()
    what_if: WhatIf | None = None

    @property
    def notes(self) -> list[str]:
        """What was assumed, and what a user should know about the result."""
        notes = [*self.plan.facts.config.notes, *self.remarks]
        if not self.plan.request.gpu.sourced and self.plan.budgets[0].decides:
            notes.append(f"some figures of {self.plan.request.gpu.name} in the table of cards have no checked source")
        if not self.plan.request.has_hybrid_manager:
            notes.append("hybrid KV cache manager off: windowed and chunked layers are charged like full ones")
        padding = padding_note(self.plan)
        step = reuse_step(self.plan)
        return [*notes, *([padding] if padding else []), *([step.warning] if step and step.warning else [])]


def kind_words(spec: KVCacheSpec) -> str:
    """What a layer keeps, with its window or chunk."""
    words = KIND_WORDS.get(type(spec).__name__, type(spec).__name__)
    if window := getattr(spec, "sliding_window", 0):
        words += f" of {window:,}" if "window" in words else f" (window {window:,} stored whole)"
    if chunk := getattr(spec, "attention_chunk_size", 0):
        words += f" of {chunk:,}" if "chunk" in words else f" (chunks of {chunk:,} stored whole)"
    return words


def group_words(group: KVCacheGroupSpec) -> str:
    kinds = dict.fromkeys(kind_words(spec) for spec in (group.layer_specs or (group.spec,)))
    sizes = len({spec.page_size_bytes for spec in group.layer_specs})
    return ", ".join(kinds) + (f", {sizes} page sizes" if sizes > 1 else "")


def padding_note(plan: Plan) -> str:
    """vLLM's warning about layers that are allocated and do not exist."""
    layers = plan.layout.padding_layers()
    if not layers:
        return ""
    size = plan.layout.group_size
    word = "layer" if layers == 1 else "layers"
    fix = "`kvledger plan --layout best` shows what that costs"
    return f"{layers} padding {word}: groups of {size} do not divide the layers; {fix}"


def term_object(term: Term) -> dict[str, JSONValue]:
    return {
        "name": term.name,
        "bytes": term.bytes,
        "low": term.low,
        "high": term.high,
        "origin": term.origin,
        "detail": term.detail,
    }


def group_object(plan: Plan, group: KVCacheGroupSpec) -> dict[str, JSONValue]:
    members = group.layer_specs or (group.spec,) * len(group.layer_names)
    pages: list[JSONValue] = [*sorted({spec.page_size_bytes for spec in members})]
    return {
        "kind": type(group.spec).__name__,
        "layers": len(group.layer_names),
        "layer_names": list(group.layer_names),
        "block_size": group.spec.block_size,
        "page_size_bytes": pages[0] if len(pages) == 1 else pages,
        "bytes_per_block": group.page_size_bytes,
        "blocks_per_request": blocks_of_group(group, plan.limits),
        "spec": spec_object(group.spec),
    }


def spec_object(spec: KVCacheSpec) -> dict[str, JSONValue]:
    named: dict[str, JSONValue] = {"type": type(spec).__name__}
    for field in fields(spec):
        value = getattr(spec, field.name)
        is_nested = isinstance(value, tuple)
        named[field.name] = [list(item) if isinstance(item, tuple) else item for item in value] if is_nested else value
    return named


def error_object(refusal: Refusal) -> dict[str, JSONValue]:
    return {"kind": refusal.kind, "message": refusal.message, "ways_out": list(refusal.ways_out)}


def refusal_object(
    model: str | None, vllm_version: str, refusal: Refusal, notes: Sequence[str], unmodelled: Sequence[str]
) -> dict[str, JSONValue]:
    """The object of an engine that would not start: the fields of a plan that there are."""
    return {
        "model": model,
        "vllm_version": vllm_version,
        "fits": False,
        "error": error_object(refusal),
        "notes": list(notes),
        "not_modelled": list(unmodelled),
    }


def plan_object(view: PlanView) -> dict[str, JSONValue]:
    """One object for --json and for `replay --plan`."""
    plan, options, settings = view.plan, view.plan.request.options, view.plan.settings
    low, high = block_range(plan)
    answer: dict[str, JSONValue] = {
        "model": plan.facts.name,
        "architecture": plan.facts.config.architecture,
        "source": plan.facts.config.source,
        "gpu": [gpu.name for gpu in plan.request.gpus],
        "vllm_version": plan.request.rules.name,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "data_parallel_size": options.data_parallel_size,
        "prefill_context_parallel_size": options.prefill_context_parallel_size,
        "decode_context_parallel_size": options.decode_context_parallel_size,
        "max_model_len": plan.max_model_len,
        "estimated_max_model_len": plan.estimated_max_len,
        "dtype": settings.dtype,
        "kv_cache_dtype": settings.cache.cache_dtype,
        "block_size": plan.block_size,
        "num_blocks": plan.num_blocks,
        "num_blocks_low": low,
        "num_blocks_high": high,
        "bytes_per_block": plan.bytes_per_block,
        "kv_cache_tokens": plan.kv_cache_tokens,
        "max_concurrency": plan.max_concurrency,
        "blocks_per_request": plan.blocks_per_request,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "max_in_flight_tokens": settings.max_in_flight_tokens,
        "enable_prefix_caching": settings.prefix_caching,
        "attention_backend": settings.backend.name,
        "groups": [group_object(plan, group) for group in plan.layout.groups],
        "padding_layers": plan.layout.padding_layers(),
        "hybrid_kv_cache_manager": plan.request.has_hybrid_manager,
        "kv_cache_memory_bytes": min(worker.available_bytes for worker in plan.workers),
        "memory": [memory_object(view, stage) for stage in range(len(plan.budgets))],
        "fits": plan.error is None,
        "notes": list(view.notes),
        "not_modelled": list(view.unmodelled),
    }
    kept = host_cache(options, plan.workers)
    if kept is not None:
        answer["host_kv_cache"] = {"bytes": kept.bytes, "num_blocks": kept.num_blocks}
    if plan.request.draft is not None:
        answer["draft"] = draft_object(plan)
    step = reuse_step(plan)
    answer["prefix_reuse_step"] = step.tokens if isinstance(step, ReuseStep) else None
    if not plan.keeps_nothing:
        answer["work"] = step_work(plan)
    if view.holding is not None:
        answer["request"] = dict(vars(view.holding))
    if view.layouts is not None:
        answer["layout"] = layout_object(view.layouts)
    if view.checks:
        answer["log"] = [{**vars(check), "agrees": check.agrees} for check in view.checks]
    if view.what_if is not None:
        before = sweep_object("log", "as it started", plan.request.rules.name, view.what_if.before)
        answer["what_if"] = {"changes": list(view.what_if.changes), "before": before}
    if plan.error is not None:
        answer["error"] = error_object(plan.error)
    return answer


def draft_object(plan: Plan) -> dict[str, JSONValue]:
    draft = plan.request.draft
    assert draft is not None
    ranks = weight_ranks(plan.request.options)
    _, size = draft.rank_bytes(dtype_bytes(plan.settings.dtype), ranks, plan.request.options.quantization)
    return {
        "method": draft.method,
        "num_tokens": draft.num_tokens,
        "lookahead_slots": lookahead_slots(draft),
        "reads_hidden_states": draft.method in EAGLE_LIKE,
        "layers": len(draft.layers),
        "weight_bytes": size,
    }


def memory_object(view: PlanView, stage: int) -> dict[str, JSONValue]:
    budget, worker = view.plan.budgets[stage], view.plan.workers[stage]
    return {
        "stage": stage,
        "gpu": budget.gpu.name,
        "layers": worker.num_layers,
        "total_bytes": budget.total_bytes,
        "requested_bytes": budget.requested_bytes,
        "available_bytes": worker.available_bytes,
        "num_blocks": worker.num_blocks,
        "bytes_per_block": worker.bytes_per_block,
        "terms": [term_object(term) for term in (*budget.terms, budget.cache)],
    }


def layout_object(comparison: LayoutComparison) -> dict[str, JSONValue]:
    def choice(which: str) -> dict[str, JSONValue]:
        chosen = comparison.best if which == "best" else comparison.vllm
        return {**vars(chosen), "waste": chosen.waste}

    return {
        "buckets": list(comparison.buckets),
        "vllm": choice("vllm"),
        "best": choice("best"),
        "extra_requests": comparison.extra_requests,
    }


def block_range(plan: Plan) -> tuple[int, int]:
    """Blocks over the range of the estimated memory terms."""
    low, high = [], []
    for budget, worker in zip(plan.budgets, plan.workers, strict=True):
        if not worker.bytes_per_block or plan.request.options.num_gpu_blocks_override is not None:
            low.append(worker.num_blocks)
            high.append(worker.num_blocks)
            continue
        low.append(max(budget.cache.low, 0) // worker.bytes_per_block)
        high.append(max(budget.cache.high, 0) // worker.bytes_per_block)
    return min(low), min(high)


def holding_of(plan: Plan, prompt: int, output: int) -> RequestHolding | None:
    """What a typical request holds, cut to max_model_len where it is longer; None where nothing is kept."""
    if not plan.layout.groups or plan.num_blocks < 2:
        return None
    output = min(output, plan.settings.max_model_len - 1)
    return request_holding(plan, min(prompt, plan.settings.max_model_len - output), output)


def sweep_object(key: str, value: str, vllm_version: str, result: Plan | Refusal) -> dict[str, JSONValue]:
    """One line of a sweep."""
    if isinstance(result, Refusal):
        return {key: value, "vllm_version": vllm_version, "fits": False, "error": error_object(result)}
    return {
        key: value,
        "vllm_version": vllm_version,
        "fits": result.error is None,
        "block_size": result.block_size,
        "num_blocks": result.num_blocks,
        "kv_cache_tokens": result.kv_cache_tokens,
        "max_concurrency": result.max_concurrency,
        "max_model_len": result.max_model_len,
        "estimated_max_model_len": result.estimated_max_len,
    }
