"""StepTimeModel: how long one engine step takes on a GPU, by the roofline. The clock of the simulated time.

A step over requests that compute new_i tokens each, after computed_i tokens that are computed already:

    flops  = 2 * active parameters * sum(new_i)                            every weight, one multiply and one add
           + flops a pair * sum(pairs_i)                                   attention, q.k and p.v, for layers of a reach
    bytes  = weight bytes + KV bytes per token * sum(context_i)            every weight once, every context once
           + 2 * state bytes * requests                                    recurrent states, read and written
    time   = step overhead + max(flops / (FLOPS_EFFICIENCY * peak), bytes / (BANDWIDTH_EFFICIENCY * bandwidth))

A layer that reads everything has new_i * (computed_i + (new_i + 1) / 2) pairs and a context of computed_i + new_i;
windows and chunks have less (LocalReach). Of the routed experts, a step of n tokens reads the share
1 - (1 - experts per token / experts) ** n. Several GPUs share weights, KV cache and work evenly, and what they say to
each other is free. It is a model of what the scheduler's decisions cost relative to each other; step_table.py fits it
to steps that were measured.
"""

from abc import ABC, abstractmethod
from typing import Final

import msgspec

from kvledger.core.extents.step_clock import StepClock
from kvledger.plan.gpus import Gpu

FLOPS_EFFICIENCY: Final = 0.6
BANDWIDTH_EFFICIENCY: Final = 0.8


class AttentionWork(msgspec.Struct, frozen=True):
    """Layers of one reach (`window` or `chunk` tokens; both 0: all), added up over all GPUs."""

    flops_per_pair: float
    bytes_per_token: float
    window: int = 0
    chunk: int = 0


class StepWork(msgspec.Struct, frozen=True):
    """What a model costs, over all GPUs.

    `expert_bytes`: the part of weight_bytes that is routed experts; `expert_share`: of them, what one token is sent to.
    `state_bytes`: recurrent states of one request.
    """

    num_parameters: int
    num_active_parameters: int
    weight_bytes: int
    expert_bytes: int = 0
    expert_share: float = 1.0
    attention: tuple[AttentionWork, ...] = ()
    state_bytes: int = 0


class LocalReach(ABC):
    """Layers that read a part of the context: what num_new tokens after num_computed read and look at."""

    @abstractmethod
    def context(self, num_new: int, num_computed: int) -> int:
        """Tokens read, the new ones included."""

    @abstractmethod
    def pairs(self, num_new: int, num_computed: int) -> float:
        """Pairs of a query and a key that it sees."""


class WindowReach(LocalReach):
    """Every token sees the last `size` tokens, itself included."""

    def __init__(self, size: int) -> None:
        self._size: Final = size

    def context(self, num_new: int, num_computed: int) -> int:
        before = self._size - 1
        return (num_computed if num_computed < before else before) + num_new

    def pairs(self, num_new: int, num_computed: int) -> float:
        if num_new == 1:
            return num_computed + 1.0 if num_computed < self._size else float(self._size)
        # The first tokens see less than a window, the others all of it.
        num_growing = min(max(0, self._size - num_computed), num_new)
        return num_pairs(num_growing, num_computed) + (num_new - num_growing) * self._size


class ChunkReach(LocalReach):
    """Every token sees the tokens of its chunk of `size` tokens up to itself."""

    def __init__(self, size: int) -> None:
        self._size: Final = size

    def context(self, num_new: int, num_computed: int) -> int:
        return num_computed % self._size + num_new

    def pairs(self, num_new: int, num_computed: int) -> float:
        size = self._size
        start = num_computed % size
        num_whole, rest = divmod(start + num_new, size)
        return num_whole * num_pairs(size, 0) + num_pairs(rest, 0) - num_pairs(start, 0)


class StepTimeModel:
    """Seconds of a step, from a few numbers of it. `reaches`: of the layers that read less than everything."""

    def __init__(
        self,
        work: StepWork,
        gpu: Gpu,
        num_gpus: int,
        overhead_seconds: float,
        *,
        flops_efficiency: float = FLOPS_EFFICIENCY,
        bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY,
    ) -> None:
        flops_s = gpu.peak_flops * flops_efficiency * num_gpus
        bytes_s = gpu.bandwidth_bytes_s * bandwidth_efficiency * num_gpus
        full = [part for part in work.attention if not part.window and not part.chunk]
        local = [part for part in work.attention if part.window or part.chunk]
        # Of all but the layers that read less.
        self.clock: Final = StepClock(
            overhead_seconds,
            seconds_per_token=2 * work.num_active_parameters / flops_s,
            seconds_per_pair=sum(part.flops_per_pair for part in full) / flops_s,
            seconds_weights=work.weight_bytes / bytes_s,
            seconds_per_context_token=sum(part.bytes_per_token for part in full) / bytes_s,
            seconds_per_request=2 * work.state_bytes / bytes_s,
            seconds_experts=work.expert_bytes / bytes_s,
            experts_missed=1.0 - work.expert_share,
        )
        self.reaches: Final[list[LocalReach]] = [
            WindowReach(part.window) if part.window else ChunkReach(part.chunk) for part in local
        ]
        self._local_costs: Final = [(part.bytes_per_token / bytes_s, part.flops_per_pair / flops_s) for part in local]

    def seconds(
        self,
        num_new: int,
        num_context: int,
        num_pairs: float,
        num_requests: int = 0,
        local: list[tuple[int, float]] | None = None,
    ) -> float:
        """`num_new`: tokens computed; `num_context`: sum(computed_i + new_i); `num_pairs`: query-key pairs.

        `local`: context and pairs of each of the reaches.
        """
        compute, read = self.sides(num_new, num_context, num_pairs, num_requests, local)
        return self.clock.overhead + (compute if compute > read else read)

    def sides(
        self,
        num_new: int,
        num_context: int,
        num_pairs: float,
        num_requests: int = 0,
        local: list[tuple[int, float]] | None = None,
    ) -> tuple[float, float]:
        """Seconds of what is computed, and of what is read; the longer one counts."""
        compute = self.clock.compute(num_new, num_pairs)
        read = self.clock.read(num_new, num_context, num_requests)
        if local:
            for (context, pairs), (byte_seconds, flop_seconds) in zip(local, self._local_costs, strict=True):
                read += context * byte_seconds
                compute += pairs * flop_seconds
        return compute, read


def num_pairs(num_new: int, num_computed: int) -> float:
    """Query-key pairs of a causal chunk of num_new tokens after num_computed."""
    return num_new * (num_computed + (num_new + 1) / 2)
