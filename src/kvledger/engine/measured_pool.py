"""The number of blocks of an engine that is not told one: from memory that is given, or measured."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from kvledger.core.units import cdiv
from kvledger.engine.load_options import CPU_KV_CACHE_BYTES, LoadOptions
from kvledger.engine.memory_device import CpuMemory, CudaMemory, MemoryDevice
from kvledger.engine.pool_size import pool_size
from kvledger.engine.profile import DEFAULT_UTILIZATION, MemoryProfiler
from kvledger.engine.transformers_model import kv_cache_layout
from kvledger.errors import wrong_value
from kvledger.plan.pool import RequestLimits


def make_profiler(device: MemoryDevice, options: LoadOptions) -> MemoryProfiler:
    """To be made before the model is loaded. ConfigError when the share of the device is not free."""
    given = options.kv_cache_memory_bytes
    if given is None and options.gpu_memory_utilization is None and isinstance(device, CpuMemory):
        given = CPU_KV_CACHE_BYTES
    return MemoryProfiler(device, options.gpu_memory_utilization or DEFAULT_UTILIZATION, given)


def memory_device(name: str) -> MemoryDevice:
    """The memory of a device that torch knows by that name. ConfigError when there is no such device here."""
    try:
        device = torch.device(name)
    except RuntimeError as failed:
        raise wrong_value("device", name, "no device that torch knows", "use cpu, cuda or cuda:1") from failed
    if device.type not in ("cpu", "cuda"):
        raise wrong_value("device", name, "its memory cannot be measured", "use cpu or cuda")
    return CudaMemory(device.index or 0) if device.type == "cuda" else CpuMemory()


def measure_pool(
    profiler: MemoryProfiler,
    model: PreTrainedModel,
    limits: RequestLimits,
    options: LoadOptions,
    report: Callable[[str], None],
) -> int:
    """Blocks of the pool, the null block included. `report` gets the lines that an engine prints at start.

    ConfigError when the memory does not hold one request of max_model_len.
    """

    def run(num_tokens: int) -> None:
        run_tokens(model, num_tokens, options.num_seats, limits.max_model_len)

    profile = profiler.measure(run, options.max_num_batched_tokens)
    for line in profile.lines():
        report(line)
    layout = kv_cache_layout(model.config, block_size=options.block_size, dtype=options.dtype)
    size = pool_size([profile], layout.groups, layout.bytes_per_block(), limits)
    for line in size.lines():
        report(line)
    return size.num_blocks


def run_tokens(model: PreTrainedModel, num_tokens: int, max_num_seqs: int, max_model_len: int) -> None:
    """The largest step: so many tokens, in texts that are no longer than one can be, and logits for max_num_seqs of
    them, computed with the attention that the model came with."""
    num_texts = cdiv(num_tokens, max_model_len)
    shape = (num_texts, cdiv(num_tokens, num_texts))
    token_ids = torch.zeros(shape, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        model(input_ids=token_ids, use_cache=False, logits_to_keep=cdiv(max_num_seqs, num_texts))
