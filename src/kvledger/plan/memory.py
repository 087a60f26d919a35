"""Where a card's bytes go: each term with its value, where it came from, and a range when it is an estimate.

available = utilization * the card's bytes - weights - activation peak - CUDA graphs - other. The estimates are fitted
to public start-up logs of vLLM 0.17 to 0.19 on H100 that print every term: see the constants below. vLLM takes its own
estimate of the CUDA graphs off the cache since 0.21; before, the graphs came on top.
"""

from dataclasses import dataclass

from kvledger.models.config import ModelConfig
from kvledger.models.experts import num_experts
from kvledger.models.weights import WeightBytes
from kvledger.plan.engine import EngineSettings
from kvledger.plan.gpus import GIB, Gpu
from kvledger.plan.options import EngineOptions

GIVEN, MEASURED, COUNTED, ESTIMATED = "given", "measured", "counted", "estimated"

# Sampling at start-up keeps this many float32 tensors of max_num_seqs * vocabulary: 3.65 to 3.94 in the logs.
LOGIT_COPIES = 3.8
# A forward pass keeps its widest layer: gate and up, their product, and three hidden states, in the model's type.
WIDEST_HIDDEN_STATES = 3
# Bytes outside the framework: the CUDA context, and what collective communication takes with several ranks.
OTHER_ALONE = int(0.25 * GIB)
OTHER_WITH_RANKS = int(2.1 * GIB)
# CUDA graphs: a fixed part and one for each layer, for vLLM's default capture sizes.
GRAPH_FIXED = int(0.4 * GIB)
GRAPH_PER_LAYER = int(0.016 * GIB)


@dataclass(frozen=True)
class MeasuredMemory:
    """Bytes of one GPU that the user knows from a log or a profile; None means count or estimate."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    weight_bytes: int | None = None
    activation_bytes: int | None = None
    graph_bytes: int | None = None
    other_bytes: int | None = None


NOTHING_MEASURED = MeasuredMemory()


@dataclass(frozen=True)
class Term:
    """One part of a card's memory. `origin`: given, measured, counted or estimated; `low` to `high` is its range."""

    name: str
    bytes: int
    low: int
    high: int
    origin: str
    detail: str

    @property
    def is_exact(self) -> bool:
        return self.low == self.high


def exact(name: str, size: int, origin: str, detail: str) -> Term:
    return Term(name, size, size, size, origin, detail)


@dataclass(frozen=True)
class MemoryBudget:
    """One GPU. `cache` is what the KV cache gets; `terms` is what else there is; `decides` when the terms give it."""

    gpu: Gpu
    total_bytes: int
    requested_bytes: int
    terms: tuple[Term, ...]
    cache: Term
    decides: bool

    @property
    def available_bytes(self) -> int:
        return self.cache.bytes


@dataclass(frozen=True)
class StageLoad:
    """What a pipeline stage puts on each of its GPUs."""

    weights: WeightBytes
    num_layers: int


def memory_budget(
    config: ModelConfig,
    options: EngineOptions,
    settings: EngineSettings,
    gpu: Gpu,
    stage: StageLoad,
    measured: MeasuredMemory,
) -> MemoryBudget:
    """The budget of one GPU of a pipeline stage."""
    terms = (
        weights_term(stage.weights, measured),
        activation_term(config, settings, options, measured),
        graphs_term(options, stage.num_layers, measured),
        other_term(options, measured),
    )
    total = measured.total_bytes or gpu.total_bytes
    requested = int(total * options.gpu_memory_utilization)
    if options.kv_cache_memory_bytes is not None:
        cache = exact("KV cache", options.kv_cache_memory_bytes, GIVEN, "--kv-cache-memory-bytes")
        return MemoryBudget(gpu, total, requested, terms, cache, decides=False)
    if measured.available_bytes is not None:
        cache = exact("KV cache", measured.available_bytes, MEASURED, "available KV cache memory of the log")
        return MemoryBudget(gpu, total, requested, terms, cache, decides=False)
    return MemoryBudget(gpu, total, requested, terms, remainder(gpu, options, requested, terms, measured), decides=True)


