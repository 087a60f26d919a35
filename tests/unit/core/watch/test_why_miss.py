"""Why a prompt was not a hit, part by part, in numbers that can be counted on fingers. Blocks of 4 tokens."""

import gc
import tracemalloc
from typing import Any

import pytest

from kvledger import (
    Adapter,
    AdmissionRule,
    KVCacheManager,
    MissConfig,
    MissExplainer,
    MultiModalItem,
    PromptAccount,
    Request,
    Sha256BlockHasher,
)
from kvledger.core.groups.policy import DraftRule
from kvledger.core.watch.prompt_split import curve_blocks
from kvledger.errors import ConfigError
from kvledger.scheduler import Scheduler, SchedulerConfig
from tests.groups import chunked, chunks, cross, full, host, hybrid, mla, state, window
from tests.helpers import admit, admitted, cached_ids, decode, hit, ids, leave, ledger, other, request


def explaining(usable: int, **options: Any) -> MissExplainer:
    return MissExplainer(ledger(usable, **options))


def account(misses: MissExplainer) -> PromptAccount:
    """Of the request that was admitted last."""
    last = misses.recent()[-1]
    assert last.split.num_tokens() == last.num_tokens
    misses.ledger.check()
    return last


def parts(misses: MissExplainer) -> dict[str, int]:
    return {name: number for name, number in account(misses).split.as_dict().items() if number}


def served(misses: MissExplainer, req: Request) -> dict[str, int]:
    """Admits a request, lets it go, and says where its tokens came from."""
    chunks(misses.ledger, req)
    leave(misses.ledger, req)
    return parts(misses)


def forget(manager: KVCacheManager) -> None:
    """Resets the prefix cache, once the copies that hold blocks are done."""
    manager.release_block_copies(manager.take_block_copies())
    assert manager.reset_prefix_cache()


# One group


def test_a_new_prompt_and_the_same_again() -> None:
    misses = explaining(8)
    assert served(misses, request("a", 10)) == {"never_seen": 8, "shorter_than_block": 2}
    assert served(misses, request("b", 10)) == {"hit": 8, "shorter_than_block": 2}
    assert served(misses, request("c", 14)) == {"hit": 8, "never_seen": 4, "shorter_than_block": 2}


def test_a_prompt_shorter_than_a_block_explains_its_zero() -> None:
    misses = explaining(8)
    assert served(misses, request("a", 3)) == {"shorter_than_block": 3}
    assert served(misses, request("b", 3)) == {"shorter_than_block": 3}


def test_a_prompt_that_ends_with_a_block_gives_up_that_block() -> None:
    misses = explaining(8)
    assert served(misses, request("a", 8)) == {"never_seen": 4, "last_token_rule": 4}
    assert served(misses, request("b", 8)) == {"hit": 4, "last_token_rule": 4}
    assert served(misses, request("c", 9)) == {"hit": 8, "shorter_than_block": 1}


def test_evicted_and_how_many_blocks_more_would_have_kept_it() -> None:
    misses = explaining(4)
    served(misses, request("a", 9))
    # Four blocks: the one that was never used, a's partial one, and a's two cached ones, the later one first.
    served(misses, request("b", other(13)))
    assert served(misses, request("c", 9)) == {"evicted": 8, "shorter_than_block": 1}
    # Two evictions, and the block that went first is the sequence's second.
    assert account(misses).num_blocks_short == 2
    assert misses.new.tokens_kept_by[:3] == [4, 4, 0]
    assert hit(larger_pool(4 + 1), request("d", 9)) == 4
    assert hit(larger_pool(4 + 2), request("d", 9)) == 8


def larger_pool(usable: int) -> KVCacheManager:
    """What the test above did before c, in another pool."""
    manager = ledger(usable)
    leave(manager, admitted(manager, "a", 9))
    leave(manager, admitted(manager, "b", other(13)))
    return manager


def test_what_was_cached_again_counts_from_its_last_eviction() -> None:
    misses = explaining(4)
    for number in range(3):
        served(misses, request(f"a{number}", 9))
        served(misses, request(f"b{number}", other(13)))
    # a takes b's blocks 2 and 1 every time, and b takes both of a.
    assert parts(misses) == {"hit": 4, "evicted": 8, "shorter_than_block": 1}
    assert account(misses).num_blocks_short == 2
    assert served(misses, request("c", 9)) == {"evicted": 8, "shorter_than_block": 1}
    assert account(misses).num_blocks_short == 2


