"""States for whoever stores them elsewhere: where each lies when it becomes a hit, and hits that leave states behind.

Blocks of 4 tokens unless said otherwise.
"""

import pytest

from kvledger import KVCacheBlocks, KVCacheManager, PrefixHit, Request
from kvledger.core.groups.state_offers import StateOffers
from kvledger.errors import RequestError
from tests.groups import chunks, compute, full, hybrid, ring, state, tables, window
from tests.helpers import admit, admitted, leave, pool_of, request, snapshot


def offering(manager: KVCacheManager) -> StateOffers:
    return manager.coordinator.offer_states()


def told(offers: StateOffers) -> list[tuple[str, int, int, int]]:
    """(request, group, block id, tokens) of each offer since the last look."""
    return [(o.request_id, o.group_id, int(o.block.block_id), o.num_tokens) for o in offers.take()]


def lengths(manager: KVCacheManager, req: Request) -> list[int]:
    """What each group could start from alone."""
    manager.get_computed_blocks(req)  # hashes it
    return [hit.num_tokens for hit in manager.coordinator.find_hit_of_each_group(req.block_hashes, req.num_tokens - 1)]


def test_every_boundary_state_is_offered_once_with_its_block() -> None:
    manager = hybrid(40, full(), state(), state(heads=2))
    offers = offering(manager)
    a = request("a", 9)
    found = manager.get_computed_blocks(a)
    assert manager.allocate_slots(a, 4, found) is not None
    a.num_computed_tokens = 4
    first = tables(manager, a)
    assert told(offers) == [("a", 1, first[1][0], 4), ("a", 2, first[2][0], 4)]
    assert compute(manager, a, 4)
    second = tables(manager, a)
    # Attention offers nothing: its blocks stay where they are.
    assert told(offers) == [("a", 1, second[1][1], 8), ("a", 2, second[2][1], 8)]
    assert compute(manager, a, 1)
    assert told(offers) == []


def test_a_request_that_goes_takes_its_offers_with_it() -> None:
    manager = hybrid(40, full(), state())
    offers = offering(manager)
    a, b = request("a", 4), request("b", 5, cache_salt="b")
    assert admit(manager, a) is not None
    assert admit(manager, b, 4) is not None
    leave(manager, a)
    assert [request_id for request_id, *_ in told(offers)] == ["b"]
    assert compute(manager, b, 4)
    manager.release_detached(manager.detach(b))
    assert told(offers) == []


def test_the_state_inside_a_block_is_offered_where_it_is_copied_to() -> None:
    """Hash units of 4 in blocks of 8: a prompt of 13 tokens is cached after 12, and token 13 is computed on it."""
    manager = hybrid(40, full(), state(8))
    offers = offering(manager)
    a = request("a", 13)
    assert chunks(manager, a) == [8, 4, 1]
    block_of_8 = tables(manager, a)[1][0]
    copies = manager.take_block_copies()
    copied_to = copies[0].target_block_id
    assert [copy.source_block_id for copy in copies] == [tables(manager, a)[1][1]]
    # The block after 8 tokens has been given up meanwhile, which is why an offer is for its step only.
    assert block_of_8 == 0
    assert [(num_tokens, block_id == copied_to) for _, _, block_id, num_tokens in told(offers)] == [
        (8, False),
        (12, True),
    ]
    manager.release_block_copies(copies)
    manager.check()


@pytest.mark.parametrize(("num_done", "is_offered"), [(12, True), (-1, False), (8, False)])
def test_who_ends_with_its_prompt_still_has_that_state(num_done: int, is_offered: bool) -> None:
    """-1: a step is in flight, which writes over it."""
    manager = hybrid(40, full(), state(8))
    offering(manager)
    a = request("a", 13)
    found = manager.get_computed_blocks(a)
    for num_new in (8, 4):
        assert manager.allocate_slots(a, num_new, found if num_new == 8 else None) is not None
        a.num_computed_tokens += num_new
        manager.start_step()
    held = manager.coordinator.require_held("a")
    last = [(int(o.block.block_id), o.num_tokens) for o in manager.coordinator.last_state_offers(held, num_done)]
    assert last == ([(tables(manager, a)[1][1], 12)] if is_offered else [])
    assert manager.coordinator.last_state_offers(held, 12) == []


