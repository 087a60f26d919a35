"""Which attention kernels a card runs and the block sizes that they accept, as far as sizes depend on it.

Facts about vLLM 0.32 and 0.33. A backend is a row; the choice among them is by card, KV type and kind of attention.
"""

from dataclasses import dataclass

from kvledger.core.units import NVFP4, SCALED_TYPES
from kvledger.errors import ConfigError
from kvledger.models.facts import ModelFacts
from kvledger.models.layers import AttentionCache, LatentCache

# The kernels of hybrid MLA models need blocks in multiples of this.
HYBRID_MLA_STEP = 128


FP8 = ("fp8", "fp8_e4m3")
# NVFP4 with a search for scales, which only cards of compute capability 10 have.
NVFP4_SEARCHED = "nvfp4_4over6"
ANY_CARD = 0.0


@dataclass(frozen=True)
class Backend:
    """`smallest`: the smallest block; `any_multiple`: every multiple of it works too; `preferred`: used unless told.
    `quantized`: KV types that it takes besides 16-bit ones, on cards of at least `quantized_from`; `cards`: compute
    capabilities that it runs on, from and to.
    """

    name: str
    smallest: int
    preferred: int
    any_multiple: bool = True
    accepted: tuple[int, ...] = ()
    quantized: tuple[str, ...] = ()
    quantized_from: float = ANY_CARD
    cards: tuple[float, float] = (ANY_CARD, 99.0)

    def accepts(self, block_size: int) -> bool:
        if self.accepted:
            return any(block_size % size == 0 for size in self.accepted)
        return block_size % self.smallest == 0 if self.any_multiple else block_size == self.smallest

    def problem(self, kv_cache_dtype: str, compute_capability: float) -> str:
        """Why it cannot be taken, "" where it can. A card whose capability is not known is taken to be able."""
        if not kv_cache_dtype.startswith(("auto", "float", "bfloat")):
            able = kv_cache_dtype in self.quantized and not 0 < compute_capability < self.quantized_from
            searches = kv_cache_dtype == NVFP4_SEARCHED and compute_capability and int(compute_capability) != 10
            if not able or searches:
                return "kv_cache_dtype not supported"
        low, high = self.cards
        return "" if not compute_capability or low <= compute_capability <= high else "compute capability not supported"


FLASH_ATTN = Backend("FLASH_ATTN", 16, 16, quantized=FP8, quantized_from=9.0, cards=(8.0, 99.0))
TRITON_ATTN = Backend("TRITON_ATTN", 16, 16, quantized=(*FP8, "fp8_e5m2", *SCALED_TYPES))
FLASHINFER = Backend(
    "FLASHINFER", 16, 16, accepted=(16, 32, 64), quantized=(*FP8, "fp8_e5m2", NVFP4, NVFP4_SEARCHED), cards=(8.0, 12.1)
)
FLEX_ATTENTION = Backend("FLEX_ATTENTION", 16, 16)
TRITON_FLASH_ATTN_FP8 = Backend("TRITON_FLASH_ATTN", 64, 64, quantized=FP8)
FLASH_ATTN_MLA = Backend("FLASH_ATTN_MLA", 16, 16, cards=(9.0, 9.9))
FLASHMLA = Backend("FLASHMLA", 64, 64, quantized=FP8, cards=(9.0, 10.9))
FLASHINFER_MLA = Backend("FLASHINFER_MLA", 32, 32, accepted=(32, 64), quantized=FP8, cards=(10.0, 10.9))
CUTLASS_MLA = Backend("CUTLASS_MLA", 128, 128, quantized=FP8, cards=(10.0, 10.9))
TRITON_MLA = Backend("TRITON_MLA", 16, 16, quantized=FP8)
SPARSE_MLA = Backend("FLASH_ATTN_MLA_SPARSE", 64, 64)
SPARSE_MLA_PACKED = Backend("FLASHMLA_SPARSE", 64, 64)
FLASHINFER_SPARSE_MLA = Backend("FLASHINFER_MLA_SPARSE", 64, 64)
COMPRESSED_MLA = Backend("FLASHMLA_SPARSE_DSV4", 256, 256)
NO_ATTENTION = Backend("none", 1, 16)

# Families whose attention has sinks.
WITH_SINKS = ("gpt_oss",)

