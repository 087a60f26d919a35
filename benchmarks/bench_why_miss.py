"""What does it cost to know why prompts miss? With and without, in turns: python -m benchmarks.bench_why_miss

"decode": schedule() and update_from_output() with 1024 running requests. "and evictions": in a pool that is full of
cached blocks, so that every new block evicts one. "admission": look up, allocate the prompt, free. "replay": the
recorded prompts one after another through a pool that keeps about ten of them, which is nothing but admissions,
evictions and lookups of what was evicted.
"""

import random

from benchmarks.ledgers import (
    BLOCK_SIZE,
    FULL,
    MAX_MODEL_LEN,
    NUM_RUNNING,
    PREFILL_TOKENS,
    admit,
    blocks_for_decoding,
    fill,
    make_manager,
    prompt,
    start_decoding,
)
from benchmarks.measure import Row, compare, print_off_and_on
from benchmarks.peers.operation import Operation, num_runs
from kvledger import KVCacheConfig, KVCacheGroupSpec, KVCacheManager, MissExplainer, Request
from kvledger.scheduler import Scheduler, SchedulerConfig
from kvledger.traces.formats import open_trace, sample_path
from kvledger.traces.prompts import make_prompt_maker
from kvledger.traces.trace_request import TraceRequest

QUESTION = "why did it miss"
REPLAY_BLOCKS = 10_000


def manager(num_blocks: int, explains: bool, hash_name: str = "sha256") -> KVCacheManager:
    made = make_manager(num_blocks, hash_name=hash_name)
    if explains:
        MissExplainer(made)
    return made


class Decode(Operation):
    def __init__(self, explains: bool, num_steps: int, is_full: bool) -> None:
        num_blocks = blocks_for_decoding(num_steps)
        ledger = manager(num_blocks, explains)
        if is_full:
            fill(ledger, num_blocks)
        config = SchedulerConfig(max_num_seqs=NUM_RUNNING, max_num_batched_tokens=PREFILL_TOKENS)
        self.scheduler = Scheduler(ledger, config)
        self.sampled = [[token] for token in start_decoding(self.scheduler)]

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
        config = KVCacheConfig(REPLAY_BLOCKS, (KVCacheGroupSpec(("layer.0",), FULL),))
        self.ledger = KVCacheManager(config, MAX_MODEL_LEN, hasher=maker.hasher)
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
