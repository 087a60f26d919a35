"""kvledger itself, as a caller from interpreted Python meets it."""

import gc
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, Final

from kvledger import (
    BlockPool,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    Request,
    SlidingWindowSpec,
    build_info,
    make_block_hasher,
)
from kvledger.bench.operation import Builder, Cold, MemoryOf, Operation, num_runs
from kvledger.bench.workload import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    POOL_BLOCKS,
    TABLE_COLUMNS,
    TABLE_ROWS,
    TOKEN_BUDGET,
    WINDOW,
    blocks_for_decoding,
    decoding_prompts,
    fillers,
    prompts,
    read_prompts,
    slot_batch,
    table_ids,
    traffic,
)
from kvledger.cli import main
from kvledger.core.tables import BlockTable, slot_mapping
from kvledger.scheduler import Scheduler, SchedulerConfig

REPLAY_ENGINE: Final = ("--num-blocks", "50000", "--max-num-seqs", "256", "--max-num-batched-tokens", "8192")


def version() -> str:
    return build_info()


def prepare(case: dict[str, Any]) -> Operation | str:
    return _OPERATIONS[case["question"]](case)


def spec(index: int) -> KVCacheSpec:
    """The spec of that group."""
    if index == 0:
        return FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=8)
    return SlidingWindowSpec(BLOCK_SIZE, num_kv_heads=1, head_size=8, sliding_window=WINDOW)


def make_manager(num_blocks: int, hash_name: str = "sha256", num_groups: int = 1) -> KVCacheManager:
    groups = tuple(KVCacheGroupSpec((f"layer.{index}",), spec(index)) for index in range(num_groups))
    hasher = make_block_hasher(hash_name, BLOCK_SIZE)
    return KVCacheManager(KVCacheConfig(num_blocks, groups), MAX_MODEL_LEN, hasher=hasher)


def admit(manager: KVCacheManager, request: Request) -> None:
    hit = manager.get_computed_blocks(request)
    if manager.allocate_slots(request, request.num_tokens - hit.num_tokens, hit) is None:
        raise RuntimeError("the benchmark's pool is too small")
    request.num_computed_tokens = request.num_tokens


def fill(manager: KVCacheManager, num_blocks: int) -> None:
    """Leaves so many cached blocks that nobody holds."""
    for index, tokens in enumerate(fillers(num_blocks)):
        filler = Request(f"filler{index}", tokens)
        admit(manager, filler)
        manager.free(filler)


class SchedulerStep(Operation):
    def __init__(self, case: dict[str, Any]) -> None:
        num_running = case["num_running"]
        config = SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=TOKEN_BUDGET)
        manager = make_manager(blocks_for_decoding(case), num_groups=case["num_groups"])
        self._scheduler: Final = Scheduler(manager, config)
        for index, prompt in enumerate(decoding_prompts(num_running)):
            self._scheduler.add_request(Request(f"r{index}", prompt, max_tokens=MAX_TOKENS))
        self._sampled: Final = [7] * num_running
        # The prefills, all in one step.
        self.run()
        if self._scheduler.num_running != num_running:
            raise RuntimeError("not everything runs")

    def run(self) -> None:
        output = self._scheduler.schedule()
        self._scheduler.update_from_tokens(output, self._sampled)


