"""What a layer keeps in the KV cache: the KVCacheSpec family, groups of like layers, and the whole configuration.

Layer 1: pure data. A spec answers two questions: how many bytes does one block (page) of one layer take, and how many
blocks can one request hold at most. How blocks are handed out per attention type is the managers' business (layer 4).
"""

from dataclasses import dataclass, field

from kvledger.errors import wrong_value
from kvledger.units import cdiv, dtype_bytes, require_not_negative, require_positive


@dataclass(frozen=True)
class KVCacheSpec:
    """One layer's share of the KV cache. `block_size`: tokens per block."""

    block_size: int

    def __post_init__(self) -> None:
        require_positive("block_size", self.block_size)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        raise NotImplementedError

    def max_blocks_per_request(self, max_model_len: int) -> int:
        """Most blocks that one request of max_model_len tokens holds at a time."""
        return cdiv(max_model_len, self.block_size)


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """Keys and values of every token, kept until the request ends (MHA, GQA, MQA).

    `head_size_v` 0 means the same as `head_size`.
    """

    num_kv_heads: int
    head_size: int
    head_size_v: int = 0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        require_positive("block_size", self.block_size)
        require_positive("num_kv_heads", self.num_kv_heads)
        require_positive("head_size", self.head_size)
        require_not_negative("head_size_v", self.head_size_v)
        dtype_bytes(self.dtype)

    @property
    def page_size_bytes(self) -> int:
        value_size = self.head_size_v or self.head_size
        return self.num_kv_heads * self.block_size * (self.head_size + value_size) * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class MLAAttentionSpec(KVCacheSpec):
    """Multi-head latent attention: one latent vector a token that serves as key and value (DeepSeek-V2 paper, 2.1)."""

    head_size: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        require_positive("block_size", self.block_size)
        require_positive("head_size", self.head_size)
        dtype_bytes(self.dtype)

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.head_size * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table: the same blocks, ids and lengths for all of them."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec

    def __post_init__(self) -> None:
        if not self.layer_names:
            raise wrong_value("layer_names", self.layer_names, "a group needs a layer", "name at least one layer")

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        return self.spec.page_size_bytes * len(self.layer_names)


@dataclass(frozen=True)
class KVCacheConfig:
    """The pool and how it is shared out. `num_blocks` counts the null block, so num_blocks - 1 can hold tokens."""

    num_blocks: int
    groups: tuple[KVCacheGroupSpec, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.num_blocks < 2:
            raise wrong_value(
                "num_blocks", self.num_blocks, "block 0 is the null block, so nothing is left", "give at least 2"
            )
        if not self.groups:
            raise wrong_value("groups", self.groups, "no layer keeps a KV cache", "give at least one group")
