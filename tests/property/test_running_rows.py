"""A scheduler whose requests decode in rows does what one does whose requests all count for themselves.

The second of two twins takes every request out of its row after every call. Nobody looks at the first one's requests
while it works, so that its rows really hold what they count.
"""

import random
from dataclasses import dataclass, field

import pytest

from kvledger import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    Request,
    SlidingWindowSpec,
)
from kvledger.core.requests.running_table import NUM_OPEN
from kvledger.scheduler import Scheduler, SchedulerConfig, SchedulerOutput, SchedulingPolicy

BLOCK_SIZE = 4
FULL = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=8)
WINDOW = SlidingWindowSpec(BLOCK_SIZE, num_kv_heads=1, head_size=8, sliding_window=6)
STATE = MambaSpec(BLOCK_SIZE, ((4,),), ("float32",), mamba_cache_mode="align")
# Blocks as large as the sequences: rows run out of room for open tokens long before a block is full.
LARGE = FullAttentionSpec(64, num_kv_heads=1, head_size=8)
KINDS: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (FULL,),
    "window": (FULL, WINDOW),
    "state": (FULL, STATE),
    "large blocks": (LARGE,),
}


@dataclass
class Twin:
    scheduler: Scheduler
    requests: dict[str, Request] = field(default_factory=dict)
    in_flight: list[SchedulerOutput] = field(default_factory=list)
    said: list[object] = field(default_factory=list)
    num_entered: int = 0
    num_rows: int = 0

    def say(self, output: SchedulerOutput) -> None:
        new = output.new_block_ids_by_request()
        started = [(data.request_id, data.block_ids, data.token_ids) for data in output.new_requests]
        self.said.append((output.ranges_by_request(), new, started, output.preempted_request_ids))
        self.said.append((output.finished_request_ids, output.total_num_computed_tokens, output.draft_token_ids))

    def leave(self) -> None:
        for request in self.requests.values():
            request.leave()


def make(rng: random.Random, kind: str, num_steps: int) -> Scheduler:
    groups = tuple(KVCacheGroupSpec((f"layer.{index}",), spec) for index, spec in enumerate(KINDS[kind]))
    num_blocks = rng.choice([12, 30, 200]) * (1 + len(groups))
    manager = KVCacheManager(KVCacheConfig(num_blocks, groups), 120, enable_caching=rng.random() < 0.8)
    config = SchedulerConfig(
        max_num_seqs=rng.choice([3, 8]),
        max_num_batched_tokens=rng.choice([64, 256]),
        max_steps_in_flight=num_steps,
        num_lookahead_tokens=rng.choice([0, 0, 2]),
        policy=rng.choice([SchedulingPolicy.FCFS, SchedulingPolicy.PRIORITY]),
    )
    return Scheduler(manager, config)


def arrive(twins: list[Twin], rng: random.Random, name: str) -> None:
    prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
    stops = rng.choice([(), (2,), (1, 2), (2**32 - 1,), (-2,)])
    max_tokens, priority, arrival = rng.randrange(1, 70), rng.randrange(3), rng.random()
    for twin in twins:
        request = Request(
            name, prompt, max_tokens=max_tokens, stop_token_ids=stops, priority=priority, arrival_time=arrival
        )
        twin.requests[name] = request
        twin.scheduler.add_request(request)


def sampled(output: SchedulerOutput, rng: random.Random) -> list[list[int]]:
    rows = []
    for row, request_id in enumerate(output.request_ids):
        request = output.requests[row]
        end = output.num_computed_tokens[row] + output.num_scheduled_tokens[row]
        is_due = end >= request.num_tokens
        assert request_id == request.request_id
        tokens = [rng.choice([0, 0, 0, 0, 0, 0, 0, 1, 2, 2**31, 2**32 - 1]) for _ in range(int(is_due))]
        rows.append(tokens)
    return rows


