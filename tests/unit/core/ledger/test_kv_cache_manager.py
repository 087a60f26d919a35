"""KVCacheManager: ranges, admission, caching, forks, copies, statistics and misuse."""

from collections.abc import Callable
from functools import partial

import pytest

from kvledger import (
    AdmissionRule,
    FullAttentionSpec,
    GivenBlockHasher,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    PoolOccupancy,
    Sha256BlockHasher,
)
from kvledger.core.groups.spec import KVCacheSpec, SlidingWindowSpec
from kvledger.errors import ConfigError, InvariantError, KVLedgerError, RequestError, UnknownRequestError
from tests.groups import chunked, cross, full, host, hybrid, state, tables, window
from tests.helpers import (
    Journal,
    admit,
    admitted,
    cached_ids,
    decode,
    draft,
    free_order,
    hit,
    ids,
    leave,
    ledger,
    other,
    pool_of,
    ref_cnts,
    request,
    snapshot,
)


def refuses(manager: KVCacheManager, error: type[Exception], match: str, misuse: Callable[[], object]) -> None:
    """The misuse raises, and the ledger is as it was."""
    before = snapshot(pool_of(manager))
    with pytest.raises(error, match=match):
        misuse()
    assert snapshot(pool_of(manager)) == before
    manager.check()


# Construction


def test_wrong_options_are_named() -> None:
    for options, match in (
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"watermark": 1.0}, "watermark=1.0: not a share of the pool"),
        ({"watermark": -0.1}, "watermark=-0.1"),
        ({"hasher": Sha256BlockHasher(3)}, "hash_block_size=3: does not fit a group with blocks of 4"),
    ):
        with pytest.raises(ConfigError, match=match):
            ledger(usable=4, **options)


# Prefix hits


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (16, 12), (17, 12)]
)
def test_a_hit_is_whole_blocks_of_at_most_all_but_one_token(num_tokens: int, expected: int) -> None:
    manager = ledger(usable=8)
    admit(manager, request("a", 13))
    assert hit(manager, request("b", num_tokens)) == expected


def test_a_lookup_changes_nothing() -> None:
    manager = ledger(usable=8)
    a = admitted(manager, "a", 13)
    leave(manager, a)
    before = snapshot(pool_of(manager))
    assert hit(manager, request("b", 13)) == 12
    assert snapshot(pool_of(manager)) == before


def test_a_hit_ends_at_the_first_block_that_is_gone() -> None:
    manager = ledger(usable=8)
    a = admitted(manager, "a", 17)
    manager.evict_blocks([ids(manager, a)[2]])
    assert hit(manager, request("b", 17)) == 8


def test_skip_prefix_lookup_computes_all_and_caches_all() -> None:
    manager = ledger(usable=12)
    admit(manager, request("a", 9))
    b = request("b", other(9), skip_prefix_lookup=True)
    assert hit(manager, request("c", 9, skip_prefix_lookup=True)) == 0
    admit(manager, b)
    assert hit(manager, request("d", other(9))) == 8


def test_two_that_computed_the_same_keep_their_own_blocks_and_the_first_answers() -> None:
    manager = ledger(usable=8)
    a, b = request("a", 5), request("b", 5)
    found_b = manager.get_computed_blocks(b)
    admit(manager, a)
    admit(manager, b, found=found_b)
    c = admitted(manager, "c", 5)
    assert (ids(manager, a), ids(manager, b), ids(manager, c)) == ([1, 2], [3, 4], [1, 5])
    leave(manager, a)
    leave(manager, c)
    manager.evict_blocks([1])
    assert manager.get_computed_blocks(request("d", 5)).blocks.get_block_ids() == ([3],)
    manager.check()


# Ranges of one call


def test_lookahead_takes_slots_beyond_the_new_tokens() -> None:
    manager = ledger(usable=8)
    a = request("a", 6)
    blocks = admit(manager, a, num_lookahead_tokens=3)
    assert blocks is not None
    assert blocks.get_block_ids() == ([1, 2, 3],)
    assert cached_ids(manager) == [1]