# By priority: plain attention, with FlashInfer first on compute capability 10, and latents.
PLAIN = (FLASH_ATTN, FLASHINFER, TRITON_ATTN, FLEX_ATTENTION)
PLAIN_10 = (FLASHINFER, FLASH_ATTN, TRITON_ATTN, FLEX_ATTENTION)
LATENT = (FLASH_ATTN_MLA, FLASHMLA, FLASHINFER_MLA, TRITON_MLA)
LATENT_10 = (FLASHINFER_MLA, CUTLASS_MLA, FLASHMLA, TRITON_MLA)

# Names that --attention-backend takes here.
SELECTABLE = tuple(dict.fromkeys(backend.name for backend in (*PLAIN, *LATENT_10, *LATENT)))


class NoBackendError(ConfigError):
    """No attention kernel runs this model with that KV type on that card."""


def choose_backend(
    facts: ModelFacts, kv_cache_dtype: str, compute_capability: float, asked: str | None = None
) -> Backend:
    """The kernels for the layers that cache something for each token. NoBackendError when the card has none, or cannot
    run those that are `asked` for.
    """
    sparse = facts.config.has("kv_lora_rank") and any("indexer" in layer.role for layer in facts.layers)
    if facts.is_compressed:
        return COMPRESSED_MLA
    if sparse:
        return sparse_backend(facts, kv_cache_dtype, compute_capability)
    on_10 = 10 <= compute_capability < 11
    refuse_nvfp4(facts, kv_cache_dtype, on_10=on_10)
    if is_latent(facts):
        return first_able(LATENT_10 if on_10 else LATENT, kv_cache_dtype, compute_capability, asked)
    if not any(not layer.cache.is_state for layer in facts.layers):
        return NO_ATTENTION
    if facts.config.has("sparse_attention_config"):
        return Backend("MINIMAX_SPARSE", 128, 128)
    if asked is None and wide_heads_with_images(facts, kv_cache_dtype, compute_capability):
        return TRITON_FLASH_ATTN_FP8
    return first_able(PLAIN_10 if on_10 else PLAIN, kv_cache_dtype, compute_capability, asked)


def refuse_nvfp4(facts: ModelFacts, kv_cache_dtype: str, *, on_10: bool) -> None:
    """NoBackendError where no kernel reads it: latents, and off compute capability 10 heads of 64 and sinks."""
    if not kv_cache_dtype.startswith(NVFP4):
        return
    if is_latent(facts):
        raise NoBackendError("nvfp4 KV cache is not supported with MLA; use another --kv-cache-dtype, like fp8")
    sizes = {layer.cache.head_size for layer in facts.layers if isinstance(layer.cache, AttentionCache)}
    if not on_10 and (64 in sizes or facts.config.model_type in WITH_SINKS):
        what = "heads of 64" if 64 in sizes else "attention sinks"
        fix = "use a card of compute capability 10.0, or another --kv-cache-dtype"
        raise NoBackendError(f"nvfp4 KV cache is not read for {what} off compute capability 10; {fix}")


def first_able(
    backends: tuple[Backend, ...], kv_cache_dtype: str, compute_capability: float, asked: str | None
) -> Backend:
    """The one that was asked for, else the first that takes this KV type on this card."""
    problems = {backend.name: backend.problem(kv_cache_dtype, compute_capability) for backend in backends}
    if asked is None or asked.upper() == "AUTO":
        for backend in backends:
            if not problems[backend.name]:
                return backend
        raise NoBackendError(
            f"No valid attention backend found for kv_cache_dtype={kv_cache_dtype} on compute capability "
            f"{compute_capability}: " + ", ".join(f"{name}: {problem}" for name, problem in problems.items())
        )
    named = next((backend for backend in backends if backend.name == asked.upper()), None)
    problem = "not one for this kind of attention" if named is None else problems[named.name]
    if named is None or problem:
        fix = "use one of " + ", ".join(name for name, reason in problems.items() if not reason)
        raise NoBackendError(f"Selected backend {asked} is not valid for this configuration: {problem}; {fix}")
    return named


def is_latent(facts: ModelFacts) -> bool:
    """Whether attention reads latent vectors, by one of the MLA kernels."""
    return any(isinstance(layer.cache, LatentCache) for layer in facts.layers) and facts.config.has("kv_lora_rank")


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
