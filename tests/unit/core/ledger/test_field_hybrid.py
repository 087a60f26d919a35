"""Reports from the field about groups of several kinds, by their number in the collection. Blocks of 4 tokens."""

import pytest

from kvledger import AdmissionRule, KVCacheManager, Request
from kvledger.core.groups.policy import DraftRule
from kvledger.core.units import cdiv
from tests.groups import chunks, compute, full, hybrid, ring, state, tables, window
from tests.helpers import admit, admitted, cached_ids, free_order, hit, leave, other, request


def sent_twice(manager: KVCacheManager, length: int) -> int:
    """Tokens that the second of two equal prompts finds."""
    a = request("first", length)
    chunks(manager, a)
    leave(manager, a)
    return hit(manager, request("second", length))


def test_b11_a_window_smaller_than_a_block_is_sized_for_every_decode() -> None:
    """Window 2, blocks of 4: not one slot but what 8 decodes hold, or admission waits; and nobody is stuck."""
    spec = window(2)
    assert spec.max_admission_blocks(64, 1) == 2
    manager = hybrid(8 * (2 + 2), full(), spec, max_model_len=64, max_in_flight_tokens=1)
    running: list[Request] = []
    for number in range(10):
        req = request(str(number), other(3, number))
        if admit(manager, req, 1, admission=AdmissionRule()) is not None:
            running.append(req)
            compute(manager, req, 1)
            compute(manager, req, 1)
    assert len(running) == 10
    done = 0
    while running:
        req = running.pop(0)
        if req.num_tokens == 8:
            manager.free(req)
            done += 1
        elif compute(manager, req, 1):
            running.append(req)
        else:
            # What a scheduler does: the last one starts over later.
            victim = running.pop() if running else req
            assert victim is not req, "nobody can go on"
            manager.free(victim)
            running.insert(0, req)
        manager.check()
    assert done >= 8
    assert manager.num_free_blocks == 32


def test_b39_a_block_of_16_is_no_hit_for_12_tokens_with_hashes_of_4() -> None:
    manager = hybrid(40, full(4), full(16))
    leave(manager, admitted(manager, "a", 40))
    assert hit(manager, request("b", list(range(12)) + other(20))) == 0
    assert hit(manager, request("c", list(range(16)) + other(20))) == 16


@pytest.mark.parametrize("num_groups", [2, 3, 4, 6])
def test_b42_a_draft_costs_one_block_whatever_the_number_of_groups(num_groups: int) -> None:
    windows = [window(8, heads=heads) for heads in range(1, num_groups)]
    # 32 are cached and one block is given up; the draft looks at all 32 even where only 31 may be hit.
    assert sent_twice(hybrid(99, full(), *windows, drafts=DraftRule(hashes_ahead=False)), 33) == 32 - 4
    assert sent_twice(hybrid(99, full(), *windows, drafts=DraftRule(hashes_ahead=False)), 32) == 32 - 4


@pytest.mark.parametrize("retention", [None, 0, 16])
def test_b44_what_is_kept_is_what_is_looked_up(retention: int | None) -> None:
    for length in range(13, 50):
        manager = hybrid(99, full(), window(8), drafts=DraftRule(hashes_ahead=False), retention_interval=retention)
        assert sent_twice(manager, length) == length // 4 * 4 - 4
        states = hybrid(99, full(), state(), drafts=DraftRule(hashes_ahead=False), retention_interval=retention)
        assert sent_twice(states, length) == length // 4 * 4 - 4


def test_b45_sessions_that_take_turns_keep_their_window() -> None:
    """4 sessions of 3 turns, 64 tokens of context: a pool of 4 sessions is a quarter used and must serve hits."""
    manager = hybrid(4 * 2 * 18, full(), window(8), retention_interval=0)
    served = []
    for turn in range(3):
        for session in range(4):
            req = request(f"{session}.{turn}", other(48 + 8 * turn, session))
            found = manager.get_computed_blocks(req)
            served.append(found.num_tokens)
            assert admit(manager, req, found=found) is not None
            leave(manager, req)
            assert manager.num_free_blocks > manager.num_usable_blocks // 2
    # The first turns find nothing, the later ones all that can be resumed of the turn before: 44 of 48, 52 of 56.
    assert served == [0] * 4 + [44] * 4 + [52] * 4