def test_lookahead_stops_at_max_model_len() -> None:
    manager = ledger(usable=8, max_model_len=8)
    a = request("a", 6)
    admit(manager, a, num_lookahead_tokens=100)
    assert ids(manager, a) == [1, 2]


def test_external_tokens_get_blocks_and_are_cached_with_the_new_ones() -> None:
    manager = ledger(usable=8)
    a = request("a", 10)
    blocks = admit(manager, a, num_external_computed_tokens=5)
    assert a.num_computed_tokens == 10
    assert ids(manager, a) == [1, 2, 3]
    assert blocks is not None
    assert blocks.get_block_ids() == ([3],)
    assert cached_ids(manager) == [1, 2]


def test_local_then_external_then_new() -> None:
    manager = ledger(usable=10)
    admit(manager, request("a", 8))
    b = request("b", 18)
    found = manager.get_computed_blocks(b)
    assert found.num_tokens == 8
    blocks = manager.allocate_slots(b, 3, found, num_external_computed_tokens=6, num_lookahead_tokens=2)
    assert blocks is not None
    # 8 local + 6 external = 14 tokens in 4 blocks; 3 new and 2 lookahead end at 19, in block 5.
    assert ids(manager, b) == [1, 2, 3, 4, 5]
    assert blocks.get_block_ids() == ([5],)
    # Indexed up to 8 + 6 + 3 = 17 tokens.
    assert cached_ids(manager) == [1, 2, 3, 4]


def test_delayed_blocks_are_cached_when_they_arrive() -> None:
    manager = ledger(usable=8)
    a = request("a", 10)
    admit(manager, a, 0, num_external_computed_tokens=8, delay_cache_blocks=True)
    assert cached_ids(manager) == []
    assert hit(manager, request("b", 10)) == 0
    manager.cache_blocks(a, 7)
    assert cached_ids(manager) == [1]
    manager.cache_blocks(a, 8)
    manager.cache_blocks(a, 8)
    assert cached_ids(manager) == [1, 2]
    assert hit(manager, request("b", 10)) == 8


def test_drafts_get_slots_and_are_never_cached() -> None:
    manager = ledger(usable=8)
    a = admitted(manager, "a", 6)
    draft(manager, a, num_drafts=6, num_accepted=0)
    assert len(ids(manager, a)) == 4
    assert cached_ids(manager) == [1]
    # 7 tokens are known; the block of tokens 4 .. 7 fills with the next one.
    decode(manager, a)
    assert cached_ids(manager) == [1, 2]
    assert len(ids(manager, a)) == 4


def test_accepted_drafts_are_cached_by_the_next_step() -> None:
    manager = ledger(usable=8)
    a = admitted(manager, "a", 6)
    draft(manager, a, num_drafts=6, num_accepted=6)
    assert (a.num_tokens, cached_ids(manager)) == (13, [1])
    decode(manager, a)
    assert cached_ids(manager) == [1, 2, 3]


def test_a_prompt_longer_than_max_model_len_is_refused_whole() -> None:
    manager = ledger(usable=8, max_model_len=8)
    a = request("a", 12)
    refuses(manager, RequestError, "max_model_len", lambda: manager.allocate_slots(a, 12))


# None changes nothing


def test_none_changes_nothing() -> None:
    manager = ledger(usable=4)
    a, b = request("a", 5), request("b", 13)
    admit(manager, a)
    before = snapshot(pool_of(manager))
    for options in ({}, {"admission": AdmissionRule()}, {"delay_cache_blocks": True}, {"num_lookahead_tokens": 9}):
        assert admit(manager, b, **options) is None
        assert snapshot(pool_of(manager)) == before
        assert not manager.holds_blocks(b)
    assert manager.allocate_slots(a, 12) is None
    assert ids(manager, a) == [1, 2]
    manager.check()