def test_a_hit_then_evicted_then_new() -> None:
    misses = explaining(6)
    served(misses, request("a", 17))
    # Takes the never used block, a's partial one, and a's blocks 3 and 2.
    served(misses, request("b", other(13)))
    assert served(misses, request("c", list(range(12)) + other(10))) == {
        "hit": 8,
        "evicted": 4,
        "never_seen": 8,
        "shorter_than_block": 2,
    }
    # Block 3 went first, but c does not want that one.
    assert account(misses).num_blocks_short == 1


def test_a_block_with_a_copy_is_evicted_with_the_last_copy() -> None:
    misses = explaining(5)
    served(misses, request("a", 8))
    b = admitted(misses.ledger, "b", 8)
    # Blocks 0, 1 and a second block 1: the one of a is older and goes first.
    assert ids(misses.ledger, b) == [1, 3]
    leave(misses.ledger, b)
    served(misses, request("x", other(9)))
    assert served(misses, request("c", 9)) == {"hit": 8, "shorter_than_block": 1}
    served(misses, request("y", other(17, family=2)))
    assert served(misses, request("d", 9)) == {"evicted": 8, "shorter_than_block": 1}


# Taken back


def test_evictions_that_no_larger_pool_would_prevent_are_named() -> None:
    misses = explaining(8)
    a = admitted(misses.ledger, "a", 13)
    misses.ledger.evict_blocks(ids(misses.ledger, a)[1:2])
    leave(misses.ledger, a)
    # Block 2 is cached still, behind the gap.
    assert served(misses, request("b", 13)) == {"hit": 4, "evicted_by_call": 8, "shorter_than_block": 1}
    assert account(misses).num_blocks_short == 0
    misses.ledger.reset_prefix_cache()
    assert served(misses, request("c", 13)) == {"reset": 12, "shorter_than_block": 1}


def test_a_reset_counts_for_what_was_evicted_before_it() -> None:
    misses = explaining(4)
    served(misses, request("a", 9))
    served(misses, request("b", other(13)))
    misses.ledger.reset_prefix_cache()
    assert served(misses, request("c", 9)) == {"reset": 8, "shorter_than_block": 1}


def test_a_reset_is_remembered_as_compactly_as_evictions_are() -> None:
    misses = explaining(500)
    for name, family in (("a", 0), ("b", 1)):
        # Blocks are handed out from the end of the one before, so in b their numbers fall.
        leave(misses.ledger, admitted(misses.ledger, name, other(2000, family)))
    assert misses.num_runs == 1
    misses.ledger.reset_prefix_cache()
    # 500 blocks of a gave way to b, and then the reset took 500 of b.
    assert misses.num_runs == 2
    assert served(misses, request("c", other(1000))) == {"reset": 996, "last_token_rule": 4}
    assert served(misses, request("d", other(2000, 0))) == {"reset": 1996, "last_token_rule": 4}


@pytest.mark.parametrize("falling", [False, True])
def test_free_blocks_that_a_call_took_are_one_run_in_whatever_order(falling: bool) -> None:
    misses = explaining(100)
    a = admitted(misses.ledger, "a", 400)
    block_ids = ids(misses.ledger, a)
    leave(misses.ledger, a)
    misses.ledger.evict_blocks(sorted(block_ids[10:], reverse=falling))
    assert misses.num_runs == 1
    assert served(misses, request("b", 400)) == {"hit": 40, "evicted_by_call": 356, "last_token_rule": 4}


def test_blocks_that_a_call_took_from_requests_are_remembered_one_by_one() -> None:
    misses = explaining(20)
    a = admitted(misses.ledger, "a", 13)
    b = admitted(misses.ledger, "b", 17)
    misses.ledger.evict_blocks(ids(misses.ledger, a)[1:3])
    # Who holds such blocks may cache what lies behind them, and a run of both would hide that block 2 is back.
    assert misses.num_runs == 2
    leave(misses.ledger, a)
    leave(misses.ledger, b)
    assert served(misses, request("c", 17)) == {"hit": 4, "evicted_by_call": 12, "shorter_than_block": 1}


