"""What do KV events add to a decode step?

Each side with events off and on, in turns. Before each step everything rests for a while, as when the model runs: our
sender's thread works in that time, and all sides find the same caches. A row has the step with events, and what share
they add on either side. Nobody is sent anything: that is other threads' work on both sides, and so is making the events
on ours. Run: scripts/reference_python.sh compiled -m benchmarks.bench_events
"""

import gc
from statistics import median
from time import sleep, thread_time_ns
from typing import Any

from benchmarks.peers.contestants.ours import OurServing, kv_cache_config
from benchmarks.peers.contestants.vllm import VllmParts
from benchmarks.peers.operation import Operation
from benchmarks.peers.operations import start_decoding
from benchmarks.peers.workload import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    TOKEN_BUDGET,
    blocks_for_decoding,
)
from kvledger import KVCacheManager, make_block_hasher
from kvledger.events import LedgerEvents, NullSink

REST_S = 0.003


class Ours(Operation):
    def __init__(self, case: dict[str, Any], has_events: bool) -> None:
        kv_config = kv_cache_config(blocks_for_decoding(case), case["num_groups"])
        self.events = LedgerEvents(kv_config, NullSink()) if has_events else None
        observer = None if self.events is None else self.events.observer
        hasher = make_block_hasher("sha256", BLOCK_SIZE)
        manager = KVCacheManager(kv_config, MAX_MODEL_LEN, hasher=hasher, observer=observer)
        self.serving = OurServing(manager, case["num_running"], TOKEN_BUDGET)
        start_decoding(self.serving, case["num_running"])
        self.end_step()

    def before(self) -> None:
        sleep(REST_S)
        while self.events is not None and self.events.num_pending_changes > 0:
            sleep(REST_S)

    def run(self) -> None:
        self.serving.decode(self.serving.sampled())
        self.end_step()

    def end_step(self) -> None:
        if self.events is not None:
            self.events.end_step(0.0)

    def close(self) -> None:
        if self.events is not None:
            self.events.close()


class Theirs(Operation):
    def __init__(self, case: dict[str, Any], has_events: bool) -> None:
        self.serving = VllmParts().serving(
            blocks_for_decoding(case), case["num_running"], TOKEN_BUDGET, case["num_groups"]
        )
        self.serving.scheduler.kv_cache_manager.block_pool.enable_kv_cache_events = has_events
        start_decoding(self.serving, case["num_running"])

    def before(self) -> None:
        self.sampled = self.serving.sampled()
        sleep(REST_S)

    def run(self) -> None:
        self.serving.decode(self.sampled)


def in_turns(with_events: Operation, without: Operation, repeats: int) -> tuple[list[float], list[float]]:
    """Microseconds of each step of the two, which alternate: what is looked for is less than the machine drifts."""
    sides: tuple[tuple[Operation, list[float]], ...] = ((with_events, []), (without, []))
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for _ in range(repeats):
            for side, times in sides:
                side.before()
                start = thread_time_ns()
                side.run()
                times.append((thread_time_ns() - start) / 1000)
    finally:
        gc.enable()
        gc.unfreeze()
    return sides[0][1], sides[1][1]


def cells(with_events: list[float], without: list[float]) -> str:
    added = median(on - off for on, off in zip(with_events, without, strict=True)) / median(without)
    return f"{median(with_events):.3g} us | {added:+.1%}"


def main() -> None:
    print("| running | groups | ours with events | they add | vLLM with events | they add |")
    print("|---:|---:|---:|---:|---:|---:|")
    for num_running, num_groups in ((64, 1), (256, 1), (1024, 1), (1024, 6)):
        repeats = BLOCK_SIZE * 15
        case = {"num_running": num_running, "num_groups": num_groups, "repeats": repeats}
        ours = [Ours(case, has_events) for has_events in (True, False)]
        our_times = in_turns(ours[0], ours[1], repeats)
        ours[0].close()
        theirs = [Theirs(case, has_events) for has_events in (True, False)]
        their_times = in_turns(theirs[0], theirs[1], repeats // 3)
        print(f"| {num_running} | {num_groups} | {cells(*our_times)} | {cells(*their_times)} |", flush=True)


if __name__ == "__main__":
    main()
