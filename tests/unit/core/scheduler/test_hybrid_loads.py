"""External tokens over groups that read different things: windows, chunks, states, rings beside full attention.

A source offers tokens; how many of them arrive decides where the request can go on. It goes on only from where every
group holds what it reads.
"""

from typing import Any

import pytest

from kvledger import KVCacheManager, Request, RequestStatus, Sha256BlockHasher
from kvledger.scheduler import ExternalHit, ExternalKVSource, Scheduler, SchedulerConfig, SchedulingPolicy
from tests.groups import chunked, full, hybrid, ring, state, tables, window


class Store(ExternalKVSource):
    """Offers what `offers` says, and notes what was taken."""

    def __init__(self) -> None:
        self.offers: dict[str, ExternalHit] = {}
        self.asked: list[tuple[str, int]] = []
        self.taken: dict[str, int] = {}

    def lookup(self, request: Request, num_local_tokens: int) -> ExternalHit | None:
        self.asked.append((request.request_id, num_local_tokens))
        return self.offers.get(request.request_id, ExternalHit(0))

    def allocated(self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int) -> None:
        self.taken[request.request_id] = num_external_tokens


class Desk:
    """A scheduler over those groups, with a store behind it. Every step computes at once."""

    def __init__(self, manager: KVCacheManager, **options: Any) -> None:
        self.manager, self.store = manager, Store()
        self.scheduler = Scheduler(manager, SchedulerConfig(max_num_batched_tokens=256, **options), self.store)

    def add(self, name: str, prompt: int | list[int], offer: ExternalHit | None = None, **options: int) -> Request:
        if offer is not None:
            self.store.offers[name] = offer
        made = Request(name, list(range(prompt)) if isinstance(prompt, int) else prompt, **options)
        self.scheduler.add_request(made)
        return made

    def step(self) -> dict[str, tuple[int, int]]:
        """{request: tokens computed}."""
        output = self.scheduler.schedule()
        ranges = output.ranges_by_request()
        ends = [end for _, end in ranges.values()]
        known = [request.num_tokens for request in output.requests]
        self.scheduler.update_from_output(
            output, [[900] if end == num else [] for end, num in zip(ends, known, strict=True)]
        )
        self.scheduler.check()
        return ranges

    def load(self, name: str, num_valid: int) -> dict[str, tuple[int, int]]:
        """The load of that request reports; what the next step computes. The store has no more to give."""
        self.store.offers.pop(name, None)
        assert self.scheduler.external_load_finished(name, num_valid)
        return self.step()


LOADED = ExternalHit(16, asynchronous=True)


@pytest.mark.parametrize(
    ("specs", "goes_on_at"),
    [
        ((full(),), 8),
        # A window of 8 took blocks for tokens 9 .. 15: from 8 on, 1 .. 7 are read.
        ((full(), window(8)), 0),
        ((window(8),), 0),
        # A window of 30 took all that it reads from 16 on, and so from 8 on.
        ((full(), window(30)), 8),
        # Of chunks of 8 the one from 16 on has blocks, not that from 8 on, which would be written.
        ((full(), chunked(8)), 0),
        ((full(), chunked(32)), 8),
        # The state after 16 tokens has not arrived, and that after 8 is nowhere.
        ((full(), state()), 0),
        # Blocks of 4 tokens begin a ring.
        ((full(), ring()), 8),
    ],
)
def test_half_a_load_is_used_where_every_group_can_go_on(specs: tuple[object, ...], goes_on_at: int) -> None:
    desk = Desk(hybrid(60, *specs))  # type: ignore[arg-type]
    desk.add("a", 24, LOADED, max_tokens=1)
    assert desk.step() == {}
    assert desk.load("a", 8)["a"][0] == goes_on_at
    while desk.scheduler.has_unfinished_requests:
        desk.step()
    # What it left behind is what it computed: another one with its prompt hits the same blocks that it wrote.
    hit = desk.manager.get_computed_blocks(Request("b", [*range(24), 99]))
    assert hit.num_tokens == 24


def test_a_window_goes_on_where_its_blocks_begin() -> None:
    """Of 16 tokens a window of 4 took the block from 12 on, in which 15 of them end and the last lies."""
    desk = Desk(hybrid(60, full(), window(4)))
    desk.add("a", 24, LOADED, max_tokens=1)
    desk.step()
    assert tables(desk.manager, desk.scheduler.get_request("a"))[1][:3] == [0, 0, 0]
    assert desk.load("a", 15) == {"a": (15, 24)}


@pytest.mark.parametrize("num_lost", [0, 1])
def test_a_whole_prompt_is_loaded_and_its_last_token_computed(num_lost: int) -> None:
    """The window of 5 ends with a block: token 15 reads 11, so the block of 8 .. 11 is taken though 16 would not."""
    desk = Desk(hybrid(60, full(), window(5)))
    a = desk.add("a", 16, LOADED, max_tokens=1)
    desk.step()
    assert desk.store.taken == {"a": 16}
    assert tables(desk.manager, a)[1][1] == 0
    assert tables(desk.manager, a)[1][2] != 0
    assert desk.load("a", 16 - num_lost) == {"a": (15, 16)}


