"""Options -> settings: what an engine decides at start, each with where it came from."""

import math
from dataclasses import dataclass, field, replace

from kvledger.core.units import NVFP4, SCALED_TYPES, cdiv, round_up
from kvledger.models.facts import ModelFacts, engine_dtype
from kvledger.models.layers import WINDOWS, AttentionCache, CacheSettings, GatedDeltaNetState
from kvledger.plan.backends import HYBRID_MLA_STEP, Backend, NoBackendError, choose_backend, is_latent
from kvledger.plan.gpus import GIB, Gpu
from kvledger.plan.options import AUTO_LENGTH, EngineOptions
from kvledger.plan.refusal import CONTEXT_RANKS, HEADS, NO_BACKEND, STATE_BLOCKS, TOO_LONG, RefusedError
from kvledger.plan.versions import VersionRules, gdn_checkpoint_step

# Classes that never hand the KV type to their attention.
KEEPS_MODEL_DTYPE = ("falcon", "RefinedWeb", "RefinedWebModel")


@dataclass(frozen=True)
class EngineSettings:
    """What the engine runs with. `origins`: setting -> where its value came from, in the order of decision."""

    max_model_len: int
    dtype: str
    cache_dtype: str
    prefix_caching: bool
    max_num_batched_tokens: int
    max_num_seqs: int
    max_in_flight_tokens: int
    backend: Backend
    cache: CacheSettings
    origins: dict[str, str] = field(default_factory=dict)

    @property
    def block_size(self) -> int:
        return self.cache.block_size


@dataclass(frozen=True)
class BatchDefaults:
    """max_num_batched_tokens of a server and of the LLM class, and max_num_seqs, for cards of at least that memory."""

    at_least_gib: int
    server: int
    llm: int
    max_num_seqs: int


# First row whose memory the card has. An A100 is treated as a small card whatever its memory.
BATCH_DEFAULTS = (
    BatchDefaults(160, 16384, 16384, 1024),
    BatchDefaults(70, 8192, 16384, 1024),
    BatchDefaults(0, 2048, 8192, 256),
)


# CPU servers: batches for each rank of a server, half of those of the LLM class, and blocks.
PROCESSOR_TOKENS, PROCESSOR_SEQS = 2048, 128
PROCESSOR_BLOCK, PROCESSOR_LATENT_BLOCK = 128, 16

# A video of Gemma 4: 32 frames of 70 tokens, two markers and a time stamp of six.
GEMMA4_VIDEO_TOKENS = 32 * (70 + 2 + 6)


def batch_defaults(gpu: Gpu, options: EngineOptions) -> BatchDefaults:
    if gpu.is_processor:
        ranks = options.world_size
        seqs = PROCESSOR_SEQS if options.entry_point == "server" else 2 * PROCESSOR_SEQS
        return BatchDefaults(0, PROCESSOR_TOKENS * ranks, 2 * PROCESSOR_TOKENS * ranks, seqs * ranks)
    if "a100" in gpu.name.lower() and gpu.total_bytes < 160 * GIB:
        return BATCH_DEFAULTS[-1]
    return next(row for row in BATCH_DEFAULTS if gpu.total_bytes >= row.at_least_gib * GIB)


def engine_settings(
    facts: ModelFacts, options: EngineOptions, gpu: Gpu, rules: VersionRules, num_drafted: int = 0
) -> EngineSettings:
    """Settings of one engine. `num_drafted`: tokens that are drafted in a step. RefusedError when vLLM would not start
    with these options.
    """
    origins: dict[str, str] = {}
    check_heads(facts, options)
    check_context_ranks(facts, options)
    check_state_blocks(facts, options)
    length = model_length(facts, options, origins)
    dtype = engine_dtype(facts, options.dtype, gpu.compute_capability)
    origins["dtype"] = "--dtype" if options.dtype != "auto" else f"checkpoint ({facts.checkpoint_dtype})"
    cache_dtype = kv_cache_dtype(facts, options, gpu, origins)
    caching = prefix_caching(facts, options, origins)
    batched, seqs = batch_sizes(options, length, gpu, origins, largest_item(facts))
    in_flight = batched * concurrent_batches(options)
    origins["max_in_flight_tokens"] = f"{concurrent_batches(options)} batches in flight * max_num_batched_tokens"
    try:
        backend = choose_backend(facts, cache_dtype, gpu.compute_capability, options.attention_backend)
    except NoBackendError as error:
        raise RefusedError(NO_BACKEND, str(error)) from None
    cache = CacheSettings(
        base_block_size(facts, options, gpu, backend, origins),
        options.tensor_parallel_size,
        element_type(cache_dtype, dtype),
        dtype,
        packed_latents=backend.name == "FLASHMLA_SPARSE",
        # vLLM reserves a whole batch of encoder tokens, not the encoder's own length.
        max_encoder_tokens=batched,
        cache_mode="align" if caching and facts.is_hybrid else "none",
        state_block_size=(options.mamba_block_size or length) if caching else length,
        state_dtype=options.mamba_ssm_cache_dtype,
        convolution_dtype=options.mamba_cache_dtype,
        checkpointing=checkpointing_kinds(facts, gpu, rules, caching),
        num_speculative_tokens=num_drafted,
    )
    if facts.is_hybrid:
        step = state_step(facts, gpu, rules, caching)
        cache = align_states(facts, cache, backend, step, origins)
    if options.kv_cache_dtype_skip_layers:
        cache = align_types(facts, cache, backend, options.kv_cache_dtype_skip_layers, origins)
    return EngineSettings(length, dtype, cache_dtype, caching, batched, seqs, in_flight, backend, cache, origins)


