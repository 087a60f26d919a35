"""What a layer keeps in the KV cache: the KVCacheSpec family, groups of like layers, and the whole configuration.

Layer 1: pure data. A spec answers two questions: how many bytes does one block (page) of one layer take, and how many
blocks can one request hold at most. How blocks are handed out per attention type is the managers' business (layer 4).

KVCacheSpec
    AttentionSpec                  keys and values of some tokens, `num_kv_heads` heads of `head_size` (+ `head_size_v`)
        FullAttentionSpec          every token, until the request ends (MHA, GQA, MQA)
            SinkFullAttentionSpec  the same, behind `sink_len` learned tokens that every request shares
            HostResidentSpec       the same, in host memory
        SlidingWindowSpec          the last `sliding_window` tokens
        ChunkedLocalAttentionSpec  the tokens of the current chunk of `attention_chunk_size`
        CrossAttentionSpec         the tokens of the encoder
        CircularBufferSpec         the last tokens of a request, in a ring that is never shared
    MLAAttentionSpec               one latent vector a token, key and value at once; also index keys
        SlidingWindowMLASpec       the same, for the last `sliding_window` tokens only
    MambaSpec                      a state of fixed size, whatever the length (Mamba, gated delta nets, ...)
"""

from dataclasses import dataclass, field
from typing import Final

from mypy_extensions import mypyc_attr

from kvledger.core.record import Record
from kvledger.core.units import (
    MAX_COUNT,
    cdiv,
    dtype_bytes,
    require_not_negative,
    require_positive,
    round_up,
    vector_bytes,
)
from kvledger.errors import wrong_value

MAMBA_CACHE_MODES: Final[tuple[str, ...]] = ("none", "align")


def padded_page(content_bytes: int, page_size_padded: int) -> int:
    """The page to allocate for content_bytes: page_size_padded, or the content where that is 0."""
    if page_size_padded and page_size_padded < content_bytes:
        problem = f"smaller than the {content_bytes} bytes that a block holds"
        raise wrong_value("page_size_padded", page_size_padded, problem, "give at least that, or 0 for no padding")
    return page_size_padded or content_bytes


def windowed_blocks(reach_tokens: int, block_size: int, max_model_len: int, max_in_flight_tokens: int) -> int:
    """Most blocks that hold `reach_tokens` settled tokens and what is in flight behind them, both parts contiguous.

    Blocks behind the window are freed on the settled-token basis, so every token that is scheduled and not settled
    (max_in_flight_tokens) may still keep its block.
    """
    return cdiv(min(reach_tokens + max_in_flight_tokens, max_model_len), block_size)


def require_window(sliding_window: int, extra_retained_tokens: int) -> None:
    """ConfigError for a window that is none, or less than none behind it."""
    require_positive("sliding_window", sliding_window, MAX_COUNT)
    require_not_negative("extra_retained_tokens", extra_retained_tokens, MAX_COUNT)