def test_the_full_sequence_gate_looks_beyond_this_steps_chunk() -> None:
    manager = ledger(usable=4)
    admit(manager, request("a", 5))
    b = request("b", other(12))
    assert admit(manager, b, 4, admission=AdmissionRule(full_sequence_must_fit=True)) is None
    assert admit(manager, b, 4, admission=AdmissionRule(full_sequence_must_fit=False)) is not None
    assert len(ids(manager, b)) == 1


def test_the_gate_counts_at_most_max_model_len() -> None:
    manager = ledger(usable=4, max_model_len=16)
    a = request("a", 20)
    assert admit(manager, a, 16, admission=AdmissionRule()) is not None


def test_reserved_blocks_stay_free() -> None:
    manager = ledger(usable=6)
    a = request("a", 12)
    assert admit(manager, a, admission=AdmissionRule(reserved_blocks=4)) is None
    assert admit(manager, a, admission=AdmissionRule(reserved_blocks=3)) is not None


def test_reserved_blocks_do_not_count_at_the_gate() -> None:
    manager = ledger(usable=6)
    a = request("a", 24)
    assert admit(manager, a, 4, admission=AdmissionRule(reserved_blocks=5)) is not None


def test_the_watermark_binds_requests_that_start_while_others_are_scheduled() -> None:
    # 10 % of 31 blocks (null block included) is 3.
    def fits(num_tokens: int, rule: AdmissionRule | None, num_new: int | None = None) -> bool:
        return admit(ledger(30, watermark=0.1), request("a", num_tokens), num_new, admission=rule) is not None

    for gate in (True, False):
        assert not fits(28 * 4, AdmissionRule(gate, has_scheduled_requests=True))
        assert fits(27 * 4, AdmissionRule(gate, has_scheduled_requests=True))
        assert fits(30 * 4, AdmissionRule(gate, has_scheduled_requests=False))
    assert fits(30 * 4, None)
    assert not fits(28 * 4, AdmissionRule(True), num_new=4)
    assert fits(28 * 4, AdmissionRule(False), num_new=4)


def test_a_running_request_may_use_the_watermark() -> None:
    manager = ledger(usable=4, watermark=0.5)
    a = request("a", 8)
    admit(manager, a, admission=AdmissionRule())
    assert decode(manager, a, 8) == [3, 4]


# Counting


def test_what_a_request_needs_and_misses() -> None:
    manager = ledger(usable=8, max_model_len=24)
    assert [manager.num_blocks_for(number) for number in (1, 4, 5, 24, 1000)] == [1, 1, 2, 6, 6]
    a = request("a", 11)
    assert manager.demand.num_blocks_missing(a) == 3
    admit(manager, a, 4)
    assert manager.demand.num_blocks_missing(a) == 2
    assert (manager.num_free_blocks, manager.num_usable_blocks) == (7, 8)
    assert manager.occupancy() == PoolOccupancy(live=1, cached=0, unused=7)


def test_lookups_are_counted_at_admission_and_preempted_ones_apart() -> None:
    manager = ledger(usable=8)
    a, b = request("a", 10), request("b", 10)
    manager.record_prefix_lookup(a, 0)
    manager.record_prefix_lookup(b, 8)
    a.num_preemptions = 1
    manager.record_prefix_lookup(a, 4)
    manager.record_prefix_lookup(request("c", 5, skip_prefix_lookup=True), 0)
    stats = manager.take_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (2, 20, 8)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 10, 4)
    assert not stats.reset
    manager.reset_prefix_cache()
    stats = manager.take_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits, stats.reset) == (0, 0, 0, True)


