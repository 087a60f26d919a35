"""Reports from the field, section A: deadlock, starvation, thrash. N usable blocks of 4 tokens, as in the reports."""

import random

import pytest

from kvledger import KVCacheSpec
from kvledger.errors import RequestTooLargeError
from kvledger.metrics import IntervalLog
from kvledger.scheduler import (
    ExternalHit,
    RequestOutput,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SchedulingPolicy,
)
from tests.engine import Engine
from tests.groups import chunked, full, hybrid, state, window
from tests.helpers import other, request


def answer_loads(engine: Engine) -> None:
    """Whatever the external store was asked for arrives."""
    for waiting in engine.scheduler.waiting_requests():
        if waiting.status.name == "WAITING_FOR_EXTERNAL_KV" and waiting.request_id in engine.source.taken:
            engine.load(waiting.request_id)


def answer(scheduler: Scheduler, output: SchedulerOutput) -> list[RequestOutput]:
    """Every request that is through its prompt samples a token."""
    sampled = [[] if request.is_prefill_chunk else [7] for request in output.requests]
    return scheduler.update_from_output(output, sampled)


@pytest.mark.parametrize("reserve", [True, False])
def test_b01_a_prompt_longer_than_the_pool_is_refused_and_others_go_on(reserve: bool) -> None:
    engine = Engine(4, max_model_len=64, reserve_full_sequence=reserve)
    with pytest.raises(RequestTooLargeError, match="40 tokens need 10 blocks, the pool has 4"):
        engine.add("long", 40)
    engine.add("short", 4, max_tokens=3)
    engine.run()
    assert engine.finished == {"short": "FINISHED_LENGTH"}


@pytest.mark.parametrize("reserve", [True, False])
def test_b01_a_request_that_outgrows_the_pool_while_decoding_ends_alone(reserve: bool) -> None:
    engine = Engine(4, max_model_len=64, reserve_full_sequence=reserve)
    engine.add("growing", 14, max_tokens=40)
    engine.add("short", other(4), max_tokens=3)
    engine.run()
    assert engine.finished == {"growing": "error", "short": "FINISHED_LENGTH"}
    # 14 + 2 tokens fill the pool, and the token sampled from the 16th position is the last.
    assert len(engine.tokens["growing"]) == 3
    assert engine.manager.num_free_blocks == 4


@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize(
    "specs", [(full(), window(8)), (full(), chunked(8)), (full(), full(heads=2), window(8), state())]
)
def test_b01_with_several_groups_too(specs: tuple[KVCacheSpec, ...], reserve: bool) -> None:
    """A block a group for each 4 tokens of the sequence, so one group's blocks say nothing about what fits."""
    # Full attention alone could keep 40 tokens in 10 of these 11 blocks; with another group's they are too many.
    manager = hybrid(11, *specs, max_model_len=64, max_in_flight_tokens=64)
    scheduler = Scheduler(
        manager, SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, reserve_full_sequence=reserve)
    )
    with pytest.raises(RequestTooLargeError, match=r"40 tokens need \d+ blocks, the pool has 11"):
        scheduler.add_request(request("long", 40))
    # The first one outgrows the pool while it decodes; the second and third are served, before and after.
    for name, length, max_tokens in (("growing", 8, 56), ("short", 4, 3), ("late", 3, 3)):
        scheduler.add_request(request(name, other(length, length), max_tokens=max_tokens))
    ended: dict[str, str] = {}
    for _ in range(200):
        output = scheduler.schedule()
        ended |= dict.fromkeys(output.errors, "error")
        ended |= {o.request_id: o.finish.name for o in answer(scheduler, output) if o.finish is not None}
        manager.check()
    assert ended == {"growing": "error", "short": "FINISHED_LENGTH", "late": "FINISHED_LENGTH"}
    assert manager.num_free_blocks == 11


@pytest.mark.parametrize("reserve", [True, False])
def test_b02_two_asynchronous_loads_under_pressure_both_finish(reserve: bool) -> None:
    engine = Engine(8, reserve_full_sequence=reserve)
    for family, name in enumerate("ab"):
        engine.source.offers[name] = ExternalHit(16, asynchronous=True)
        engine.add(name, other(24, family), max_tokens=3)
    engine.steps(2)
    # a holds 4 blocks and will need 6; b's 4 would leave it none of the 2 that it still needs.
    assert engine.manager.occupancy().live == 4
    for _ in range(20):
        answer_loads(engine)
        engine.step()
    assert engine.finished == {"a": "FINISHED_LENGTH", "b": "FINISHED_LENGTH"}


@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_b04_two_half_pool_holders_both_finish(reserve: bool, together: bool) -> None:
    engine = Engine(10, reserve_full_sequence=reserve)
    for family, (name, num_blocks) in enumerate((("a", 8), ("b", 6))):
        engine.source.offers[name] = ExternalHit(20, asynchronous=True)
        engine.add(name, other(num_blocks * 4, family), max_tokens=1)
        if not together:
            engine.step()
    for _ in range(20):
        answer_loads(engine)
        engine.step()
    assert engine.finished == {"a": "FINISHED_LENGTH", "b": "FINISHED_LENGTH"}


def test_b05_requests_put_off_by_the_source_hold_no_seat() -> None:
    engine = Engine(12, max_num_seqs=2)
    for family, name in enumerate("ab"):
        engine.source.offers[name] = None
        engine.add(name, other(6, family), max_tokens=2)
    engine.add("c", other(6, 3), max_tokens=2)
    engine.steps(3)
    assert engine.finished == {"c": "FINISHED_LENGTH"}
    engine.source.offers = {"a": ExternalHit(4, asynchronous=True), "b": ExternalHit(4)}
    engine.step()
    engine.load("a")
    engine.run(max_steps=10)
    assert set(engine.finished) == {"a", "b", "c"}


