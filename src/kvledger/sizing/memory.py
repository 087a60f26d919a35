"""Where a card's bytes go: each term with its value, where it came from, and a range when it is an estimate."""

from dataclasses import dataclass

from kvledger.models.facts import ModelFacts
from kvledger.sizing.engine import EngineSettings
from kvledger.sizing.gpus import Gpu
from kvledger.sizing.options import EngineOptions


@dataclass(frozen=True)
class MeasuredMemory:
    """Bytes that the user knows from a log or a profile, for each GPU; None means estimate."""

    total_bytes: int | None = None
    weight_bytes: int | None = None
    activation_bytes: int | None = None
    graph_bytes: int | None = None
    other_bytes: int | None = None


@dataclass(frozen=True)
class MemoryBudget:
    available_bytes: int


def memory_budget(
    facts: ModelFacts, options: EngineOptions, settings: EngineSettings, gpu: Gpu, measured: MeasuredMemory, stage: int
) -> MemoryBudget:
    return MemoryBudget(options.kv_cache_memory_bytes or 0)