# Cached for somebody else


def test_the_same_tokens_under_another_salt() -> None:
    misses = explaining(16)
    assert served(misses, request("a", 10, cache_salt="alice")) == {"never_seen": 8, "shorter_than_block": 2}
    assert served(misses, request("b", 14, cache_salt="bob")) == {
        "other_salt": 8,
        "never_seen": 4,
        "shorter_than_block": 2,
    }
    assert served(misses, request("c", 10)) == {"other_salt": 8, "shorter_than_block": 2}
    assert served(misses, request("d", 14, cache_salt="bob")) == {"hit": 12, "shorter_than_block": 2}
    assert served(misses, request("e", other(10), cache_salt="carol")) == {"never_seen": 8, "shorter_than_block": 2}


def test_what_the_other_salt_has_lost_is_not_claimed() -> None:
    misses = explaining(8)
    a = admitted(misses.ledger, "a", 10, cache_salt="alice")
    misses.ledger.evict_blocks(ids(misses.ledger, a)[1:2])
    assert served(misses, request("b", 10)) == {"other_salt": 4, "never_seen": 4, "shorter_than_block": 2}


def test_another_adapter_and_the_same_one_loaded_anew() -> None:
    misses = explaining(16)
    served(misses, request("a", 10))
    served(misses, request("b", 10, adapter=Adapter("sql", 1)))
    assert parts(misses) == {"other_adapter": 8, "shorter_than_block": 2}
    served(misses, request("c", 10, adapter=Adapter("sql", 1, generation=1)))
    assert parts(misses) == {"other_adapter": 8, "shorter_than_block": 2}
    served(misses, request("d", 10, adapter=Adapter("sql", 1)))
    assert parts(misses) == {"hit": 8, "shorter_than_block": 2}


def test_another_image_behind_the_same_placeholders() -> None:
    misses = explaining(16)
    served(misses, request("a", 14, multimodal=(MultiModalItem("cat", 5, 4),)))
    served(misses, request("b", 14, multimodal=(MultiModalItem("dog", 5, 4),)))
    assert parts(misses) == {"hit": 4, "other_content": 8, "shorter_than_block": 2}


def test_new_weights() -> None:
    misses = explaining(16)
    served(misses, request("a", 10))
    misses.ledger.start_epoch()
    assert served(misses, request("b", 10)) == {"other_epoch": 8, "shorter_than_block": 2}
    assert served(misses, request("c", 10)) == {"hit": 8, "shorter_than_block": 2}


# Not looked up


def test_lookup_disabled() -> None:
    misses = explaining(8)
    served(misses, request("a", 10))
    assert served(misses, request("b", 10, skip_prefix_lookup=True)) == {"lookup_off": 10}
    off = explaining(8, enable_caching=False)
    assert served(off, request("a", 10)) == {"lookup_off": 10}


def test_a_caller_that_does_not_look_is_told_so() -> None:
    misses = explaining(8)
    leave(misses.ledger, admitted(misses.ledger, "a", 10))
    b = request("b", 14)
    assert misses.ledger.allocate_slots(b, 14) is not None
    assert parts(misses) == {"lookup_off": 8, "never_seen": 4, "shorter_than_block": 2}


def test_groups_that_can_never_be_cached_are_not_looked_up() -> None:
    misses = MissExplainer(hybrid(8, state(mode="none"), enable_caching=False))
    assert served(misses, request("a", 10)) == {"lookup_off": 10}


# External tokens


def test_external_tokens_take_the_place_of_what_would_have_missed() -> None:
    misses = explaining(16)
    served(misses, request("a", 9))
    b = request("b", 22)
    assert admit(misses.ledger, b, num_external_computed_tokens=6) is not None
    assert parts(misses) == {"hit": 8, "external": 6, "never_seen": 6, "shorter_than_block": 2}
    leave(misses.ledger, b)


def test_a_load_of_the_whole_prompt_leaves_nothing_to_explain() -> None:
    misses = explaining(16)
    a = request("a", 10)
    assert admit(misses.ledger, a, 0, num_external_computed_tokens=10, delay_cache_blocks=True) is not None
    assert parts(misses) == {"external": 10}


