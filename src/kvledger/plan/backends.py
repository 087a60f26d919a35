"""Which attention kernels a card runs and the block sizes that they accept, as far as sizes depend on it.

Facts about vLLM 0.32 and 0.33. A backend is a row; the choice among them is by card, KV type and kind of attention.
"""

from dataclasses import dataclass

from kvledger.errors import ConfigError
from kvledger.models.facts import ModelFacts
from kvledger.models.layers import LatentCache

# The kernels of hybrid MLA models need blocks in multiples of this.
HYBRID_MLA_STEP = 128


@dataclass(frozen=True)
class Backend:
    """`smallest`: the smallest block; `any_multiple`: every multiple of it works too; `preferred`: used unless told."""

    name: str
    smallest: int
    preferred: int
    any_multiple: bool = True
    accepted: tuple[int, ...] = ()

    def accepts(self, block_size: int) -> bool:
        if self.accepted:
            return any(block_size % size == 0 for size in self.accepted)
        return block_size % self.smallest == 0 if self.any_multiple else block_size == self.smallest


FLASH_ATTN = Backend("FLASH_ATTN", 16, 16)
TRITON_ATTN = Backend("TRITON_ATTN", 16, 16)
FLASHINFER = Backend("FLASHINFER", 16, 16, accepted=(16, 32, 64))
TRITON_FLASH_ATTN_FP8 = Backend("TRITON_FLASH_ATTN", 64, 64)
FLASH_ATTN_MLA = Backend("FLASH_ATTN_MLA", 16, 16)
FLASHMLA = Backend("FLASHMLA", 64, 64)
FLASHINFER_MLA = Backend("FLASHINFER_MLA", 32, 32, accepted=(32, 64))
TRITON_MLA = Backend("TRITON_MLA", 16, 16)
SPARSE_MLA = Backend("FLASH_ATTN_MLA_SPARSE", 64, 64)
SPARSE_MLA_PACKED = Backend("FLASHMLA_SPARSE", 64, 64)
FLASHINFER_SPARSE_MLA = Backend("FLASHINFER_MLA_SPARSE", 64, 64)
COMPRESSED_MLA = Backend("FLASHMLA_SPARSE_DSV4", 256, 256)
NO_ATTENTION = Backend("none", 1, 16)


class NoBackendError(ConfigError):
    """No attention kernel runs this model with that KV type on that card."""


def choose_backend(facts: ModelFacts, kv_cache_dtype: str, compute_capability: float) -> Backend:
    """The kernels for the layers that cache something for each token. NoBackendError when the card has none."""
    latent = facts.config.has("kv_lora_rank") and any("indexer" in layer.role for layer in facts.layers)
    if facts.is_compressed:
        return COMPRESSED_MLA
    if latent:
        return sparse_backend(facts, kv_cache_dtype, compute_capability)
    if is_latent(facts):
        return latent_backend(kv_cache_dtype, compute_capability)
    if not any(not layer.cache.is_state for layer in facts.layers):
        return NO_ATTENTION
    if facts.config.has("sparse_attention_config"):
        return Backend("MINIMAX_SPARSE", 128, 128)
    if wide_heads_with_images(facts, kv_cache_dtype, compute_capability):
        return TRITON_FLASH_ATTN_FP8
    return FLASHINFER if 10 <= compute_capability < 11 else FLASH_ATTN


def is_latent(facts: ModelFacts) -> bool:
    """Whether attention reads latent vectors, by one of the MLA kernels."""
    return any(isinstance(layer.cache, LatentCache) for layer in facts.layers) and facts.config.has("kv_lora_rank")


def latent_backend(kv_cache_dtype: str, compute_capability: float) -> Backend:
    if compute_capability == 9.0:
        return FLASHMLA if kv_cache_dtype.startswith("fp8") else FLASH_ATTN_MLA
    return FLASHINFER_MLA if 10 <= compute_capability < 11 else TRITON_MLA


def sparse_backend(facts: ModelFacts, kv_cache_dtype: str, compute_capability: float) -> Backend:
    if compute_capability == 9.0:
        if not kv_cache_dtype.startswith("fp8"):
            return SPARSE_MLA
        if kv_cache_dtype in ("fp8", "fp8_ds_mla"):
            return SPARSE_MLA_PACKED
        fix = "use --kv-cache-dtype fp8 (the packed format) or bfloat16, or a card of compute capability 10.0"
    elif compute_capability >= 10:
        return FLASHINFER_SPARSE_MLA
    else:
        fix = "use a card of compute capability 9.0 or higher"
    raise NoBackendError(
        f"No valid attention backend found for sparse MLA with kv_cache_dtype={kv_cache_dtype} on compute capability "
        f"{compute_capability}: {facts.name} selects tokens with an indexer; {fix}"
    )


def wide_heads_with_images(facts: ModelFacts, kv_cache_dtype: str, compute_capability: float) -> bool:
    """Heads of 512 with image tokens that see both ways: an fp8 cache then needs 64-token blocks on Hopper."""
    wide = facts.config.number("global_head_dim", 0) or 0
    fp8 = kv_cache_dtype in ("fp8", "fp8_e4m3")
    return compute_capability == 9.0 and fp8 and wide >= 512 and facts.attends_both_ways_to_images