def test_a_state_is_asked_for_one_token_before_the_prompts_end() -> None:
    """Nobody can compute the last token again from the state behind it."""
    desk = Desk(hybrid(60, full(), state()))
    desk.add("a", 16, LOADED, max_tokens=1)
    desk.step()
    assert desk.store.taken == {"a": 15}
    assert desk.load("a", 15) == {"a": (15, 16)}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_prompt_of_one_token_has_nothing_to_load(asynchronous: bool) -> None:
    desk = Desk(hybrid(60, full()))
    desk.add("a", 1, ExternalHit(1, asynchronous), max_tokens=1)
    assert desk.step() == {"a": (0, 1)}


def test_a_request_that_must_compute_its_prompt_takes_nothing() -> None:
    desk = Desk(hybrid(60, full()))
    desk.store.offers["a"] = ExternalHit(8)
    desk.scheduler.add_request(Request("a", list(range(20)), skip_prefix_lookup=True))
    assert desk.step() == {"a": (0, 20)}
    assert (desk.store.asked, desk.store.taken) == ([], {"a": 0})


def with_a_hit_inside_a_block(offer: int, asynchronous: bool) -> Desk:
    """b hits 12 tokens of a's 13, in blocks of 8: one block whole, and the start of the next."""
    desk = Desk(hybrid(60, full(8), state(8), hasher=Sha256BlockHasher(4)))
    desk.add("a", [1] * 13, max_tokens=1)
    while desk.scheduler.has_unfinished_requests:
        desk.step()
    desk.add("b", [1] * 12 + [9] * 9, ExternalHit(offer, asynchronous), max_tokens=1)
    return desk


@pytest.mark.parametrize("offer", [0, 3, 4])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_source_is_asked_behind_whole_blocks_and_must_beat_the_hit(offer: int, asynchronous: bool) -> None:
    desk = with_a_hit_inside_a_block(offer, asynchronous)
    assert desk.step() == {"b": (12, 16)}
    assert desk.store.asked[-1] == ("b", 8)
    assert desk.store.taken["b"] == 0


def test_a_longer_offer_takes_the_place_of_what_was_hit_inside_a_block() -> None:
    desk = with_a_hit_inside_a_block(8, asynchronous=False)
    assert desk.step() == {"b": (16, 20)}
    assert desk.store.taken["b"] == 8


def test_a_load_that_fails_leaves_the_hit_before_it() -> None:
    desk = with_a_hit_inside_a_block(8, asynchronous=True)
    assert desk.step() == {}
    assert desk.load("b", 0) == {"b": (12, 16)}


def test_a_load_does_not_wait_for_its_own_drafts() -> None:
    """Two blocks, a prompt of 8: drafts never fit, and the load must not wait for them."""
    desk = Desk(hybrid(2, full()), num_speculative_tokens=1)
    desk.add("a", 8, ExternalHit(8, asynchronous=True), max_tokens=1)
    desk.add("b", [1, 2], max_tokens=1)
    desk.step()
    assert desk.load("a", 8) == {"a": (7, 8)}
    assert desk.step() == {"b": (0, 2)}


def test_a_load_that_goes_first_fits_beside_what_the_others_hold() -> None:
    """6 blocks. a holds 2 of its 4; b, more urgent, needs 5: with 1 of them each would wait for the other for ever."""
    options = {"policy": SchedulingPolicy.PRIORITY, "reserve_full_sequence": False}
    desk = Desk(hybrid(6, full()), **options)
    desk.add("a", 16, ExternalHit(8, asynchronous=True), max_tokens=1, priority=1)
    desk.step()
    desk.add("b", [9] * 20, ExternalHit(4, asynchronous=True), max_tokens=1, priority=0)
    desk.step()
    waits = desk.scheduler.explain("b")
    assert "'b' waits: needs 5 blocks for all its tokens, 4 left by other loads" in str(waits)
    assert desk.load("a", 8) == {"a": (8, 16)}
    desk.step()
    assert desk.load("b", 4) == {"b": (4, 20)}


def test_a_load_leaves_whole_blocks_for_its_drafts_while_others_hold_some() -> None:
    """1 token, 3 drafts and 2 slots of the drafter are 2 blocks of full attention, 2 of the window, none of states."""
    desk = Desk(hybrid(9, full(), window(8), state()), num_speculative_tokens=3, num_lookahead_tokens=2)
    assert desk.manager.demand.num_draft_blocks(6) == 4
    desk.add("a", [7], max_tokens=40)
    desk.step()
    # a holds a block of each kind; b needs 3 and leaves 4: 7 of the 6 free ones.
    desk.add("b", 5, ExternalHit(4, asynchronous=True), max_tokens=1)
    held = desk.manager.num_usable_blocks - desk.manager.num_free_blocks
    desk.step()
    assert desk.manager.num_usable_blocks - desk.manager.num_free_blocks == held
    waits = desk.scheduler.explain("b")
    assert waits is not None
    assert waits.shortage is not None
    assert (waits.shortage.num_needed, waits.shortage.num_reserved) == (3, 4)
    desk.scheduler.abort("a")
    desk.step()
    assert desk.scheduler.get_request("b").status is RequestStatus.WAITING_FOR_EXTERNAL_KV