# Drafts


def test_the_block_that_a_draft_computes_again() -> None:
    misses = explaining(16, drafts=DraftRule(hashes_ahead=False))
    assert served(misses, request("a", 14)) == {"never_seen": 12, "shorter_than_block": 2}
    assert served(misses, request("b", 14)) == {"hit": 8, "draft_rule": 4, "shorter_than_block": 2}
    assert served(misses, request("c", 18)) == {
        "hit": 8,
        "draft_rule": 4,
        "never_seen": 4,
        "shorter_than_block": 2,
    }


# Several groups


@pytest.mark.parametrize("num_tokens", range(7, 13))
def test_the_last_tokens_have_no_name_yet_where_names_look_ahead(num_tokens: int) -> None:
    """Names cover four tokens behind them, so the last four tokens of a prompt cannot be looked up."""
    drafts = DraftRule(4, hashes_ahead=True)
    misses = MissExplainer(hybrid(16, full(), state(), hasher=Sha256BlockHasher(2), drafts=drafts))
    served(misses, request("a", 16))
    misses.ledger.evict_blocks(cached_ids(misses.ledger))
    assert sum(served(misses, request("b", num_tokens)).values()) == num_tokens


def test_the_group_that_limits_a_hit_and_its_tokens() -> None:
    misses = MissExplainer(hybrid(60, full(), window(8)))
    a = request("a", 22)
    chunks(misses.ledger, a)
    windows = misses.ledger.get_block_ids("a")[1]
    leave(misses.ledger, a)
    # The window cannot start at 20, nor at 16: both need its block 3.
    misses.ledger.evict_blocks(windows[3:4])
    assert served(misses, request("b", 22)) == {"hit": 12, "limited_by_group": 8, "shorter_than_block": 2}
    assert account(misses).limiting_group == 1
    assert misses.new.limited == [0, 8]


def test_limited_then_evicted_then_new() -> None:
    misses = MissExplainer(hybrid(60, full(), window(8)))
    a = request("a", 22)
    chunks(misses.ledger, a)
    blocks, windows = misses.ledger.get_block_ids("a")
    leave(misses.ledger, a)
    misses.ledger.evict_blocks([blocks[4], windows[3]])
    assert served(misses, request("b", list(range(20)) + other(10))) == {
        "hit": 12,
        "limited_by_group": 4,
        "evicted_by_call": 4,
        "never_seen": 8,
        "shorter_than_block": 2,
    }


def test_what_only_small_blocks_have_is_limited_by_the_larger_ones() -> None:
    misses = MissExplainer(hybrid(60, full(4), full(16, heads=2)))
    served(misses, request("a", 60))
    # 28 of the 60 tokens are a's: seven blocks of 4, and one of 16.
    assert served(misses, request("b", list(range(28)) + other(32))) == {
        "hit": 16,
        "limited_by_group": 12,
        "never_seen": 20,
        "shorter_than_block": 12,
    }
    assert account(misses).limiting_group == 1


def test_two_groups_that_tell_must_both_have_lost_it_or_have_it() -> None:
    """Two groups of one spec are looked up together: a block counts if both have it."""
    misses = MissExplainer(hybrid(12, full(), full()))
    served(misses, request("a", 9))
    # Six blocks of the twelve were used. Then ten are taken: six new ones and the first four that a left.
    served(misses, request("b", other(17)))
    # In the order in which a's left: its partial ones (not cached), group 0's block 1 and 0, group 1's block 1 and 0.
    assert served(misses, request("c", 9)) == {"evicted": 8, "shorter_than_block": 1}
    assert account(misses).num_blocks_short == 2


def test_hits_end_where_all_block_sizes_meet() -> None:
    misses = MissExplainer(hybrid(40, full(4), full(8, heads=2), window(8, block_size=8)))
    assert served(misses, request("a", 22)) == {"never_seen": 16, "shorter_than_block": 6}
    assert served(misses, request("b", 22)) == {"hit": 16, "shorter_than_block": 6}
    assert served(misses, request("c", 24)) == {"hit": 16, "last_token_rule": 8}


