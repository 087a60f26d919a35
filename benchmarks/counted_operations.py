"""The operations whose instructions are counted. Runs under callgrind, started by benchmarks/instructions.py.

Between marks, which are calls of getppid() that callgrind splits its counts at, each operation runs FEW times and then
MANY times; the difference is MANY - FEW runs and nothing else. Prints the operations in order.
"""

import gc
import os
from collections.abc import Callable

from kvledger import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager, Request, make_block_hasher
from kvledger.core.tables import BlockTable, slot_mapping
from kvledger.scheduler import Scheduler, SchedulerConfig

BLOCK_SIZE = 16
NUM_RUNNING = 64
FEW = 1
MANY = 5

Run = Callable[[int], None]


def manager(num_blocks: int) -> KVCacheManager:
    group = KVCacheGroupSpec(("layer",), FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=8))
    # xxh3: sha256 takes other instructions on every CPU.
    hasher = make_block_hasher("xxh3", BLOCK_SIZE)
    return KVCacheManager(KVCacheConfig(num_blocks, (group,)), 65_536, hasher=hasher)


def admit(ledger: KVCacheManager, request: Request) -> None:
    hit = ledger.get_computed_blocks(request)
    assert ledger.allocate_slots(request, request.num_tokens - hit.num_tokens, hit) is not None
    request.num_computed_tokens = request.num_tokens


def prompt(seed: int, num_tokens: int) -> list[int]:
    return [(seed * 7919 + index * 31) % 50_000 for index in range(num_tokens)]


def decode_steps(num_prompt_tokens: int) -> Run:
    """Whole steps of 64 requests in step, of which all or none fill a block: by how far their prompts reach into it."""
    scheduler = Scheduler(manager(4000), SchedulerConfig(max_num_seqs=NUM_RUNNING, max_num_batched_tokens=100_000))
    for index in range(NUM_RUNNING):
        scheduler.add_request(Request(f"r{index}", prompt(index, num_prompt_tokens), max_tokens=10_000))
    sampled = [7] * NUM_RUNNING

    def run(times: int) -> None:
        for _ in range(times):
            scheduler.update_from_tokens(scheduler.schedule(), sampled)

    # The prompts, and a step after which all requests only count.
    run(2)
    return run


def whole_rounds() -> Run:
    """16 steps of 64 requests: each fills one block and starts another."""
    steps = decode_steps(256)
    return lambda times: steps(times * BLOCK_SIZE)


def admissions(is_hit: bool) -> Run:
    """A prompt of 512 tokens made, hashed, looked up, allocated and freed, in a pool full of cached blocks."""
    ledger = manager(1025)
    for index in range(40):
        filler = Request(f"f{index}", prompt(1000 + index, 512))
        admit(ledger, filler)
        ledger.free(filler)
    prompts = [prompt(1039 if is_hit else 2000 + index, 512) for index in range(FEW + MANY)]

    def run(times: int) -> None:
        for _ in range(times):
            request = Request("r", prompts.pop())
            admit(ledger, request)
            ledger.free(request)

    return run


def frees() -> Run:
    """Requests of 32 blocks freed."""
    ledger = manager(1025)
    requests = [Request(f"r{index}", prompt(3000 + index, 512)) for index in range(FEW + MANY)]
    for request in requests:
        admit(ledger, request)

    def run(times: int) -> None:
        for _ in range(times):
            ledger.free(requests.pop())

    return run


def table_rows() -> Run:
    """Rows of 512 ids written."""
    table = BlockTable(8, 1024, BLOCK_SIZE)
    ids = list(range(1, 513))

    def run(times: int) -> None:
        for _ in range(times):
            table.set_row(3, ids)
            table.clear_row(3)

    return run


def slots() -> Run:
    """Slots of 256 decodes."""
    table = BlockTable(256, 64, BLOCK_SIZE)
    for row in range(256):
        table.set_row(row, list(range(1, 65)))
    rows, starts, lengths = list(range(256)), [3 * row for row in range(256)], [1] * 256

    def run(times: int) -> None:
        for _ in range(times):
            slot_mapping(table, rows, starts, lengths)

    return run


OPERATIONS: dict[str, Callable[[], Run]] = {
    # Prompts end in the middle of a block, so that no step fills one: FEW + MANY + 1 tokens come after 260.
    "decode step of 64, none fills a block": lambda: decode_steps(260),
    "16 decode steps of 64, each request fills a block": whole_rounds,
    "512 tokens admitted and freed, nothing cached": lambda: admissions(False),
    "512 tokens admitted and freed, all cached": lambda: admissions(True),
    "512 tokens freed": frees,
    "block table, a row of 512 ids": table_rows,
    "slots of 256 decodes": slots,
}


def main() -> None:
    gc.disable()
    for name, make in OPERATIONS.items():
        print(name)
        run = make()
        os.getppid()
        run(FEW)
        os.getppid()
        run(MANY)
        os.getppid()


if __name__ == "__main__":
    main()