def check_heads(facts: ModelFacts, options: EngineOptions) -> None:
    heads, ranks = facts.num_attention_heads, options.tensor_parallel_size
    if heads % ranks:
        raise RefusedError(
            HEADS, f"Total number of attention heads ({heads}) must be divisible by tensor parallel size ({ranks})."
        )
    for kv_heads in sorted({cache.num_kv_heads for cache in attention_caches(facts)}):
        # Fewer heads than ranks are copied, so that each rank has one.
        if max(kv_heads, ranks) % min(kv_heads, ranks):
            raise RefusedError(
                HEADS,
                f"{kv_heads} KV heads cannot be shared by tensor parallel size ({ranks}): vLLM asserts that one is a "
                "multiple of the other.",
            )


def attention_caches(facts: ModelFacts) -> list[AttentionCache]:
    """Of the layers that keep keys and values of heads."""
    return [layer.cache for layer in facts.layers if isinstance(layer.cache, AttentionCache)]


def check_context_ranks(facts: ModelFacts, options: EngineOptions) -> None:
    """Ranks that share the tokens of a request: those that would hold copies of the same KV heads."""
    ranks, decode = options.tensor_parallel_size, options.decode_context_parallel_size
    caches = attention_caches(facts)
    if decode == 1 or not caches or is_latent(facts):
        return
    kv_heads = caches[0].num_kv_heads
    if ranks <= kv_heads:
        raise RefusedError(
            CONTEXT_RANKS,
            f"Decode context parallelism for GQA/MQA requires --tensor-parallel-size ({ranks}) to be greater than the "
            f"model's total number of KV heads ({kv_heads}).",
        )
    if decode > ranks // kv_heads:
        raise RefusedError(
            CONTEXT_RANKS,
            f"--decode-context-parallel-size ({decode}) exceeds the maximum supported value ({ranks // kv_heads}) for "
            f"--tensor-parallel-size ({ranks}) and {kv_heads} model KV heads.",
        )
    group = facts.num_attention_heads // kv_heads
    if group % decode:
        raise RefusedError(
            CONTEXT_RANKS,
            f"The model's number of query heads per KV head ({group}) must be divisible by "
            f"--decode-context-parallel-size ({decode}).",
        )


def check_state_blocks(facts: ModelFacts, options: EngineOptions) -> None:
    caching = prefix_caching(facts, options, {})
    if facts.has_states and options.mamba_block_size is not None and not caching:
        raise RefusedError(STATE_BLOCKS, "--mamba-block-size can only be set with --enable-prefix-caching.")


def model_length(facts: ModelFacts, options: EngineOptions, origins: dict[str, str]) -> int:
    context, asked = facts.context, options.max_model_len
    if asked is None or asked == AUTO_LENGTH:
        origins["max_model_len"] = f"config field {context.field}"
        return context.default
    if asked > context.longest and options.allow_long_max_model_len:
        origins["max_model_len"] = f"--max-model-len, longer than {context.field}, which the environment allows"
        return asked
    if asked > context.longest:
        raise RefusedError(
            TOO_LONG,
            f"User-specified max_model_len ({asked}) is greater than the derived max_model_len "
            f"({context.field}={context.longest} in the model's config.json).",
        )
    origins["max_model_len"] = "--max-model-len"
    return asked