def test_a_state_that_was_not_kept_limits_the_hit() -> None:
    misses = MissExplainer(hybrid(40, full(), state(), retention_interval=0))
    a = request("a", 22)
    chunks(misses.ledger, a)
    leave(misses.ledger, a)
    # Full attention has the first 12 tokens, but states are kept only where the whole prompt can be resumed.
    assert served(misses, request("b", list(range(12)) + other(9))) == {
        "limited_by_group": 12,
        "never_seen": 8,
        "shorter_than_block": 1,
    }
    assert account(misses).limiting_group == 1


def test_hits_inside_blocks() -> None:
    misses = MissExplainer(hybrid(40, full(8), state(8), hasher=Sha256BlockHasher(4)))
    a = request("a", 14)
    assert served(misses, a) == {"never_seen": 12, "shorter_than_block": 2}
    assert served(misses, request("b", 14)) == {"hit": 12, "shorter_than_block": 2}
    forget(misses.ledger)
    # The first block, and the prefix that ends inside the second one.
    assert served(misses, request("c", 14)) == {"reset": 12, "shorter_than_block": 2}
    forget(misses.ledger)
    assert served(misses, request("d", list(range(8)) + other(6))) == {
        "reset": 8,
        "never_seen": 4,
        "shorter_than_block": 2,
    }


def test_a_whole_block_that_holds_the_last_token_is_no_hit_up_to_a_place_inside_it() -> None:
    misses = MissExplainer(hybrid(40, full(8), state(8), hasher=Sha256BlockHasher(4)))
    a = request("a", 20)
    chunks(misses.ledger, a, max_chunk=8)
    leave(misses.ledger, a)
    # Hits can end at 12, but the second block answers for its 16 tokens only.
    assert served(misses, request("b", 16)) == {"hit": 8, "last_token_rule": 8}


def test_only_windows() -> None:
    """No group caches all of a prompt, so the window tells: what it would have started from, had it kept all."""
    misses = MissExplainer(hybrid(6, window(8)))
    served(misses, request("a", 17))
    assert served(misses, request("b", 17)) == {"hit": 16, "shorter_than_block": 1}
    served(misses, request("x", other(21)))
    # At 16 a hit reads blocks 2 and 3.
    assert served(misses, request("c", 17)) == {"evicted": 16, "shorter_than_block": 1}
    assert account(misses).num_blocks_short > 0
    assert served(misses, request("d", other(17, family=2))) == {"never_seen": 16, "shorter_than_block": 1}


def test_chunked_local_mla_cross_and_host_groups_sum_too() -> None:
    for specs in ((full(), chunked(8)), (mla(), window(8)), (full(), cross()), (full(), host(40)), (chunked(8),)):
        misses = MissExplainer(hybrid(60, *specs))
        for number in range(4):
            req = request(str(number), 17 + number, num_encoder_tokens=8)
            served(misses, req)
            assert hit(misses.ledger, request("again", 17 + number)) == 16


# Resumed requests, totals, limits


def test_preempted_requests_are_counted_apart_as_the_lookups_are() -> None:
    misses = explaining(6)
    scheduler = Scheduler(misses.ledger, SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64))
    for name in ("a", "b"):
        scheduler.add_request(request(name, other(11, family=ord(name)), max_tokens=10))
    while scheduler.has_unfinished_requests:
        output = scheduler.schedule()
        scheduler.update_from_output(output, [[7] for _ in output.requests])
        scheduler.check()
    assert scheduler.num_preemptions > 0
    misses, stats = misses, misses.ledger.take_prefix_cache_stats()
    assert (misses.new.num_requests, misses.resumed.num_requests) == (stats.requests, stats.preempted_requests)
    assert (misses.new.num_tokens, misses.new.split.hit) == (stats.queries, stats.hits) == (22, 0)
    assert (misses.resumed.num_tokens, misses.resumed.split.hit) == (stats.preempted_queries, stats.preempted_hits)
    assert misses.resumed.split.num_tokens() == misses.resumed.num_tokens


def test_a_request_that_does_not_fit_is_not_counted() -> None:
    misses = explaining(4)
    assert admit(misses.ledger, request("a", 30), admission=AdmissionRule()) is None
    assert (misses.new.num_requests, misses.recent()) == (0, [])