def test_the_group_that_limits_a_hit_is_counted_with_what_it_lacks() -> None:
    full = FullAttentionSpec(4, 1, 8)
    window = SlidingWindowSpec(4, 1, 8, sliding_window=8)
    groups = (KVCacheGroupSpec(("full",), full), KVCacheGroupSpec(("window",), window))
    manager = KVCacheManager(KVCacheConfig(50, groups), 4096)
    a = admitted(manager, "a", 16)
    held = manager.group_occupancies()
    assert [(group.num_held, group.num_null, group.num_cached) for group in held] == [(4, 0, 4), (4, 0, 4)]
    decode(manager, a)
    # The window has left the first two blocks: token 16 sees tokens 9 to 16.
    held = manager.group_occupancies()
    assert [(group.num_held, group.num_null, group.num_cached) for group in held] == [(5, 0, 4), (3, 2, 4)]
    # Without its third block the window has nothing to start from; the full group has 12 of 13 tokens.
    manager.evict_blocks([manager.get_block_ids("a")[1][2]])
    b = request("b", 13)
    found = manager.get_computed_blocks(b)
    assert (found.num_tokens, found.limiting_group) == (8, 1)
    manager.record_prefix_lookup(b, found.num_tokens, found)
    b.num_preemptions = 1
    manager.record_prefix_lookup(b, found.num_tokens, found)
    stats = manager.take_prefix_cache_stats()
    assert (stats.limited, stats.lost) == ([0, 1], [0, 4])
    assert manager.take_prefix_cache_stats().limited == [0, 0]


def test_nothing_is_counted_without_caching() -> None:
    manager = ledger(usable=8, enable_caching=False)
    manager.record_prefix_lookup(request("a", 10), 0)
    assert manager.take_prefix_cache_stats().requests == 0


# Misuse is loud and changes nothing


def test_freeing_twice_or_an_unknown_request() -> None:
    manager = ledger(usable=4)
    a = request("a", 5)
    refuses(manager, UnknownRequestError, "request_id='a': holds no blocks", lambda: manager.free(a))
    admit(manager, a)
    leave(manager, a)
    refuses(manager, UnknownRequestError, "never admitted, or freed already", lambda: manager.free(a))
    for ask in (manager.get_blocks, manager.get_block_ids):
        refuses(manager, UnknownRequestError, "'a'", partial(ask, "a"))
    refuses(manager, UnknownRequestError, "'a'", lambda: manager.cache_blocks(a, 4))


def test_a_lookup_or_a_hit_for_a_request_that_holds_blocks() -> None:
    manager = ledger(usable=8)
    admit(manager, request("a", 9))
    b = request("b", 9)
    found = manager.get_computed_blocks(b)
    admit(manager, b)
    refuses(manager, RequestError, "holds blocks already; look up before", lambda: manager.get_computed_blocks(b))
    refuses(manager, RequestError, "prefix hit or external", lambda: manager.allocate_slots(b, 1, found))
    refuses(
        manager,
        RequestError,
        "prefix hit or external",
        lambda: manager.allocate_slots(b, 1, num_external_computed_tokens=4),
    )


def test_reuse_after_free() -> None:
    manager = ledger(usable=4)
    a = admitted(manager, "a", 5)
    manager.free(a)
    refuses(
        manager,
        RequestError,
        "counts 5 computed tokens but holds no blocks: set num_computed_tokens to 0",
        lambda: manager.allocate_slots(a, 1),
    )
    a.num_computed_tokens = 0
    admit(manager, a)
    manager.check()


def test_negative_external_tokens() -> None:
    manager = ledger(usable=4)
    refuses(
        manager,
        RequestError,
        "num_external_computed_tokens=-1: out of range",
        lambda: manager.allocate_slots(request("a", 5), 5, num_external_computed_tokens=-1),
    )


def test_caching_more_than_the_request_has() -> None:
    manager = ledger(usable=4)
    a = request("a", 6)
    admit(manager, a, 4)
    refuses(manager, RequestError, "num_computed_tokens=9: request 'a' has 6", lambda: manager.cache_blocks(a, 9))


def test_caching_more_than_the_request_holds_blocks_for() -> None:
    manager = ledger(usable=4)
    a = request("a", 12)
    admit(manager, a, 4, delay_cache_blocks=True)
    refuses(manager, RequestError, "12", lambda: manager.cache_blocks(a, 12))


def test_wrong_ids_to_evict() -> None:
    manager = ledger(usable=4)
    admit(manager, request("a", 5))
    for wrong_id in (0, 5, -3):
        refuses(manager, KVLedgerError, str(wrong_id), partial(manager.evict_blocks, [1, wrong_id]))