def kv_cache_dtype(facts: ModelFacts, options: EngineOptions, gpu: Gpu, origins: dict[str, str]) -> str:
    """The KV type: as asked, else what the checkpoint asks for, else the model's."""
    if facts.config.model_type in KEEPS_MODEL_DTYPE:
        origins["kv_cache_dtype"] = "vLLM's class keeps the model's type, whatever is asked"
        return "auto"
    if options.kv_cache_dtype != "auto":
        origins["kv_cache_dtype"] = "--kv-cache-dtype"
        return options.kv_cache_dtype
    if facts.kv_scheme is not None:
        origins["kv_cache_dtype"] = f"checkpoint ({facts.kv_scheme.field})"
        return facts.kv_scheme.dtype
    if facts.config.model_type == "glm_moe_dsa" and 10 <= gpu.compute_capability < 11:
        origins["kv_cache_dtype"] = "vLLM's choice for this family on compute capability 10"
        return "fp8_e4m3"
    origins["kv_cache_dtype"] = "model dtype"
    return "auto"


def element_type(cache_dtype: str, dtype: str) -> str:
    if cache_dtype == "auto":
        return dtype
    if cache_dtype in SCALED_TYPES:
        return cache_dtype
    if cache_dtype.startswith(NVFP4):
        return NVFP4
    return "fp8" if cache_dtype.startswith("fp8") else cache_dtype


def prefix_caching(facts: ModelFacts, options: EngineOptions, origins: dict[str, str]) -> bool:
    """On by default for decoders and hybrids; off for encoders, encoder-decoders and models of states only."""
    if options.enable_prefix_caching is not None:
        origins["prefix_caching"] = "--enable-prefix-caching"
        return options.enable_prefix_caching
    only_states = facts.has_states and not facts.is_hybrid
    origins["prefix_caching"] = "default for this kind of model"
    return not (only_states or facts.is_encoder_decoder)


def largest_item(facts: ModelFacts) -> int:
    """Tokens of the largest image or video where one must fit in a step, because its tokens see both ways; else 0."""
    is_video = facts.config.outer_type == "gemma4" and facts.attends_both_ways_to_images
    return GEMMA4_VIDEO_TOKENS if is_video else 0


def batch_sizes(
    options: EngineOptions, length: int, gpu: Gpu, origins: dict[str, str], item: int = 0
) -> tuple[int, int]:
    """max_num_batched_tokens and max_num_seqs. `item`: tokens that must fit in one step."""
    row = batch_defaults(gpu, options)
    factor = 2 if options.performance_mode == "throughput" else 1
    seqs = options.max_num_seqs or row.max_num_seqs * factor
    if options.max_num_batched_tokens is not None:
        origins["max_num_batched_tokens"] = "--max-num-batched-tokens"
        batched = options.max_num_batched_tokens
    else:
        kind = "vllm serve" if options.entry_point == "server" else "the LLM class"
        origins["max_num_batched_tokens"] = f"default of {kind} on this card"
        default = factor * (row.server if options.entry_point == "server" else row.llm)
        if options.enable_chunked_prefill is False:
            # A whole prompt must fit in a step.
            default = max(length, default)
            origins["max_num_batched_tokens"] += ", at least max_model_len without chunked prefill"
        if item > default:
            origins["max_num_batched_tokens"] = f"one video of {item:,} tokens must fit in a step"
        batched = min(seqs * length, max(default, item))
    return batched, min(seqs, batched) if options.max_num_seqs is None else seqs


def concurrent_batches(options: EngineOptions) -> int:
    """Steps in flight: one for each pipeline stage and, with async scheduling, one that is being prepared."""
    return options.pipeline_parallel_size + (1 if options.prepares_steps else 0)


def base_block_size(
    facts: ModelFacts, options: EngineOptions, gpu: Gpu, backend: Backend, origins: dict[str, str]
) -> int:
    """Tokens per block before states make it larger: as asked, else what the kernels prefer."""
    if gpu.is_processor and options.block_size is None:
        origins["block_size"] = "default on CPUs"
        return PROCESSOR_LATENT_BLOCK if is_latent(facts) else PROCESSOR_BLOCK
    if options.block_size is None:
        origins["block_size"] = f"preferred by {backend.name}"
        return backend.preferred
    if not backend.accepts(options.block_size):
        raise RefusedError(
            NO_BACKEND,
            f"No valid attention backend found for block_size={options.block_size}: {backend.name} needs multiples of "
            f"{backend.smallest}; use --block-size {backend.preferred} or leave it out",
        )
    origins["block_size"] = "--block-size"
    return options.block_size


