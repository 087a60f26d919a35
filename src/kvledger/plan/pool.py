"""Groups and memory -> blocks, tokens, concurrency, and whether one request fits.

num_blocks counts the null block, which no request gets; the check that one request fits leaves it out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvledger.core.groups.spec import KVCacheGroupSpec
from kvledger.core.units import cdiv
from kvledger.errors import wrong_value
from kvledger.plan.gpus import GIB
from kvledger.plan.groups import GroupLayout, Specs


@dataclass(frozen=True)
class RequestLimits:
    """What bounds one request: its length, the tokens in flight, and the ranks that share its tokens."""

    max_model_len: int
    max_in_flight_tokens: int
    decode_context_parallel_size: int = 1


def blocks_of_group(group: KVCacheGroupSpec, limits: RequestLimits) -> int:
    """Blocks that one request of full length holds in the group on one rank."""
    length = limits.max_model_len
    if group.spec.shards_over_context:
        length = cdiv(length, limits.decode_context_parallel_size)
    return group.max_admission_blocks(length, limits.max_in_flight_tokens)


def blocks_per_request(groups: Sequence[KVCacheGroupSpec], limits: RequestLimits) -> int:
    """Blocks of one request over all groups, which take them from one pool."""
    return sum(blocks_of_group(group, limits) for group in groups)


def longest_that_fits(longest: int, fits: Callable[[int], bool]) -> int:
    """The largest length up to `longest` that fits, by binary search; 0 when one token does not."""
    if not fits(1):
        return 0
    low, high, found = 1, longest, 1
    while low <= high:
        middle = (low + high) // 2
        if fits(middle):
            found, low = middle, middle + 1
        else:
            high = middle - 1
    return found


@dataclass(frozen=True)
class WorkerPool:
    """The pool of one worker (a pipeline stage; its tensor-parallel ranks are alike)."""

    stage: int
    num_layers: int
    bytes_per_block: int
    available_bytes: int
    num_blocks: int

    def needed_bytes(self, blocks: int) -> int:
        return blocks * self.bytes_per_block

    def fits(self, blocks: int) -> bool:
        """Whether a request of that many blocks fits beside the null block."""
        return self.needed_bytes(blocks) <= self.available_bytes - self.bytes_per_block


def no_memory_message(available_bytes: int, where: str = "") -> str:
    """`where`: " on pipeline stage 1", if it matters."""
    return (
        f"No available memory for the cache blocks: {available_bytes / GIB:,.2f} GiB are left{where} after weights and "
        "activations. Raise gpu_memory_utilization, lower max_num_batched_tokens, or use more or larger GPUs."
    )


def too_long_message(pool: WorkerPool, blocks: int, max_model_len: int, estimated: int, where: str = "") -> str:
    """One request of max_model_len takes `blocks` blocks and the pool has fewer; `estimated` tokens would fit."""
    usable = pool.available_bytes - pool.bytes_per_block
    estimate = f" The estimated maximum model length is {estimated:,}." if estimated else ""
    return (
        f"One request of max_model_len {max_model_len:,} needs {pool.needed_bytes(blocks) / GIB:,.2f} GiB of KV cache"
        f"{where} and {usable / GIB:,.2f} GiB are available.{estimate}"
    )


def capacity_lines(num_tokens: int, max_model_len: int, max_concurrency: float) -> tuple[str, str]:
    """The two lines that an engine prints at start."""
    return (
        f"GPU KV cache size: {num_tokens:,} tokens",
        f"Maximum concurrency for {max_model_len:,} tokens per request: {max_concurrency:.2f}x",
    )


def worker_pool(
    layout: GroupLayout, stage: int, specs: Specs, available_bytes: int, override: int | None
) -> WorkerPool:
    """The pool of the worker that holds these layers. With an override the memory follows from the blocks."""
    per_block = layout.bytes_per_block(specs)
    if not per_block:
        return WorkerPool(stage, 0, 0, available_bytes, 1)
    if override is not None:
        available_bytes = override * per_block
    return WorkerPool(stage, len(specs), per_block, available_bytes, max(available_bytes, 0) // per_block)


def pipeline_stages(num_layers: int, stages: int, partition: tuple[int, ...] = ()) -> list[range]:
    """Decoder layers of each stage: as given, else even, with the rest to the stages before the last, from the back."""
    if partition and sum(partition) != num_layers:
        problem = f"{sum(partition)} layers in all and the model has {num_layers}"
        raise wrong_value("--pp-layer-partition", partition, problem, "give parts that add up to the model's layers")
    if stages > num_layers:
        problem = f"the model has {num_layers} decoder layers"
        raise wrong_value("--pipeline-parallel-size", stages, problem, "use at most one stage for each layer")
    sizes = list(partition) or [num_layers // stages] * stages
    for extra in range(0 if partition else num_layers % stages):
        sizes[-2 - extra if stages > 1 else -1] += 1
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return [range(start, end) for start, end in pairwise(bounds)]
