"""MemoryError and KeyboardInterrupt in the midst of a call: either nothing is lost and everything goes on, or check()
names the change that never ended and every further call is refused. Never a ledger that looks sound and is not."""

from collections.abc import Callable

import pytest

from kvledger import KVCacheManager, Request
from kvledger.core.units import IS_COMPILED
from kvledger.errors import InvariantError, UnfinishedChangeError
from kvledger.scheduler import RequestAccounting, Scheduler, SchedulerConfig, SchedulerOutput
from tests.groups import full, hybrid, state, window
from tests.helpers import Journal, admit, admitted, leave, other, request
from tests.injection import interrupt, num_lines, starve

interpreted = pytest.mark.skipif(IS_COMPILED, reason="lines of compiled code cannot be traced")
compiled = pytest.mark.skipif(not IS_COMPILED, reason="most allocations are the interpreter's own")


class Desk:
    """A scheduler at work: "a" and "b" decode and need a block each in the next step, of which one is left, so that "b"
    is preempted; "c" and "d" wait, and "c" has a prefix hit."""

    def __init__(self, overlapping: bool = False) -> None:
        self.manager = hybrid(12, full(), window(8), observer=Journal())
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, max_steps_in_flight=2 if overlapping else 1)
        self.scheduler = Scheduler(self.manager, config, accounting=RequestAccounting(self.manager))
        leave(self.manager, admitted(self.manager, "old", other(9, family=3)))
        self.add("a", other(7, family=1))
        self.add("b", other(7, family=2))
        self.step()
        self.step()
        self.add("c", other(13, family=3))
        self.add("d", other(6, family=4))

    def add(self, name: str, prompt: list[int]) -> None:
        self.scheduler.add_request(Request(name, prompt, max_tokens=6))

    def step(self) -> None:
        self.update(self.scheduler.schedule())

    def update(self, output: SchedulerOutput) -> None:
        self.scheduler.update_from_output(output, self.rows(output))

    def rows(self, output: SchedulerOutput) -> list[list[int]]:
        ends = [start + num for start, num in zip(output.num_computed_tokens, output.num_scheduled_tokens, strict=True)]
        return [[7] if end >= req.num_tokens else [] for end, req in zip(ends, output.requests, strict=True)]

    def with_step(self) -> "Desk":
        self.scheduler.schedule()
        return self

    @property
    def output(self) -> SchedulerOutput:
        return self.scheduler.steps_in_flight[0]

    def finish(self) -> None:
        """Everybody ends, and all blocks come back."""
        for _ in range(60):
            for output in self.scheduler.steps_in_flight:
                self.update(output)
                self.scheduler.check()
            if not self.scheduler.has_unfinished_requests:
                break
            self.scheduler.schedule()
            self.scheduler.check()
        assert not self.scheduler.has_unfinished_requests
        self.manager.release_block_copies(self.manager.take_block_copies())
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks


Door = tuple[Callable[[], Desk], Callable[[Desk], object]]
DOORS: dict[str, Door] = {
    "schedule": (Desk, lambda desk: desk.scheduler.schedule()),
    "schedule, overlapping": (
        lambda: Desk(overlapping=True).with_step(),
        lambda desk: desk.scheduler.schedule(),
    ),
    "update_from_output": (
        lambda: Desk().with_step(),
        lambda desk: desk.scheduler.update_from_output(desk.output, desk.rows(desk.output)),
    ),
    "update_from_output, overlapping": (
        lambda: Desk(overlapping=True).with_step(),
        lambda desk: desk.scheduler.update_from_output(desk.output, desk.rows(desk.output)),
    ),
    "update_from_tokens": (
        lambda: Desk().with_step(),
        lambda desk: desk.scheduler.update_from_tokens(
            desk.output, [row[0] if row else -1 for row in desk.rows(desk.output)]
        ),
    ),
    "fail_step": (lambda: Desk().with_step(), lambda desk: desk.scheduler.fail_step(desk.output)),
    "add_request": (Desk, lambda desk: desk.add("e", other(9, family=3))),
    "abort": (Desk, lambda desk: desk.scheduler.abort("a")),
    "fork": (Desk, lambda desk: desk.scheduler.fork("a", ["e"])),
    "reset": (Desk, lambda desk: desk.scheduler.reset_prefix_cache(preempt_running=True)),
}


