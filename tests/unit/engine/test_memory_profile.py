"""What is left for the KV cache: measured with real allocations on the CPU, and on a card that is pure bookkeeping."""

import mmap
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvledger.core.groups.spec import FullAttentionSpec
from kvledger.engine.memory_device import CpuMemory, CudaMemory, MemoryDevice
from kvledger.engine.pool_size import PoolSize, pool_size
from kvledger.engine.profile import MemoryProfile, MemoryProfiler
from kvledger.errors import ConfigError, KVLedgerError
from kvledger.plan.logs import read_log
from kvledger.plan.memory import MeasuredMemory
from kvledger.plan.pool import RequestLimits
from tests.groups import full, groups_of, window

MIB = 1 << 20
GIB = 1 << 30


class Card(MemoryDevice):
    """A device of 80 GiB that keeps books: what this process allocates, and what is used beside that."""

    name = "card"

    def __init__(self, used_by_others: int = 0) -> None:
        self.allocated = 0
        self.peak = 0
        self.outside = used_by_others

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def total_bytes(self) -> int:
        return 80 * GIB

    def free_bytes(self) -> int:
        return self.total_bytes() - self.allocated - self.outside

    def allocated_bytes(self) -> int:
        return self.allocated

    def outside_bytes(self) -> int:
        return self.outside

    def start_peak(self) -> None:
        self.peak = self.allocated

    def peak_bytes(self) -> int:
        return self.peak


def activations(card: Card, size: int) -> Callable[[int], None]:
    """A step that allocates so many bytes for each token and gives them back."""

    def run(num_tokens: int) -> None:
        card.allocate(size * num_tokens)
        card.allocated -= size * num_tokens

    return run


