"""What a request can ever need: one number refuses it or lets it in, and whoever is let in gets to its end.

Blocks of 4 tokens unless said otherwise. A pool is as small as it can be; what is asked for is counted by hand.
"""

import pytest

from kvledger import KVCacheManager, Request, Sha256BlockHasher
from kvledger.errors import ConfigError, RequestTooLargeError
from kvledger.scheduler import (
    ExternalHit,
    ExternalKVSource,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    WaitReason,
)
from tests.groups import chunked, full, host, hybrid, managers_of, state, window
from tests.helpers import other, request


class Driver:
    """A scheduler and somebody who sends its tokens back."""

    def __init__(
        self,
        manager: KVCacheManager,
        max_num_batched_tokens: int = 64,
        source: ExternalKVSource | None = None,
        **limits: int,
    ) -> None:
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=max_num_batched_tokens, **limits)
        self.scheduler = Scheduler(manager, config, source)
        self.in_flight: list[SchedulerOutput] = []
        self.finished: dict[str, str] = {}

    def add(self, request_id: str, prompt: int | list[int], max_tokens: int = 1) -> None:
        self.scheduler.add_request(request(request_id, prompt, max_tokens=max_tokens))

    def schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.in_flight.append(output)
        for request_id in output.errors:
            self.finished[request_id] = "error"
        self.scheduler.check()
        return output

    def deliver(self) -> None:
        output = self.in_flight.pop(0)
        sampled = [
            [1] if output.num_computed_tokens[row] + output.num_scheduled_tokens[row] >= each.num_tokens else []
            for row, each in enumerate(output.requests)
        ]
        for gained in self.scheduler.update_from_output(output, sampled):
            if gained.finish is not None:
                self.finished[gained.request_id] = gained.finish.name

    def run(self, max_steps: int = 60) -> dict[str, str]:
        """Steps until nobody is left, with as many in flight as may be. How each request ended."""
        for _ in range(max_steps):
            if len(self.in_flight) == self.scheduler.config.max_steps_in_flight:
                self.deliver()
            if not self.scheduler.has_unfinished_requests:
                break
            self.schedule()
        while self.in_flight:
            self.deliver()
        assert not self.scheduler.has_unfinished_requests, [str(each) for each in self.scheduler.explain_all()]
        return self.finished


def test_a_prompt_is_refused_for_the_states_that_its_steps_hold_at_a_time() -> None:
    # 70 tokens: 2 blocks of full attention; of each state the one after 64 tokens and the running one behind it.
    specs = [full(64), state(64), state(64), state(64)]
    driver = Driver(hybrid(7, *specs))
    with pytest.raises(RequestTooLargeError, match="70 tokens need 8 blocks, the pool has 7"):
        driver.add("big", 70)
    driver.add("small", other(2))
    assert driver.run() == {"small": "FINISHED_LENGTH"}
    driver = Driver(hybrid(8, *specs))
    driver.add("big", 70)
    driver.add("small", other(2))
    assert driver.run() == {"big": "FINISHED_LENGTH", "small": "FINISHED_LENGTH"}


def test_a_request_that_outgrows_the_pool_with_a_second_state_ends_and_the_rest_go_on() -> None:
    driver = Driver(hybrid(3, full(), state()))
    # 4 tokens are one block and one state. The fifth needs two of each.
    driver.add("growing", 4, max_tokens=2)
    driver.add("small", other(2))
    assert driver.run() == {"growing": "error", "small": "FINISHED_LENGTH"}


def test_a_window_is_counted_for_the_steps_of_its_scheduler() -> None:
    # A window of 8 and steps of 8: 7 tokens behind the step and 8 of it are 4 blocks, and one may begin before them.
    manager = hybrid(5, window(8), max_model_len=256)
    assert manager.num_blocks_for(64) == 16
    driver = Driver(manager, 8)
    assert manager.num_blocks_for(64) == 5
    assert managers_of(manager)[0].policy.max_admission_blocks == 5
    driver.add("a", 64)
    assert driver.run() == {"a": "FINISHED_LENGTH"}
    driver = Driver(hybrid(4, window(8), max_model_len=256), 8)
    with pytest.raises(RequestTooLargeError, match="64 tokens need 5 blocks, the pool has 4"):
        driver.add("a", 64)


def test_a_ledger_made_for_smaller_steps_is_refused_where_that_matters() -> None:
    # 7 tokens behind 8 in flight: 4 blocks and one; behind 2 * 32: 18 and one.
    manager = hybrid(40, full(), window(8), max_in_flight_tokens=8)
    problem = "max_in_flight_tokens=8: less than 2 steps of max_num_batched_tokens=32"
    with pytest.raises(ConfigError, match=f"{problem}, with which group 1 may hold 19 blocks of a request; "):
        Scheduler(manager, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_steps_in_flight=2))
    assert managers_of(manager)[1].policy.max_admission_blocks == 5
    Scheduler(manager, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=4, max_steps_in_flight=2))
    # Full attention holds the same, however large the steps.
    Scheduler(hybrid(40, full(), max_in_flight_tokens=8), SchedulerConfig())


def test_a_chunk_that_begins_inside_a_block_is_counted_with_that_block() -> None:
    # Chunks of 6 in blocks of 4, steps of 5: tokens 15 .. 19 are read from 12 on; tokens 9 .. 13 touch blocks 1 to 3.
    manager = hybrid(3, chunked(6), max_model_len=256)
    driver = Driver(manager, 5)
    assert manager.num_blocks_for(64) == 4
    with pytest.raises(RequestTooLargeError):
        driver.add("a", 64)