def step(twins: list[Twin], rng: random.Random, num_steps: int, is_flat: bool) -> None:
    for twin in twins:
        output = twin.scheduler.schedule()
        twin.in_flight.append(output)
        twin.say(output)
        if twin is twins[1]:
            twin.leave()
        twin.num_rows += len(output.request_ids)
        table = twin.scheduler._state.rows.table
        twin.num_entered += sum(1 for request in output.requests if request.row_in(table) >= 0)
    if len(twins[0].in_flight) < num_steps:
        return
    # Only the second is looked at: its requests count for themselves anyway.
    tokens = sampled(twins[1].in_flight[0], rng)
    for twin in twins:
        output = twin.in_flight.pop(0)
        if is_flat:
            flat = [row[0] if row else -1 for row in tokens]
            end = twin.scheduler.update_from_tokens(output, flat)
            twin.said.append(([repr(gained) for gained in end.finished], end.dropped_rows))
        else:
            gained = twin.scheduler.update_from_output(output, tokens)
            twin.said.append([repr(one) for one in gained])
        if twin is twins[1]:
            twin.leave()


def meddle(twins: list[Twin], rng: random.Random, number: int) -> None:
    """Something from outside, at any moment between two calls."""
    running = [request.request_id for request in twins[1].scheduler.running_requests()]
    if not running:
        return
    name = rng.choice(running)
    deed = rng.randrange(5)
    for twin in twins:
        if deed == 0:
            twin.scheduler.abort(name)
        elif deed == 1 and "child" not in name and twin.requests[name].num_processed_tokens > 0:
            child = f"child {number}"
            if twin.scheduler.fork(name, [child]):
                twin.requests[child] = twin.scheduler.get_request(child)
        elif deed == 2:
            twin.scheduler.reset_prefix_cache(preempt_running=True)
        elif deed == 3:
            # Reading changes nothing.
            request = twin.requests[name]
            twin.said.append((request.num_tokens, request.num_computed_tokens, request.output_token_ids()))
        elif deed == 4 and len(twin.in_flight) == 0:
            twin.scheduler.update_draft_tokens(name, [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_rows_count_what_requests_would(kind: str, num_steps: int, seed: int) -> None:
    rng = random.Random(f"{kind} {num_steps} {seed}")
    state = rng.getstate()
    twins = []
    for _ in range(2):
        rng.setstate(state)
        twins.append(Twin(make(rng, kind, num_steps)))
    for number in range(150):
        if rng.random() < 0.15:
            arrive(twins, rng, f"r{number}")
        if rng.random() < 0.12:
            meddle(twins, rng, number)
        step(twins, rng, num_steps, is_flat=rng.random() < 0.7)
        assert twins[0].said == twins[1].said, number
        twins[1].scheduler.check()
    twins[0].scheduler.check()
    for name, request in twins[0].requests.items():
        other = twins[1].requests[name]
        assert request.output_token_ids() == other.output_token_ids()
        assert (request.status, request.num_computed_tokens) == (other.status, other.num_computed_tokens)
        assert request.num_in_flight_tokens == other.num_in_flight_tokens
    assert twins[1].num_entered == 0
    if kind != "state":
        # Or the first would only seem to use its rows. (States want to be asked about every step.)
        assert twins[0].num_entered > twins[0].num_rows / 5


def test_a_row_that_nobody_reads_gives_all_its_tokens_back() -> None:
    config = KVCacheConfig(20, (KVCacheGroupSpec(("layer",), LARGE),))
    scheduler = Scheduler(KVCacheManager(config, 256), SchedulerConfig(max_num_batched_tokens=256))
    request = Request("a", [1, 2, 3], max_tokens=100)
    scheduler.add_request(request)
    for token in range(3 * NUM_OPEN + 5):
        scheduler.update_from_tokens(scheduler.schedule(), [token])
    assert request.output_token_ids() == list(range(3 * NUM_OPEN + 5))
    scheduler.check()