def measured_card(weights: int, activation: int, other: int = 0, utilization: float = 0.9) -> MemoryProfile:
    card = Card()
    profiler = MemoryProfiler(card, utilization)
    card.allocate(weights)
    card.outside += other
    profiler.weights_loaded()
    return profiler.measure(activations(card, activation // 1024), 1024)


# The sum


def test_what_weights_activations_and_the_rest_leave_of_the_share() -> None:
    profile = measured_card(16 * GIB, 2 * GIB, GIB)
    assert profile.requested_bytes == 72 * GIB
    assert (profile.weight_bytes, profile.activation_bytes, profile.other_bytes) == (16 * GIB, 2 * GIB, GIB)
    assert profile.available_bytes == 53 * GIB


def test_the_peak_is_that_of_the_profile_run_and_not_of_loading() -> None:
    card = Card()
    profiler = MemoryProfiler(card, 0.5)
    card.allocate(30 * GIB)
    card.allocated -= 20 * GIB  # a checkpoint that was converted
    profiler.weights_loaded()
    profile = profiler.measure(activations(card, MIB), 1024)
    assert (profile.weight_bytes, profile.activation_bytes) == (10 * GIB, GIB)


def test_the_profile_run_has_the_largest_step_there_can_be() -> None:
    sizes: list[int] = []
    profiler = MemoryProfiler(Card())
    profiler.weights_loaded()
    profiler.measure(sizes.append, 8192)
    assert sizes == [8192]


def test_what_the_process_held_before_and_what_others_release_are_not_lost() -> None:
    card = Card(used_by_others=8 * GIB)
    card.allocate(GIB)
    profiler = MemoryProfiler(card, 0.5)
    profiler.weights_loaded()
    card.outside -= 4 * GIB
    profile = profiler.measure(activations(card, 0), 1)
    assert (profile.weight_bytes, profile.other_bytes, profile.available_bytes) == (0, GIB, 39 * GIB)


def test_a_share_that_is_not_free_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError) as caught:
        MemoryProfiler(Card(used_by_others=30 * GIB), 0.9)
    assert str(caught.value) == (
        "gpu_memory_utilization=0.9: 72.00 GiB of card are asked for, and 50.00 of 80.00 GiB are free; lower it or "
        "stop what else uses the device; the shares of all engines on one must stay below 1"
    )
    assert MemoryProfiler(Card(used_by_others=30 * GIB), 0.6)


@pytest.mark.parametrize("utilization", [0.0, -0.1, 1.1])
def test_what_is_no_share_is_refused(utilization: float) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization="):
        MemoryProfiler(Card(), utilization)


def test_a_given_size_measures_nothing_runs_nothing_and_ignores_the_share() -> None:
    def run(num_tokens: int) -> None:
        raise AssertionError("nothing is to be run")

    profiler = MemoryProfiler(Card(used_by_others=79 * GIB), 0.9, kv_cache_memory_bytes=3 * GIB)
    profiler.weights_loaded()
    profile = profiler.measure(run, 8192)
    assert (profile.available_bytes, profile.is_given) == (3 * GIB, True)
    assert profile.lines() == [
        "Available KV cache memory: 3.00 GiB on card, as given by kv_cache_memory_bytes; nothing was measured"
    ]


def test_misuse_is_an_error() -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes=0"):
        MemoryProfiler(Card(), kv_cache_memory_bytes=0)
    profiler = MemoryProfiler(Card())
    with pytest.raises(KVLedgerError, match=r"call weights_loaded\(\)"):
        profiler.measure(lambda num_tokens: None, 8)
    profiler.weights_loaded()
    with pytest.raises(ConfigError, match="max_num_batched_tokens=0"):
        profiler.measure(lambda num_tokens: None, 0)


# What is printed is what `kvledger plan` reads


def test_the_start_up_lines_can_be_read_back() -> None:
    profile = measured_card(16 * GIB, 2 * GIB, GIB)
    lines = profile.lines()
    assert lines == [
        "Memory of card: 72.00 of 80.00 GiB are this worker's: weights 16.00 GiB, activation peak 2.00 GiB, other "
        "1.00 GiB",
        "Available KV cache memory: 53.00 GiB",
    ]
    facts = read_log("\n".join(lines))
    assert (facts.available_gib, facts.weights_gib) == (53.0, 16.0)
    assert profile.measured() == MeasuredMemory(
        total_bytes=80 * GIB, weight_bytes=16 * GIB, activation_bytes=2 * GIB, graph_bytes=0, other_bytes=GIB
    )


# The pool


LLAMA = groups_of(FullAttentionSpec(16, 8, 128))
LIMITS = RequestLimits(131_072, 8192)


def with_memory(available_bytes: int) -> MemoryProfile:
    return replace(measured_card(GIB, GIB), available_bytes=available_bytes)


def test_the_worked_example() -> None:
    """Llama-3.1-8B on 80 GiB: 54.6 GiB for the cache, 2 MiB a block."""
    size = pool_size([with_memory(55_910 * MIB)], LLAMA, 2 * MIB, LIMITS)
    assert size == PoolSize(27_955, 2 * MIB, 8192, 131_072)
    assert size.lines() == [
        "GPU KV cache size: 447,280 tokens",
        "Maximum concurrency for 131,072 tokens per request: 3.41x",
    ]


def test_all_workers_get_the_smallest_count() -> None:
    workers = [with_memory(gib * GIB) for gib in (20, 18, 19)]
    assert pool_size(workers, LLAMA, 2 * MIB, LIMITS).num_blocks == 9 * 1024


def test_groups_share_the_pool() -> None:
    groups = groups_of(full(16), window(1024, 16))
    # 256 blocks in the full group, and (1023 + 2048) / 16 rounded up, and 1, in the windowed one.
    assert pool_size([with_memory(GIB)], groups, MIB, RequestLimits(4096, 2048)).blocks_per_request == 256 + 193


@pytest.mark.parametrize("available", [-GIB, 0, 2 * MIB])
def test_without_memory_there_is_no_pool(available: int) -> None:
    with pytest.raises(ConfigError, match="No available memory for the cache blocks"):
        pool_size([with_memory(20 * GIB), with_memory(available)], LLAMA, 2 * MIB, LIMITS)


def test_a_request_that_does_not_fit_is_an_error_with_the_length_that_does() -> None:
    with pytest.raises(ConfigError) as caught:
        pool_size([with_memory(101 * 2 * MIB)], LLAMA, 2 * MIB, LIMITS)
    assert str(caught.value) == (
        "One request of max_model_len 131,072 needs 16.00 GiB of KV cache and 0.20 GiB are available. The estimated "
        "maximum model length is 1,600."
    )


def test_an_engine_without_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="an engine needs a worker"):
        pool_size([], LLAMA, 2 * MIB, LIMITS)


