"""What does it cost to know why prompts miss? With and without, in turns: python -m benchmarks.bench_why_miss

"decode": schedule() and update_from_output() with 1024 running requests. "and evictions": in a pool that is full of
cached blocks, so that every new block evicts one. "admission": look up, allocate the prompt, free. "replay": the
recorded prompts one after another through a pool that keeps about ten of them, which is nothing but admissions,
evictions and lookups of what was evicted.
"""

import random

from benchmarks.measure import Row, compare, print_off_and_on
from benchmarks.peers.operation import Operation, num_runs
from kvledger import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    MissExplainer,
    Request,
    make_block_hasher,
)
from kvledger.scheduler import Scheduler, SchedulerConfig
from kvledger.traces.formats import open_trace, sample_path
from kvledger.traces.prompts import make_prompt_maker
from kvledger.traces.trace_request import TraceRequest

QUESTION = "why did it miss"
BLOCK_SIZE = 16
MAX_MODEL_LEN = 1 << 20
NUM_RUNNING = 1024
REPLAY_BLOCKS = 10_000


def manager(num_blocks: int, explains: bool, hash_name: str = "sha256") -> KVCacheManager:
    spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=8, head_size=128)
    made = KVCacheManager(
        KVCacheConfig(num_blocks, (KVCacheGroupSpec(("layer.0",), spec),)),
        MAX_MODEL_LEN,
        hasher=make_block_hasher(hash_name, BLOCK_SIZE),
    )
    if explains:
        MissExplainer(made)
    return made


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(100_000) for _ in range(num_tokens)]


def fill(ledger: KVCacheManager, num_blocks: int) -> None:
    """Leaves so many cached blocks behind, of prompts that nobody sends again."""
    rng = random.Random(1)
    for number in range(num_blocks // 256):
        admit(ledger, Request(f"fill{number}", prompt(rng, 256 * BLOCK_SIZE)))


def admit(ledger: KVCacheManager, request: Request) -> None:
    hit = ledger.get_computed_blocks(request)
    if ledger.allocate_slots(request, request.num_tokens - hit.num_tokens, hit) is None:
        raise RuntimeError("the benchmark's pool is too small")
    ledger.record_prefix_lookup(request, hit.num_tokens, hit)
    ledger.free(request)


class Decode(Operation):
    def __init__(self, explains: bool, num_steps: int, is_full: bool) -> None:
        num_blocks = NUM_RUNNING * (16 + (num_steps + BLOCK_SIZE) // BLOCK_SIZE + 2) + 1
        ledger = manager(num_blocks, explains)
        if is_full:
            fill(ledger, num_blocks)
        self.scheduler = Scheduler(
            ledger, SchedulerConfig(max_num_seqs=NUM_RUNNING, max_num_batched_tokens=NUM_RUNNING * 512)
        )
        rng = random.Random(2)
        for index in range(NUM_RUNNING):
            # At all phases of a block.
            request = Request(f"r{index}", prompt(rng, 240 + index % BLOCK_SIZE), max_tokens=10_000)
            self.scheduler.add_request(request)
        self.sampled = [[7] for _ in range(NUM_RUNNING)]
        self.run()
        if self.scheduler.num_running != NUM_RUNNING:
            raise RuntimeError("not everything runs")

    def run(self) -> None:
        output = self.scheduler.schedule()
        self.scheduler.update_from_output(output, self.sampled)


class Admission(Operation):
    """Prompts that were never seen, in a pool full of cached blocks: each block evicts one."""

    def __init__(self, explains: bool, num_tokens: int, hash_name: str) -> None:
        self.ledger = manager(20_000, explains, hash_name)
        fill(self.ledger, 20_000)
        self.rng = random.Random(3)
        self.num_tokens = num_tokens
        self.number = 0

    def before(self) -> None:
        self.number += 1
        self.request = Request(str(self.number), prompt(self.rng, self.num_tokens))

    def run(self) -> None:
        admit(self.ledger, self.request)


class Replay(Operation):
    def __init__(self, explains: bool, recorded: list[TraceRequest], hash_name: str) -> None:
        self.explains = explains
        self.recorded = recorded
        self.hash_name = hash_name

    def before(self) -> None:
        maker = make_prompt_maker(self.hash_name, BLOCK_SIZE)
        self.requests = [maker.make(each, serial) for serial, each in enumerate(self.recorded)]
        spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=8, head_size=128)
        self.ledger = KVCacheManager(
            KVCacheConfig(REPLAY_BLOCKS, (KVCacheGroupSpec(("layer.0",), spec),)),
            MAX_MODEL_LEN,
            hasher=maker.hasher,
        )
        if self.explains:
            MissExplainer(self.ledger)

    def run(self) -> None:
        for request in self.requests:
            admit(self.ledger, request)


def run() -> list[Row]:
    rows: list[Row] = []
    repeats = 160
    for is_full in (False, True):
        sides = [Decode(explains, num_runs(repeats) + 1, is_full) for explains in (False, True)]
        case = f"decode, {NUM_RUNNING} running" + (", and evictions" if is_full else "")
        rows.append(compare(QUESTION, case, sides[0], sides[1], repeats))
    for num_tokens in (512, 32_768):
        for hash_name in ("sha256", "xxh3"):
            off, on = (Admission(explains, num_tokens, hash_name) for explains in (False, True))
            case = f"admission, {num_tokens:,} tokens, {hash_name}"
            rows.append(compare(QUESTION, case, off, on, 400 if num_tokens == 512 else 64))
    recorded = list(open_trace(sample_path()).requests())[:300]
    for hash_name in ("sha256", "xxh3", "none"):
        without, with_ = (Replay(explains, recorded, hash_name) for explains in (False, True))
        rows.append(compare(QUESTION, f"replay, a request, hash {hash_name}", without, with_, 16, per=len(recorded)))
    return rows


def main() -> None:
    print_off_and_on(run())


if __name__ == "__main__":
    main()
