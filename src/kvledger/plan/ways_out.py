"""A plan that does not fit -> what would, each computed by planning again."""

from dataclasses import replace

from kvledger.errors import ConfigError
from kvledger.plan.gpus import gpus
from kvledger.plan.memory import MeasuredMemory
from kvledger.plan.options import EngineOptions
from kvledger.plan.plan import Plan, PlanRequest, make_plan
from kvledger.plan.refusal import HEADS, NO_BACKEND, NO_PROMOTION, TOO_LONG, Refusal

PARALLEL_SIZES = (2, 4, 8, 16)
# Options that decide what a GPU holds of a model.
RANK_OPTIONS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")
# A share above this leaves less than the CUDA context and fragmentation take.
HIGHEST_SHARE = 0.98
# Lengths are suggested in multiples of this, or exactly where less fits.
LENGTH_STEP = 1024


def ways_out(request: PlanRequest, plan: Plan | None, refusal: Refusal) -> tuple[str, ...]:
    """Changes that were planned and fit, the smallest change first. `plan` is None when the engine would not start."""
    if plan is None:
        return start_ways(request, refusal)
    ways = [*length_way(plan), *cache_type_way(request), *share_way(request), *batch_ways(request)]
    ways += [*parallel_way(request), *pipeline_way(request), *card_way(request)]
    return tuple(ways)


def fits(request: PlanRequest) -> Plan | None:
    """The plan of a changed request when it works, else None."""
    try:
        plan = make_plan(request)
    except ConfigError:
        return None
    return plan if plan.error is None else None


