"""A fuzzer for stalls: whoever is let in must end, whatever the groups, the pool, the limits and the outside do.

    python -m tests.property.stalls --seeds 3000                 (PYTHONPATH=src, from the root of the project)
    python -m tests.property.stalls --first 7 --seeds 1 --log    one life, told step by step

Each seed is one life: random groups (states with hash units inside their blocks among them), a pool that just fits some
prompt, random limits, drafts, one or two steps in flight, an external source that delivers, fails or does not know.
After every step all layers are checked and every explanation is compared with the step. At the end nothing new comes,
the source answers, and all that is there has to end within a bounded number of steps. Only a request that has outgrown
the pool may end with an error.
"""

import argparse
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from kvledger import KVCacheManager, KVCacheSpec, Request, RequestStatus, Sha256BlockHasher
from kvledger.core.groups.policy import DraftRule
from kvledger.errors import ConfigError, RequestTooLargeError
from kvledger.scheduler import (
    ExternalHit,
    ExternalKVSource,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SchedulingPolicy,
    StallDetector,
    WaitReason,
)
from tests import groups
from tests.groups import hybrid
from tests.property.test_hybrid_machine import Layout, draw_layout
from tests.wait_checker import WaitChecker

MAX_MODEL_LEN = 64
# Own steps without a token that is new: more than it takes to compute all tokens of a request again one by one, waiting
# for each to come back.
STALL_STEPS = 3 * MAX_MODEL_LEN


class StallFoundError(AssertionError):
    """Somebody who was let in does not get to the end."""


def draw_states(rng: random.Random) -> Layout:
    """Full attention beside one to three states in blocks of one or two sizes, and hash units inside them."""
    unit = rng.choice([1, 2, 4])
    num_drafts = rng.choice([0, 0, 2])
    checkpoint = rng.choice([0, 0, unit, 2 * unit])

    def size() -> int:
        return unit * rng.choice([1, 2, 4])

    state_size, full_size = size(), size()
    specs: list[KVCacheSpec] = [groups.full(full_size, rng.choice([1, 2]))] if rng.random() < 0.9 else []
    for _ in range(rng.randint(1 if specs else 2, 3)):
        own = state_size if rng.random() < 0.8 else size()
        specs.append(groups.state(own, "align", num_drafts, checkpoint, rng.choice([1, 1, 2])))
    rng.shuffle(specs)
    return Layout(
        specs,
        num_lookahead=rng.choice([0, 0, 0, 1, min(spec.block_size for spec in specs)]),
        num_state_drafts=num_drafts,
        retention=rng.choice([None, None, None, 0]),
        pins=rng.random() < 0.4,
    )


def draw_unit(rng: random.Random, layout: Layout) -> int:
    """Tokens under a hash: a divisor of all blocks that are cached; 0 where there is no choice."""
    sizes = [
        spec.block_size * (layout.ranks if spec.shards_over_context else 1)
        for spec in layout.specs
        if spec.prefix_cacheable
    ]
    if len(layout.specs) == 1 or not layout.caching:
        return 0
    common = gcd(*sizes)
    return rng.choice([common, *[unit for unit in (1, 2, 4) if common % unit == 0]])


