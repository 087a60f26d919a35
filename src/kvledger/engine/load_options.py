"""LoadOptions: what it takes to load an engine from a model's files. Names are vLLM's where it has one."""

from dataclasses import dataclass
from typing import Final

from kvledger.core.units import require_not_negative, require_positive
from kvledger.errors import wrong_value

CPU_KV_CACHE_BYTES: Final = 1 << 30
DEFAULT_NUM_SEQS: Final = 64
DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LoadOptions:
    """`model`: see find_model. `num_blocks`: blocks of the pool, one of them the null block; None: as many as fit
    `kv_cache_memory_bytes`, or what is left of this share of the device, `gpu_memory_utilization`, when the weights and
    the largest step are measured. With neither, a CPU gives CPU_KV_CACHE_BYTES, because a measured step takes long
    there and a share of main memory belongs to other programs; a GPU is measured. ConfigError for `num_blocks` together
    with either of them.

    `max_model_len` None: the model's. `num_speculative_tokens`: drafts a step, 0 for none; they
    come from the text itself, where between `prompt_lookup_min` and `prompt_lookup_max` last tokens occurred before.
    `dtype`: of weights, keys and values. `seed`: for sampled requests without one of their own.
    """

    model: str
    num_blocks: int | None = None
    block_size: int = 16
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 0
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_blocks is not None and self.num_blocks < 2:
            raise wrong_value("num_blocks", self.num_blocks, "one is the null block, so none is left", "give 2 or more")
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            problem = f"num_blocks={self.num_blocks} gives the size of the pool already"
            raise wrong_value("kv_cache_memory_bytes", self.kv_cache_memory_bytes, problem, "leave out one of them")
        if self.num_blocks is not None and self.gpu_memory_utilization is not None:
            problem = f"num_blocks={self.num_blocks} gives the size of the pool already"
            raise wrong_value("gpu_memory_utilization", self.gpu_memory_utilization, problem, "leave out one of them")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise wrong_value("max_model_len", self.max_model_len, "no room for a prompt and a token", "give 2 or more")
        require_positive("block_size", self.block_size)
        require_positive("max_num_batched_tokens", self.max_num_batched_tokens)
        if self.max_num_seqs is not None:
            require_positive("max_num_seqs", self.max_num_seqs)
        require_not_negative("num_speculative_tokens", self.num_speculative_tokens)
        if self.dtype not in DTYPES:
            raise wrong_value("dtype", self.dtype, "not a type to compute in", "use one of " + ", ".join(DTYPES))

    @property
    def num_seats(self) -> int:
        """max_num_seqs, or its default: never more than tokens in a step."""
        return self.max_num_seqs or min(DEFAULT_NUM_SEQS, self.max_num_batched_tokens)