def changed(request: PlanRequest, options: EngineOptions) -> PlanRequest:
    """The request with other options. What was measured of a GPU holds for as many ranks and stages only: its weights
    change as they are counted, and the other terms are estimated anew.
    """
    if is_alike(request.options, options) or not any(map(is_measured, request.measured)):
        return replace(request, options=options)
    bare = tuple(MeasuredMemory(total_bytes=stage.total_bytes) for stage in request.measured)
    try:
        plans = [make_plan(replace(request, options=each, measured=bare)) for each in (request.options, options)]
    except ConfigError:
        return replace(request, options=options)
    before, after = (max(budget.terms[0].bytes for budget in plan.budgets) for plan in plans)
    measured = tuple(
        replace(plain, weight_bytes=None if stage.weight_bytes is None else stage.weight_bytes * after // before)
        for stage, plain in zip(request.measured, bare, strict=True)
    )
    return replace(request, options=options, measured=measured)


def is_measured(stage: MeasuredMemory) -> bool:
    """Whether single terms are, not the cache itself nor another start that the terms are worked out from."""
    terms = (stage.weight_bytes, stage.activation_bytes, stage.graph_bytes, stage.other_bytes)
    return stage.available_bytes is None and stage.calibration is None and any(size is not None for size in terms)


def is_alike(one: EngineOptions, other: EngineOptions) -> bool:
    """Whether a GPU holds the same of the model with both."""
    return all(getattr(one, name) == getattr(other, name) for name in RANK_OPTIONS)


def length_way(plan: Plan) -> list[str]:
    longest = plan.estimated_max_len
    if longest < 1:
        return []
    rounded = longest // LENGTH_STEP * LENGTH_STEP or longest
    exactly = "" if rounded == longest else f" (up to {longest:,})"
    return [f"max_model_len {rounded:,} fits{exactly}: --max-model-len {rounded}"]


def cache_type_way(request: PlanRequest) -> list[str]:
    """Keys and values of one byte, where they have two."""
    if request.options.kv_cache_dtype.startswith("fp8") or request.facts.kv_scheme is not None:
        return []
    plan = fits(changed(request, replace(request.options, kv_cache_dtype="fp8")))
    if plan is not None:
        return [f"fp8 KV fits {plan.max_model_len:,}: --kv-cache-dtype fp8"]
    try:
        shorter = make_plan(changed(request, replace(request.options, kv_cache_dtype="fp8")))
    except ConfigError:
        return []
    if shorter.estimated_max_len < 1:
        return []
    return [f"fp8 KV fits up to {shorter.estimated_max_len:,}: --kv-cache-dtype fp8"]


def share_way(request: PlanRequest) -> list[str]:
    """The smallest share of the card that is enough, in steps of one percent."""
    if request.has_given_memory:
        return []
    share = round(request.options.gpu_memory_utilization + 0.01, 2)
    while share <= HIGHEST_SHARE:
        if fits(changed(request, replace(request.options, gpu_memory_utilization=share))):
            return [f"utilization {share:.2f} fits: --gpu-memory-utilization {share:.2f}"]
        share = round(share + 0.01, 2)
    return []


def batch_ways(request: PlanRequest) -> list[str]:
    """Smaller batches: windows reserve less, and the profile run peaks lower."""
    for batched, seqs in ((4096, None), (2048, None), (2048, 128)):
        smaller = replace(request.options, max_num_batched_tokens=batched)
        if seqs:
            smaller = replace(smaller, max_num_seqs=seqs)
        current = request.options.max_num_batched_tokens
        if current is not None and current <= batched:
            continue
        if fits(changed(request, smaller)):
            also = f" --max-num-seqs {seqs}" if seqs else ""
            return [f"batches of {batched:,} tokens fit: --max-num-batched-tokens {batched}{also}"]
    return []


def parallel_way(request: PlanRequest) -> list[str]:
    for size in PARALLEL_SIZES:
        if size > request.options.tensor_parallel_size and fits(
            changed(request, replace(request.options, tensor_parallel_size=size))
        ):
            return [f"tp {size} fits: --tensor-parallel-size {size}"]
    return []


def pipeline_way(request: PlanRequest) -> list[str]:
    """More stages, where all have the same card."""
    if len(request.gpus) > 1 or len(request.measured) > 1:
        return []
    for size in PARALLEL_SIZES:
        larger = replace(request.options, pipeline_parallel_size=size, pipeline_layers=())
        if size > request.options.pipeline_parallel_size and fits(changed(request, larger)):
            return [f"pp {size} fits: --pipeline-parallel-size {size}"]
    return []


def card_way(request: PlanRequest) -> list[str]:
    """The smallest card of the same maker that is enough alone, where memory is not given."""
    if request.has_given_memory:
        return []
    if len(request.gpus) > 1:
        return []
    maker = request.gpu.name.split()[0]
    larger = [
        card
        for card in gpus()
        if card.sourced and card.total_bytes > request.gpu.total_bytes and card.name.startswith(maker)
    ]
    for card in sorted(larger, key=lambda card: card.total_bytes):
        if fits(replace(request, gpus=(card,), measured=tuple(map(on_another_card, request.measured)))):
            return [f'{card.name} fits: --gpu "{card.name}"']
    return []


def on_another_card(measured: MeasuredMemory) -> MeasuredMemory:
    """What holds there too: the weights."""
    return MeasuredMemory(weight_bytes=measured.weight_bytes)


def start_ways(request: PlanRequest, refusal: Refusal) -> tuple[str, ...]:
    """Ways out when the engine would not even look at its memory."""
    heads = request.facts.num_attention_heads
    if refusal.kind == HEADS:
        sizes = [size for size in range(1, 17) if heads % size == 0]
        return tuple(f"tp {size} divides {heads} heads: --tensor-parallel-size {size}" for size in sizes[-3:])
    if refusal.kind == TOO_LONG:
        longest = request.facts.context.longest
        return (f"max_model_len {longest:,} is the longest that the model takes: --max-model-len {longest}",)
    if refusal.kind == NO_PROMOTION:
        return ("the hybrid manager on: leave --disable-hybrid-kv-cache-manager out",)
    return backend_ways(request) if refusal.kind == NO_BACKEND else ()


def starts(request: PlanRequest) -> bool:
    """Whether the engine would get as far as its memory."""
    try:
        make_plan(request)
    except ConfigError:
        return False
    return True


def backend_ways(request: PlanRequest) -> tuple[str, ...]:
    options = request.options
    dtypes = [dtype for dtype in ("bfloat16", "fp8") if dtype != options.kv_cache_dtype]
    ways = [
        f"{dtype} KV: --kv-cache-dtype {dtype}"
        for dtype in dtypes
        if starts(changed(request, replace(options, kv_cache_dtype=dtype)))
    ]
    if options.block_size is not None and starts(changed(request, replace(request.options, block_size=None))):
        ways.insert(0, "the kernels' own block size: leave --block-size out")
    return tuple(ways)
