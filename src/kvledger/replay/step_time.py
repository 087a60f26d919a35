"""StepTimeModel: how long one engine step takes on a GPU, by the roofline. The clock of the simulated time.

A step over requests that compute new_i tokens each, after computed_i tokens that are computed already:

    flops  = 2 * parameters * sum(new_i)                                   every weight, one multiply and one add
           + 4 * layers * heads * head_size * sum(new_i * (computed_i + (new_i + 1) / 2))       attention, q.k and p.v
    bytes  = weight bytes + KV bytes per token * sum(computed_i + new_i)   every weight once, every context once
    time   = step overhead + max(flops / (FLOPS_EFFICIENCY * peak), bytes / (BANDWIDTH_EFFICIENCY * bandwidth))

Several GPUs share weights, KV cache and work evenly, and what they say to each other is free. It is a model of what the
scheduler's decisions cost relative to each other; it has not been fitted to one engine.
"""

from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from kvledger.errors import wrong_value
from kvledger.spec import FullAttentionSpec
from kvledger.units import dtype_bytes, require_positive

FLOPS_EFFICIENCY: Final = 0.6
BANDWIDTH_EFFICIENCY: Final = 0.8
# Share of the memory that an engine takes, as vLLM's gpu_memory_utilization.
MEMORY_UTILIZATION: Final = 0.9


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder with grouped-query attention. The default is Llama 3.1 8B's."""

    num_parameters: int = 8_030_000_000
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    weight_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        require_positive("num_parameters", self.num_parameters)
        require_positive("num_layers", self.num_layers)
        require_positive("num_heads", self.num_heads)
        dtype_bytes(self.weight_dtype)
        self.spec(1)

    def spec(self, block_size: int) -> FullAttentionSpec:
        """What one layer keeps."""
        return FullAttentionSpec(block_size, self.num_kv_heads, self.head_size, dtype=self.kv_dtype)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.spec(1).page_size_bytes * self.num_layers

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * dtype_bytes(self.weight_dtype)


@dataclass(frozen=True)
class Gpu:
    """What the roofline needs of an accelerator. `memory_bytes`: as its driver offers it to programs."""

    name: str
    memory_bytes: int
    bandwidth_bytes_s: float
    peak_flops: float


class StepTimeModel:
    """Seconds of a step, from four numbers of it."""

    def __init__(
        self, shape: ModelShape, gpu: Gpu, num_gpus: int, kv_bytes_per_token: int, overhead_seconds: float
    ) -> None:
        self._overhead: Final = overhead_seconds
        flops_s = gpu.peak_flops * FLOPS_EFFICIENCY * num_gpus
        bytes_s = gpu.bandwidth_bytes_s * BANDWIDTH_EFFICIENCY * num_gpus
        self._seconds_per_token: Final = 2 * shape.num_parameters / flops_s
        self._seconds_per_pair: Final = 4 * shape.num_layers * shape.num_heads * shape.head_size / flops_s
        self._seconds_weights: Final = shape.weight_bytes / bytes_s
        self._seconds_per_context_token: Final = kv_bytes_per_token / bytes_s

    def seconds(self, num_new: int, num_context: int, num_pairs: float) -> float:
        """`num_new`: tokens computed; `num_context`: sum(computed_i + new_i); `num_pairs`: query-key pairs."""
        compute = num_new * self._seconds_per_token + num_pairs * self._seconds_per_pair
        read = self._seconds_weights + num_context * self._seconds_per_context_token
        return self._overhead + (compute if compute > read else read)


def num_pairs(num_new: int, num_computed: int) -> float:
    """Query-key pairs of a causal chunk of num_new tokens after num_computed."""
    return num_new * (num_computed + (num_new + 1) / 2)


def kv_memory_bytes(shape: ModelShape, gpu: Gpu, num_gpus: int) -> int:
    """Memory left for the KV cache: MEMORY_UTILIZATION of all GPUs, less the weights. May be negative."""
    return int(MEMORY_UTILIZATION * gpu.memory_bytes * num_gpus) - shape.weight_bytes


def gpu_names() -> list[str]:
    return list(_gpus())


def find_gpu(name: str) -> Gpu:
    """The GPU of that name in the bundled table."""
    gpu = _gpus().get(name.lower())
    if gpu is None:
        raise wrong_value("gpu", name, "not in the table of GPUs", "use one of " + ", ".join(_gpus()))
    return gpu


def _gpus() -> dict[str, Gpu]:
    table = (files("kvledger.replay") / "data" / "gpus.tsv").read_text(encoding="utf-8")
    gpus: dict[str, Gpu] = {}
    for line in table.splitlines()[1:]:
        name, memory_gib, bandwidth_gb_s, tflops = line.split("\t")[:4]
        gpus[name] = Gpu(name, int(float(memory_gib) * 2**30), float(bandwidth_gb_s) * 1e9, float(tflops) * 1e12)
    return gpus