class DecodeStep(Operation):
    """A call for each request."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._manager: Final = make_manager(blocks_for_decoding(case), num_groups=case["num_groups"])
        decoding = decoding_prompts(case["num_running"])
        self._requests: Final = [Request(f"r{index}", prompt) for index, prompt in enumerate(decoding)]
        for request in self._requests:
            admit(self._manager, request)
            request.append_token(7)

    def run(self) -> None:
        allocate_slots = self._manager.allocate_slots
        for request in self._requests:
            allocate_slots(request, 1)

    def after(self) -> None:
        for request in self._requests:
            request.num_computed_tokens += 1
            request.append_token(7)


class DecodeStepInOneCall(DecodeStep):
    def run(self) -> None:
        self._manager.allocate_running(self._requests, [1] * len(self._requests))


class DecodeStepWithAppend(DecodeStep):
    """Appending the token is timed too: vLLM hashes a block that became full there."""

    def before(self) -> None:
        for request in self._requests:
            request.num_computed_tokens += 1

    def run(self) -> None:
        allocate_slots = self._manager.allocate_slots
        for request in self._requests:
            request.append_token(7)
            allocate_slots(request, 1)

    def after(self) -> None:
        pass


def _decode_step(case: dict[str, Any]) -> Operation:
    kinds: dict[str, Callable[[dict[str, Any]], Operation]] = {
        "calls": DecodeStep,
        "append": DecodeStepWithAppend,
        "batch": DecodeStepInOneCall,
    }
    return kinds[case["variant"]](case)


def _scheduler_step(case: dict[str, Any]) -> Operation:
    return Cold(SchedulerStep(case)) if case["variant"] == "cold" else SchedulerStep(case)


class Admission(Operation):
    """Making the request packs its prompt. That counts as hashing, since nothing else needs it."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._manager: Final = make_manager(POOL_BLOCKS, case["hash_name"])
        fill(self._manager, POOL_BLOCKS - 1)
        self._traffic: Final = traffic(case["num_tokens"], case["hit_percent"])
        self._request = Request("r", next(self._traffic))
        self._prompt: list[int] = []

    def before(self) -> None:
        self._prompt = next(self._traffic)

    def run(self) -> None:
        self._request = Request("r", self._prompt)
        admit(self._manager, self._request)

    def after(self) -> None:
        self._manager.free(self._request)


class Hashing(Operation):
    """A prompt hashed, from its tokens as a list."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._hasher: Final = make_block_hasher(case["hash_name"], BLOCK_SIZE)
        self._traffic: Final = traffic(case["num_tokens"], 0)
        self._prompt: list[int] = []

    def before(self) -> None:
        self._prompt = next(self._traffic)

    def run(self) -> None:
        self._hasher.extend(Request("r", self._prompt))


def _admission(case: dict[str, Any]) -> Operation:
    return Hashing(case) if case["variant"] == "hash" else Admission(case)


class Free(Admission):
    def before(self) -> None:
        self._request = Request("r", next(self._traffic))
        admit(self._manager, self._request)

    def run(self) -> None:
        self._manager.free(self._request)

    def after(self) -> None:
        pass


class PoolBuild(Builder):
    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self._num_blocks: Final[int] = case["num_blocks"]

    def build(self) -> object:
        return BlockPool(self._num_blocks)


class CachedPoolBuild(PoolBuild):
    """A ledger whose blocks are all cached and free."""

    def build(self) -> object:
        manager = make_manager(self._num_blocks, "xxh3")
        fill(manager, self._num_blocks - 1)
        return manager


def _memory(case: dict[str, Any]) -> Operation:
    return MemoryOf(CachedPoolBuild(case) if case["variant"] == "cached" else PoolBuild(case))


class Collection(Operation):
    """A full collection over a ledger whose blocks are all held by requests. "frozen": what tools do with theirs."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._manager: Final = make_manager(case["num_blocks"], "xxh3")
        self._requests: Final = [
            Request(f"r{index}", tokens) for index, tokens in enumerate(fillers(case["num_blocks"] - 1))
        ]
        for request in self._requests:
            admit(self._manager, request)
        if case["variant"] == "frozen":
            gc.freeze()

    def run(self) -> None:
        gc.collect()


