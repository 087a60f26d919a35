"""kvledger itself, as a caller from interpreted Python meets it."""

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, Final

from benchmarks.peers.case import WHOLE, WHOLE_BY_BLOCKS, WHOLE_IN_SEQUENCE, WHOLE_REPLAYS
from benchmarks.peers.operation import Operation
from benchmarks.peers.operations import make_operation
from benchmarks.peers.parts import DecodingLedger, Parts, Serving, Table
from benchmarks.peers.workload import BLOCK_SIZE, MAX_MODEL_LEN, TABLE_COLUMNS, TABLE_ROWS, WINDOW
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
from kvledger.cli import main
from kvledger.core.requests.siphash import KEY_BYTES
from kvledger.core.tables import BlockTable, slot_mapping
from kvledger.scheduler import Scheduler, SchedulerConfig, SchedulerOutput

_HOW: Final = {
    WHOLE: (),
    WHOLE_BY_BLOCKS: ("--block-by-block", "--hash", "none"),
    WHOLE_IN_SEQUENCE: ("--sequential",),
}
REPLAY_ENGINE: Final = ("--num-blocks", "50000", "--max-num-seqs", "256", "--max-num-batched-tokens", "8192")


def version() -> str:
    return build_info()


def prepare(case: dict[str, Any]) -> Operation | str:
    if case["variant"] in WHOLE_REPLAYS:
        return ReplayWhole(case)
    return make_operation(OurParts(case["decides_as"]), case)


def kv_cache_config(num_blocks: int, num_groups: int) -> KVCacheConfig:
    """The first group keeps everything, the others a window."""
    specs: list[KVCacheSpec] = [FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=8)]
    window = SlidingWindowSpec(BLOCK_SIZE, num_kv_heads=1, head_size=8, sliding_window=WINDOW)
    specs += [window] * (num_groups - 1)
    groups = tuple(KVCacheGroupSpec((f"layer.{index}",), spec) for index, spec in enumerate(specs))
    return KVCacheConfig(num_blocks, groups)


class OurLedger(DecodingLedger[Request]):
    """Making a request packs its prompt. That counts as hashing, since nothing else needs it."""

    def __init__(self, manager: KVCacheManager, hash_name: str) -> None:
        self._manager: Final = manager
        self._hasher: Final = make_block_hasher(hash_name, BLOCK_SIZE)
        self.free = manager.free
        self.reset = manager.reset_prefix_cache
        self.allocate = manager.allocate_slots
        self.append = Request.append_token

    def request(self, name: str, tokens: list[int]) -> Request:
        request = Request(name, tokens)
        self._hasher.extend(request)
        return request

    def admit(self, request: Request) -> None:
        manager = self._manager
        hit = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, request.num_tokens - hit.num_tokens, hit) is None:
            raise RuntimeError("the benchmark's pool is too small")
        request.num_computed_tokens = request.num_tokens

    def hashed(self, prompt: list[int]) -> Request:
        return self.request("r", prompt)

    def arrive(self, prompt: list[int]) -> Request:
        """The lookup hashes."""
        request = Request("r", prompt)
        self.admit(request)
        return request

    def allocate_all(self, requests: list[Request]) -> None:
        self._manager.allocate_running(requests, [1] * len(requests))


class OurServing(Serving):
    def __init__(self, manager: KVCacheManager, max_num_seqs: int, token_budget: int, num_steps: int = 1) -> None:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=token_budget, max_steps_in_flight=num_steps
        )
        self.scheduler: Final = Scheduler(manager, config)
        self._sampled: Final[list[int]] = []
        self._in_flight: Final[list[SchedulerOutput]] = []

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self.scheduler.add_request(Request(name, prompt, max_tokens=max_tokens))
        self._sampled.append(7)

    def num_running(self) -> int:
        return self.scheduler.num_running

    def is_busy(self) -> bool:
        return self.scheduler.has_unfinished_requests

    def sampled(self) -> Any:
        return self._sampled

    def decode(self, sampled: Any) -> None:
        steps = self._in_flight
        steps.append(self.scheduler.schedule())
        if len(steps) == self.scheduler.config.max_steps_in_flight:
            self.scheduler.update_from_tokens(steps.pop(0), sampled)

    def advance(self) -> None:
        output = self.scheduler.schedule()
        sampled = [-1 if request.is_prefill_chunk else 7 for request in output.requests]
        self.scheduler.update_from_tokens(output, sampled)


class ResultsServing(OurServing):
    """Makes a result for each request, as vLLM does."""

    def sampled(self) -> Any:
        return [[token] for token in super().sampled()]

    def decode(self, sampled: Any) -> None:
        self.scheduler.update_from_output(self.scheduler.schedule(), sampled)


class OurTable(Table):
    def __init__(self) -> None:
        self._table: Final = BlockTable(TABLE_ROWS, TABLE_COLUMNS, BLOCK_SIZE)

    def write_rows(self, rows: list[list[int]]) -> None:
        set_row = self._table.set_row
        for row, block_ids in enumerate(rows):
            set_row(row, block_ids)

    def clear_row(self, row: int) -> None:
        self._table.clear_row(row)

    def grow_rows(self) -> None:
        append_row = self._table.append_row
        for row in range(TABLE_ROWS):
            append_row(row, [7])

    def slots_of(self, rows: list[int], starts: list[int], num_tokens: list[int]) -> Callable[[], object]:
        return lambda: slot_mapping(self._table, rows, starts, num_tokens)


class OurParts(Parts):
    """`decides_as`: the release of vLLM."""

    def __init__(self, decides_as: str) -> None:
        self._decides_as: Final = decides_as

    def ledger(self, num_blocks: int, hash_name: str = "sha256") -> OurLedger:
        return OurLedger(self.manager(num_blocks, hash_name=hash_name), hash_name)

    def decoding_ledger(self, num_blocks: int, num_groups: int) -> OurLedger:
        return OurLedger(self.manager(num_blocks, num_groups), "sha256")

    def pool(self, num_blocks: int) -> BlockPool:
        return BlockPool(num_blocks)

    def serving(
        self, num_blocks: int, max_num_seqs: int, token_budget: int, num_groups: int = 1, variant: str = ""
    ) -> OurServing:
        kind = ResultsServing if variant == "results" else OurServing
        manager = self.manager(num_blocks, num_groups, "siphash" if variant == "siphash" else "sha256")
        return kind(manager, max_num_seqs, token_budget, 2 if variant == "overlap" else 1)

    def table(self) -> OurTable:
        return OurTable()

    def manager(self, num_blocks: int, num_groups: int = 1, hash_name: str = "sha256") -> KVCacheManager:
        hasher = make_block_hasher(hash_name, BLOCK_SIZE, bytes(KEY_BYTES) if hash_name == "siphash" else b"")
        config = kv_cache_config(num_blocks, num_groups)
        return KVCacheManager(config, MAX_MODEL_LEN, hasher=hasher, decisions=self._decides_as)


class ReplayWhole(Operation):
    """`kvledger replay` on a recorded trace, from reading to report: by extents, or block by block with blocks named by
    numbers instead of hashed."""

    def __init__(self, case: dict[str, Any]) -> None:
        engine = (*REPLAY_ENGINE, "--vllm-version", case["decides_as"], *_HOW[case["variant"]])
        self._arguments: Final = ["replay", case["trace"], "--json", *engine]

    def run(self) -> None:
        with redirect_stdout(StringIO()):
            code = main(self._arguments)
        if code != 0:
            raise RuntimeError("the replay failed")