def test_b05_parking_and_releasing_at_random_never_stops_admission() -> None:
    rng = random.Random(5)
    engine = Engine(12, max_num_seqs=2)
    for number in range(40):
        engine.source.offers[str(number)] = None
        engine.add(str(number), other(rng.randrange(1, 20), number), max_tokens=rng.randrange(1, 6))
    for _ in range(400):
        for name in engine.source.offers:
            if rng.random() < 0.2:
                engine.source.offers[name] = rng.choice(
                    [None, ExternalHit(0), ExternalHit(4), ExternalHit(4, asynchronous=True)]
                )
        answer_loads(engine)
        engine.step()
    assert len(engine.finished) == 40


@pytest.mark.parametrize(("reserve", "num_preemptions"), [(True, 0), (False, 1)])
def test_b07_only_the_first_chunk_must_fit_means_preemption(reserve: bool, num_preemptions: int) -> None:
    # Four running requests of 4 blocks that grow to 5 fill the pool of 20; the fifth has a prompt of 8 blocks.
    engine = Engine(20, max_num_batched_tokens=8, reserve_full_sequence=reserve)
    for family, name in enumerate("abcd"):
        engine.source.offers[name] = ExternalHit(12)
        engine.add(name, other(13, family), max_tokens=8)
    engine.step()
    assert (engine.scheduler.num_running, engine.manager.num_free_blocks) == (4, 4)
    engine.add("fifth", other(32, 5), max_tokens=1)
    engine.run()
    assert len(engine.finished) == 5
    assert engine.scheduler.num_preemptions == num_preemptions


def test_b07_a_watermark_leaves_the_running_room_to_grow() -> None:
    def preemptions(watermark: float) -> int:
        engine = Engine(40, watermark=watermark, max_num_seqs=20)
        for number in range(40):
            engine.add(str(number), other(8, number), max_tokens=16)
        engine.run(max_steps=2000)
        return engine.scheduler.num_preemptions

    assert preemptions(0.3) < preemptions(0.0) / 2


@pytest.mark.parametrize(
    ("policy", "order"), [(SchedulingPolicy.FCFS, ["a", "b"]), (SchedulingPolicy.PRIORITY, ["b", "a"])]
)
def test_b08_who_is_admitted_after_a_preemption(policy: SchedulingPolicy, order: list[str]) -> None:
    # b arrived first but could not run; a runs, and is preempted by c's growth.
    engine = Engine(5, policy=policy)
    engine.source.offers["b"] = None
    engine.add("b", other(8, 2), priority=1, arrival_time=0.0, max_tokens=1)
    engine.add("c", other(8, 3), priority=0, arrival_time=2.0, max_tokens=4)
    engine.add("a", other(7, 1), priority=1, arrival_time=1.0, max_tokens=6)
    engine.steps(3)
    assert engine.preemptions == {"a": 1}
    assert [waiting.request_id for waiting in engine.scheduler.waiting_requests()] == order
    engine.source.offers["b"] = ExternalHit(0)
    engine.run()
    # The recompute tax: a lost 2 full blocks, and c holds the other 3. Under FCFS a is next and finds both; by
    # priority b, which arrived first, takes just those 2.
    stats = engine.manager.take_prefix_cache_stats()
    assert stats.preempted_hits == {"FCFS": 8, "PRIORITY": 0}[policy.name]


def test_b10_preemptions_per_request_stay_bounded() -> None:
    rng = random.Random(963)
    engine = Engine(64, max_num_seqs=64, max_num_batched_tokens=128)
    for number in range(200):
        length = min(100, int(rng.paretovariate(1.1) * 4))
        engine.add(str(number), other(length, number), max_tokens=min(100, int(rng.paretovariate(1.1) * 4)))
    engine.run(max_steps=4000)
    assert set(engine.finished.values()) == {"FINISHED_LENGTH"}
    assert max(engine.preemptions.values(), default=0) <= 10
    assert engine.scheduler.num_preemptions == sum(engine.preemptions.values()) > 0


def test_b13_requests_that_ask_for_the_rest_of_the_context_all_finish() -> None:
    # 16 requests may grow to 64 tokens each, and the pool holds 2 such requests: the last one that started gives way.
    engine = Engine(32, max_model_len=64, max_num_seqs=16)
    for number in range(16):
        engine.add(str(number), other(8, number), max_tokens=56)
    num_steps = engine.run(max_steps=2000)
    assert set(engine.finished.values()) == {"FINISHED_LENGTH"}
    # Two at a time, 56 steps a pair, would take 448.
    assert num_steps < 600


def test_b13_the_log_warns_of_what_the_started_requests_may_grow_to() -> None:
    engine = Engine(32, max_model_len=64, max_num_seqs=16)
    now = 0.0
    log = IntervalLog(engine.scheduler, 10.0, lambda: now)
    for number in range(16):
        engine.add(str(number), other(8, number), max_tokens=56)
    engine.step()
    now = 10.0
    line = log.step(0, 16)
    # All 16 run, and nobody had to give way yet.
    assert line is not None
    assert "may grow" not in line
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    now = 20.0
    line = log.step(0, 16)
    assert line is not None
    # 64 tokens are 16 blocks, for each of them.
    warning = "16 started requests may grow to 256 blocks, 8.0x the pool (lower max_tokens or max_num_seqs)"
    assert line.endswith(warning)
