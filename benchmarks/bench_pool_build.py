"""What does a pool cost to build, how much memory does it take, and how long is a full garbage collection over it?"""

import gc
import tracemalloc
from collections.abc import Callable
from statistics import median
from time import thread_time_ns

from vllm.v1.core.block_pool import BlockPool as TheirPool

from benchmarks.measure import Row, Side, compare
from kvledger import BlockPool

Build = Callable[[int], object]


def build_ours(num_blocks: int) -> object:
    return BlockPool(num_blocks)


def build_theirs(num_blocks: int) -> object:
    return TheirPool(num_blocks, enable_caching=True, hash_block_size=16)


class Builder(Side):
    def __init__(self, build: Build, num_blocks: int) -> None:
        self.build = build
        self.num_blocks = num_blocks

    def run(self) -> None:
        self.pool = self.build(self.num_blocks)

    def after(self) -> None:
        self.pool = None


def megabytes(build: Build, num_blocks: int) -> float:
    tracemalloc.start()
    pool = build(num_blocks)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del pool
    return size / 1e6


def collection_us(build: Build, num_blocks: int, repeats: int) -> float:
    """A full collection over the pool and nothing else."""
    gc.collect()
    gc.freeze()
    pool = build(num_blocks)
    times: list[float] = []
    for _ in range(repeats):
        start = thread_time_ns()
        gc.collect()
        times.append((thread_time_ns() - start) / 1000)
    gc.unfreeze()
    del pool
    return median(times)


def run(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for num_blocks, name in ((10_000, "10k blocks"), (100_000, "100k blocks"), (1_000_000, "1M blocks")):
        if quick and num_blocks == 1_000_000:
            continue
        repeats = 3 if quick or num_blocks == 1_000_000 else 9
        sides = Builder(build_ours, num_blocks), Builder(build_theirs, num_blocks)
        rows.append(compare("building a pool", name, *sides, repeats))
    ours, theirs = (megabytes(build, num_blocks) for build in (build_ours, build_theirs))
    rows.append(Row("memory of a pool", name, "MB", ours, theirs, 0.0, 0.0, 1))
    ours, theirs = (collection_us(build, num_blocks, 3) for build in (build_ours, build_theirs))
    rows.append(Row("a full garbage collection over it", name, "us", ours, theirs, 0.0, 0.0, 3))
    return rows
