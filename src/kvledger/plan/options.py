"""What the user asks for. Names are vLLM's, so a `vllm serve` command line maps one to one."""

from dataclasses import dataclass

from kvledger.errors import wrong_value
from kvledger.models.layers import WINDOWS
from kvledger.plan.backends import SELECTABLE
from kvledger.plan.speculative import WITHOUT_ASYNC, SpeculativeConfig

AUTO_LENGTH = -1
KV_CACHE_DTYPES = (
    "auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4", "nvfp4_4over6",
    "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head",
)  # fmt: skip
ENTRY_POINTS = ("server", "llm")
# Other names that vLLM takes for a model's type -> its usual name.
DTYPES = {
    "auto": "auto",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}
PERFORMANCE_MODES = ("balanced", "interactivity", "throughput")
OPTIMIZATION_LEVELS = (0, 1, 2, 3)
# Modes of CUDA graphs -> whether mixed batches are captured, and whether those that only decode have their own graphs.
GRAPH_MODES = {
    "NONE": (False, False),
    "PIECEWISE": (True, False),
    "FULL": (True, False),
    "FULL_DECODE_ONLY": (False, True),
    "FULL_AND_PIECEWISE": (True, True),
}
# The mode of each optimization level, where compilation_config gives none.
GRAPH_MODE_OF_LEVEL = ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE")
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
LORA_DTYPES = ("auto", "float16", "bfloat16")
STATE_DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class EngineOptions:
    """Engine options; None means vLLM's default. `entry_point`: `vllm serve` or the LLM class, whose defaults differ.

    `max_model_len` -1: the longest that fits. `kv_cache_memory_bytes`: the KV cache of each GPU, instead of a share.
    `quantization`: as the checkpoint stores its weights where it is empty.
    `pipeline_layers`: decoder layers of each stage (vLLM's VLLM_PP_LAYER_PARTITION); () for an even partition.
    `allow_long_max_model_len`: VLLM_ALLOW_LONG_MAX_MODEL_LEN, a longer max_model_len than the config's.
    `kv_cache_dtype_skip_layers`: numbers of layers that keep the model's type, sliding_window for all that have one.
    `cudagraph_mode`: of compilation_config; "": vLLM's default. `cpu_offload_gb`, `kv_offloading_size`: GiB.
    """

    max_model_len: int | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enable_prefix_caching: bool | None = None
    disable_hybrid_kv_cache_manager: bool = False
    async_scheduling: bool = True
    enforce_eager: bool = False
    mamba_ssm_cache_dtype: str = "auto"
    quantization: str = ""
    entry_point: str = "server"
    pipeline_layers: tuple[int, ...] = ()
    prefill_context_parallel_size: int = 1
    enable_chunked_prefill: bool | None = None
    performance_mode: str = "balanced"
    optimization_level: int = 2
    cudagraph_mode: str = ""
    attention_backend: str | None = None
    mamba_cache_dtype: str = "auto"
    mamba_block_size: int | None = None
    allow_long_max_model_len: bool = False
    speculative_config: SpeculativeConfig | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    lora_dtype: str = "auto"
    fully_sharded_loras: bool = False
    cpu_offload_gb: float = 0.0
    offload_group_size: int = 0
    offload_num_in_group: int = 1
    offload_prefetch_step: int = 1
    kv_offloading_size: float | None = None
    language_model_only: bool = False
    cudagraph_capture_sizes: tuple[int, ...] = ()
    max_cudagraph_capture_size: int | None = None
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.check_numbers()
        self.check_partition()
        if self.dtype not in DTYPES:
            raise wrong_value("--dtype", self.dtype, "not a type of a model", "use one of " + ", ".join(DTYPES))
        object.__setattr__(self, "dtype", DTYPES[self.dtype])
        self.check_words()
        self.check_context_parallel()

    def check_context_parallel(self) -> None:
        """Decode ranks are taken from the tensor ranks; with prefill ranks, from those or from both."""
        tensor, prefill = self.tensor_parallel_size, self.prefill_context_parallel_size
        decode = self.decode_context_parallel_size
        if prefill == 1 and tensor % decode:
            problem = f"does not divide --tensor-parallel-size {tensor}"
            raise wrong_value("--decode-context-parallel-size", decode, problem, "use a divisor")
        if prefill > 1 and decode not in (1, prefill, tensor * prefill):
            problem = f"not a size that goes with --prefill-context-parallel-size {prefill} and tp {tensor}"
            fix = f"use 1, {prefill} or {tensor * prefill}"
            raise wrong_value("--decode-context-parallel-size", decode, problem, fix)

    def check_words(self) -> None:
        for option, value, known in (
            ("--kv-cache-dtype", self.kv_cache_dtype, KV_CACHE_DTYPES),
            ("--mamba-cache-dtype", self.mamba_cache_dtype, STATE_DTYPES),
            ("--mamba-ssm-cache-dtype", self.mamba_ssm_cache_dtype, STATE_DTYPES),
            ("--entry-point", self.entry_point, ENTRY_POINTS),
            ("--max-lora-rank", self.max_lora_rank, LORA_RANKS),
            ("--lora-dtype", self.lora_dtype, LORA_DTYPES),
            ("--performance-mode", self.performance_mode, PERFORMANCE_MODES),
            ("--optimization-level", self.optimization_level, OPTIMIZATION_LEVELS),
            ("--compilation-config: cudagraph_mode", self.cudagraph_mode.upper(), ("", *GRAPH_MODES)),
            ("--attention-backend", (self.attention_backend or "auto").upper(), ("AUTO", *SELECTABLE)),
        ):
            if value not in known:
                raise wrong_value(option, value, "not one that is modelled", "use one of " + ", ".join(map(str, known)))
        for word in self.kv_cache_dtype_skip_layers:
            if not word.isdecimal() and word != WINDOWS:
                fix = f"give numbers of layers from 0 on, or {WINDOWS}"
                raise wrong_value("--kv-cache-dtype-skip-layers", word, "not the number of a layer", fix)

    def check_numbers(self) -> None:
        if not 0 < self.gpu_memory_utilization <= 1:
            problem = "must be above 0 and at most 1"
            raise wrong_value("--gpu-memory-utilization", self.gpu_memory_utilization, problem, "0.92 is the default")
        if self.max_model_len is not None and self.max_model_len != AUTO_LENGTH and self.max_model_len < 1:
            raise wrong_value(
                "--max-model-len", self.max_model_len, "must be at least 1", "or auto for the longest that fits"
            )
        for option, value in (
            ("--block-size", self.block_size),
            ("--kv-cache-memory-bytes", self.kv_cache_memory_bytes),
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--max-num-seqs", self.max_num_seqs),
            ("--tensor-parallel-size", self.tensor_parallel_size),
            ("--pipeline-parallel-size", self.pipeline_parallel_size),
            ("--data-parallel-size", self.data_parallel_size),
            ("--decode-context-parallel-size", self.decode_context_parallel_size),
            ("--prefill-context-parallel-size", self.prefill_context_parallel_size),
            ("--mamba-block-size", self.mamba_block_size),
            ("--max-loras", self.max_loras),
            ("--max-cudagraph-capture-size", self.max_cudagraph_capture_size),
            ("--cudagraph-capture-sizes", min(self.cudagraph_capture_sizes, default=None)),
            ("--offload-num-in-group", self.offload_num_in_group),
            ("--offload-prefetch-step", self.offload_prefetch_step),
        ):
            if value is not None and value < 1:
                raise wrong_value(option, value, "must be at least 1", "give a positive number")
        for option, size in (
            ("--cpu-offload-gb", self.cpu_offload_gb),
            ("--kv-offloading-size", self.kv_offloading_size or 0.0),
            ("--offload-group-size", self.offload_group_size),
        ):
            if size < 0:
                raise wrong_value(option, size, "less than nothing", "give 0 or more")
        if self.offload_group_size and self.offload_num_in_group > self.offload_group_size:
            problem = f"more than --offload-group-size {self.offload_group_size}"
            raise wrong_value("--offload-num-in-group", self.offload_num_in_group, problem, "give at most as many")
        if self.num_gpu_blocks_override is not None and self.num_gpu_blocks_override < 2:
            problem = "block 0 is the null block, so nothing would be left"
            raise wrong_value("--num-gpu-blocks-override", self.num_gpu_blocks_override, problem, "give at least 2")

    def check_partition(self) -> None:
        layers, stages = self.pipeline_layers, self.pipeline_parallel_size
        if layers and (len(layers) != stages or min(layers) < 1):
            fix = f"give {stages} positive numbers, one for each stage"
            raise wrong_value("--pp-layer-partition", layers, f"{stages} pipeline stages", fix)

    @property
    def world_size(self) -> int:
        """GPUs of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size

    @property
    def prepares_steps(self) -> bool:
        """Whether a step is prepared while the last one runs."""
        drafts = self.speculative_config
        return self.async_scheduling and (drafts is None or drafts.kind not in WITHOUT_ASYNC)

    @property
    def captured_batches(self) -> tuple[bool, bool]:
        """Whether graphs of mixed batches are captured, and graphs of batches that only decode; none when eager."""
        mode = self.cudagraph_mode.upper() or GRAPH_MODE_OF_LEVEL[self.optimization_level]
        return (False, False) if self.enforce_eager else GRAPH_MODES[mode]

    @property
    def captures_graphs(self) -> bool:
        return any(self.captured_batches)
