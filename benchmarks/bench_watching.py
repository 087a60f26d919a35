"""What does it cost to watch? Without and with, in turns: python -m benchmarks.bench_watching

"decode": schedule() and update_from_tokens() with 1024 running requests, in a pool full of cached blocks, so that every
new block evicts one. "a window": as many, whose accounts look for the peak of their blocks all the time. "admission": a
prompt that is cached whole is looked up, takes its blocks and frees them, with blocks sampled on the way.
"""

import random
import time

from benchmarks.measure import Row, compare, print_off_and_on
from benchmarks.peers.operation import Operation, num_runs
from kvledger import (
    BlockResidency,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    Request,
    SlidingWindowSpec,
)
from kvledger.metrics.prometheus import MetricsTarget, RequestMetrics, SchedulerMetrics
from kvledger.scheduler import RequestAccounting, Scheduler, SchedulerConfig, StallDetector

QUESTION = "watching"
BLOCK_SIZE = 16
MAX_MODEL_LEN = 1 << 16
NUM_RUNNING = 1024
FULL = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=8, head_size=128)
WINDOW = SlidingWindowSpec(BLOCK_SIZE, num_kv_heads=8, head_size=128, sliding_window=512)


def manager(spec: KVCacheSpec, num_blocks: int, residency: BlockResidency | None) -> KVCacheManager:
    return KVCacheManager(
        KVCacheConfig(num_blocks, (KVCacheGroupSpec(("layer.0",), spec),)), MAX_MODEL_LEN, observer=residency
    )


def admit(ledger: KVCacheManager, request: Request) -> None:
    hit = ledger.get_computed_blocks(request)
    if ledger.allocate_slots(request, request.num_tokens - hit.num_tokens, hit) is None:
        raise RuntimeError("the benchmark's pool is too small")
    ledger.free(request)


class Decode(Operation):
    """`watches`: of accounts, stalls, metrics, residency; "nothing" else."""

    def __init__(self, watches: str, spec: KVCacheSpec, num_steps: int) -> None:
        num_blocks = NUM_RUNNING * (16 + (num_steps + BLOCK_SIZE) // BLOCK_SIZE + 2) + 1
        residency = BlockResidency(time.monotonic) if "residency" in watches else None
        ledger = manager(spec, num_blocks, residency)
        rng = random.Random(1)
        for number in range(num_blocks // 256):
            admit(ledger, Request(f"fill{number}", [rng.randrange(100_000) for _ in range(256 * BLOCK_SIZE)]))
        target = MetricsTarget()
        accounting = None
        if "accounts" in watches:
            requests = RequestMetrics(target, MAX_MODEL_LEN)
            accounting = RequestAccounting(ledger, time.monotonic, requests.finished)
        config = SchedulerConfig(max_num_seqs=NUM_RUNNING, max_num_batched_tokens=NUM_RUNNING * 512)
        self.scheduler = Scheduler(ledger, config, accounting=accounting)
        self.detector = StallDetector(self.scheduler, 1000) if "stalls" in watches else None
        self.metrics = SchedulerMetrics(target, self.scheduler, residency=residency) if "metrics" in watches else None
        for index in range(NUM_RUNNING):
            # At all phases of a block.
            prompt = [rng.randrange(100_000) for _ in range(240 + index % BLOCK_SIZE)]
            self.scheduler.add_request(Request(f"r{index}", prompt, max_tokens=10_000))
        self.tokens = [7] * NUM_RUNNING
        self.run()
        if self.scheduler.num_running != NUM_RUNNING:
            raise RuntimeError("not everything runs")

    def run(self) -> None:
        output = self.scheduler.schedule()
        if self.detector is not None:
            self.detector.watch(output)
        if self.metrics is not None:
            self.metrics.step(output)
        self.scheduler.update_from_tokens(output, self.tokens)


class Admission(Operation):
    def __init__(self, samples: bool, num_tokens: int) -> None:
        self.ledger = manager(FULL, 4 * num_tokens // BLOCK_SIZE, BlockResidency(time.monotonic) if samples else None)
        rng = random.Random(2)
        self.prompt = [rng.randrange(100_000) for _ in range(num_tokens)]
        admit(self.ledger, Request("first", self.prompt))
        self.number = 0

    def before(self) -> None:
        self.number += 1
        self.request = Request(str(self.number), self.prompt)

    def run(self) -> None:
        admit(self.ledger, self.request)


def run() -> list[Row]:
    rows: list[Row] = []
    repeats = 240
    num_steps = num_runs(repeats) + 1
    for watches in ("accounts", "stalls", "metrics", "residency", "accounts, stalls, metrics, residency"):
        off, on = Decode("nothing", FULL, num_steps), Decode(watches, FULL, num_steps)
        rows.append(compare(QUESTION, f"decode, {NUM_RUNNING} running: {watches}", off, on, repeats))
    off, on = Decode("nothing", WINDOW, num_steps), Decode("accounts", WINDOW, num_steps)
    rows.append(compare(QUESTION, f"decode, {NUM_RUNNING} running, a window: accounts", off, on, repeats))
    for num_tokens in (512, 32_768):
        sides = [Admission(samples, num_tokens) for samples in (False, True)]
        case = f"admission, {num_tokens:,} cached tokens: residency"
        rows.append(compare(QUESTION, case, sides[0], sides[1], 800 if num_tokens == 512 else 80))
    return rows


def main() -> None:
    print_off_and_on(run())


if __name__ == "__main__":
    main()
