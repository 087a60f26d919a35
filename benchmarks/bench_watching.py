"""What does it cost to watch? Without and with, in turns: python -m benchmarks.bench_watching

"decode": schedule() and update_from_tokens() with 1024 running requests, in a pool full of cached blocks, so that every
new block evicts one. "a window": as many, whose accounts look for the peak of their blocks all the time. "admission": a
prompt that is cached whole is looked up, takes its blocks and frees them, with blocks sampled on the way.
"""

import random
import time

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
from kvledger import BlockResidency, KVCacheSpec, Request, SlidingWindowSpec
from kvledger.metrics.prometheus import MetricsTarget, RequestMetrics, SchedulerMetrics
from kvledger.scheduler import RequestAccounting, Scheduler, SchedulerConfig, StallDetector

QUESTION = "watching"
WINDOW = SlidingWindowSpec(BLOCK_SIZE, num_kv_heads=8, head_size=128, sliding_window=512)


class Decode(Operation):
    """`watches`: of accounts, stalls, metrics, residency; "nothing" else."""

    def __init__(self, watches: str, spec: KVCacheSpec, num_steps: int) -> None:
        num_blocks = blocks_for_decoding(num_steps)
        residency = BlockResidency(time.monotonic) if "residency" in watches else None
        ledger = make_manager(num_blocks, spec, observer=residency)
        fill(ledger, num_blocks)
        target = MetricsTarget()
        accounting = None
        if "accounts" in watches:
            requests = RequestMetrics(target, MAX_MODEL_LEN)
            accounting = RequestAccounting(ledger, time.monotonic, requests.finished)
        config = SchedulerConfig(max_num_seqs=NUM_RUNNING, max_num_batched_tokens=PREFILL_TOKENS)
        self.scheduler = Scheduler(ledger, config, accounting=accounting)
        self.detector = StallDetector(self.scheduler, 1000) if "stalls" in watches else None
        self.metrics = SchedulerMetrics(target, self.scheduler, residency=residency) if "metrics" in watches else None
        self.tokens = start_decoding(self.scheduler)

    def run(self) -> None:
        output = self.scheduler.schedule()
        if self.detector is not None:
            self.detector.watch(output)
        if self.metrics is not None:
            self.metrics.step(output)
        self.scheduler.update_from_tokens(output, self.tokens)


class Admission(Operation):
    def __init__(self, samples: bool, num_tokens: int) -> None:
        residency = BlockResidency(time.monotonic) if samples else None
        self.ledger = make_manager(4 * num_tokens // BLOCK_SIZE, observer=residency)
        self.prompt = prompt(random.Random(2), num_tokens)
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