class Source(ExternalKVSource):
    """Answers at random; what it was asked to load arrives when the life says so."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self.rng, self.share = rng, share
        self.is_closing = False

    def lookup(self, request: Request, num_local_tokens: int) -> ExternalHit | None:
        rng = self.rng
        if self.is_closing or rng.random() >= self.share:
            return ExternalHit(0)
        if rng.random() < 0.2:
            return None
        return ExternalHit(rng.randint(0, 24), asynchronous=rng.random() < 0.6)

    def allocated(self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int) -> None:
        """Nothing to pin."""


@dataclass
class InFlight:
    output: SchedulerOutput
    # By row: whether it samples.
    samples: list[bool]


class Life:
    """One scheduler with everything around it."""

    def __init__(self, seed: int, log: Callable[[str], None] | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.log = log
        self.layout = draw_states(rng) if rng.random() < 0.6 else draw_layout(rng)
        self.unit = draw_unit(rng, self.layout)
        self.release = rng.choice(["0.32", "0.33"])
        self.config = self.draw_config()
        self.usable = self.draw_usable()
        self.manager = self.make_manager(self.usable)
        self.source = Source(rng, rng.choice([0.0, 0.0, 0.3]))
        self.scheduler = Scheduler(self.manager, self.config, self.source if self.source.share else None)
        self.detector = StallDetector(self.scheduler, STALL_STEPS, on_stall=self.on_stall)
        self.wait_checker = WaitChecker(self.scheduler)
        self.in_flight: list[InFlight] = []
        self.added: dict[str, Request] = {}
        self.errors: dict[str, RequestTooLargeError] = {}
        self.counts: Counter[str] = Counter()
        if log is not None:
            log(f"{self.layout}\nunit {self.unit}, {self.usable} blocks, {self.config}, vLLM {self.release}")

    def draw_config(self) -> SchedulerConfig:
        rng, layout = self.rng, self.layout
        seats = rng.randint(1, 5)
        num_drafts = layout.num_state_drafts if layout.num_state_drafts else rng.choice([0, 0, 1, 3])
        chunked = rng.random() < 0.9
        return SchedulerConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=max(seats, rng.randint(2, 40)) if chunked else MAX_MODEL_LEN,
            policy=rng.choice([SchedulingPolicy.FCFS, SchedulingPolicy.FCFS, SchedulingPolicy.PRIORITY]),
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=rng.choice([0, 0, 0, 3, 7]),
            reserve_full_sequence=rng.random() < 0.6,
            num_speculative_tokens=num_drafts,
            num_lookahead_tokens=rng.choice([0, 0, num_drafts, 3]),
            max_steps_in_flight=rng.choice([1, 1, 2]),
            external_lease_steps=rng.choice([0, 3]),
        )

    def make_manager(self, usable: int) -> KVCacheManager:
        layout = self.layout
        return hybrid(
            usable,
            *layout.specs,
            draft=layout.draft,
            max_model_len=MAX_MODEL_LEN,
            enable_caching=layout.caching,
            hasher=Sha256BlockHasher(self.unit) if self.unit else None,
            drafts=DraftRule(layout.num_lookahead) if layout.num_lookahead else None,
            retention_interval=layout.retention,
            pins_shared_prefix=layout.pins,
            context_parallel_size=layout.ranks,
            watermark=self.rng.choice([0.0, 0.0, 0.2]),
            decisions=self.release,
        )

    def draw_usable(self) -> int:
        """Blocks that just fit a request of some length, or a few more, or several such."""
        rng = self.rng
        probe = self.make_manager(999)
        Scheduler(probe, self.config)
        one = probe.num_blocks_for(rng.randint(1, MAX_MODEL_LEN - 1), 5, self.config.num_lookahead_tokens)
        return max(1, min(one, 900) * rng.choice([1, 1, 1, 2]) + rng.choice([-1, 0, 0, 1, 2, 5]))

    # Moves

    def add(self) -> None:
        rng = self.rng
        shared = list(range(rng.choice([0, 4, 8, 14, 30])))
        family = rng.randint(1, 3)
        prompt = [*shared, *[family * 1000 + position for position in range(rng.randint(1, 20))]]
        name = str(len(self.added) + self.counts["refused"])
        request = Request(
            name,
            prompt,
            max_tokens=rng.choice([1, 1, 3, 12]),
            priority=rng.randint(0, 2),
            arrival_time=float(name),
            num_encoder_tokens=5,
            skip_prefix_lookup=rng.random() < 0.05,
        )
        try:
            self.scheduler.add_request(request)
        except RequestTooLargeError:
            self.counts["refused"] += 1
            return
        self.added[name] = request
        if self.log is not None:
            self.log(f"add {name}: {len(prompt)} tokens and {request.max_tokens}, priority {request.priority}")

    def live(self) -> list[Request]:
        return self.scheduler.running_requests() + self.scheduler.waiting_requests()

    def abort(self) -> None:
        live = self.live()
        if live:
            self.scheduler.abort(self.rng.choice(live).request_id)
            self.counts["aborted"] += 1

    def schedule(self) -> None:
        output = self.scheduler.schedule()
        self.counts["steps"] += 1
        self.counts["preempted"] += len(output.preempted_request_ids)
        for request_id, error in output.errors.items():
            self.errors[request_id] = error  # type: ignore[assignment]
        samples = [not request.is_prefill_chunk for request in output.requests]
        self.in_flight.append(InFlight(output, samples))
        self.scheduler.check()
        self.wait_checker.check(output)
        self.count_reasons()
        if self.log is not None:
            told = "; ".join(str(each) for each in self.scheduler.explain_all())
            copies = [(each.source_block_id, each.target_block_id) for each in output.block_copies]
            preempted = output.preempted_request_ids
            self.log(f"{output.step}: {output.num_tokens_by_request()} preempted {preempted} copies {copies} | {told}")
        self.detector.watch(output)

    def count_reasons(self) -> None:
        """No admission can wait for more than the whole pool has, unless a shorter hit is tried next."""
        for told in self.scheduler.explain_all():
            self.counts[told.reason.name] += 1
            if told.reason is WaitReason.BLOCKS and told.shortage is not None and told.shortage.never_fits:
                raise StallFoundError(f"waits for what the pool has not: {told}")
        self.check_order()

    def check_order(self) -> None:
        """Whoever stands behind another does so in the order in which they are served."""
        served = [each.request_id for each in self.scheduler.running_requests() + self.scheduler.waiting_requests()]
        places = {request_id: place for place, request_id in enumerate(served)}
        for told in self.scheduler.explain_all():
            if told.reason is WaitReason.BEHIND and places.get(told.other_id or "", -1) >= places[told.request_id]:
                raise StallFoundError(f"stands before the one that it stands behind: {told}; order: {served}")

    def deliver(self) -> None:
        step = self.in_flight.pop(0)
        rng, output = self.rng, step.output
        sampled: list[list[int]] = []
        for row, request_id in enumerate(output.request_ids):
            num_accepted = rng.randint(0, len(output.draft_token_ids.get(request_id, ())))
            sampled.append(self.tokens(1 + num_accepted) if step.samples[row] else [])
        self.scheduler.update_from_output(output, sampled)
        if self.config.num_speculative_tokens and self.config.max_steps_in_flight == 1:
            for request in output.requests:
                num_drafts = rng.randint(0, self.config.num_speculative_tokens)
                if request.status is RequestStatus.RUNNING:
                    self.scheduler.update_draft_tokens(request.request_id, self.tokens(num_drafts))
        self.scheduler.check()
        self.check_order()

    def tokens(self, number: int) -> list[int]:
        return [self.rng.randrange(50) for _ in range(number)]

    def report_loads(self, share: float) -> None:
        rng = self.rng
        for request in self.scheduler.waiting_requests():
            if request.status is RequestStatus.WAITING_FOR_EXTERNAL_KV and rng.random() < share:
                num_valid = request.num_computed_tokens
                if rng.random() < 0.3:
                    num_valid = rng.randint(0, num_valid)
                self.scheduler.external_load_finished(request.request_id, num_valid)
        if share == 1.0:
            for request_id in list(self.scheduler._state.loads.orphans):
                self.scheduler.external_load_finished(request_id, 0)

    # A life

    def turn(self) -> None:
        if len(self.in_flight) == self.config.max_steps_in_flight:
            self.deliver()
        self.schedule()

    def play(self) -> None:
        rng = self.rng
        for _ in range(rng.randint(5, 60)):
            while rng.random() < 0.35:
                self.add()
            if rng.random() < 0.04:
                self.abort()
            if rng.random() < 0.02:
                self.scheduler.reset_prefix_cache(preempt_running=rng.random() < 0.5)
            if self.in_flight and rng.random() < 0.3:
                self.deliver()
            self.report_loads(0.4)
            self.turn()
        self.close()

    def close(self) -> None:
        """Nothing new comes; all that is there ends."""
        self.source.is_closing = True
        limit = self.counts["steps"] + 400 + 150 * len(self.added)
        while self.scheduler.has_unfinished_requests:
            self.report_loads(1.0)
            self.turn()
            if self.counts["steps"] > limit:
                raise StallFoundError(
                    f"no end: {self.scheduler.num_running} running, {self.scheduler.num_waiting} waiting"
                )
        while self.in_flight:
            self.deliver()
        self.report_loads(1.0)
        for _ in range(self.config.external_lease_steps + 2):
            self.turn()
        while self.in_flight:
            self.deliver()
        assert self.manager.num_free_blocks == self.usable, "blocks are lost"
        for request_id, error in self.errors.items():
            self.require_outgrown(self.added[request_id], error)

    def require_outgrown(self, request: Request, error: RequestTooLargeError) -> None:
        """It was ended at a length that the pool cannot hold, and that it did not come with."""
        self.counts["outgrew"] += 1
        num_tokens = int(str(error).split(": ")[1].split()[0])
        num_lookahead = self.config.num_lookahead_tokens
        num_needed = self.manager.num_blocks_for(num_tokens, request.num_encoder_tokens, num_lookahead)
        if num_needed <= self.usable or num_tokens <= request.num_prompt_tokens:
            raise StallFoundError(f"ended although it fits: {error}")

    def on_stall(self, report: object) -> None:
        raise StallFoundError(str(report))


def play(seed: int, log: Callable[[str], None] | None = None) -> Counter[str]:
    """One life; what happened in it. StallFoundError, or whatever a check says, when it is not as it should be."""
    try:
        life = Life(seed, log)
    except ConfigError:
        return Counter(invalid=1)
    life.play()
    return life.counts


def main() -> int:
    parser = argparse.ArgumentParser(description="Random lives of a scheduler, each of which must come to its end.")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=3000, help="how many")
    parser.add_argument("--log", action="store_true", help="tell every step")
    options = parser.parse_args()
    totals: Counter[str] = Counter()
    failed: list[int] = []
    for seed in range(options.first, options.first + options.seeds):
        try:
            totals += play(seed, print if options.log else None)
        except Exception as error:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:400]}", flush=True)
            if options.log:
                raise
    print(f"seeds {options.first} to {options.first + options.seeds - 1}: {len(failed)} failed {failed[:20]}")
    print(", ".join(f"{name} {number:,}" for name, number in sorted(totals.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