def test_a_step_whose_given_hashes_are_missing_changes_nothing() -> None:
    manager = ledger(usable=4, hasher=GivenBlockHasher(4))
    a = request("a", 7)
    a.block_hashes = [b"first"]
    admit(manager, a)
    a.append_token(7)
    a.append_token(8)
    refuses(manager, RequestError, "1 block hashes for 2 full blocks", lambda: manager.allocate_slots(a, 2))
    assert ids(manager, a) == [1, 2]


def test_a_generated_value_that_is_no_token_id_changes_nothing() -> None:
    manager = ledger(usable=4)
    a = admitted(manager, "a", 7)

    def next_step() -> None:
        a.append_token(-1)
        a.append_token(8)
        manager.allocate_slots(a, 2)

    refuses(manager, RequestError, "-1", next_step)


# Epochs


def test_a_new_epoch_separates_lookups_even_while_requests_run() -> None:
    manager = ledger(usable=12)
    a = admitted(manager, "a", 9)
    manager.start_epoch()
    assert hit(manager, request("b", 9)) == 0
    # What the running request still caches stays in the old epoch.
    decode(manager, a, 4)
    longer = request("c", a.tokens.token_ids(0, 13))
    assert hit(manager, longer) == 0
    admit(manager, longer)
    assert hit(manager, request("d", a.tokens.token_ids(0, 13))) == 12
    manager.check()


# Forks


def test_a_fork_shares_full_blocks_and_copies_the_partial_tail() -> None:
    manager = ledger(usable=8)
    a = admitted(manager, "a", 10)
    b = a.twin("b")
    blocks = manager.fork(a, b)
    assert blocks is not None
    assert blocks.get_block_ids() == ([1, 2, 4],)
    assert ids(manager, b) == [1, 2, 4]
    assert ref_cnts(manager, [1, 2]) == [2, 2]
    (copy,) = manager.take_block_copies()
    assert (copy.group_id, copy.source_block_id, copy.target_block_id) == (0, 3, 4)
    assert manager.take_block_copies() == []
    manager.check()


def test_a_block_full_of_accepted_drafts_is_cached_by_parent_or_fork() -> None:
    manager = ledger(usable=12)
    a = admitted(manager, "a", 6)
    draft(manager, a, num_drafts=6, num_accepted=6)
    # 13 tokens are computed in 3 full blocks, and only the first of them is cached so far.
    b = a.twin("b")
    manager.fork(a, b)
    b.num_computed_tokens = 13
    decode(manager, a)
    assert cached_ids(manager) == [1, 2, 3]
    decode(manager, b)
    assert cached_ids(manager) == [1, 2, 3]
    manager.check()


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    manager = ledger(usable=4)
    a = admitted(manager, "a", 8)
    assert manager.fork(a, a.twin("b")) is not None
    assert manager.take_block_copies() == []
    assert manager.num_free_blocks == 2


def test_a_fork_leaves_out_what_is_in_flight() -> None:
    manager = ledger(usable=8)
    a = admitted(manager, "a", 10)
    a.num_in_flight_tokens = 2
    assert manager.fork(a, a.twin("b")) is not None
    assert ids(manager, request("b", 1)) == [1, 2]


def test_fork_and_parent_go_their_own_ways_and_the_last_to_leave_frees() -> None:
    manager = ledger(usable=8)
    a = admitted(manager, "a", 10)
    b = a.twin("b")
    manager.fork(a, b)
    b.num_computed_tokens = 10
    manager.release_block_copies(manager.take_block_copies())
    decode(manager, a, 3)
    decode(manager, b, 3, first_token=950_000)
    assert (ids(manager, a), ids(manager, b)) == ([1, 2, 3, 5], [1, 2, 4, 6])
    leave(manager, a)
    assert manager.occupancy().live == 4
    leave(manager, b)
    assert manager.occupancy() == PoolOccupancy(live=0, cached=4, unused=4)
    manager.check()