def test_a_hit_that_costs_more_blocks_than_the_pool_has_is_left_for_a_shorter_one() -> None:
    # 62 tokens in blocks of 16: 4 blocks and 2 states. Its hit of 12 tokens ends inside a block: to go on behind it,
    # both groups would need a copy of that block beside it, 8 in all.
    for usable, num_hit in ((6, 0), (7, 0), (8, 12)):
        manager = hybrid(usable, full(16), state(16), max_model_len=64, hasher=Sha256BlockHasher(4))
        driver = Driver(manager)
        driver.add("a", 14)
        driver.run()
        driver.add("b", list(range(14)) + other(48))
        driver.add("c", other(2, 2))
        manager.take_prefix_cache_stats()
        assert driver.run() == dict.fromkeys("abc", "FINISHED_LENGTH")
        assert manager.take_prefix_cache_stats().hits == num_hit


def test_a_shorter_hit_is_one_that_ends_with_a_block() -> None:
    # Of 30 tokens the states after 16 and after 28 are cached. 60 tokens take 4 blocks and 2 states, and with the hit
    # of 28 a copy in each group: in 7 blocks the hit is 16.
    manager = hybrid(7, full(16), state(16), max_model_len=64, hasher=Sha256BlockHasher(4))
    driver = Driver(manager)
    driver.add("a", 30)
    driver.run()
    driver.add("b", list(range(30)) + other(30))
    manager.take_prefix_cache_stats()
    assert driver.run() == {"a": "FINISHED_LENGTH", "b": "FINISHED_LENGTH"}
    assert manager.take_prefix_cache_stats().hits == 16


@pytest.mark.parametrize("specs", [(full(), state()), (full(16), state(16), state(16)), (window(8),)])
def test_what_fits_with_one_step_in_flight_runs_with_two(specs: tuple[object, ...]) -> None:
    sized = hybrid(99, *specs, max_model_len=64)  # type: ignore[arg-type]
    Driver(sized, 16)
    usable = sized.num_blocks_for(63)
    # Two steps in flight hold more, and the whole pool has not so many: then there is one.
    driver = Driver(hybrid(usable, *specs, max_model_len=64), 16, max_steps_in_flight=2)  # type: ignore[arg-type]
    driver.add("a", 60, max_tokens=4)
    assert driver.run(200) == {"a": "FINISHED_LENGTH"}
    assert driver.scheduler.num_preemptions == 0


def test_alone_it_waits_for_its_step_in_flight_before_it_gives_up_what_it_has() -> None:
    # The running state of each block that a step in flight has entered is held: a third one does not fit.
    driver = Driver(hybrid(6, full(), state(), max_model_len=64), 4, max_steps_in_flight=2)
    driver.add("a", 16)
    assert [driver.schedule().num_tokens_by_request() for _ in range(2)] == [{"a": 4}, {"a": 4}]
    driver.deliver()
    driver.schedule()
    driver.deliver()
    assert driver.schedule().num_tokens_by_request() == {}
    told = driver.scheduler.explain("a")
    assert told is not None
    assert told.reason is WaitReason.BLOCKS_IN_FLIGHT
    assert str(told.shortage) == "needs 2 blocks for the step, 1 free"
    assert driver.run() == {"a": "FINISHED_LENGTH"}
    assert driver.scheduler.num_preemptions == 0


def test_a_lone_decode_is_not_padded_beyond_the_tokens_of_a_step() -> None:
    # Its last token is left to compute; with 3 drafts it would be 4 tokens, and steps have 2.
    driver = Driver(hybrid(20, full(), max_model_len=64), 4, num_speculative_tokens=4)
    driver.add("a", 9)
    driver.run()
    driver.add("b", 9)
    assert driver.run() == {"a": "FINISHED_LENGTH", "b": "FINISHED_LENGTH"}


class Store(ExternalKVSource):
    """Has 8 tokens of everybody, and takes its time."""

    def lookup(self, request: Request, num_local_tokens: int) -> ExternalHit:
        return ExternalHit(8 - num_local_tokens, asynchronous=True)

    def allocated(self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int) -> None:
        """Nothing to pin."""


def test_loads_leave_each_other_their_blocks_in_host_memory() -> None:
    # Each needs 3 blocks in host memory, the 2 that it loads and one more. There are 5: the second load would take
    # those two without which neither can go on.
    driver = Driver(hybrid(40, full(), host(6)), source=Store())
    driver.add("a", other(12, 1))
    driver.add("b", other(12, 2))
    driver.schedule()
    driver.deliver()
    told = driver.scheduler.explain("b")
    assert told is not None
    shortage = "needs more blocks for the step than are free in host memory"
    assert (told.reason, str(told.shortage)) == (WaitReason.BLOCKS, shortage)
    assert driver.scheduler.external_load_finished("a", 8)
    # a computes its last 4 tokens in its third block, ends, and leaves room for b's load.
    assert driver.schedule().num_tokens_by_request() == {"a": 4}
    driver.deliver()
    driver.schedule()
    driver.deliver()
    assert driver.scheduler.external_load_finished("b", 8)
    assert driver.run() == {"a": "FINISHED_LENGTH", "b": "FINISHED_LENGTH"}