def test_b47_a_request_does_not_evict_what_it_is_about_to_hit() -> None:
    manager = hybrid(6, full())
    leave(manager, admitted(manager, "a", 16))
    b = request("b", 24)
    found = manager.get_computed_blocks(b)
    assert found.num_tokens == 16
    assert admit(manager, b, found=found, admission=AdmissionRule()) is not None
    assert tables(manager, b) == ([1, 2, 3, 4, 5, 6],)


def test_b47_nor_what_another_group_is_about_to_hit() -> None:
    manager = hybrid(6, full(), window(8))
    leave(manager, admitted(manager, "a", 12))
    b = request("b", 12)
    found = manager.get_computed_blocks(b)
    assert found.num_tokens == 8
    # 2 and 2 hits; a new block in each group: exactly the other two of the pool.
    assert admit(manager, b, found=found) is not None
    assert manager.num_free_blocks == 0
    assert [table[:2] for table in tables(manager, b)] == [list(blocks) for blocks in found.blocks.get_block_ids()]
    manager.check()


def test_b48_blocks_go_back_tail_first_group_by_group() -> None:
    manager = hybrid(6, full(), window(16))
    a = admitted(manager, "a", 12)
    mine = tables(manager, a)
    leave(manager, a)
    assert free_order(manager) == mine[0][::-1] + mine[1][::-1]


def test_b48_also_when_the_window_has_let_go_of_some_before() -> None:
    manager = hybrid(10, full(), window(5))
    a = admitted(manager, "a", 12)
    assert compute(manager, a, 4)
    mine = tables(manager, a)
    # Ids 4 and 5 of the window went when token 12 came: the later before the earlier, at the end of the queue.
    assert mine[1][:2] == [0, 0]
    assert free_order(manager)[-2:] == [5, 4]
    leave(manager, a)
    assert free_order(manager)[-6:] == mine[0][::-1] + mine[1][:1:-1]


def test_b50_what_caches_nothing_is_reused_first() -> None:
    manager = hybrid(8, full(), window(16))
    leave(manager, admitted(manager, "a", 8))
    b = admitted(manager, "b", other(6))
    partial = [table[1] for table in tables(manager, b)]
    leave(manager, b)
    # The last group's first.
    assert free_order(manager)[:2] == partial[::-1]
    admitted(manager, "c", other(3, 2))
    assert sorted(cached_ids(manager)) == sorted(set(range(1, 9)) - set(partial))
    assert hit(manager, request("a", 9)) == 8


def test_b51_a_draft_in_a_window_asks_for_one_block_more_in_a_row() -> None:
    """W=4, blocks of 2: a hit at 8 with a draft looks up to 10, so it needs blocks 2, 3 (the window) and 4."""
    manager = hybrid(30, window(4, 2), drafts=DraftRule(hashes_ahead=False))
    leave(manager, admitted(manager, "a", 11))
    found = manager.get_computed_blocks(request("b", 11))
    assert found.blocks.get_block_ids() == ([0, 0, 3, 4],)
    # Without block 2 the window of token 8 would have a hole: 8 is no hit; nor is anything before it a whole run.
    manager.evict_blocks([3])
    assert hit(manager, request("b", 11)) == 2


def test_b53_sizes_without_a_common_divisor_hit_at_their_multiple_only() -> None:
    manager = hybrid(99, full(6), state(16))
    # Inside blocks the unit is gcd(6, 16) = 2 and hits end there; states of whole blocks would only meet at 48.
    assert sent_twice(manager, 60) == 58
    windows = hybrid(99, full(6), window(16, 16))
    assert [cdiv(n, 48) for n in (sent_twice(windows, 48), sent_twice(windows, 97))] == [0, 2]
    assert sent_twice(hybrid(99, full(6), window(16, 16)), 49) == 48


def test_b53_a_prompt_shorter_than_a_block_is_no_hit() -> None:
    manager = hybrid(40, full(16), window(8, 16), ring())
    assert sent_twice(manager, 16) == 0
    assert sent_twice(manager, 17) == 16
