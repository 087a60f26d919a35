"""Weights that stay in the host's memory, by either of vLLM's ways, and host memory for the KV cache."""

from dataclasses import dataclass

from kvledger.plan.gpus import GIB
from kvledger.plan.options import EngineOptions
from kvledger.plan.pool import WorkerPool


@dataclass(frozen=True)
class HostCache:
    """Blocks of the pool that the host keeps besides, for all ranks together."""

    bytes: int
    num_blocks: int


def offloaded_bytes(options: EngineOptions, layer_bytes: int, num_layers: int) -> int:
    """What a GPU does not hold of its stage's decoder layers, which have `layer_bytes` on it.

    `cpu_offload_gb`: that much of them, in their order. `offload_group_size`: the last layers of each group, which pass
    through buffers of as many layers as are fetched in advance.
    """
    if options.offload_group_size:
        group, last = options.offload_group_size, options.offload_num_in_group
        moved = sum(index % group >= group - last for index in range(num_layers))
        kept = min(options.offload_prefetch_step, moved)
        return layer_bytes * (moved - kept) // max(num_layers, 1)
    return min(int(options.cpu_offload_gb * GIB), layer_bytes)


def host_cache(options: EngineOptions, workers: tuple[WorkerPool, ...]) -> HostCache | None:
    """What --kv-offloading-size holds: its bytes are shared by all ranks. None where it is not given."""
    if not options.kv_offloading_size:
        return None
    size = int(options.kv_offloading_size * GIB)
    all_ranks = options.tensor_parallel_size * sum(worker.bytes_per_block for worker in workers)
    return HostCache(size, size // all_ranks if all_ranks else 0)