def test_what_is_generated_can_be_hit_and_evicted_too() -> None:
    misses = explaining(4)
    a = admitted(misses.ledger, "a", 6)
    decode(misses.ledger, a, 4)
    turn = a.tokens.token_ids(0, 9)
    leave(misses.ledger, a)
    served(misses, request("x", other(13)))
    assert served(misses, request("b", turn)) == {"evicted": 8, "shorter_than_block": 1}


def test_beyond_the_limit_the_oldest_evictions_are_forgotten() -> None:
    misses = MissExplainer(ledger(4), MissConfig(max_evicted_blocks=2))
    for family in range(4):
        served(misses, request(str(family), other(13, family)))
    assert misses.num_evictions == 3 * 3
    # Of the three blocks of family 2 the last one went first, and two evictions followed it.
    assert misses.num_forgotten == 9 - 2
    assert served(misses, request("a", other(13, 2))) == {"evicted": 8, "never_seen": 4, "shorter_than_block": 1}
    assert served(misses, request("b", other(13, 0))) == {"never_seen": 12, "shorter_than_block": 1}


def test_prompts_beyond_the_limit_are_not_compared() -> None:
    misses = MissExplainer(ledger(40), MissConfig(max_compared_tokens=20))
    served(misses, request("a", 10, cache_salt="alice"))
    assert served(misses, request("b", 10)) == {"other_salt": 8, "shorter_than_block": 2}
    served(misses, request("c", other(10)))
    served(misses, request("d", other(10, 2)))
    assert served(misses, request("e", 10, cache_salt="eve")) == {"never_seen": 8, "shorter_than_block": 2}


def test_the_last_requests_can_be_asked_about() -> None:
    misses = MissExplainer(ledger(8), MissConfig(max_accounts=2))
    for name in ("a", "b", "c"):
        served(misses, request(name, 5))
    assert [each.request_id for each in misses.recent()] == ["b", "c"]


def test_an_explainer_comes_before_the_first_request() -> None:
    manager = ledger(8)
    a = admitted(manager, "a", 8)
    for _ in ("while it runs", "when its blocks are cached"):
        with pytest.raises(ConfigError, match="make the explainer before the first request"):
            MissExplainer(manager)
        if manager.holds_blocks(a):
            leave(manager, a)
    manager.reset_prefix_cache()
    assert served(MissExplainer(manager), request("b", 8)) == {"never_seen": 4, "last_token_rule": 4}


@pytest.mark.parametrize("name", ["max_evicted_blocks", "max_compared_tokens", "max_accounts"])
def test_a_limit_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0"):
        MissConfig(**{name: 0})


def test_what_is_no_bound_is_refused() -> None:
    # A compiled class has typed attributes and refuses these itself, with a TypeError that names the type.
    with pytest.raises((ConfigError, TypeError), match=r"max_accounts=1\.5: no whole|int object expected; got float"):
        MissConfig(max_accounts=1.5)  # type: ignore[arg-type]
    with pytest.raises(
        (ConfigError, TypeError), match=r"config=True: .*; give MissConfig\(\)|MissConfig.* expected; got bool"
    ):
        MissExplainer(ledger(8), True)  # type: ignore[arg-type]


def test_the_curve_has_four_points_an_octave() -> None:
    assert [curve_blocks(point) for point in range(16)] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32]


@pytest.mark.parametrize(("num_blocks", "most"), [(500, 30), (1, 330)])
def test_an_eviction_is_remembered_in_a_few_bytes(num_blocks: int, most: int) -> None:
    """Of long prompts in about 9, of prompts of one block in about 110; in more where it is not compiled."""

    def bytes_of(max_evicted_blocks: int) -> int:
        manager = ledger(600)
        config = MissConfig(max_evicted_blocks=max_evicted_blocks, max_compared_tokens=1, max_accounts=1)
        MissExplainer(manager, config)
        tracemalloc.start()
        for number in range(10_000 // num_blocks):
            leave(manager, admitted(manager, str(number), other(4 * num_blocks, number)))
        gc.collect()
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return used

    bytes_of(1)  # what is made only once
    # 10,000 blocks go through a pool of 600.
    assert 0 < bytes_of(1 << 20) - bytes_of(1) < most * 9_400