def broken(check: Callable[[], None]) -> str:
    """What a check finds; empty when all is well."""
    try:
        check()
    except InvariantError as error:
        return str(error)
    return ""


def outcome(desk: Desk) -> str:
    """What an interrupted call has left: "sound", and everybody can go on to the end, or "named"."""
    found = broken(desk.scheduler.check)
    if found:
        assert "was interrupted by an exception, so this" in found
        for call in (
            desk.scheduler.schedule,
            lambda: desk.scheduler.abort("a"),
            lambda: desk.add("z", [1, 2]),
            lambda: desk.scheduler.reset_prefix_cache(),
        ):
            with pytest.raises(UnfinishedChangeError, match="half changed"):
                call()
        return "named"
    desk.finish()
    return "sound"


@interpreted
@pytest.mark.parametrize("door", DOORS)
def test_an_interrupt_at_any_line_is_harmless_or_named(door: str):
    build, call = DOORS[door]
    desk = build()
    lines = num_lines(lambda: call(desk))
    outcomes = {"sound": 0, "named": 0}
    for line in range(1, lines + 1):
        victim = build()
        assert interrupt(lambda: call(victim), line)  # noqa: B023
        outcomes[outcome(victim)] += 1
    assert outcomes["sound"] > 0
    assert outcomes["named"] > 0


@compiled
@pytest.mark.parametrize("door", DOORS)
def test_memory_that_runs_out_at_any_allocation_is_harmless_or_named(door: str):
    pytest.importorskip("_testcapi")
    build, call = DOORS[door]
    num_starved = 0
    for allocation in range(10_000):
        victim = build()
        came_out = starve(lambda: call(victim), allocation)  # noqa: B023
        if came_out is None:
            break
        num_starved += 1
        outcome(victim)
    assert num_starved > 0


def manager_doors() -> dict[str, tuple[Callable[[], KVCacheManager], Callable[[KVCacheManager], object]]]:
    def build() -> KVCacheManager:
        manager = hybrid(14, full(), window(8), state(), observer=Journal())
        a = admitted(manager, "a", other(8, family=1))
        leave(manager, admitted(manager, "old", other(9, family=2)))
        a.append_token(7)
        requests["a"] = a
        requests["b"] = request("b", other(13, family=2))
        return manager

    requests: dict[str, Request] = {}
    return {
        "start": (build, lambda manager: admit(manager, requests["b"])),
        "decode": (build, lambda manager: manager.allocate_slots(requests["a"], 1)),
        "batch": (build, lambda manager: manager.allocate_running([requests["a"]], [1])),
        "free": (build, lambda manager: manager.free(requests["a"])),
        "fork": (build, lambda manager: manager.fork(requests["a"], requests["a"].twin("c"))),
        "evict": (build, lambda manager: manager.evict_blocks([1, 2, 3, 4])),
        "detach": (build, lambda manager: manager.detach(requests["a"])),
    }


@interpreted
@pytest.mark.parametrize("door", manager_doors())
def test_the_ledger_alone_is_as_sound_or_says_what_was_interrupted(door: str):
    build, call = manager_doors()[door]
    manager = build()
    lines = num_lines(lambda: call(manager))
    num_named = 0
    for line in range(1, lines + 1):
        victim = build()
        assert interrupt(lambda: call(victim), line)  # noqa: B023
        found = broken(victim.check)
        if found:
            assert "was interrupted by an exception, so this ledger is half changed" in found
            num_named += 1
            with pytest.raises(UnfinishedChangeError, match="half changed"):
                victim.get_computed_blocks(request("z", 5))
            with pytest.raises(UnfinishedChangeError, match="half changed"):
                victim.allocate_slots(request("z", 5), 5)
    assert num_named > 0