def test_blocks_of_a_copy_stay_until_the_worker_has_made_it() -> None:
    manager = ledger(usable=4)
    a = admitted(manager, "a", 6)
    b = a.twin("b")
    manager.fork(a, b)
    copies = manager.take_block_copies()
    leave(manager, a)
    manager.free(b)
    assert free_order(manager) == [4, 1]
    assert not manager.reset_prefix_cache()
    manager.check()
    manager.release_block_copies(copies)
    assert manager.num_free_blocks == 4
    assert manager.reset_prefix_cache()
    manager.check()


def test_one_source_may_be_copied_many_times() -> None:
    manager = ledger(usable=8)
    a = admitted(manager, "a", 6)
    for name in "bcd":
        manager.fork(a, a.twin(name))
    copies = manager.take_block_copies()
    assert [(copy.source_block_id, copy.target_block_id) for copy in copies] == [(2, 3), (2, 4), (2, 5)]
    assert ref_cnts(manager, [1, 2, 3]) == [4, 4, 2]
    manager.release_block_copies(copies[:2])
    manager.release_block_copies(copies[2:])
    assert ref_cnts(manager, [1, 2, 3]) == [4, 1, 1]
    manager.check()


def test_a_copy_can_be_released_once() -> None:
    manager = ledger(usable=4)
    a = admitted(manager, "a", 6)
    manager.fork(a, a.twin("b"))
    copies = manager.take_block_copies()
    manager.release_block_copies(copies)
    refuses(
        manager,
        KVLedgerError,
        "no copy under way",
        lambda: manager.release_block_copies(copies),
    )


def test_a_copy_stands_once_in_a_release() -> None:
    manager = ledger(usable=4)
    a = admitted(manager, "a", 6)
    manager.fork(a, a.twin("b"))
    copies = manager.take_block_copies()
    refuses(manager, KVLedgerError, "released already", lambda: manager.release_block_copies(copies + copies))


def test_a_fork_that_does_not_fit_changes_nothing() -> None:
    manager = ledger(usable=2)
    a = admitted(manager, "a", 6)
    before = snapshot(pool_of(manager))
    assert manager.fork(a, a.twin("b")) is None
    assert snapshot(pool_of(manager)) == before
    assert manager.take_block_copies() == []
    manager.check()


def test_wrong_forks_are_refused() -> None:
    manager = ledger(usable=8)
    a = request("a", 6)
    refuses(manager, UnknownRequestError, "'a': holds no blocks", lambda: manager.fork(a, a.twin("b")))
    admit(manager, a)
    refuses(manager, RequestError, "no fork of 'a': their first 6", lambda: manager.fork(a, request("b", other(6))))
    refuses(manager, RequestError, "no fork of 'a'", lambda: manager.fork(a, request("b", 5)))
    b = a.twin("b")
    manager.fork(a, b)
    refuses(manager, RequestError, "request 'b' holds blocks already", lambda: manager.fork(a, b))
    gone = request("gone", 6)
    gone.num_computed_tokens = 6
    refuses(manager, UnknownRequestError, "'gone'", lambda: manager.fork(gone, gone.twin("c")))


# What an observer sees


def test_an_observer_sees_blocks_become_hits_and_go() -> None:
    journal = Journal()
    manager = ledger(usable=3, observer=journal)
    a = admitted(manager, "a", 5)
    decode(manager, a, 4)
    leave(manager, a)
    admit(manager, request("b", other(12)))
    assert journal.cached == [("a", [1]), ("a", [2]), ("b", [3, 2, 1])]
    assert [block_id for block_id, _ in journal.evicted] == [2, 1]


def test_check_finds_a_reference_without_a_holder() -> None:
    manager = ledger(usable=4)
    admit(manager, request("a", 6))
    pool = pool_of(manager)
    pool.touch([pool.blocks[1]])
    with pytest.raises(InvariantError, match="has 1 holders"):
        manager.check()
    manager = ledger(usable=4)
    admitted(manager, "a", 6)
    blocks = manager.get_blocks("a").blocks[0]
    blocks.append(blocks[0])
    with pytest.raises(InvariantError, match=r"holds .* twice"):
        manager.check()
    blocks.pop()
    blocks.append(pool_of(ledger(usable=4)).blocks[3])
    with pytest.raises(InvariantError, match="is of another pool"):
        manager.check()


