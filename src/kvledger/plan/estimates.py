"""Estimates of what a profile run of vLLM measures: activations, CUDA graphs, and what is outside the framework.

Each is a value with a range. The constants are fitted to public start-up logs of vLLM 0.17 to 0.19 on one H100 that
print every term, the graphs also to those of 0.21 and later that print vLLM's own estimate; the range is checked on
logs that they were not fitted to (tests/golden/test_golden_memory.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvledger.core.units import dtype_bytes
from kvledger.models.config import JSON, ModelConfig
from kvledger.models.experts import num_experts
from kvledger.models.towers import TOWERS, WIDTHS, first
from kvledger.plan.engine import EngineSettings
from kvledger.plan.gpus import GIB, MIB, Gpu
from kvledger.plan.options import EngineOptions

# Sampling at start-up keeps this many float32 tensors of max_num_seqs * vocabulary: 3.65 to 3.94 in the logs.
LOGIT_COPIES = 3.8
# A forward pass keeps its widest layer: gate and up, their product, and three hidden states, in the model's type.
WIDEST_HIDDEN_STATES = 3
# A tower keeps about this many of its own hidden states for each patch of the largest input.
TOWER_HIDDEN_STATES = 5
# Tokens of the largest image or video that a profile run puts in, for towers that merge patches, and for others.
MERGED_TOKENS, PLAIN_TOKENS = 16384, 2048
# Bytes of a CUDA graph for each layer in it: 0.15 to 0.33 MiB in the logs, more where experts bring more kernels.
GRAPH_LAYER = 0.25 * MIB
EXPERT_GRAPHS = 2.0
# Largest batch that is captured, by compute capability.
LARGEST_GRAPH, LARGEST_GRAPH_CAPABILITY_10 = 512, 1024


@dataclass(frozen=True)
class Estimate:
    """Bytes, with the range that holds the truth most of the time; `detail`: what it follows from."""

    bytes: int
    low: int
    high: int
    detail: str


def estimate(size: float, low: float, high: float, detail: str) -> Estimate:
    return Estimate(int(size), int(low), int(high), detail)


def activations(config: ModelConfig, settings: EngineSettings, options: EngineOptions) -> Estimate:
    """The peak of the profile run: sampling max_num_seqs tokens, one forward pass or one encoder, whichever is most."""
    seqs, batched = settings.max_num_seqs, settings.max_num_batched_tokens
    encoded = encoded_bytes(config, settings)
    parts = {
        f"sampling {seqs:,} sequences": sampling_bytes(config, settings) + encoded,
        f"a pass over {batched:,} tokens": forward_bytes(config, settings, options) + encoded,
        "the largest image": tower_bytes(config, settings),
    }
    detail = max(parts, key=lambda name: parts[name])
    size = parts[detail]
    # Kernels that tune themselves and encoders leave buffers behind, so small peaks are the least certain.
    return estimate(size, size * 0.7, size * 1.35 + 0.35 * GIB, detail)


def sampling_bytes(config: ModelConfig, settings: EngineSettings) -> int:
    return int(LOGIT_COPIES * settings.max_num_seqs * config.need("vocab_size") * 4)


def forward_bytes(config: ModelConfig, settings: EngineSettings, options: EngineOptions) -> int:
    """The widest layer. Routed experts keep one output for each expert that a token is sent to."""
    wide = forward_width(config) / options.tensor_parallel_size
    hidden = config.need("hidden_size")
    chosen = (config.number("num_experts_per_tok", 1) or 1) if num_experts(config) else 0
    values = 3 * wide + (WIDEST_HIDDEN_STATES + chosen) * hidden
    return int(settings.max_num_batched_tokens * values * dtype_bytes(settings.dtype))


def forward_width(config: ModelConfig) -> int:
    """Values that a token has between the two matrices of the widest feed-forward part."""
    widths = [size for size in config.items("intermediate_size") if isinstance(size, int)]
    dense = max(widths) if widths else config.number("intermediate_size") or 4 * config.need("hidden_size")
    if num_experts(config):
        chosen = config.number("num_experts_per_tok", 1) or 1
        return max(dense, chosen * (config.number("moe_intermediate_size") or dense))
    return dense


def tower_bytes(config: ModelConfig, settings: EngineSettings) -> int:
    """The encoder on its largest input, in patches; 0 for models of text only."""
    most = 0
    for name in TOWERS:
        section: object = config.root.get(name)
        if isinstance(section, Mapping):
            sizes: JSON = section
            merged = sizes.get("spatial_merge_size")
            patches = MERGED_TOKENS * merged * merged if isinstance(merged, int) else PLAIN_TOKENS
            most = max(most, patches * first(sizes, WIDTHS) * TOWER_HIDDEN_STATES * dtype_bytes(settings.dtype))
    return most


def encoded_bytes(config: ModelConfig, settings: EngineSettings) -> int:
    """What the encoder made of its largest input, which stays while the language model runs."""
    vision: object = config.root.get("vision_config")
    if not isinstance(vision, Mapping) or not isinstance(vision.get("spatial_merge_size"), int):
        return 0
    deeper = vision.get("deepstack_visual_indexes")
    outputs = 1 + (len(deeper) if isinstance(deeper, list) else 0)
    return MERGED_TOKENS * outputs * config.need("hidden_size") * dtype_bytes(settings.dtype)


def graph_counts(
    settings: EngineSettings, gpu: Gpu, decode_tokens: int = 1, options: EngineOptions | None = None
) -> tuple[int, int]:
    """Graphs that vLLM captures: of mixed batches, and of batches that only decode.

    Sizes are those that were asked for, else 1, 2, 4, every 8 up to 256 and every 16 above, up to two tokens a
    sequence, 512 tokens (1,024 on compute capability 10) or a step. `decode_tokens`: tokens of one request in a step,
    1 and the drafts.
    """
    widest, step = settings.max_num_seqs * decode_tokens, settings.max_num_batched_tokens
    largest = LARGEST_GRAPH_CAPABILITY_10 if 10 <= gpu.compute_capability < 11 else LARGEST_GRAPH
    limit = min(2 * widest, largest)
    asked: tuple[int, ...] = ()
    if options is not None:
        asked = options.cudagraph_capture_sizes
        limit = options.max_cudagraph_capture_size or limit
    limit = min(limit, step)
    usual = (1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16))
    sizes = [size for size in (sorted(set(asked)) or usual) if size <= (step if asked else limit)]
    mixed, decoding = (True, True) if options is None else options.captured_batches
    return len(sizes) * mixed, sum(decode_tokens <= size <= widest for size in sizes) * decoding


def graphs(
    config: ModelConfig,
    settings: EngineSettings,
    gpu: Gpu,
    num_layers: int,
    decode_tokens: int = 1,
    options: EngineOptions | None = None,
) -> Estimate:
    """What vLLM sets aside for CUDA graphs since 0.21: it captures two of each kind and multiplies. With adapters a
    graph is captured for batches with and without one.
    """
    copies = 2 if options is not None and options.enable_lora else 1
    mixed, decoding = (count * copies for count in graph_counts(settings, gpu, decode_tokens, options))
    count = mixed + decoding
    has_experts = num_experts(config) > 0
    size = GRAPH_LAYER * count * num_layers * (EXPERT_GRAPHS if has_experts else 1.0)
    # FlashInfer's wrappers bring work buffers of their own, and are counted with the first graph.
    buffers = 2 * GIB if settings.backend.name.startswith("FLASHINFER") or settings.cache_dtype != "auto" else 0
    detail = f"{mixed} + {decoding} graphs of {num_layers} layers"
    return estimate(size, size * 0.25, size * (2.2 if has_experts else 1.7) + buffers + 0.35 * GIB, detail)


def outside(gpu: Gpu, options: EngineOptions) -> Estimate:
    """Bytes that the framework does not allocate: the CUDA context, and buffers of collective communication."""
    if gpu.shares_memory:
        # What the machine takes meanwhile counts as the engine's, files that are read included: 4 to 8 GiB in the logs.
        return estimate(3 * GIB, 0.1 * GIB, 10 * GIB, "memory that the whole machine shares: what else runs counts")
    if options.tensor_parallel_size == 1:
        share = 0.25 * GIB if options.pipeline_parallel_size == 1 else 0.3 * GIB
        return estimate(share, 0.05 * GIB, 0.6 * GIB, "CUDA context")
    if gpu.compute_capability >= 9 and gpu.is_datacenter:
        return estimate(2.1 * GIB, 1.0 * GIB, 2.8 * GIB, "CUDA context, NCCL and all-reduce buffers over NVLink")
    return estimate(0.6 * GIB, 0.15 * GIB, 1.8 * GIB, "CUDA context and NCCL")
