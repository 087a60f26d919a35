"""MemoryProfiler: how much memory is left for the KV cache, measured once, at start.

    available = ceil(gpu_memory_utilization * total) - weights - activation peak - other

    profiler = MemoryProfiler(CpuMemory())            # the share must be free
    ... load the model ...
    profiler.weights_loaded()
    profile = profiler.measure(run, 8192)             # run(8192) computes a step of max_num_batched_tokens tokens

With `kv_cache_memory_bytes` nothing is measured, nothing is run, and the share does not matter.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvledger.core.units import require_positive
from kvledger.engine.memory_device import MemoryDevice
from kvledger.errors import KVLedgerError, wrong_value
from kvledger.plan.gpus import GIB
from kvledger.plan.memory import MeasuredMemory

DEFAULT_UTILIZATION = 0.92


@dataclass(frozen=True)
class MemoryProfile:
    """One worker's memory, in bytes. `requested_bytes`: its share of the device. `other_bytes`: what the process held
    there before the weights, and what is used outside of the framework since. `available_bytes`: for the KV cache;
    negative when the rest takes more than the share. Where it was given, it is all that is known (`is_given`).
    """

    device: str
    total_bytes: int
    requested_bytes: int
    weight_bytes: int
    activation_bytes: int
    other_bytes: int
    available_bytes: int
    is_given: bool = False

    def measured(self) -> MeasuredMemory:
        """The same for `kvledger plan`, which then estimates nothing of it."""
        if self.is_given:
            return MeasuredMemory(total_bytes=self.total_bytes, available_bytes=self.available_bytes)
        return MeasuredMemory(
            total_bytes=self.total_bytes,
            weight_bytes=self.weight_bytes,
            activation_bytes=self.activation_bytes,
            graph_bytes=0,
            other_bytes=self.other_bytes,
        )

    def lines(self) -> list[str]:
        """What a worker prints at start. `kvledger plan --from-log` reads it."""
        available = f"Available KV cache memory: {self.available_bytes / GIB:.2f} GiB"
        if self.is_given:
            return [f"{available} on {self.device}, as given by kv_cache_memory_bytes; nothing was measured"]
        return [
            f"Memory of {self.device}: {self.requested_bytes / GIB:.2f} of {self.total_bytes / GIB:.2f} GiB are this "
            f"worker's: weights {self.weight_bytes / GIB:.2f} GiB, activation peak "
            f"{self.activation_bytes / GIB:.2f} GiB, other {self.other_bytes / GIB:.2f} GiB",
            available,
        ]


class MemoryProfiler:
    """Measures one worker. Made before anything is loaded.

    ConfigError when the share is not free at that moment: another engine on the device, or anything else, has it.
    """

    def __init__(
        self,
        device: MemoryDevice,
        gpu_memory_utilization: float = DEFAULT_UTILIZATION,
        kv_cache_memory_bytes: int | None = None,
    ) -> None:
        self._device = device
        self._given_bytes = kv_cache_memory_bytes
        self._total_bytes = device.total_bytes()
        self._requested_bytes = math.ceil(self._total_bytes * gpu_memory_utilization)
        if kv_cache_memory_bytes is not None:
            require_positive("kv_cache_memory_bytes", kv_cache_memory_bytes)
            return
        if not 0.0 < gpu_memory_utilization <= 1.0:
            problem = "must be above 0 and at most 1"
            raise wrong_value("gpu_memory_utilization", gpu_memory_utilization, problem, "0.92 is the default")
        self._allocated_at_start = device.allocated_bytes()
        self._outside_at_start = device.outside_bytes()
        self._allocated_with_weights: int | None = None
        self._require_free(gpu_memory_utilization)

    def weights_loaded(self) -> None:
        """The model is on the device, and nothing else was done since the profiler was made."""
        if self._given_bytes is None:
            self._allocated_with_weights = self._device.allocated_bytes()

    def measure(self, run: Callable[[int], object], max_num_batched_tokens: int) -> MemoryProfile:
        """Calls run(max_num_batched_tokens), the largest step there can be, and does the sum.

        KVLedgerError before weights_loaded.
        """
        require_positive("max_num_batched_tokens", max_num_batched_tokens)
        if self._given_bytes is not None:
            return MemoryProfile(self._device.name, self._total_bytes, 0, 0, 0, 0, self._given_bytes, is_given=True)
        with_weights = self._allocated_with_weights
        if with_weights is None:
            raise KVLedgerError("measure: the weights are not loaded yet; call weights_loaded() once they are")
        self._device.start_peak()
        run(max_num_batched_tokens)
        weights = max(0, with_weights - self._allocated_at_start)
        activations = max(0, self._device.peak_bytes() - with_weights)
        # Others may have given memory back meanwhile; that is theirs and must not be counted as ours.
        other = self._allocated_at_start + max(0, self._device.outside_bytes() - self._outside_at_start)
        return MemoryProfile(
            device=self._device.name,
            total_bytes=self._total_bytes,
            requested_bytes=self._requested_bytes,
            weight_bytes=weights,
            activation_bytes=activations,
            other_bytes=other,
            available_bytes=self._requested_bytes - weights - activations - other,
        )

    def _require_free(self, utilization: float) -> None:
        # What the process itself holds already is part of its share.
        free = self._device.free_bytes() + self._allocated_at_start
        if free < self._requested_bytes:
            problem = (
                f"{self._requested_bytes / GIB:.2f} GiB of {self._device.name} are asked for, and {free / GIB:.2f} of "
                f"{self._total_bytes / GIB:.2f} GiB are free"
            )
            fix = "lower it or stop what else uses the device; the shares of all engines on one must stay below 1"
            raise wrong_value("gpu_memory_utilization", utilization, problem, fix)