def test_nobody_who_hit_a_state_offers_it_as_its_own() -> None:
    manager = hybrid(40, full(), state(8))
    chunks(manager, request("a", 13))
    offers = offering(manager)
    b = request("b", 14)
    assert admit(manager, b) is not None
    assert [(request_id, num_tokens) for request_id, _, _, num_tokens in told(offers)] == []
    assert manager.coordinator.last_state_offers(manager.coordinator.require_held("b"), 12) == []


def test_what_each_group_could_start_from_alone() -> None:
    manager = hybrid(60, full(), window(8), state(), ring())
    a = request("a", 17)
    chunks(manager, a, 4)
    ids = tables(manager, a)
    leave(manager, a)
    assert lengths(manager, request("b", 17)) == [16, 16, 16, 0]
    # Without its third block attention ends at 8; a state stands for itself.
    manager.evict_blocks([ids[0][2]])
    assert lengths(manager, request("b", 17)) == [8, 16, 16, 0]
    manager.evict_blocks([ids[2][3]])
    assert lengths(manager, request("b", 17)) == [8, 16, 12, 0]
    assert manager.get_computed_blocks(request("b", 17)).num_tokens == 8


def lagging(manager: KVCacheManager, req: Request) -> PrefixHit:
    """All that attention has of a request, whatever the states have."""
    manager.get_computed_blocks(req)
    hits = manager.coordinator.find_hit_of_each_group(req.block_hashes, req.num_tokens - 1)
    return PrefixHit(KVCacheBlocks([hit.blocks[0] for hit in hits]), hits[0].num_tokens, -1)


def states_up_to_8(usable: int = 60) -> KVCacheManager:
    """Attention has 16 tokens cached, states have the first 8."""
    manager = hybrid(usable, full(), state())
    a = request("a", 17)
    chunks(manager, a, 4)
    states = [pool_of(manager).get_cached_block(block_hash, 1) for block_hash in a.block_hashes[2:4]]
    manager.evict_blocks([int(block.block_id) for block in states if block is not None])
    leave(manager, a)
    return manager


def test_states_may_end_before_a_hit_with_external_tokens_behind_it() -> None:
    manager = states_up_to_8()
    b = request("b", 25)
    found = lagging(manager, b)
    assert (found.num_tokens, [len(blocks) for blocks in found.blocks.blocks]) == (16, [4, 2])
    # 4 tokens from outside, with the state at their end; then 5 are computed.
    assert manager.allocate_slots(b, 5, found, num_external_computed_tokens=4) is not None
    full_blocks, states = tables(manager, b)
    assert len(full_blocks) == 7
    # The delivered state stands after 20 tokens; the one before it is read by nobody.
    assert [block_id != 0 for block_id in states] == [False, False, False, False, True, False, True]
    manager.check()


def test_without_external_tokens_they_may_not() -> None:
    manager = states_up_to_8()
    b = request("b", 25)
    found = lagging(manager, b)
    before = snapshot(pool_of(manager))
    with pytest.raises(RequestError, match="it counts 16 tokens and has 2 blocks in group 1"):
        manager.allocate_slots(b, 9, found)
    assert snapshot(pool_of(manager)) == before


def test_attention_may_never_lag() -> None:
    manager = states_up_to_8()
    b = request("b", 25)
    found = lagging(manager, b)
    short = PrefixHit(KVCacheBlocks([found.blocks.blocks[0][:3], []]), 16, -1)
    with pytest.raises(RequestError, match="it counts 16 tokens and has 3 blocks in group 0"):
        manager.allocate_slots(b, 5, short, num_external_computed_tokens=4)
    manager.check()


def test_nothing_is_kept_for_nobody() -> None:
    manager = hybrid(40, full(), state(8))
    chunks(manager, request("a", 13))
    assert manager.coordinator.last_state_offers(manager.coordinator.require_held("a"), 13) == []
    assert admitted(manager, "b", 13)
