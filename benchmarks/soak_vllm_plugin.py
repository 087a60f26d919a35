"""Does real vLLM on the ledger stay sound for long? A random mix for so many minutes, with what it did at the end.

    scripts/reference_python.sh compiled -m benchmarks.soak_vllm_plugin --minutes 20

SmolLM2 (scripts/make_reference.sh --model) on a pool so small that requests are preempted: shared prefixes, several
samples, aborts, resets of the cache while idle and busy. Every invariant of the ledger is proved once in 500 steps, and
nobody may hold a block when all requests are done.
"""

import argparse
import sys
import time
from pathlib import Path

from vllm import SamplingParams

from tests.plugin.engine_run import EngineRun, engine_run
from tests.plugin.models import smollm2

CHECK_INTERVAL = 500
# More requests would come than a CPU answers: the queue would hide what else grows.
MAX_LIVE = 64
REPORT_INTERVAL_S = 60.0


class Soak:
    """The mix, and what it did."""

    def __init__(self, run: EngineRun) -> None:
        self.run = run
        self.live: list[str] = []
        self.num_started = 0
        self.num_steps = 0
        self.num_aborts = 0
        self.num_resets = 0
        self.num_checks = 0
        self.num_queries = 0
        self.num_hits = 0
        self.num_preemptions = 0

    def turn(self) -> None:
        """Some requests more, some steps, now and then an abort or a reset."""
        run, rng = self.run, self.run.rng
        for _ in range(min(rng.randint(0, 12), MAX_LIVE - len(self.live))):
            self.num_started += 1
            name = f"soak-{self.num_started}"
            sampled = {"n": 2, "temperature": 0.8} if rng.random() < 0.1 else {"temperature": 0.0}
            params = SamplingParams(max_tokens=rng.randint(1, 60), ignore_eos=True, **sampled)
            run.engine.add_request(name, {"prompt_token_ids": run.prompt()}, params)
            self.live.append(name)
        for _ in range(rng.randint(1, 20)):
            self.step()
        if self.live and rng.random() < 0.3:
            run.abort(self.live.pop(rng.randrange(len(self.live))))
            self.num_aborts += 1
        if rng.random() < 0.02:
            run.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
            self.num_resets += 1

    def step(self) -> None:
        run = self.run
        if not run.engine.has_unfinished_requests():
            return
        done = {request.request_id for request in run.engine.step() if request.finished}
        self.live = [name for name in self.live if name not in done]
        self.num_steps += 1
        if self.num_steps % CHECK_INTERVAL == 0:
            run.manager.ledger.check()
            self.num_checks += 1
        self._count()

    def drain(self) -> None:
        """Everything is answered; no block may be held then."""
        while self.run.engine.has_unfinished_requests():
            self.step()
        self.run.manager.ledger.check()
        if self.run.manager.usage != 0.0:
            raise AssertionError(f"all requests are done and usage is {self.run.manager.usage}")

    def report(self) -> str:
        hit_rate = self.num_hits / max(1, self.num_queries)
        return (
            f"{self.num_started:,} requests, {self.num_steps:,} steps, {self.num_preemptions:,} preemptions, "
            f"{self.num_aborts:,} aborts, {self.num_resets} resets, {hit_rate:.1%} of the prompt tokens hit, "
            f"{self.num_checks} checks, {resident_mib():,.0f} MiB resident"
        )

    def _count(self) -> None:
        """Takes what was recorded of the step: kept, twenty minutes of records would hide a leak."""
        run = self.run
        self.num_preemptions += sum(len(step["resumed"]) for step in run.steps)
        for record in (run.tokens, run.steps, run.events, run.stats):
            record.clear()


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    minutes: float = parser.parse_args().minutes
    with engine_run(True, **smollm2(), num_gpu_blocks_override=40, max_num_seqs=32) as run:
        soak = Soak(run)
        take_stats = run.manager.make_prefix_cache_stats

        def counted_stats() -> object:
            stats = take_stats()
            if stats is not None:
                soak.num_queries += stats.queries
                soak.num_hits += stats.hits
            return stats

        run.manager.make_prefix_cache_stats = counted_stats
        start = last = time.monotonic()
        while time.monotonic() < start + minutes * 60:
            soak.turn()
            if time.monotonic() > last + REPORT_INTERVAL_S:
                last = time.monotonic()
                print(f"{(last - start) / 60:4.1f} min: {soak.report()}", file=sys.stderr, flush=True)
        soak.drain()
        print(f"{minutes:g} minutes, sound to the end: {soak.report()}")


if __name__ == "__main__":
    main()