def remainder(
    gpu: Gpu, options: EngineOptions, requested: int, terms: tuple[Term, ...], measured: MeasuredMemory
) -> Term:
    """What is left for the KV cache, with the range that the other terms and the card's own spread allow."""
    share = options.gpu_memory_utilization
    low_card, high_card = (requested, requested) if measured.total_bytes else spread(gpu, share)
    low = low_card - sum(term.high for term in terms)
    high = high_card - sum(term.low for term in terms)
    origin = MEASURED if low == high else ESTIMATED
    return Term("KV cache", requested - sum(term.bytes for term in terms), low, high, origin, "what is left")


def spread(gpu: Gpu, share: float) -> tuple[int, int]:
    return int(gpu.low_bytes * share), int(gpu.high_bytes * share)


def weights_term(weights: WeightBytes, measured: MeasuredMemory) -> Term:
    if measured.weight_bytes is not None:
        return exact("weights", measured.weight_bytes, MEASURED, "given by the user or a log")
    if weights.source == "the checkpoint's index":
        return exact("weights", weights.bytes, GIVEN, weights.source)
    # Within 0.5 % of vLLM's own count for 99 % of the models that it was compared on.
    return Term(
        "weights", weights.bytes, int(weights.bytes * 0.995), int(weights.bytes * 1.005), COUNTED, weights.source
    )


def activation_term(
    config: ModelConfig, settings: EngineSettings, options: EngineOptions, measured: MeasuredMemory
) -> Term:
    """The peak of the profile run: sampling max_num_seqs tokens or one forward pass, whichever is more."""
    if measured.activation_bytes is not None:
        return exact("activation peak", measured.activation_bytes, MEASURED, "given by the user or a log")
    sampling = sampling_bytes(config, settings)
    forward = forward_bytes(config, settings, options)
    seqs, batched = settings.max_num_seqs, settings.max_num_batched_tokens
    detail = f"sampling {seqs:,} sequences" if sampling > forward else f"a pass over {batched:,} tokens"
    size = max(sampling, forward)
    return Term("activation peak", size, int(size * 0.8), int(size * 1.35), ESTIMATED, detail)


def sampling_bytes(config: ModelConfig, settings: EngineSettings) -> int:
    return int(LOGIT_COPIES * settings.max_num_seqs * config.need("vocab_size") * 4)


def forward_bytes(config: ModelConfig, settings: EngineSettings, options: EngineOptions) -> int:
    wide = forward_width(config) / options.tensor_parallel_size
    element = 4 if settings.dtype == "float32" else 2
    values = 3 * wide + WIDEST_HIDDEN_STATES * config.need("hidden_size")
    return int(settings.max_num_batched_tokens * values * element)


def forward_width(config: ModelConfig) -> int:
    """Values that a token has between the two matrices of the widest feed-forward part."""
    widths = [size for size in config.items("intermediate_size") if isinstance(size, int)]
    dense = max(widths) if widths else config.number("intermediate_size") or 4 * config.need("hidden_size")
    if num_experts(config):
        chosen = config.number("num_experts_per_tok", 1) or 1
        return max(dense, chosen * (config.number("moe_intermediate_size") or dense))
    return dense


def graphs_term(options: EngineOptions, num_layers: int, measured: MeasuredMemory) -> Term:
    if not options.captures_graphs:
        return exact("CUDA graphs", 0, GIVEN, "--enforce-eager" if options.enforce_eager else "no CUDA graphs")
    if measured.graph_bytes is not None:
        return exact("CUDA graphs", measured.graph_bytes, MEASURED, "given by the user or a log")
    size = GRAPH_FIXED + GRAPH_PER_LAYER * num_layers
    detail = f"{num_layers} layers"
    return Term("CUDA graphs", size, int(size * 0.6), int(size * 1.7), ESTIMATED, detail)


def other_term(options: EngineOptions, measured: MeasuredMemory) -> Term:
    if measured.other_bytes is not None:
        return exact("other", measured.other_bytes, MEASURED, "given by the user or a log")
    alone = options.tensor_parallel_size == 1
    size = OTHER_ALONE if alone else OTHER_WITH_RANKS
    detail = "CUDA context" if alone else "CUDA context and collective communication"
    return Term("other", size, int(size * 0.5), int(size * (2 if alone else 1.2)), ESTIMATED, detail)
