"""Accelerators and the bytes that they really have, from a table with its sources (data/gpus.tsv)."""

import csv
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

from kvledger.errors import ConfigError, wrong_value

TABLE = "data/gpus.tsv"
UNSOURCED = "from memory"
GIB = 1 << 30
MIB = 1 << 20

# What people write -> the row that is meant when several match. The plan notes which one was taken.
USUAL: dict[str, str] = {
    "a100": "NVIDIA A100-SXM4-80GB",
    "a10080gb": "NVIDIA A100-SXM4-80GB",
    "a10040gb": "NVIDIA A100-SXM4-40GB",
    "h100": "NVIDIA H100 80GB HBM3 (SXM)",
    "h100sxm": "NVIDIA H100 80GB HBM3 (SXM)",
    "h10080gb": "NVIDIA H100 80GB HBM3 (SXM)",
    "a10": "NVIDIA A10",
    "l40": "NVIDIA L40",
    "l4": "NVIDIA L4",
    "v100": "Tesla V100 16GB SXM2",
    "gh200": "NVIDIA GH200 96GB",
    "b200": "NVIDIA B200",
    "b300": "NVIDIA B300 SXM",
    "rtx6000": "NVIDIA RTX 6000 Ada Generation",
    "rtx5000": "NVIDIA RTX 5000 Ada Generation",
    "rtxpro6000": "NVIDIA RTX PRO 6000 Blackwell (Server/Workstation)",
    "rtxpro5000": "NVIDIA RTX PRO 5000 Blackwell 48GB",
    "jetsonthor": "NVIDIA Jetson AGX Thor",
    "jetsonorin": "NVIDIA Jetson AGX Orin 64GB",
    "dgxspark": "NVIDIA GB10 / DGX Spark",
    "mi300": "AMD Instinct MI300X",
}


PROCESSOR = "CPU"
# Words in the names of cards that share the machine's memory, and of those of desks and workstations.
UNIFIED = ("GB10", "Spark", "Thor", "Orin", "Strix", "Apple")
WORKSTATION = ("RTX", "GeForce", "PCIe")


@dataclass(frozen=True)
class Gpu:
    """One card. `total_bytes`: what CUDA reports, which the utilization is a share of; its range where it varies.

    `compute_capability` 0: not a CUDA card. `sourced`: its memory was looked up, not remembered.
    `bandwidth_bytes_s` and `peak_flops` (dense, 16 bits): 0 where they are not known.
    """

    name: str
    total_bytes: int
    low_bytes: int
    high_bytes: int
    compute_capability: float
    source: str
    sourced: bool
    bandwidth_bytes_s: float = 0.0
    peak_flops: float = 0.0

    @property
    def shares_memory(self) -> bool:
        """Processor and card have one memory."""
        return any(word in self.name for word in UNIFIED)

    @property
    def is_processor(self) -> bool:
        """A CPU server instead of a card."""
        return self.name == PROCESSOR

    @property
    def is_datacenter(self) -> bool:
        """Cards of a server are joined by NVLink; workstation cards are not."""
        return self.name.startswith("NVIDIA") and not any(word in self.name for word in WORKSTATION)


@cache
def gpus() -> tuple[Gpu, ...]:
    """Every card of the table whose memory is known."""
    text = (files("kvledger.plan") / TABLE).read_text()
    return tuple(gpu for row in csv.DictReader(text.splitlines(), delimiter="\t") if (gpu := gpu_of(row)) is not None)


def gpu_of(row: dict[str, str]) -> Gpu | None:
    seen = row["cuda_total_GiB_seen"]
    figures = [float(figure) for figure in re.findall(r"\d+\.\d+|\d{2,}", seen.split("(")[0].split("on older")[0])]
    common = re.search(r"\((\d+\.\d+)", seen)
    driver_bytes = int(row["driver_total_bytes"] or 0)
    if figures:
        low, high = int(min(figures) * GIB), int(max(figures) * GIB)
        total = int(float(common.group(1)) * GIB) if common and "common" in seen else (low + high) // 2
    elif driver_bytes:
        low, high, total = int(driver_bytes * 0.96), driver_bytes, int(driver_bytes * 0.985)
    else:
        return None
    capability = re.fullmatch(r"\d+\.\d+", row["compute_capability"])
    source = row["source"]
    return Gpu(
        row["name"],
        total,
        low,
        high,
        float(capability.group()) if capability else 0.0,
        source,
        UNSOURCED not in source.split("; speeds:")[0],
        first_number(row["bandwidth_GB_s"]) * 1e9,
        first_number(row["bf16_dense_TFLOPs"]) * 1e12,
    )