def checkpointing_kinds(facts: ModelFacts, gpu: Gpu, rules: VersionRules, caching: bool) -> frozenset[str]:
    """Kinds of state whose prefill kernel writes a checkpoint block of its own."""
    kinds = {"mamba2"}
    if gpu.compute_capability >= 9.0:
        kinds.add("kda")
    if caching and gdn_step(facts, gpu, rules):
        kinds.add("gdn")
    return frozenset(kinds)


def gdn_step(facts: ModelFacts, gpu: Gpu, rules: VersionRules) -> int:
    """Tokens between checkpoints of this model's gated delta nets, 0 where it has none."""
    for layer in facts.layers:
        if isinstance(layer.cache, GatedDeltaNetState):
            return gdn_checkpoint_step(rules, gpu.compute_capability, layer.cache.head_k_dim)
    return 0


def state_step(facts: ModelFacts, gpu: Gpu, rules: VersionRules, caching: bool) -> int:
    return gdn_step(facts, gpu, rules) if caching else 0


def align_states(
    facts: ModelFacts, cache: CacheSettings, backend: Backend, checkpoint_step: int, origins: dict[str, str]
) -> CacheSettings:
    """Grows the attention block until its page holds a state, and pads the state's page to match.

    All layers of a hybrid model share one pool, so their pages must be equal: attention pages grow with the block,
    a state has a fixed size.
    """
    state = max((layer.cache.spec(cache).page_size_bytes for layer in facts.layers if layer.cache.is_state), default=0)
    one_token = replace(cache, block_size=1)
    first = next(layer for layer in facts.layers if not layer.cache.is_state)
    token_bytes = first.cache.spec(one_token).page_size_bytes
    step = max(backend.smallest, cache.block_size, HYBRID_MLA_STEP if is_latent(facts) else 1)
    if checkpoint_step:
        step = math.lcm(step, checkpoint_step)
    block_size = max(cache.block_size, round_up(step * cdiv(state, step * token_bytes), backend.smallest))
    if block_size != cache.block_size:
        origins["block_size"] = (
            f"{block_size}: the multiple of {step} whose page ({block_size} * {token_bytes:,} bytes) holds a state of "
            f"{state:,} bytes"
        )
    page = block_size * token_bytes
    return replace(
        cache,
        block_size=block_size,
        state_block_size=block_size if cache.cache_mode == "align" else cache.state_block_size,
        state_page_padded=page if page != state else 0,
    )


def align_types(
    facts: ModelFacts, cache: CacheSettings, backend: Backend, kept: tuple[str, ...], origins: dict[str, str]
) -> CacheSettings:
    """Grows the attention block until its page holds the smallest block of the layers that keep the model's type.

    Windows take as many tokens as that page holds, and pad it. RefusedError when the kernel takes no such block.
    """
    layers = {str(layer.index) for layer in facts.layers}
    for word in kept:
        if word != WINDOWS and word not in layers:
            facts.config.note(f"--kv-cache-dtype-skip-layers {word}: no layer is called so")
    first = next((layer for layer in facts.layers if not layer.cache.is_state), None)
    cache = replace(cache, model_dtype_layers=frozenset(kept))
    if first is None:
        return cache
    one_token = replace(cache, block_size=1)
    wide = replace(one_token, cache_dtype=cache.model_dtype, packed_latents=False)
    token, wide_token = (first.cache.spec(settings).page_size_bytes for settings in (one_token, wide))
    if wide_token <= token:
        return cache
    required = max(wide_token * backend.smallest, cache.state_page_padded)
    step = max(backend.smallest, cache.block_size)
    block_size = max(cache.block_size, round_up(cdiv(required, token), step))
    if not backend.accepts(block_size):
        raise RefusedError(
            NO_BACKEND,
            f"Aligned KV cache block size {block_size} is not supported by attention backend(s): {backend.name}.",
        )
    if block_size != cache.block_size:
        origins["block_size"] = (
            f"{block_size}: the multiple of {step} whose page holds {backend.smallest} tokens of {wide_token:,} bytes, "
            "of the layers that keep the model's type"
        )
    page = block_size * token
    return replace(
        cache,
        block_size=block_size,
        state_page_padded=page if cache.state_page_padded else 0,
        shared_page=page,
        kernel_block=backend.smallest,
    )