# Many running requests in one call


def test_one_call_allocates_for_many_running_requests() -> None:
    manager = ledger(8)
    requests = [admitted(manager, "a", 4), admitted(manager, "b", other(6)), admitted(manager, "c", other(8, 2))]
    for req in requests:
        req.append_token(7)
    slots = manager.allocate_running(requests, [1, 1, 1])
    new = slots.new_blocks
    # b's token stays within its second block; the first five blocks are taken.
    assert (slots.num_allocated, len(new)) == (3, 2)
    assert (list(new.rows), list(new.groups), list(new.positions), list(new.block_ids)) == (
        [0, 2],
        [0, 0],
        [1, 2],
        [6, 7],
    )
    assert new.ids_by_row(1) == {0: ([6],), 2: ([7],)}
    assert [ids(manager, req) for req in requests] == [[1, 6], [2, 3], [4, 5, 7]]


def test_one_call_stops_at_the_first_request_that_does_not_fit() -> None:
    manager = ledger(4)
    requests = [admitted(manager, name, other(4, family)) for family, name in enumerate("abc")]
    for req in requests:
        req.append_token(7)
    slots = manager.allocate_running(requests, [1, 1, 1])
    assert (slots.num_allocated, slots.new_blocks.ids_by_row(1)) == (1, {0: ([4],)})
    leave(manager, requests.pop())
    # The blocks of c: room for b, when it asks again.
    slots = manager.allocate_running(requests[1:], [1])
    assert (slots.num_allocated, slots.new_blocks.ids_by_row(1)) == (1, {0: ([3],)})


@pytest.mark.parametrize(
    "specs",
    [
        [full()],
        [full(), window(8), window(8)],
        [full(8), window(8)],
        [full(), chunked(8)],
        [full(), state()],
        [full(), host(40)],
        [full(), cross()],
    ],
)
def test_one_call_takes_what_one_call_each_takes(specs: list[KVCacheSpec]) -> None:
    one, many = hybrid(60, *specs), hybrid(60, *specs)
    pairs = [(admitted(one, name, 6), admitted(many, name, 6)) for name in "ab"]
    # Within a block, across one boundary, across several, with slots for drafts.
    for num_new, lookahead in ((1, 0), (1, 0), (3, 0), (9, 0), (1, 4), (1, 0), (4, 0), (4, 0), (1, 6)):
        expected: dict[int, tuple[list[int], ...]] = {}
        for row, (a, twin) in enumerate(pairs):
            for _ in range(num_new):
                a.append_token(900 + row)
                twin.append_token(900 + row)
            new = one.allocate_slots(a, num_new, num_lookahead_tokens=lookahead)
            assert new is not None
            if not new.is_empty():
                expected[row] = new.get_block_ids()
        twins = [twin for _, twin in pairs]
        slots = many.allocate_running(twins, [num_new, num_new], num_lookahead_tokens=lookahead)
        assert (slots.num_allocated, slots.new_blocks.ids_by_row(len(specs))) == (2, expected)
        assert snapshot(pool_of(many)) == snapshot(pool_of(one))
        for a, twin in pairs:
            assert (tables(many, twin), twin.quiet_end) == (tables(one, a), a.quiet_end)
            a.num_computed_tokens += num_new
            twin.num_computed_tokens += num_new
        many.check()


def test_flat_new_blocks_are_seen_without_a_copy() -> None:
    manager = ledger(4)
    a = admitted(manager, "a", 4)
    a.append_token(7)
    view = memoryview(manager.allocate_running([a], [1]).new_blocks.block_ids)
    assert (view.format, view.itemsize, view.tolist()) == ("i", 4, [2])


