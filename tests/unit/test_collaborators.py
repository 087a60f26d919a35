"""Observers, sources, hashers and callbacks that raise or call back: the ledger and the scheduler do all of their work,
as if these had been quiet, and then the exception surfaces."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kvledger import (
    BlockHasher,
    ChainedBlockHasher,
    EvictionCause,
    GivenBlockHasher,
    KVCacheBlock,
    KVCacheManager,
    LedgerObserver,
    LedgerObservers,
    Request,
    RequestStatus,
)
from kvledger.errors import RequestError, UnfinishedChangeError
from kvledger.scheduler import (
    ExternalHit,
    ExternalKVSource,
    RequestAccount,
    RequestAccounting,
    Scheduler,
    SchedulerConfig,
)
from tests.groups import full, hybrid, window
from tests.helpers import Journal, admit, admitted, decode, leave, ledger, other, pool_of, request, snapshot


class Loud(LedgerObserver):
    """Does `act` on every notice but every other third one."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.num_told = 0

    def told(self) -> None:
        self.num_told += 1
        if self.num_told % 3:
            self.act()

    def blocks_cached(self, request: Request, group_id: int, blocks: list[KVCacheBlock]) -> None:
        self.told()

    def blocks_evicted(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> None:
        self.told()

    def prefix_cache_reset(self) -> None:
        self.told()

    def prefix_cache_reset_refused(self, num_held_blocks: int) -> None:
        self.told()


class TroubleError(Exception):
    pass


def trouble() -> None:
    raise TroubleError("the observer's own")


def random_call(random: Random, manager: KVCacheManager, running: list[Request], number: int) -> None:
    """One call on the ledger. What it raises is passed on when the books are right."""
    action = random.random()
    if action < 0.45:
        req = request(str(number), other(random.randrange(1, 20), random.randrange(3)))
        found = manager.get_computed_blocks(req)
        try:
            manager.allocate_slots(req, req.num_tokens - found.num_tokens, found)
        finally:
            if manager.holds_blocks(req):
                req.num_computed_tokens = req.num_tokens
                running.append(req)
    elif action < 0.7 and running:
        req = random.choice(running)
        num_slots = len(manager.get_block_ids(req.request_id)[0]) * 4
        req.append_token(number)
        try:
            manager.allocate_running([req], [1])
        finally:
            if len(manager.get_block_ids(req.request_id)[0]) * 4 > num_slots or req.num_tokens <= num_slots:
                req.num_computed_tokens += 1
            else:
                manager.free(req)
                running.remove(req)
    elif action < 0.85 and running:
        manager.free(running.pop(random.randrange(len(running))))
    elif action < 0.95:
        manager.evict_blocks([random.randrange(1, 13)])
    else:
        manager.reset_prefix_cache()


@pytest.mark.parametrize("several", [False, True])
def test_a_ledger_whose_observer_raises_does_what_a_quiet_one_does(several: bool):
    num_raised = 0
    for seed in range(30):
        loud = Loud(trouble)
        journal, quiet_journal = Journal(), Journal()
        watched = hybrid(12, full(), window(8), observer=LedgerObservers([loud, journal]) if several else loud)
        quiet = hybrid(12, full(), window(8), observer=quiet_journal)
        random, quiet_random = Random(seed), Random(seed)
        running: list[Request] = []
        quiet_running: list[Request] = []
        for number in range(50):
            try:
                random_call(random, watched, running, number)
            except TroubleError:
                num_raised += 1
            random_call(quiet_random, quiet, quiet_running, number)
            assert snapshot(pool_of(watched)) == snapshot(pool_of(quiet))
            watched.check()
        if several:  # told of everything, although the one before it raises
            assert (journal.cached, journal.evicted) == (quiet_journal.cached, quiet_journal.evicted)
    assert num_raised > 200


def test_all_that_observers_raise_within_a_call_surfaces_with_the_first():
    manager = ledger(usable=2, observer=LedgerObservers([Loud(trouble), Loud(trouble)]))
    with pytest.raises(TroubleError) as caught:
        admitted(manager, "a", 8)
    assert caught.value.__notes__ == ['then, within the same call: TroubleError("the observer\'s own")']
    assert manager.get_block_ids("a") == ([1, 2],)
    manager.check()


def test_an_observer_that_calls_back_is_refused_and_may_read():
    seen: list[int] = []
    refusals: list[str] = []
    calls: list[Callable[[], object]] = []

    def call_back() -> None:
        seen.append(manager.num_free_blocks)
        for call in calls:
            with pytest.raises(UnfinishedChangeError, match="If an observer or another callback") as error:
                call()
            refusals.append(str(error.value))

    manager = ledger(usable=4, observer=Loud(call_back))
    a = admitted(manager, "a", 6)
    b = request("b", other(4))
    calls += [
        lambda: manager.free(a),
        lambda: manager.detach(a),
        lambda: manager.get_computed_blocks(b),
        lambda: manager.allocate_slots(b, 4),
        lambda: manager.allocate_running([a], [1]),
        lambda: manager.cache_blocks(a, 4),
        lambda: manager.uncache_beyond(a, 0),
        lambda: manager.fork(a, a.twin("c")),
        lambda: manager.evict_blocks([1]),
        lambda: manager.reset_prefix_cache(),
        lambda: manager.take_block_copies(),
        lambda: manager.release_block_copies([]),
        lambda: manager.release_skipped(a),
        lambda: manager.release_detached([]),
    ]
    decode(manager, a, 2)
    assert len(refusals) == len(calls) * (len(seen) - 1)
    assert len(seen) > 1
    manager.check()
    leave(manager, a)
    assert manager.num_free_blocks == 4


# In the scheduler


def rows_of(output: Any) -> list[list[int]]:
    ends = [start + num for start, num in zip(output.num_computed_tokens, output.num_scheduled_tokens, strict=True)]
    return [[7] if end >= req.num_tokens else [] for end, req in zip(ends, output.requests, strict=True)]


def life(scheduler: Scheduler, raised: list[BaseException], may_raise: type[BaseException]) -> list[object]:
    """Everybody to the end, with whatever surfaces on the way. What every step did."""
    log: list[object] = []
    for number in range(12):
        if number < 6:
            scheduler.add_request(Request(str(number), other(5 + 3 * number, number % 2), max_tokens=3))
    for _ in range(100):
        if not scheduler.has_unfinished_requests:
            break
        try:
            scheduler.schedule()
        except may_raise as error:
            raised.append(error)
        (output,) = scheduler.steps_in_flight
        log.append((output.ranges_by_request(), output.new_block_ids_by_request()))
        scheduler.check()
        try:
            scheduler.update_from_output(output, rows_of(output))
        except may_raise as error:
            raised.append(error)
        assert scheduler.steps_in_flight == []
        scheduler.check()
    assert not scheduler.has_unfinished_requests
    assert scheduler.manager.num_free_blocks == scheduler.manager.num_usable_blocks
    return log


CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)


