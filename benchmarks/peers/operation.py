"""Operations that can be timed, and how: CPU time of the thread, in bursts whose first runs are not counted.

CPU time, because other processes share the cores. Bursts, because contestants take turns: the first runs of a turn find
the other's data in the CPU's caches, which costs the smaller one most.
"""

import tracemalloc
from time import thread_time_ns

# Runs of a burst that count, and those before them that do not.
BURST = 8
WARM_UP = 2


def num_runs(repeats: int) -> int:
    """How often run() is called for that many counted repeats: operations that grow need room for it."""
    return repeats + WARM_UP * -(-repeats // BURST)


class Operation:
    """Something that a contestant does again and again. Only run() is timed.

    `warm_up`: runs at the start of each turn that do not count, at most WARM_UP.
    """

    warm_up = WARM_UP

    def before(self) -> None:
        """Puts things in place for the next run."""

    def run(self) -> None:
        raise NotImplementedError

    def after(self) -> None:
        """Clears up after a run, so that the next one starts from the same state."""

    def measured(self, elapsed_ns: int) -> float:
        """What one run is worth. Operations that measure something else than their own time say so here."""
        return float(elapsed_ns)


def burst(operation: Operation, num_counted: int) -> list[float]:
    """The counted runs of one turn, in nanoseconds unless the operation measures something else."""
    return [_measure(operation) for _ in range(operation.warm_up + num_counted)][operation.warm_up :]


def _measure(operation: Operation) -> float:
    operation.before()
    start = thread_time_ns()
    operation.run()
    elapsed = thread_time_ns() - start
    value = operation.measured(elapsed)
    operation.after()
    return value


class Cold(Operation):
    """An operation before whose runs more memory is touched than the CPU's caches next to the core hold, as an engine
    has it when the model runs in between on the same core.
    """

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self._memory = bytearray(64 << 20)

    def before(self) -> None:
        self._operation.before()
        self._memory[::64] = bytes(len(self._memory) // 64)

    def run(self) -> None:
        self._operation.run()

    def after(self) -> None:
        self._operation.after()


class Builder(Operation):
    """Builds a large thing, and drops it after the run."""

    def __init__(self) -> None:
        self._built: object = None

    def build(self) -> object:
        raise NotImplementedError

    def run(self) -> None:
        self._built = self.build()

    def after(self) -> None:
        self._built = None


class MemoryOf(Operation):
    """Bytes that what is built takes of Python's memory. Much slower than building it: every allocation is noted."""

    warm_up = 0

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._num_bytes = 0

    def run(self) -> None:
        tracemalloc.start()
        self._builder.run()
        self._num_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    def after(self) -> None:
        self._builder.after()

    def measured(self, elapsed_ns: int) -> float:
        return float(self._num_bytes)
