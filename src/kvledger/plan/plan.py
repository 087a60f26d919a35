"""A model, a card and options -> a plan: settings, groups, memory, blocks, and what vLLM would say."""

from dataclasses import dataclass, replace

from kvledger.core.groups.spec import KVCacheSpec
from kvledger.core.units import dtype_bytes
from kvledger.models.adapters import Adapters
from kvledger.models.drafts import Draft
from kvledger.models.facts import ModelFacts
from kvledger.models.layers import AttentionCache, Layer
from kvledger.models.quantization import UnknownQuantizationError
from kvledger.models.shards import Ranks
from kvledger.models.weights import WeightBytes, layer_bytes, model_weights, rank_weight_bytes
from kvledger.plan.engine import EngineSettings, engine_settings
from kvledger.plan.gpus import GIB, Gpu
from kvledger.plan.groups import GroupLayout, group_layers
from kvledger.plan.memory import NOTHING_MEASURED, MeasuredMemory, MemoryBudget, StageLoad, memory_budget
from kvledger.plan.offloading import offloaded_bytes
from kvledger.plan.options import AUTO_LENGTH, EngineOptions
from kvledger.plan.pool import (
    RequestLimits,
    WorkerPool,
    blocks_per_request,
    longest_that_fits,
    no_memory_message,
    pipeline_stages,
    too_long_message,
    worker_pool,
)
from kvledger.plan.refusal import DOES_NOT_FIT, NO_MEMORY, QUANTIZATION, Refusal, RefusedError
from kvledger.plan.speculative import EAGLE_LIKE
from kvledger.plan.versions import VersionRules


@dataclass(frozen=True)
class PlanRequest:
    """What to plan. `gpus` and `measured`: for each pipeline stage, or one for all."""

    facts: ModelFacts
    options: EngineOptions
    gpus: tuple[Gpu, ...]
    rules: VersionRules
    measured: tuple[MeasuredMemory, ...] = (NOTHING_MEASURED,)
    group_size: int = 0
    draft: Draft | None = None

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The caches of the model and of what drafts for it."""
        return self.facts.layers + (self.draft.layers if self.draft is not None else ())

    @property
    def has_hybrid_manager(self) -> bool:
        """Off as asked, and where a draft reads the hidden states of a model whose attention is chunked."""
        chunked = any(isinstance(layer.cache, AttentionCache) and layer.cache.chunk for layer in self.facts.layers)
        drafted = self.draft is not None and self.draft.method in EAGLE_LIKE
        return not (self.options.disable_hybrid_kv_cache_manager or (chunked and drafted))

    @property
    def gpu(self) -> Gpu:
        """The card that decides the engine's defaults: the first stage's."""
        return self.gpus[0]

    def gpu_of_stage(self, stage: int) -> Gpu:
        return self.gpus[stage] if len(self.gpus) > 1 else self.gpus[0]

    def measured_of_stage(self, stage: int) -> MeasuredMemory:
        return self.measured[stage] if len(self.measured) > 1 else self.measured[0]

    @property
    def has_given_memory(self) -> bool:
        """The KV cache's memory is given, so the card's does not decide it."""
        given = any(measured.available_bytes is not None for measured in self.measured)
        return given or self.options.kv_cache_memory_bytes is not None


@dataclass(frozen=True)
class Plan:
    """What an engine would do. `error`: why it would not start, although the numbers say how far it is."""

    request: PlanRequest
    settings: EngineSettings
    layout: GroupLayout
    budgets: tuple[MemoryBudget, ...]
    workers: tuple[WorkerPool, ...]
    max_model_len: int
    estimated_max_len: int
    error: Refusal | None

    @property
    def facts(self) -> ModelFacts:
        return self.request.facts

    @property
    def keeps_nothing(self) -> bool:
        """An encoder: no layer keeps anything between steps."""
        return not self.layout.groups

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included: the least of all workers."""
        return min(worker.num_blocks for worker in self.workers)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block on the worker that has the most."""
        return max(worker.bytes_per_block for worker in self.workers)

    @property
    def limits(self) -> RequestLimits:
        return request_limits(self.request.options, self.settings, self.max_model_len)

    @property
    def blocks_per_request(self) -> int:
        """Blocks of one request of max_model_len."""
        return blocks_per_request(self.layout.groups, self.limits)

    @property
    def max_concurrency(self) -> float:
        """Requests of max_model_len that fit at a time, by vLLM's figure, which counts the null block."""
        return self.num_blocks / self.blocks_per_request if self.blocks_per_request else 0.0

    @property
    def kv_cache_tokens(self) -> int:
        """vLLM's "GPU KV cache size": concurrency * max_model_len, rounded down."""
        return int(self.max_concurrency * self.max_model_len)

    @property
    def block_size(self) -> int:
        return self.settings.block_size


def weight_ranks(options: EngineOptions) -> Ranks:
    """Ranks that share weights: experts go over the replicas as well, when they are parallel."""
    tensor, whole = options.tensor_parallel_size, options.enable_expert_parallel
    others = options.prefill_context_parallel_size * options.data_parallel_size
    return Ranks(tensor, tensor * (others if whole else 1), whole)


def request_limits(options: EngineOptions, settings: EngineSettings, length: int) -> RequestLimits:
    return RequestLimits(length, settings.max_in_flight_tokens, options.decode_context_parallel_size)


