"""What contestants do for each question, the same for all of them: made of the parts that each brings (parts.py)."""

import gc
from collections.abc import Callable
from typing import Any, Final

from benchmarks.peers.operation import Builder, Cold, MemoryOf, Operation, num_runs
from benchmarks.peers.parts import Parts, Serving
from benchmarks.peers.workload import (
    MAX_TOKENS,
    POOL_BLOCKS,
    TABLE_COLUMNS,
    TABLE_ROWS,
    TOKEN_BUDGET,
    blocks_for_decoding,
    decoding_prompts,
    fillers,
    prompts,
    read_prompts,
    slot_batch,
    table_ids,
    traffic,
)

Case = dict[str, Any]


def make_operation(parts: Parts, case: Case) -> Operation:
    """The operation that the case asks for."""
    return _OPERATIONS[case["question"]](parts, case)


class SchedulerStep(Operation):
    def __init__(self, parts: Parts, case: Case) -> None:
        num_running = case["num_running"]
        self._serving: Final = parts.serving(
            blocks_for_decoding(case), num_running, TOKEN_BUDGET, case["num_groups"], case["variant"]
        )
        start_decoding(self._serving, num_running)

    def before(self) -> None:
        """What workers hand over is made outside the timed part."""
        self._sampled = self._serving.sampled()

    def run(self) -> None:
        self._serving.decode(self._sampled)


def start_decoding(serving: Serving, num_running: int) -> None:
    """So many requests run, their prompts computed in one step."""
    for index, prompt in enumerate(decoding_prompts(num_running)):
        serving.add(f"r{index}", prompt, MAX_TOKENS)
    serving.decode(serving.sampled())
    if serving.num_running() != num_running:
        raise RuntimeError("not everything runs")


def _scheduler_step(parts: Parts, case: Case) -> Operation:
    return Cold(SchedulerStep(parts, case)) if case["variant"] == "cold" else SchedulerStep(parts, case)


class DecodeStep(Operation):
    """A call for each request."""

    def __init__(self, parts: Parts, case: Case) -> None:
        self._ledger: Final = parts.decoding_ledger(blocks_for_decoding(case), case["num_groups"])
        decoding = decoding_prompts(case["num_running"])
        self._requests: Final = [self._ledger.request(f"r{index}", prompt) for index, prompt in enumerate(decoding)]
        for request in self._requests:
            self._ledger.admit(request)
            self._ledger.append(request, 7)

    def run(self) -> None:
        allocate = self._ledger.allocate
        for request in self._requests:
            allocate(request, 1)

    def after(self) -> None:
        append = self._ledger.append
        for request in self._requests:
            request.num_computed_tokens += 1
            append(request, 7)


class DecodeStepInOneCall(DecodeStep):
    def run(self) -> None:
        self._ledger.allocate_all(self._requests)


class DecodeStepWithAppend(DecodeStep):
    """Appending the token is timed too: vLLM hashes a block that became full there."""

    def before(self) -> None:
        for request in self._requests:
            request.num_computed_tokens += 1

    def run(self) -> None:
        allocate, append = self._ledger.allocate, self._ledger.append
        for request in self._requests:
            append(request, 7)
            allocate(request, 1)

    def after(self) -> None:
        pass


def _decode_step(parts: Parts, case: Case) -> Operation:
    kinds = {"calls": DecodeStep, "append": DecodeStepWithAppend, "batch": DecodeStepInOneCall}
    return kinds[case["variant"]](parts, case)


class Admission(Operation):
    """Making the request counts only where nothing else needs what is made: see each contestant's unhashed()."""

    def __init__(self, parts: Parts, case: Case) -> None:
        self._ledger: Final = parts.ledger(POOL_BLOCKS, case["hash_name"])
        self._ledger.fill(POOL_BLOCKS - 1)
        self._traffic: Final = traffic(case["num_tokens"], case["hit_percent"])
        # The first of the traffic leaves the shared part behind.
        self._ledger.free(self._ledger.arrive(self._ledger.unhashed(next(self._traffic))))

    def before(self) -> None:
        self._prompt = self._ledger.unhashed(next(self._traffic))

    def run(self) -> None:
        self._request = self._ledger.arrive(self._prompt)

    def after(self) -> None:
        self._ledger.free(self._request)


class Hashing(Operation):
    """A prompt hashed."""

    def __init__(self, parts: Parts, case: Case) -> None:
        self._ledger: Final = parts.ledger(2, case["hash_name"])
        self._traffic: Final = traffic(case["num_tokens"], 0)

    def before(self) -> None:
        self._prompt = self._ledger.unhashed(next(self._traffic))

    def run(self) -> None:
        self._ledger.hashed(self._prompt)


def _admission(parts: Parts, case: Case) -> Operation:
    return Hashing(parts, case) if case["variant"] == "hash" else Admission(parts, case)


class Free(Admission):
    def before(self) -> None:
        self._request = self._ledger.arrive(self._ledger.unhashed(next(self._traffic)))

    def run(self) -> None:
        self._ledger.free(self._request)

    def after(self) -> None:
        pass


class PoolBuild(Builder):
    def __init__(self, parts: Parts, case: Case) -> None:
        super().__init__()
        self._parts: Final = parts
        self._num_blocks: Final[int] = case["num_blocks"]

    def build(self) -> object:
        return self._parts.pool(self._num_blocks)


