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

from kvledger import KVCacheConfig, KVCacheGroupSpec, KVCacheManager, Request, make_block_hasher
from kvledger.bench.contestants import ours as plain
from kvledger.bench.contestants import vllm
from kvledger.bench.operation import Operation
from kvledger.bench.workload import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    TOKEN_BUDGET,
    blocks_for_decoding,
    decoding_prompts,
)
from kvledger.events import LedgerEvents, NullSink
from kvledger.scheduler import Scheduler, SchedulerConfig

REST_S = 0.003


class Ours(Operation):
    def __init__(self, case: dict[str, Any], has_events: bool) -> None:
        groups = tuple(KVCacheGroupSpec((f"layer.{index}",), plain.spec(index)) for index in range(case["num_groups"]))
        kv_config = KVCacheConfig(blocks_for_decoding(case), groups)
        self.events = LedgerEvents(kv_config, NullSink()) if has_events else None
        observer = None if self.events is None else self.events.observer
        hasher = make_block_hasher("sha256", BLOCK_SIZE)
        manager = KVCacheManager(kv_config, MAX_MODEL_LEN, hasher=hasher, observer=observer)
        config = SchedulerConfig(max_num_seqs=case["num_running"], max_num_batched_tokens=TOKEN_BUDGET)
        self.scheduler = Scheduler(manager, config)
        for index, prompt in enumerate(decoding_prompts(case["num_running"])):
            self.scheduler.add_request(Request(f"r{index}", prompt, max_tokens=MAX_TOKENS))
        self.sampled = [7] * case["num_running"]
        self.run()
        if self.scheduler.num_running != case["num_running"]:
            raise RuntimeError("not everything runs")

    def before(self) -> None:
        sleep(REST_S)
        while self.events is not None and self.events.num_pending_changes > 0:
            sleep(REST_S)

    def run(self) -> None:
        output = self.scheduler.schedule()
        self.scheduler.update_from_tokens(output, self.sampled)
        if self.events is not None:
            self.events.end_step(0.0)

    def close(self) -> None:
        if self.events is not None:
            self.events.close()


class Theirs(vllm.SchedulerStep):
    def __init__(self, case: dict[str, Any], has_events: bool) -> None:
        super().__init__(case)
        self._scheduler.kv_cache_manager.block_pool.enable_kv_cache_events = has_events

    def before(self) -> None:
        super().before()
        sleep(REST_S)


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