@pytest.mark.parametrize(
    ("num_new", "lookahead", "problem"),
    [
        ([1], 0, "1 numbers for 2 requests"),
        ([1, 1], -1, "num_lookahead_tokens=-1"),
        ([1, 0], 0, "num_new_tokens=0: a step of request 'b' needs a token"),
        ([1, 60], 0, "request 'b': 64 tokens are more than max_model_len=63"),
    ],
)
def test_one_call_for_many_is_refused_before_anything_is_taken(
    num_new: list[int], lookahead: int, problem: str
) -> None:
    manager = ledger(8, max_model_len=63)
    requests = [admitted(manager, "a", 4), admitted(manager, "b", other(4))]
    with pytest.raises(RequestError, match=problem):
        manager.allocate_running(requests, num_new, num_lookahead_tokens=lookahead)
    assert [ids(manager, req) for req in requests] == [[1], [2]]


def test_one_call_for_many_refuses_a_request_without_blocks() -> None:
    manager = ledger(8)
    a, b = admitted(manager, "a", 4), request("b", 4)
    with pytest.raises(UnknownRequestError, match="'b': holds no blocks"):
        manager.allocate_running([a, b], [1, 1])
    assert ids(manager, a) == [1]
    # Nor does one that gave its blocks back go on as if it had them.
    leave(manager, a)
    with pytest.raises(UnknownRequestError, match="'a': holds no blocks"):
        manager.allocate_running([a], [1])


def test_a_refusal_leaves_its_numbers() -> None:
    manager = ledger(usable=10, watermark=0.2)
    assert manager.shortage is None
    a = admitted(manager, "a", 24)
    # The gate counts all 20 tokens, and a fifth of 11 blocks shall stay free.
    assert admit(manager, request("b", other(20)), 8, admission=AdmissionRule()) is None
    assert str(manager.shortage) == "needs 5 blocks for all its tokens, 4 free, watermark 2"
    # Without the gate the step's 8 tokens are counted, beside what others count on.
    rule = AdmissionRule(full_sequence_must_fit=False, reserved_blocks=1)
    assert admit(manager, request("b", other(20)), 8, admission=rule) is None
    assert str(manager.shortage) == "needs 2 blocks for the step, 4 free, watermark 2, 1 spoken for"
    admit(manager, request("c", other(16, 3)))
    a.append_token(1)
    assert manager.allocate_slots(a, 1) is None
    assert str(manager.shortage) == "needs 1 block for the step, 0 free"


def test_totals_of_lookups_count_what_was_taken_too() -> None:
    manager = ledger(usable=10)
    for name in "abc":
        found = manager.get_computed_blocks(request(name, 9))
        leave(manager, admitted(manager, name, 9))
        manager.record_prefix_lookup(request(name, 9), found.num_tokens, found)
        manager.record_external_lookup(request(name, 9), found.num_tokens, 1)
        if name != "c":
            manager.take_prefix_cache_stats()
    totals = manager.prefix_cache_totals()
    assert (totals.requests, totals.queries, totals.hits) == (3, 27, 16)
    # Behind hits of 0, 8 and 8 tokens.
    assert (totals.external_requests, totals.external_queries, totals.external_hits) == (3, 9 + 1 + 1, 3)
    assert manager.take_prefix_cache_stats().queries == 9


def test_a_request_asks_only_when_its_blocks_fill_or_end() -> None:
    manager = ledger(8)
    a = admitted(manager, "a", 5)
    # 5 tokens in 2 blocks of 4: up to 7 tokens nothing fills, the 8th fills the second block.
    assert a.quiet_end == 7
    decode(manager, a, 2)
    assert (a.num_computed_tokens, cached_ids(manager)) == (7, [1])
    decode(manager, a)
    assert (a.quiet_end, cached_ids(manager)) == (8, [1, 2])
    leave(manager, a)
    assert a.quiet_end == 0


def test_check_finds_a_request_that_asks_too_late() -> None:
    manager = ledger(8)
    a = admitted(manager, "a", 5)
    manager.check()
    a.quiet_end = 8
    with pytest.raises(InvariantError, match="'a': quiet_end is out of date"):
        manager.check()