def window_reach(sliding_window: int, extra_retained_tokens: int) -> int:
    """Settled tokens that a window keeps: the next token counts itself in the window."""
    return sliding_window - 1 + extra_retained_tokens


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True, eq=False, repr=False)
class KVCacheSpec(Record):
    """One layer's share of the KV cache. `block_size`: tokens per block."""

    block_size: int

    def __post_init__(self) -> None:
        require_positive("block_size", self.block_size, MAX_COUNT)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        raise NotImplementedError

    @property
    def prefix_cacheable(self) -> bool:
        """Whether other requests can use this layer's blocks. False for scratch and encoder states."""
        return True

    @property
    def hits_inside_blocks(self) -> bool:
        """Whether a prefix that ends inside a block, at a multiple of the hash unit, can be looked up and shared."""
        return False

    @property
    def checkpoints_inside_blocks(self) -> bool:
        """Whether this layer caches its state inside blocks, so that hits there are worth looking for."""
        return False

    @property
    def shards_over_context(self) -> bool:
        """Whether decode context parallelism splits this layer's tokens over ranks (states and windows it does not)."""
        return False

    def max_blocks_per_request(self, max_model_len: int) -> int:
        """Entries of the block table of one request of max_model_len tokens, null blocks included."""
        return cdiv(max_model_len, self.block_size)

    def max_admission_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Most blocks that one request of max_model_len tokens holds at a time.

        Sizing reserves this many and the managers admit by it: one number, or admitted requests could deadlock.
        `max_in_flight_tokens`: tokens that may be scheduled and not settled yet, over all steps in flight.
        """
        return cdiv(max_model_len, self.block_size)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True, eq=False, repr=False)
class AttentionSpec(KVCacheSpec):
    """Keys and values of `num_kv_heads` heads.

    `head_size_v` 0 means the same as `head_size`. `page_size_padded`: bytes to allocate for a block, 0 for its content.
    """

    num_kv_heads: int
    head_size: int
    head_size_v: int = 0
    dtype: str = "bfloat16"
    page_size_padded: int = 0

    def __post_init__(self) -> None:
        require_positive("block_size", self.block_size, MAX_COUNT)
        require_positive("num_kv_heads", self.num_kv_heads)
        require_positive("head_size", self.head_size)
        require_not_negative("head_size_v", self.head_size_v)
        vector_bytes(self.dtype, self.head_size)
        padded_page(self.content_bytes, self.page_size_padded)

    @property
    def content_bytes(self) -> int:
        """Bytes of one block without padding: heads * tokens * bytes of a key and a value."""
        key = vector_bytes(self.dtype, self.head_size)
        value = vector_bytes(self.dtype, self.head_size_v or self.head_size)
        return self.num_kv_heads * self.block_size * (key + value)

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.content_bytes


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True, eq=False, repr=False)
class FullAttentionSpec(AttentionSpec):
    """Keys and values of every token, kept until the request ends (MHA, GQA, MQA).

    `sliding_window` and `attention_chunk_size` (0: none) say that the layer reads less than it keeps: a local layer
    that is stored like a full one because the hybrid manager is off.
    """

    sliding_window: int = 0
    attention_chunk_size: int = 0

    @property
    def hits_inside_blocks(self) -> bool:
        return True

    @property
    def shards_over_context(self) -> bool:
        return True


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True, eq=False, repr=False)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention that also reads `sink_len` learned tokens of the model, which live outside the pool."""

    sink_len: int = 0

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        if self.sink_len < 1 or self.sink_len % self.block_size != 0:
            problem = f"no multiple of block_size={self.block_size}"
            raise wrong_value("sink_len", self.sink_len, problem, "give whole blocks of sink tokens")


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True, eq=False, repr=False)
class SlidingWindowSpec(AttentionSpec):
    """Keys and values of the last `sliding_window` tokens (Mistral 7B paper, 2.1).

    `extra_retained_tokens`: tokens behind the window that are kept as well, for drafts that go back a few tokens.
    """

    sliding_window: int = 0
    extra_retained_tokens: int = 0

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        require_window(self.sliding_window, self.extra_retained_tokens)

    def max_admission_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        # The window may start inside a block, hence + 1.
        reach = window_reach(self.sliding_window, self.extra_retained_tokens)
        return windowed_blocks(reach, self.block_size, max_model_len, max_in_flight_tokens) + 1


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True, eq=False, repr=False)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Keys and values of the current chunk: token t reads from t // attention_chunk_size * attention_chunk_size on."""

    attention_chunk_size: int = 0

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        require_positive("attention_chunk_size", self.attention_chunk_size, MAX_COUNT)

    def max_admission_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return windowed_blocks(self.attention_chunk_size, self.block_size, max_model_len, max_in_flight_tokens)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True, eq=False, repr=False)
class CrossAttentionSpec(AttentionSpec):
    """Keys and values of the encoder's tokens: `max_encoder_tokens` at most, whatever the decoder's length."""

    max_encoder_tokens: int = 0

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        require_positive("max_encoder_tokens", self.max_encoder_tokens, MAX_COUNT)

    @property
    def prefix_cacheable(self) -> bool:
        return False

    def max_blocks_per_request(self, max_model_len: int) -> int:
        return cdiv(self.max_encoder_tokens, self.block_size)

    def max_admission_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return cdiv(self.max_encoder_tokens, self.block_size)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True, eq=False, repr=False)