def test_a_step_whose_observer_raises_is_complete_and_in_flight():
    raised: list[BaseException] = []
    quiet = life(Scheduler(ledger(usable=9, observer=Journal()), CONFIG), [], ())  # type: ignore[arg-type]
    assert life(Scheduler(ledger(usable=9, observer=Loud(trouble)), CONFIG), raised, TroubleError) == quiet
    assert len(raised) > 5


def test_an_observer_that_calls_the_scheduler_is_refused():
    num_refused = 0

    def call_back() -> None:
        nonlocal num_refused
        for call in (
            scheduler.schedule,
            lambda: scheduler.abort("0"),
            lambda: scheduler.add_request(request("z", 3)),
            lambda: scheduler.fork("0", ["z"]),
            lambda: scheduler.reset_prefix_cache(),
            lambda: scheduler.external_load_finished("0", 1),
            lambda: scheduler.update_draft_tokens("0", [1]),
        ):
            with pytest.raises(UnfinishedChangeError):
                call()
            num_refused += 1

    scheduler = Scheduler(ledger(usable=9, observer=Loud(call_back)), CONFIG)
    raised: list[BaseException] = []
    life(scheduler, raised, UnfinishedChangeError)
    assert num_refused > 20
    assert raised == []


def test_on_finish_gets_every_account_although_it_raises():
    accounts: list[str] = []

    def on_finish(account: RequestAccount) -> None:
        assert account.finish is RequestStatus.FINISHED_LENGTH
        accounts.append(account.request_id)
        trouble()

    manager = ledger(usable=9)
    scheduler = Scheduler(manager, CONFIG, accounting=RequestAccounting(manager, on_finish=on_finish))
    raised: list[BaseException] = []
    life(scheduler, raised, TroubleError)
    assert sorted(accounts) == [str(number) for number in range(6)]
    assert raised


