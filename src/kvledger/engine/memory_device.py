"""MemoryDevice: what a worker must know of the memory in which its tensors lie, for the CPU and for CUDA.

allocated   bytes that this process holds on the device: weights, activations, tensors
outside     bytes in use there that `allocated` does not count: a CUDA context, communication buffers, other processes
free        bytes that nobody uses
"""

import sys
from abc import ABC, abstractmethod
from pathlib import Path

from kvledger.errors import ConfigError, wrong_value

KIB = 1 << 10
# What an unlimited container says: a number no machine has.
UNLIMITED = 1 << 60


class MemoryDevice(ABC):
    """One device of one worker. All sizes in bytes."""

    name: str

    @abstractmethod
    def total_bytes(self) -> int:
        """All of the device's memory that this process may ever use."""

    @abstractmethod
    def free_bytes(self) -> int: ...

    @abstractmethod
    def allocated_bytes(self) -> int: ...

    @abstractmethod
    def outside_bytes(self) -> int: ...

    @abstractmethod
    def start_peak(self) -> None:
        """Forgets what was allocated at most so far."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most that was allocated at a time since start_peak."""


class CpuMemory(MemoryDevice):
    """Main memory, as Linux counts it: the process by its resident pages, the machine or its container by what is
    available. `root`: where /proc and /sys are mounted."""

    name = "cpu"

    def __init__(self, root: Path = Path("/")) -> None:
        self._meminfo = root / "proc/meminfo"
        self._status = root / "proc/self/status"
        self._clear_refs = root / "proc/self/clear_refs"
        self._cgroup = root / "sys/fs/cgroup"
        if not self._meminfo.exists() or not self._status.exists():
            raise wrong_value(
                "device", "cpu", f"memory cannot be measured on {sys.platform}", "give a fixed size instead"
            )

    def total_bytes(self) -> int:
        return min(_field(self._meminfo, "MemTotal"), self._container_limit())

    def free_bytes(self) -> int:
        free = _field(self._meminfo, "MemAvailable")
        limit = self._container_limit()
        return min(free, limit - self._container_use()) if limit < UNLIMITED else free

    def allocated_bytes(self) -> int:
        return _field(self._status, "VmRSS")

    def outside_bytes(self) -> int:
        """Nothing: whatever the process holds is resident."""
        return 0

    def start_peak(self) -> None:
        """Where the kernel refuses, the peak is that of the whole life of the process: more, never less."""
        try:
            self._clear_refs.write_text("5")
        except OSError:
            return

    def peak_bytes(self) -> int:
        return max(_field(self._status, "VmHWM"), self.allocated_bytes())

    def _container_limit(self) -> int:
        """Bytes that the container may use, by cgroup version 2 or 1; UNLIMITED without a limit."""
        for file in ("memory.max", "memory/memory.limit_in_bytes"):
            text = _text(self._cgroup / file)
            if text.isdigit():
                return min(int(text), UNLIMITED)
        return UNLIMITED

    def _container_use(self) -> int:
        """Bytes that the container uses and the kernel could not simply take back."""
        for use, stat, cached in (
            ("memory.current", "memory.stat", "inactive_file"),
            ("memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
        ):
            text = _text(self._cgroup / use)
            if text.isdigit():
                pairs = dict(line.split() for line in _text(self._cgroup / stat).splitlines())
                return int(text) - int(pairs.get(cached, 0))
        return 0


class CudaMemory(MemoryDevice):
    """One CUDA device, as the driver and torch's allocator count it."""

    def __init__(self, index: int = 0) -> None:
        try:
            import torch
        except ImportError:
            problem, fix = "torch is missing", "pip install 'kvledger[torch]', or use cpu"
            raise wrong_value("device", f"cuda:{index}", problem, fix) from None
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            problem = "torch sees no such CUDA device here"
            raise wrong_value("device", f"cuda:{index}", problem, "use another one, or cpu")
        self.name = f"cuda:{index}"
        self._cuda = torch.cuda
        self._index = index

    def total_bytes(self) -> int:
        return int(self._cuda.mem_get_info(self._index)[1])

    def free_bytes(self) -> int:
        self._cuda.synchronize(self._index)
        self._cuda.empty_cache()
        return int(self._cuda.mem_get_info(self._index)[0])

    def allocated_bytes(self) -> int:
        return int(self._cuda.memory_allocated(self._index))

    def outside_bytes(self) -> int:
        free = self.free_bytes()
        return self.total_bytes() - free - int(self._cuda.memory_reserved(self._index))

    def start_peak(self) -> None:
        self._cuda.reset_peak_memory_stats(self._index)

    def peak_bytes(self) -> int:
        return int(self._cuda.max_memory_allocated(self._index))


def _field(file: Path, name: str) -> int:
    """A size in a file of lines like "MemTotal:  24576 kB"."""
    for line in file.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * KIB
    raise ConfigError(f"{file} has no line {name}; memory cannot be measured here, give a fixed size instead")


def _text(file: Path) -> str:
    """The file's text without its line end, or nothing where it does not exist."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