class HostResidentSpec(FullAttentionSpec):
    """Full attention whose blocks live in host memory: `num_host_blocks` of them, in a pool of their own."""

    num_host_blocks: int = 0

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        if self.num_host_blocks < 2:
            problem = "block 0 is the null block, so nothing is left"
            raise wrong_value("num_host_blocks", self.num_host_blocks, problem, "give at least 2")


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True, eq=False, repr=False)
class CircularBufferSpec(AttentionSpec):
    """A ring of `block_size` tokens that each request overwrites again and again: one block a request, never shared."""

    @property
    def prefix_cacheable(self) -> bool:
        return False

    def max_blocks_per_request(self, max_model_len: int) -> int:
        return 1

    def max_admission_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return 1


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True, eq=False, repr=False)
class MLAAttentionSpec(KVCacheSpec):
    """Multi-head latent attention: one latent vector a token that serves as key and value (DeepSeek-V2 paper, 2.1).

    `state_bytes` (0: head_size elements of dtype): bytes of one stored vector where it is packed with its scales.
    `tokens_per_state`: tokens that are compressed into one stored vector. `alignment`: pages are padded to a multiple.
    """

    head_size: int
    dtype: str = "bfloat16"
    state_bytes: int = 0
    tokens_per_state: int = 1
    alignment: int = 1
    page_size_padded: int = 0

    def __post_init__(self) -> None:
        require_positive("block_size", self.block_size, MAX_COUNT)
        require_positive("head_size", self.head_size)
        require_not_negative("state_bytes", self.state_bytes)
        require_positive("tokens_per_state", self.tokens_per_state, MAX_COUNT)
        require_positive("alignment", self.alignment)
        if self.block_size % self.tokens_per_state:
            problem = f"does not divide block_size={self.block_size}"
            raise wrong_value("tokens_per_state", self.tokens_per_state, problem, "use a block size that it divides")
        dtype_bytes(self.dtype)
        padded_page(self.content_bytes, self.page_size_padded)

    @property
    def content_bytes(self) -> int:
        """Bytes of one block without padding: stored vectors * bytes of one."""
        return self.block_size // self.tokens_per_state * (self.state_bytes or self.head_size * dtype_bytes(self.dtype))

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or round_up(self.content_bytes, self.alignment)

    @property
    def hits_inside_blocks(self) -> bool:
        return True

    @property
    def shards_over_context(self) -> bool:
        return True


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True, eq=False, repr=False)
class SlidingWindowMLASpec(MLAAttentionSpec):
    """A latent vector for each of the last `sliding_window` tokens."""

    sliding_window: int = 0
    extra_retained_tokens: int = 0

    def __post_init__(self) -> None:
        MLAAttentionSpec.__post_init__(self)
        require_window(self.sliding_window, self.extra_retained_tokens)

    @property
    def hits_inside_blocks(self) -> bool:
        return False

    @property
    def shards_over_context(self) -> bool:
        return False

    def max_admission_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        reach = window_reach(self.sliding_window, self.extra_retained_tokens)
        return windowed_blocks(reach, self.block_size, max_model_len, max_in_flight_tokens) + 1


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True, eq=False, repr=False)
class MambaSpec(KVCacheSpec):
    """A recurrent state: tensors of `shapes` and `dtypes`, one set a block (Mamba, Mamba-2, gated delta nets, KDA).

    `mamba_cache_mode` "none": one state a request, nothing is shared; a block spans max_model_len tokens then, as
    smaller ones are taken for every step. "align": states are kept at block boundaries so that prefixes can be reused;
    a request then holds the running state, the last boundary and `num_prefill_checkpoint_blocks` that one prefill step
    writes on its way, at multiples of `prefill_checkpoint_alignment` tokens from its start (0: nowhere).
    `num_speculative_blocks`: drafts.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    page_size_padded: int = 0
    mamba_type: str = "mamba2"
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0
    prefill_checkpoint_alignment: int = 0

    def __post_init__(self) -> None:
        require_positive("block_size", self.block_size, MAX_COUNT)
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            problem = f"{len(self.shapes)} shapes and {len(self.dtypes)} dtypes"
            raise wrong_value("shapes", self.shapes, problem, "give one dtype for each state tensor")
        if self.mamba_cache_mode not in MAMBA_CACHE_MODES:
            fix = "use one of " + ", ".join(MAMBA_CACHE_MODES)
            raise wrong_value("mamba_cache_mode", self.mamba_cache_mode, "not a caching mode", fix)
        require_not_negative("num_speculative_blocks", self.num_speculative_blocks, MAX_COUNT)
        require_not_negative("num_prefill_checkpoint_blocks", self.num_prefill_checkpoint_blocks, MAX_COUNT)
        require_not_negative("prefill_checkpoint_alignment", self.prefill_checkpoint_alignment, MAX_COUNT)
        padded_page(self.content_bytes, self.page_size_padded)

    @property
    def content_bytes(self) -> int:
        """Bytes of one state without padding."""
        total = 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            elements = 1
            for size in shape:
                elements *= size
            total += elements * dtype_bytes(dtype)
        return total

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.content_bytes

    @property
    def hits_inside_blocks(self) -> bool:
        return True

    @property
    def checkpoints_inside_blocks(self) -> bool:
        return self.mamba_cache_mode == "align"

    def max_admission_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        if self.mamba_cache_mode == "align":
            return 2 + self.num_speculative_blocks + self.num_prefill_checkpoint_blocks
        # A step has a block for each block_size of its tokens; vLLM's blocks have max_model_len of them in this mode.
        return cdiv(max_model_len, self.block_size) + self.num_speculative_blocks


@dataclass(frozen=True, eq=False, repr=False)
class KVCacheGroupSpec(Record):
    """Layers that share one block table: the same blocks, ids and lengths for all of them.

    `layer_specs` is empty when every layer has `spec`. Layers that need the same blocks but differ in page bytes (a
    sparse model's latent vectors and index keys) list their own specs there, in the order of `layer_names`; `spec` is
    then the first of them and speaks for all to the managers. `is_draft`: a draft model's layers are among them.
    """

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    layer_specs: tuple[KVCacheSpec, ...] = ()
    is_draft: bool = False

    def __post_init__(self) -> None:
        if not self.layer_names:
            raise wrong_value("layer_names", self.layer_names, "a group needs a layer", "name at least one layer")
        if self.layer_specs and len(self.layer_specs) != len(self.layer_names):
            problem = f"{len(self.layer_specs)} specs for {len(self.layer_names)} layers"
            raise wrong_value("layer_specs", len(self.layer_specs), problem, "give one a layer, or none at all")

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        if not self.layer_specs:
            return self.spec.page_size_bytes * len(self.layer_names)
        return sum([spec.page_size_bytes for spec in self.layer_specs])

    def max_admission_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Most blocks that one request holds in this group at a time."""
        most = self.spec.max_admission_blocks(max_model_len, max_in_flight_tokens)
        for spec in self.layer_specs:
            most = max(most, spec.max_admission_blocks(max_model_len, max_in_flight_tokens))
        return most


@dataclass(frozen=True, eq=False, repr=False)
class KVCacheConfig(Record):
    """The pool and how it is shared out. `num_blocks` counts the null block, so num_blocks - 1 can hold tokens."""

    num_blocks: int
    groups: tuple[KVCacheGroupSpec, ...] = field(default=())

    def __post_init__(self) -> None:
        require_positive("num_blocks", self.num_blocks, MAX_COUNT)
        if self.num_blocks < 2:
            raise wrong_value(
                "num_blocks", self.num_blocks, "block 0 is the null block, so nothing is left", "give at least 2"
            )
        if not self.groups:
            raise wrong_value("groups", self.groups, "no layer keeps a KV cache", "give at least one group")