def first_number(text: str) -> float:
    """The number at the start of a cell, 0 where there is none. What follows says where it is from."""
    number = re.match(r"\d+(?:\.\d+)?", text)
    return float(number.group()) if number else 0.0


def squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("nvidia", "").replace("tesla", "").replace("geforce", ""))


# Bytes of a card by the GB on its box: what error correction and the driver take, over the cards of the table.
SHARE_OF_BOX = (0.915, 0.97, 0.998)
# Compute capability of a card of which only the size is known.
USUAL_CAPABILITY = 8.9
BY_SIZE = "its size, given by the user"
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:GB|GiB|G)", re.IGNORECASE)


def custom_gpu(total_bytes: int, low: int = 0, high: int = 0) -> Gpu:
    """A card that is known by its memory alone: a CUDA card of the Ada generation."""
    return Gpu(
        f"a card of {total_bytes / GIB:.1f} GiB",
        total_bytes,
        low or total_bytes,
        high or total_bytes,
        USUAL_CAPABILITY,
        BY_SIZE,
        sourced=True,
    )


def processor(total_bytes: int) -> Gpu:
    """A CPU server with that much memory on a node."""
    return Gpu(PROCESSOR, total_bytes, total_bytes, total_bytes, 0.0, "the log", sourced=True)


def cards_of_total(total_bytes: int) -> list[Gpu]:
    """Cards of the table that report that much memory, as it is rounded in a log."""
    return [gpu for gpu in gpus() if gpu.low_bytes - MIB * 16 <= total_bytes <= gpu.high_bytes + MIB * 16]


def gpu_of_size(box_gb: float) -> Gpu:
    """A card with that many GB on its box."""
    low, usual, high = (int(box_gb * GIB * share) for share in SHARE_OF_BOX)
    return custom_gpu(usual, low, high)


def words_of(name: str) -> set[str]:
    """The words of a name, without those that tell no card from another."""
    return {squeezed(word) for word in re.split(r"[\s/()-]+", name)} - {""}


def nearest(found: list[Gpu], asked: str) -> list[Gpu]:
    """Those whose name ends with what was asked, so that 5070 is not the 5070 Ti; all where none does."""
    return [gpu for gpu in found if squeezed(gpu.name).endswith(asked)] or found


def find_gpu(name: str) -> Gpu:
    """The card of that name, part of a name or size (24GB). ConfigError lists the candidates when none or several
    differ.
    """
    size = SIZE.fullmatch(name.strip())
    if size is not None:
        return gpu_of_size(float(size.group(1)))
    asked = squeezed(name)
    if not asked:
        raise wrong_value("--gpu", name, "names no card", "give one like H100, or its size, like 24GB")
    usual = USUAL.get(asked)
    for gpu in gpus():
        if gpu.name == usual or squeezed(gpu.name) == asked:
            return gpu
    words = [gpu for gpu in gpus() if asked in words_of(gpu.name) or words_of(name) <= words_of(gpu.name)]
    found = nearest(words or [gpu for gpu in gpus() if asked in squeezed(gpu.name)], asked)
    if found and max(gpu.total_bytes for gpu in found) - min(gpu.total_bytes for gpu in found) <= GIB // 4:
        return found[0]
    names = [gpu.name for gpu in found] or get_close_matches(name, [gpu.name for gpu in gpus()], 8, 0.3)
    problem = "several cards match" if found else f"not in the table of {len(gpus())} cards"
    fix = "use one of: " if found else "give its size (24GB), --kv-cache-memory-bytes instead, or a card like "
    raise ConfigError(f"--gpu={name!r}: {problem}; {fix}{', '.join(names)}")