class AdmitAndFree(Operation):
    """In a pool of num_blocks, of which num_cached are cached: where that is all of them, each one taken evicts."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._manager: Final = make_manager(case["num_blocks"])
        fill(self._manager, min(case["num_cached"], case["num_blocks"] - 1))
        hasher = make_block_hasher("sha256", BLOCK_SIZE)
        self._requests: Final = [
            Request(f"r{index}", prompt)
            for index, prompt in enumerate(prompts(num_runs(case["repeats"]), case["num_tokens"], seed=3))
        ]
        for request in self._requests:
            hasher.extend(request)

    def run(self) -> None:
        request = self._requests.pop()
        admit(self._manager, request)
        self._manager.free(request)


class Reset(Operation):
    """A cache that was filled before."""

    warm_up = 0

    def __init__(self, case: dict[str, Any]) -> None:
        self._num_blocks: Final[int] = case["num_blocks"]
        self._manager: Final = make_manager(self._num_blocks, "xxh3")

    def before(self) -> None:
        fill(self._manager, self._num_blocks - 1)

    def run(self) -> None:
        self._manager.reset_prefix_cache()


class NewRow(Operation):
    """A new request gets a row that another has left; the scheduler has just made the lists of ids."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._num_rows: Final[int] = case["per"]
        self._num_ids: Final[int] = case["num_tokens"]
        self._table: Final = BlockTable(TABLE_ROWS, TABLE_COLUMNS, BLOCK_SIZE)
        self._ids: list[list[int]] = []

    def before(self) -> None:
        for row in range(self._num_rows):
            self._table.clear_row(row)
        self._ids = table_ids(self._num_rows, self._num_ids)

    def run(self) -> None:
        set_row = self._table.set_row
        for row, block_ids in enumerate(self._ids):
            set_row(row, block_ids)


class GrownRow(Operation):
    """A decoding request's next block is appended, once in each row."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._table: Final = BlockTable(TABLE_ROWS, TABLE_COLUMNS, BLOCK_SIZE)

    def run(self) -> None:
        append_row = self._table.append_row
        for row in range(TABLE_ROWS):
            append_row(row, [7])


class Slots(Operation):
    def __init__(self, case: dict[str, Any]) -> None:
        self._table: Final = BlockTable(TABLE_ROWS, TABLE_COLUMNS, BLOCK_SIZE)
        for row, block_ids in enumerate(table_ids(TABLE_ROWS, TABLE_COLUMNS)):
            self._table.set_row(row, block_ids)
        self._batch: Final = slot_batch(case)

    def run(self) -> None:
        self._slots = slot_mapping(self._table, *self._batch)


def _block_table(case: dict[str, Any]) -> Operation:
    kinds: dict[str, Callable[[dict[str, Any]], Operation]] = {"new": NewRow, "grow": GrownRow, "slots": Slots}
    return kinds[case["variant"]](case)


class ReplayInTurn(Operation):
    """Looked up, allocated and freed, one after another, in a pool that keeps about ten of them."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._prompts: Final = read_prompts(case["trace"])
        self._manager = make_manager(2)

    def before(self) -> None:
        self._manager = make_manager(10_000)

    def run(self) -> None:
        for index, prompt in enumerate(self._prompts):
            request = Request(str(index), prompt)
            admit(self._manager, request)
            self._manager.free(request)


class ReplayScheduled(Operation):
    """All at once through the whole scheduler, 64 tokens each, until all are finished."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._prompts: Final = read_prompts(case["trace"])
        self._config: Final = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=8192)
        self._scheduler = Scheduler(make_manager(2), self._config)

    def before(self) -> None:
        self._scheduler = Scheduler(make_manager(100_000), self._config)

    def run(self) -> None:
        scheduler = self._scheduler
        for index, prompt in enumerate(self._prompts):
            scheduler.add_request(Request(str(index), prompt, max_tokens=64))
        while scheduler.has_unfinished_requests:
            output = scheduler.schedule()
            sampled = [-1 if request.is_prefill_chunk else 7 for request in output.requests]
            scheduler.update_from_tokens(output, sampled)


class ReplayWhole(Operation):
    """`kvledger replay` on a recorded trace, from reading to report, its blocks named by numbers instead of hashed."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._path: Final[str] = case["trace"]

    def run(self) -> None:
        with redirect_stdout(StringIO()):
            code = main(["replay", self._path, "--hash", "none", "--json", *REPLAY_ENGINE])
        if code != 0:
            raise RuntimeError("the replay failed")


def _replay(case: dict[str, Any]) -> Operation:
    kinds: dict[str, Callable[[dict[str, Any]], Operation]] = {
        "in_turn": ReplayInTurn,
        "scheduled": ReplayScheduled,
        "whole": ReplayWhole,
    }
    return kinds[case["variant"]](case)


_OPERATIONS: Final[dict[str, Callable[[dict[str, Any]], Operation]]] = {
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