class CachedPoolBuild(PoolBuild):
    """A ledger whose blocks are all cached and free."""

    def build(self) -> object:
        ledger = self._parts.ledger(self._num_blocks, "xxh3")
        ledger.fill(self._num_blocks - 1)
        return ledger


def _memory(parts: Parts, case: Case) -> Operation:
    return MemoryOf((CachedPoolBuild if case["variant"] == "cached" else PoolBuild)(parts, case))


class Collection(Operation):
    """A full collection over a ledger whose blocks are all held by requests. "frozen": what tools do with theirs."""

    def __init__(self, parts: Parts, case: Case) -> None:
        self._ledger: Final = parts.ledger(case["num_blocks"], "xxh3")
        all_tokens = enumerate(fillers(case["num_blocks"] - 1))
        self._requests: Final = [self._ledger.filler(f"r{index}", tokens) for index, tokens in all_tokens]
        for request in self._requests:
            self._ledger.admit(request)
        if case["variant"] == "frozen":
            gc.freeze()

    def run(self) -> None:
        gc.collect()


class AdmitAndFree(Operation):
    """In a pool of num_blocks, of which num_cached are cached: where that is all of them, each one taken evicts."""

    def __init__(self, parts: Parts, case: Case) -> None:
        self._ledger: Final = parts.ledger(case["num_blocks"])
        self._ledger.fill(min(case["num_cached"], case["num_blocks"] - 1))
        all_tokens = enumerate(prompts(num_runs(case["repeats"]), case["num_tokens"], seed=3))
        self._requests: Final = [self._ledger.request(f"r{index}", tokens) for index, tokens in all_tokens]

    def run(self) -> None:
        request = self._requests.pop()
        self._ledger.admit(request)
        self._ledger.free(request)


class Reset(Operation):
    """A cache that was filled before."""

    warm_up = 0

    def __init__(self, parts: Parts, case: Case) -> None:
        self._num_blocks: Final[int] = case["num_blocks"]
        self._ledger: Final = parts.ledger(self._num_blocks, "xxh3")

    def before(self) -> None:
        self._ledger.fill(self._num_blocks - 1)

    def run(self) -> None:
        self._ledger.reset()


class NewRow(Operation):
    """A new request gets a row that another has left; the scheduler has just made the lists of ids."""

    def __init__(self, parts: Parts, case: Case) -> None:
        self._num_rows: Final[int] = case["per"]
        self._num_ids: Final[int] = case["num_tokens"]
        self._table: Final = parts.table()

    def before(self) -> None:
        for row in range(self._num_rows):
            self._table.clear_row(row)
        self._ids = table_ids(self._num_rows, self._num_ids)

    def run(self) -> None:
        self._table.write_rows(self._ids)


class GrownRow(Operation):
    """A decoding request's next block is appended, once in each row."""

    def __init__(self, parts: Parts, case: Case) -> None:
        self._table: Final = parts.table()

    def run(self) -> None:
        self._table.grow_rows()


class Slots(Operation):
    def __init__(self, parts: Parts, case: Case) -> None:
        table = parts.table()
        table.write_rows(table_ids(TABLE_ROWS, TABLE_COLUMNS))
        self._slots_of: Final = table.slots_of(*slot_batch(case))

    def run(self) -> None:
        self._slots = self._slots_of()


def _block_table(parts: Parts, case: Case) -> Operation:
    kinds: dict[str, Callable[[Parts, Case], Operation]] = {"new": NewRow, "grow": GrownRow, "slots": Slots}
    return kinds[case["variant"]](parts, case)


class ReplayInTurn(Operation):
    """Hashed, looked up, allocated and freed, one after another, in a pool that keeps about ten of them."""

    def __init__(self, parts: Parts, case: Case) -> None:
        self._parts: Final = parts
        self._prompts: Final = read_prompts(case["trace"])

    def before(self) -> None:
        self._ledger = self._parts.ledger(10_000)

    def run(self) -> None:
        ledger = self._ledger
        for index, prompt in enumerate(self._prompts):
            request = ledger.request(str(index), prompt)
            ledger.admit(request)
            ledger.free(request)


class ReplayScheduled(Operation):
    """All at once through the whole scheduler, 64 tokens each, until all are finished."""

    def __init__(self, parts: Parts, case: Case) -> None:
        self._parts: Final = parts
        self._prompts: Final = read_prompts(case["trace"])

    def before(self) -> None:
        self._serving = self._parts.serving(100_000, 64, 8192)

    def run(self) -> None:
        serving = self._serving
        for index, prompt in enumerate(self._prompts):
            serving.add(str(index), prompt, 64)
        while serving.is_busy():
            serving.advance()


def _replay(parts: Parts, case: Case) -> Operation:
    kinds: dict[str, Callable[[Parts, Case], Operation]] = {"in_turn": ReplayInTurn, "scheduled": ReplayScheduled}
    return kinds[case["variant"]](parts, case)


_OPERATIONS: Final[dict[str, Callable[[Parts, Case], Operation]]] = {
    "scheduler_step": _scheduler_step,
    "decode_step": _decode_step,
    "admission": _admission,
    "free": Free,
    "pool_build": PoolBuild,
    "memory": _memory,
    "collection": Collection,
    "pool_size": AdmitAndFree,
    "cached_blocks": AdmitAndFree,
    "reset": Reset,
    "block_table": _block_table,
    "replay": _replay,
}
