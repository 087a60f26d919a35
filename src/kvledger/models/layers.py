"""What one layer of a model caches, before an engine has chosen a block size, a dtype and a parallel size.

LayerCache                  `spec(settings)` gives the KVCacheSpec that one rank of one engine has for it
    AttentionCache          keys and values: all tokens, a window or a chunk
    CrossCache              keys and values of the encoder's tokens
    LatentCache             MLA: one latent vector a token (or for `tokens_per_state` tokens), all or a window
    StateCache              recurrent states; one subclass for each shape of state
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from kvledger.core.groups.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvledger.core.units import round_down
from kvledger.errors import wrong_value

# Bytes of one token's vector where an fp8 MLA kernel packs 512 values, their scales and 64 rotary values in bfloat16.
FP8_DS_MLA_BYTES = 656
# The word for all layers with a window, beside numbers of layers.
WINDOWS = "sliding_window"
# Tokens between the places where a prefill kernel can write a checkpoint; other kinds write them at block boundaries.
CHECKPOINT_STEPS = {"mamba2": 1, "kda": 16}


@dataclass(frozen=True)
class CacheSettings:
    """What an engine has decided for all layers.

    `cache_dtype`: element type of keys and values; `packed_latents`: the fp8 MLA kernel stores its packed format.
    `state_block_size`, `state_page_padded`, `cache_mode`, `convolution_dtype` and `state_dtype` are for recurrent
    states ("auto": the model's, or what the family fixes); `checkpointing` names the kinds of state whose kernel
    writes a checkpoint block of its own during prefill. `num_speculative_tokens`: drafted in a step, for each of which
    states have a block more and convolutions an input more. `model_dtype_layers`: what keeps the model's element type:
    numbers of layers, and WINDOWS for all that have one. `shared_page` (0: none): bytes that every window's page is
    padded to beside such layers; blocks of it are multiples of `kernel_block` tokens.
    """

    block_size: int
    tensor_parallel_size: int = 1
    cache_dtype: str = "bfloat16"
    model_dtype: str = "bfloat16"
    packed_latents: bool = False
    max_encoder_tokens: int = 1
    cache_mode: str = "none"
    state_block_size: int = 1
    state_page_padded: int = 0
    state_dtype: str = "auto"
    convolution_dtype: str = "auto"
    checkpointing: frozenset[str] = frozenset()
    num_speculative_tokens: int = 0
    model_dtype_layers: frozenset[str] = frozenset()
    shared_page: int = 0
    kernel_block: int = 1


def share(field: str, total: int, tensor_parallel_size: int) -> int:
    """A rank's part of `total`, which the parallel size must divide."""
    if total % tensor_parallel_size:
        problem = f"does not divide {field}={total}"
        fix = "use a size that divides it"
        raise wrong_value("tensor_parallel_size", tensor_parallel_size, problem, fix)
    return total // tensor_parallel_size


class LayerCache(ABC):
    """One layer's cache."""

    @abstractmethod
    def spec(self, settings: CacheSettings) -> KVCacheSpec:
        """The spec of this layer on one rank. ConfigError when the parallel size cannot divide it."""

    @property
    def is_state(self) -> bool:
        """A state of fixed size instead of something for each token."""
        return False


@dataclass(frozen=True)
class AttentionCache(LayerCache):
    """Keys and values. `window` and `chunk` are 0 for full attention."""

    num_kv_heads: int
    head_size: int
    head_size_v: int = 0
    window: int = 0
    chunk: int = 0

    def spec(self, settings: CacheSettings) -> KVCacheSpec:
        # Fewer heads than ranks: each rank keeps a copy of one.
        heads = max(1, self.num_kv_heads // settings.tensor_parallel_size)
        size, dtype = settings.block_size, settings.cache_dtype
        if self.window:
            window, page = self.window, settings.shared_page
            spec = SlidingWindowSpec(size, heads, self.head_size, self.head_size_v, dtype, sliding_window=window)
            if not page:
                return spec
            # As many tokens as the page holds.
            fitting = round_down(page // (spec.content_bytes // size), settings.kernel_block)
            return replace(spec, block_size=fitting or settings.kernel_block, page_size_padded=page)
        if self.chunk:
            chunk = self.chunk
            return ChunkedLocalAttentionSpec(
                size, heads, self.head_size, self.head_size_v, dtype, attention_chunk_size=chunk
            )
        return FullAttentionSpec(size, heads, self.head_size, self.head_size_v, dtype)


@dataclass(frozen=True)
class CrossCache(LayerCache):
    """Keys and values of the encoder's tokens."""

    num_kv_heads: int
    head_size: int

    def spec(self, settings: CacheSettings) -> KVCacheSpec:
        heads = max(1, self.num_kv_heads // settings.tensor_parallel_size)
        tokens = settings.max_encoder_tokens
        return CrossAttentionSpec(
            settings.block_size, heads, self.head_size, 0, settings.cache_dtype, max_encoder_tokens=tokens
        )


@dataclass(frozen=True)
class LatentCache(LayerCache):
    """One latent vector that every rank keeps whole.

    `dtype` and `state_bytes` are set where the model fixes its own storage format. `block_size` 0: the engine's.
    """

    head_size: int
    window: int = 0
    dtype: str = ""
    state_bytes: int = 0
    tokens_per_state: int = 1
    alignment: int = 1
    block_size: int = 0

    def spec(self, settings: CacheSettings) -> KVCacheSpec:
        size = self.block_size or settings.block_size
        dtype = self.dtype or settings.cache_dtype
        packed = self.state_bytes or (FP8_DS_MLA_BYTES if settings.packed_latents and not self.dtype else 0)
        compression, alignment = self.tokens_per_state, self.alignment
        if self.window:
            return SlidingWindowMLASpec(
                size, self.head_size, dtype, packed, compression, alignment, sliding_window=self.window
            )
        return MLAAttentionSpec(size, self.head_size, dtype, packed, compression, alignment)


def convolved(settings: CacheSettings) -> str:
    """The element type of convolution windows, which states have too unless they are told otherwise."""
    return settings.model_dtype if settings.convolution_dtype == "auto" else settings.convolution_dtype


@dataclass(frozen=True)
class StateCache(LayerCache):
    """A recurrent state. `dtype` "auto": the model's, unless the engine is told otherwise."""

    dtype: str = "auto"

    kind = "mamba2"
    # Whether its convolution keeps the inputs of drafted tokens too.
    keeps_drafts = True

    @property
    def is_state(self) -> bool:
        return True

    @abstractmethod
    def shapes(self, tensor_parallel_size: int) -> tuple[tuple[int, ...], ...]:
        """The state's tensors on one rank, the convolution's first where there is one."""

    def dtypes(self, settings: CacheSettings) -> tuple[str, ...]:
        chosen = self.dtype if settings.state_dtype == "auto" else settings.state_dtype
        return (convolved(settings), convolved(settings) if chosen == "auto" else chosen)

    def spec(self, settings: CacheSettings) -> KVCacheSpec:
        writes = self.kind in settings.checkpointing
        drafted = settings.num_speculative_tokens
        shapes = self.shapes(settings.tensor_parallel_size)
        if drafted and self.keeps_drafts:
            window, *others = shapes
            shapes = ((window[0] + drafted, *window[1:]), *others)
        return MambaSpec(
            settings.state_block_size,
            shapes,
            self.dtypes(settings),
            settings.state_page_padded,
            self.kind,
            settings.cache_mode,
            drafted,
            int(writes),
            CHECKPOINT_STEPS.get(self.kind, settings.state_block_size) if writes else 0,
        )


@dataclass(frozen=True)
class Mamba1State(StateCache):
    """Mamba (Gu and Dao 2023): convolution window and one state vector a channel."""

    intermediate_size: int = 0
    state_size: int = 0
    conv_kernel: int = 0

    kind = "mamba1"
    keeps_drafts = False

    def shapes(self, tensor_parallel_size: int) -> tuple[tuple[int, ...], ...]:
        channels = share("intermediate_size", self.intermediate_size, tensor_parallel_size)
        return ((self.conv_kernel - 1, channels), (channels, self.state_size))


@dataclass(frozen=True)
class Mamba2State(StateCache):
    """Mamba-2 (Dao and Gu 2024): convolution over channels and groups, one matrix a head."""

    intermediate_size: int = 0
    n_groups: int = 0
    num_heads: int = 0
    head_dim: int = 0
    state_size: int = 0
    conv_kernel: int = 0

    kind = "mamba2"

    def shapes(self, tensor_parallel_size: int) -> tuple[tuple[int, ...], ...]:
        # Groups that cannot be divided are copied, one for each rank.
        groups = self.n_groups if self.n_groups % tensor_parallel_size == 0 else tensor_parallel_size
        convolved = self.intermediate_size + 2 * groups * self.state_size
        return (
            (self.conv_kernel - 1, share("mamba channels", convolved, tensor_parallel_size)),
            (share("mamba heads", self.num_heads, tensor_parallel_size), self.head_dim, self.state_size),
        )


@dataclass(frozen=True)
class GatedDeltaNetState(StateCache):
    """Gated delta net (Yang et al. 2024): convolution over queries, keys and values, one matrix a value head."""

    num_k_heads: int = 0
    num_v_heads: int = 0
    head_k_dim: int = 0
    head_v_dim: int = 0
    conv_kernel: int = 0

    kind = "gdn"

    def shapes(self, tensor_parallel_size: int) -> tuple[tuple[int, ...], ...]:
        convolved = 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim
        return (
            (self.conv_kernel - 1, share("linear attention channels", convolved, tensor_parallel_size)),
            (share("linear_num_value_heads", self.num_v_heads, tensor_parallel_size), self.head_v_dim, self.head_k_dim),
        )


@dataclass(frozen=True)
class KimiDeltaState(StateCache):
    """Kimi delta attention: like a gated delta net with as many key as value heads; its state is float32."""

    num_heads: int = 0
    head_dim: int = 0
    conv_kernel: int = 0

    kind = "kda"

    def shapes(self, tensor_parallel_size: int) -> tuple[tuple[int, ...], ...]:
        convolved = share("linear attention channels", 3 * self.num_heads * self.head_dim, tensor_parallel_size)
        heads = share("linear attention heads", self.num_heads, tensor_parallel_size)
        return ((self.conv_kernel - 1, convolved), (heads, self.head_dim, self.head_dim))


@dataclass(frozen=True)
class ShortConvState(StateCache):
    """A short convolution (LFM2): its last inputs only."""

    channels: int = 0
    conv_kernel: int = 0

    kind = "short_conv"

    def shapes(self, tensor_parallel_size: int) -> tuple[tuple[int, ...], ...]:
        return ((self.conv_kernel - 1, share("conv_dim", self.channels, tensor_parallel_size)),)

    def dtypes(self, settings: CacheSettings) -> tuple[str, ...]:
        return (convolved(settings),)


@dataclass(frozen=True)
class LinearAttentionState(StateCache):
    """Lightning attention (MiniMax-01, Bailing): one matrix a head, no convolution."""

    num_heads: int = 0
    head_dim: int = 0

    kind = "linear_attention"
    keeps_drafts = False

    def shapes(self, tensor_parallel_size: int) -> tuple[tuple[int, ...], ...]:
        return ((share("num_attention_heads", self.num_heads, tensor_parallel_size), self.head_dim, self.head_dim),)

    def dtypes(self, settings: CacheSettings) -> tuple[str, ...]:
        return (convolved(settings),)


@dataclass(frozen=True)
class Layer:
    """One cache of one decoder layer; a layer with several (sparse attention, parallel heads) is listed once for each.

    `index`: position of the decoder layer, from 0, which decides the pipeline stage.
    """

    index: int
    role: str
    cache: LayerCache

    @property
    def name(self) -> str:
        return f"layers.{self.index}.{self.role}"

    def spec(self, settings: CacheSettings) -> KVCacheSpec:
        """The spec of this layer on one rank. ConfigError when the parallel size cannot divide it."""
        kept = settings.model_dtype_layers
        is_window = isinstance(self.cache, AttentionCache) and self.cache.window > 0
        if str(self.index) in kept or (is_window and WINDOWS in kept):
            settings = replace(settings, cache_dtype=settings.model_dtype, packed_latents=False)
        return self.cache.spec(settings)