# Real memory


def touched(size: int) -> mmap.mmap:
    """So many bytes that are really there, and go back to the system when they are closed."""
    memory = mmap.mmap(-1, size)
    for position in range(0, size, mmap.PAGESIZE):
        memory[position] = 1
    return memory


def test_on_the_cpu_weights_and_activations_are_what_was_really_allocated() -> None:
    profiler = MemoryProfiler(CpuMemory(), 0.01)
    weights = touched(48 * MIB)
    profiler.weights_loaded()

    def run(num_tokens: int) -> None:
        touched(num_tokens * MIB).close()

    profile = profiler.measure(run, 96)
    weights.close()
    assert profile.weight_bytes == pytest.approx(48 * MIB, abs=4 * MIB)
    # A kernel that cannot forget an earlier peak gives that; it is never too low.
    assert profile.activation_bytes >= 92 * MIB
    assert profile.other_bytes > MIB
    rest = profile.weight_bytes + profile.activation_bytes + profile.other_bytes
    assert profile.available_bytes == profile.requested_bytes - rest


def machine(root: Path, **files: str) -> CpuMemory:
    """A machine of 16 GiB, 8 GiB of them available, with these files on top."""
    texts = {
        "proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1024 kB\nMemAvailable:    8388608 kB\n",
        "proc/self/status": "Name:\tpython\nVmHWM:\t  204800 kB\nVmRSS:\t  102400 kB\n",
        **files,
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return CpuMemory(root)


def test_a_machine_without_a_container(tmp_path: Path) -> None:
    device = machine(tmp_path)
    assert (device.total_bytes(), device.free_bytes()) == (16 * GIB, 8 * GIB)
    assert (device.allocated_bytes(), device.peak_bytes(), device.outside_bytes()) == (100 * MIB, 200 * MIB, 0)


@pytest.mark.parametrize(
    ("limit", "use", "stat"),
    [
        ("memory.max", "memory.current", ("memory.stat", "inactive_file")),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", ("memory/memory.stat", "total_inactive_file")),
    ],
)
def test_a_container_has_what_its_limit_allows(tmp_path: Path, limit: str, use: str, stat: tuple[str, str]) -> None:
    cgroup = "sys/fs/cgroup/"
    files = {cgroup + limit: f"{4 * GIB}\n", cgroup + use: f"{3 * GIB}\n"}
    # Of the 3 GiB in use, 1 GiB are cached files that the kernel can drop.
    files[cgroup + stat[0]] = f"anon {2 * GIB}\n{stat[1]} {GIB}\n"
    device = machine(tmp_path, **files)
    assert (device.total_bytes(), device.free_bytes()) == (4 * GIB, 2 * GIB)


@pytest.mark.parametrize("limit", ["max\n", "9223372036854771712\n"])
def test_a_container_without_a_limit_is_the_machine(tmp_path: Path, limit: str) -> None:
    device = machine(tmp_path, **{"sys/fs/cgroup/memory.max": limit, "sys/fs/cgroup/memory.current": f"{3 * GIB}\n"})
    assert (device.total_bytes(), device.free_bytes()) == (16 * GIB, 8 * GIB)


def test_a_system_that_does_not_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device='cpu': memory cannot be measured on"):
        CpuMemory(tmp_path)


def test_a_cuda_device_that_is_not_there_is_refused() -> None:
    message = "torch sees no such CUDA device" if find_spec("torch") else "torch is missing"
    with pytest.raises(ConfigError, match=f"device='cuda:99': {message}"):
        CudaMemory(99)