def make_plan(request: PlanRequest) -> Plan:
    """The plan. RefusedError when vLLM would not get as far as its memory; ConfigError for a wrong input."""
    facts, options = request.facts, request.options
    draft = request.draft
    num_drafted = draft.num_tokens if draft is not None else 0
    settings = engine_settings(facts, options, request.gpu, request.rules, num_drafted)
    specs: dict[str, KVCacheSpec] = {layer.name: layer.spec(settings.cache) for layer in request.layers}
    layout = group_layers(
        specs,
        hybrid_manager=request.has_hybrid_manager,
        packed=facts.is_compressed,
        group_size=request.group_size,
    )
    stages = pipeline_stages(facts.num_layers, options.pipeline_parallel_size, options.pipeline_layers)
    element = dtype_bytes(settings.dtype)
    weights = stage_weights(request, element, stages)
    budgets, workers = [], []
    for stage, layers in enumerate(stages):
        load = StageLoad(weights[stage], len(layers), 1 + num_drafted)
        measured = request.measured_of_stage(stage)
        budget = memory_budget(facts.config, options, settings, request.gpu_of_stage(stage), load, measured)
        # What drafts is on the last stage.
        last = layers == stages[-1]
        on_stage = {
            layer.name: specs[layer.name]
            for layer in request.layers
            if layer.index in layers or (last and layer.index >= facts.num_layers)
        }
        budgets.append(budget)
        available = budget.available_bytes
        workers.append(worker_pool(layout, stage, on_stage, available, options.num_gpu_blocks_override))
    plan = Plan(request, settings, layout, tuple(budgets), tuple(workers), settings.max_model_len, 0, None)
    return judged(plan)


def stage_weights(request: PlanRequest, dtype_bytes: int, stages: list[range]) -> list[WeightBytes]:
    """What a rank of each stage holds. RefusedError for weights that vLLM would not load, unless they were measured."""
    facts, options = request.facts, request.options
    ranks = weight_ranks(options)
    try:
        held = rank_weight_bytes(facts.config, facts.layers, dtype_bytes, ranks, stages, options.quantization)
        return [with_extras(request, dtype_bytes, ranks, stages, stage, weights) for stage, weights in enumerate(held)]
    except UnknownQuantizationError as error:
        knows_weights = all(measured.weight_bytes is not None for measured in request.measured)
        if not knows_weights and not request.has_given_memory:
            raise RefusedError(QUANTIZATION, str(error)) from None
        facts.config.note(str(error))
        return [WeightBytes(0, 0, "not counted") for _ in stages]


def with_extras(
    request: PlanRequest, dtype_bytes: int, ranks: Ranks, stages: list[range], stage: int, weights: WeightBytes
) -> WeightBytes:
    """A stage's weights with its adapters and what drafts, without what stays in the host's memory."""
    facts, options = request.facts, request.options
    params, size, source = weights.params, weights.bytes, [weights.source]
    if options.enable_lora:
        adapters = Adapters(options.max_loras, options.max_lora_rank, options.fully_sharded_loras)
        on_stage = [weight for weight in model_weights(facts.config, facts.layers) if weight.layer in stages[stage]]
        count = adapters.params(facts.config, on_stage, ranks)
        params, size = params + count, size + count * (dtype_bytes if options.lora_dtype == "auto" else 2)
        source.append("adapters included")
    if request.draft is not None and stage == len(stages) - 1:
        count, drafted = request.draft.rank_bytes(dtype_bytes, ranks, options.quantization)
        params, size = params + count, size + drafted
        source += [f"{request.draft.method} included"] if drafted else []
    if options.cpu_offload_gb or options.offload_group_size:
        layers = layer_bytes(facts.config, facts.layers, dtype_bytes, ranks, stages[stage], options.quantization)
        moved = offloaded_bytes(options, layers, len(stages[stage]))
        size -= moved
        source.append(f"{moved / GIB:,.2f} GiB in the host's memory")
    return WeightBytes(params, size, ", ".join(source))


def judged(plan: Plan) -> Plan:
    """The plan with the longest length that fits and, where a request of max_model_len does not, the refusal."""
    if plan.keeps_nothing:
        return replace(plan, estimated_max_len=plan.max_model_len)
    starved = next((worker for worker in plan.workers if worker.available_bytes <= worker.bytes_per_block), None)
    if starved is not None and starved.num_layers:
        return replace(
            plan, error=Refusal(NO_MEMORY, no_memory_message(starved.available_bytes, on_stage(plan, starved)))
        )
    estimated = estimate_max_len(plan, plan.max_model_len)
    plan = replace(plan, estimated_max_len=estimated)
    if plan.request.options.max_model_len == AUTO_LENGTH:
        return replace(plan, max_model_len=estimated)
    blocks = plan.blocks_per_request
    short = next((worker for worker in plan.workers if worker.num_layers and not worker.fits(blocks)), None)
    if short is None:
        return plan
    message = too_long_message(short, blocks, plan.max_model_len, estimated, on_stage(plan, short))
    return replace(plan, error=Refusal(DOES_NOT_FIT, message))


def estimate_max_len(plan: Plan, longest: int) -> int:
    """The longest request that fits on every worker, up to `longest`."""

    def fits(length: int) -> bool:
        limits = request_limits(plan.request.options, plan.settings, length)
        blocks = blocks_per_request(plan.layout.groups, limits)
        return all(worker.fits(blocks) for worker in plan.workers if worker.num_layers)

    return longest_that_fits(longest, fits)


def on_stage(plan: Plan, worker: WorkerPool) -> str:
    return f" on pipeline stage {worker.stage}" if len(plan.workers) > 1 else ""