class ShakySource(ExternalKVSource):
    """Raises in every other call; otherwise offers 4 tokens."""

    def __init__(self, raises_in: str) -> None:
        self.raises_in = raises_in
        self.num_calls = 0
        self.loaded: list[str] = []

    def shake(self, name: str) -> None:
        self.num_calls += 1 if name == self.raises_in else 0
        if name == self.raises_in and self.num_calls % 2:
            trouble()

    def lookup(self, request: Request, num_local_tokens: int) -> ExternalHit | None:
        self.shake("lookup")
        return ExternalHit(4)

    def allocated(self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int) -> None:
        self.shake("allocated")
        self.loaded.append(request.request_id)


@pytest.mark.parametrize("raises_in", ["lookup", "allocated"])
def test_a_source_that_raises_delays_its_request_and_loses_nothing(raises_in: str):
    source = ShakySource(raises_in)
    scheduler = Scheduler(ledger(usable=20), CONFIG, source)
    raised: list[BaseException] = []
    life(scheduler, raised, TroubleError)
    assert raised
    assert set(source.loaded) == {str(number) for number in range(6)}


def test_a_source_that_does_not_take_an_admission_takes_its_hits_back():
    """Nobody computes the blocks of that step, so nobody may hit them."""

    class Refusing(ShakySource):
        def lookup(self, request: Request, num_local_tokens: int) -> ExternalHit | None:
            return ExternalHit(0)

        def allocated(self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int) -> None:
            trouble()

    manager = ledger(usable=8)
    scheduler = Scheduler(manager, CONFIG, Refusing(""))
    scheduler.add_request(request("a", 9))
    with pytest.raises(TroubleError):
        scheduler.schedule()
    assert scheduler.steps_in_flight[0].request_ids == []
    assert manager.get_computed_blocks(request("b", 9)).num_tokens == 0
    assert manager.num_free_blocks == 8
    scheduler.check()


# Hashes


class WrongHasher(BlockHasher):
    """Hashes like sha256 but for one kind of mistake with prompts that begin with 100000."""

    def __init__(self, mistake: str) -> None:
        super().__init__(4)
        self.mistake = mistake

    def extend(self, request: Request) -> None:
        is_wrong = request.tokens.token_ids(0, 1) == [100_000]
        if is_wrong and self.mistake == "raises":
            raise ZeroDivisionError
        hashes: list[Any] = request.block_hashes
        for end in range(len(hashes) * 4 + 4, request.num_tokens + 1, 4):
            if is_wrong and self.mistake == "too few":
                return
            name: Any = request.tokens.pack(0, end)
            if is_wrong and self.mistake == "text":
                name = str(name)
            if is_wrong and self.mistake == "empty":
                name = b""
            hashes.append(name)


MISTAKES = {
    "raises": "the hasher failed with ZeroDivisionError",
    "too few": "0 block hashes for 2 full blocks of 4 tokens",
    "text": r"block_hashes\[0\]=.*not a hash",
    "empty": r"block_hashes\[0\]=b'': not a hash",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_hashes_are_an_error_of_their_request_and_change_nothing(mistake: str):
    manager = ledger(usable=8, hasher=WrongHasher(mistake))
    good = admitted(manager, "good", 9)
    bad = request("bad", other(9))
    before = snapshot(pool_of(manager))
    for call in (
        lambda: manager.get_computed_blocks(bad),
        lambda: manager.allocate_slots(bad, 9),
    ):
        with pytest.raises(RequestError, match=f"request 'bad'.*{MISTAKES[mistake]}"):
            call()
    assert not manager.holds_blocks(bad)
    assert snapshot(pool_of(manager)) == before
    manager.check()
    decode(manager, good, 8)
    manager.check()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_request_with_wrong_hashes_ends_and_the_others_go_on(mistake: str):
    scheduler = Scheduler(ledger(usable=20, hasher=WrongHasher(mistake)), CONFIG)
    for name, prompt in (("a", list(range(9))), ("bad", other(9)), ("c", other(9, 2))):
        scheduler.add_request(Request(name, prompt, max_tokens=3))
    output = scheduler.schedule()
    assert list(output.errors) == ["bad"]
    assert output.finished_request_ids == ["bad"]
    assert "request 'bad'" in str(output.errors["bad"])
    scheduler.check()
    finished: list[str] = []
    for _ in range(10):
        finished += [each.request_id for each in scheduler.update_from_output(output, rows_of(output)) if each.finish]
        output = scheduler.schedule()
        scheduler.check()
    assert finished == ["a", "c"]
    assert scheduler.manager.num_free_blocks == 20


@pytest.mark.parametrize("steps", [1, 2])
def test_hashes_that_the_engine_forgets_to_append_end_the_request_that_needs_them(steps: int):
    """With given hashes: "a" comes with those of its prompt, and the block that its output fills has none."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_steps_in_flight=steps)
    scheduler = Scheduler(ledger(usable=20, hasher=GivenBlockHasher(4)), config)
    a = Request("a", other(6), max_tokens=9)
    a.block_hashes = [b"1"]
    b = Request("b", other(2, 2), max_tokens=2)
    scheduler.add_request(a)
    scheduler.add_request(b)
    errors: dict[str, RequestError] = {}
    for _ in range(8):
        output = scheduler.schedule()
        errors |= output.errors
        scheduler.update_from_output(output, rows_of(output))
        scheduler.check()
    assert "request 'a': 1 block hashes for 2 full blocks" in str(errors["a"])
    assert (a.status, b.status) == (RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_LENGTH)
    assert scheduler.manager.num_free_blocks == 20


def test_hashes_among_given_ones_that_are_none_are_found_wherever_they_stand():
    manager = ledger(usable=8, hasher=GivenBlockHasher(4))
    a = request("a", 12)
    hashes: list[Any] = [b"1", b"2", "3"]
    a.block_hashes = hashes
    with pytest.raises(RequestError, match=r"'a': block_hashes\[2\]='3': not a hash"):
        manager.allocate_slots(a, 12)
    assert manager.num_free_blocks == 8
    a.block_hashes = [b"1", b"2", b"3"]
    assert admit(manager, a) is not None
    manager.check()


def test_a_digest_that_is_not_the_librarys_may_fail_too():
    def digest(data: bytes) -> bytes:
        raise TroubleError("no entropy")

    scheduler = Scheduler(ledger(usable=8, hasher=ChainedBlockHasher(4, digest)), CONFIG)
    scheduler.add_request(request("a", 9))
    scheduler.add_request(request("b", 3))  # it fills no block
    output = scheduler.schedule()
    assert output.request_ids == ["b"]
    assert "the hasher failed with TroubleError('no entropy')" in str(output.errors["a"])
    scheduler.check()


# Forks


def test_a_fork_beyond_the_blocks_that_are_held_is_refused():
    for manager in (ledger(usable=8), hybrid(8, full(), window(8))):
        a = admitted(manager, "a", 6)
        for _ in range(8):
            a.append_token(7)
        a.num_computed_tokens = 13
        before = snapshot(pool_of(manager))
        with pytest.raises(RequestError, match="'a' counts 13 computed tokens and holds blocks for 8"):
            manager.fork(a, a.twin("b"))
        assert snapshot(pool_of(manager)) == before
        a.num_computed_tokens = 6
        manager.check()
        assert manager.fork(a, a.twin("b")) is not None
        manager.check()
