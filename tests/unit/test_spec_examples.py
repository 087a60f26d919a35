"""The reference page's tables, worked examples and self-check questions, one test each, with its numbers."""

import pytest

from kvledger import AdmissionRule, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager
from kvledger.errors import OutOfBlocksError, RequestError
from tests.helpers import (
    Journal,
    admit,
    admitted,
    cached_ids,
    decode,
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

# Llama-3.1-8B: 32 layers, 8 KV heads, head size 128, BF16, blocks of 16 tokens.
LLAMA = KVCacheGroupSpec(
    tuple(f"layer.{number}" for number in range(32)), FullAttentionSpec(16, num_kv_heads=8, head_size=128)
)


def test_reference_counts_and_sharing_step_by_step() -> None:
    manager = ledger(usable=8, block_size=16)
    shared = list(range(32))
    r1, r2 = request("R1", shared + other(8, 1)), request("R2", shared + other(8, 2))

    # R1 admitted: a, b, c removed from the front; its prefill fills and caches a and b, c has 8 tokens.
    admit(manager, r1)
    a, b, c = ids(manager, r1)
    assert (a, b, c) == (1, 2, 3)
    assert ref_cnts(manager, [a, b, c]) == [1, 1, 1]
    assert cached_ids(manager) == [a, b]
    assert free_order(manager) == [4, 5, 6, 7, 8]

    # R2 admitted: hits a and b, takes d.
    admit(manager, r2)
    assert ids(manager, r2) == [a, b, 4]
    d = 4
    assert ref_cnts(manager, [a, b, c, d]) == [2, 2, 1, 1]
    assert free_order(manager) == [5, 6, 7, 8]

    # R1 finishes after 4 output tokens: 44 tokens, so c is not full.
    assert decode(manager, r1, 4) == []
    leave(manager, r1)
    assert ref_cnts(manager, [a, b, c, d]) == [1, 1, 0, 1]
    assert free_order(manager) == [c, 5, 6, 7, 8]

    # R2 finishes: d to the front, then b and a to the end.
    leave(manager, r2)
    assert ref_cnts(manager, [a, b, c, d]) == [0, 0, 0, 0]
    assert free_order(manager) == [d, c, 5, 6, 7, 8, b, a]
    assert cached_ids(manager) == [a, b]

    # A third request with the same 32 tokens would hit them; one with many new blocks takes d, c first and b, a last.
    assert hit(manager, request("R3", shared + other(1, 3))) == 32
    admit(manager, request("R4", other(8 * 16, 4)))
    assert ids(manager, request("R4", 1)) == [d, c, 5, 6, 7, 8, b, a]
    manager.check()


def test_page_sizes_of_llama_3_1_8b() -> None:
    assert LLAMA.spec.page_size_bytes == 65_536 == 64 * 1024
    assert LLAMA.page_size_bytes == 2 * 1024**2


def test_blocks_and_tokens_in_54_6_gib() -> None:
    num_blocks = 55_910 * 1024**2 // LLAMA.page_size_bytes
    assert num_blocks == 27_955
    assert num_blocks * 16 == 447_280
    assert LLAMA.spec.max_blocks_per_request(131_072) == 8192
    assert round(num_blocks / 8192, 2) == 3.41


def test_a_chat_of_2500_tokens_holds_157_blocks_0_56_percent() -> None:
    manager = KVCacheManager(KVCacheConfig(27_955, (LLAMA,)), max_model_len=131_072)
    assert manager.num_usable_blocks == 27_954
    chat = admitted(manager, "chat", 2000)
    assert len(ids(manager, chat)) == 125
    assert len(decode(manager, chat, 500)) == 32
    assert chat.num_tokens == 2500
    assert len(ids(manager, chat)) == 157
    assert manager.num_blocks_for(2500) == 157
    assert round(manager.usage * 100, 2) == 0.56
    assert 157 * LLAMA.page_size_bytes == 314 * 1024**2


def test_a_pool_of_1000_blocks_gives_requests_at_most_999() -> None:
    config = KVCacheConfig(1000, (LLAMA,))
    manager = KVCacheManager(config, max_model_len=1_000_000)
    assert manager.num_usable_blocks == 999
    too_long, longest = request("too long", 999 * 16 + 1), request("longest", 999 * 16)
    assert admit(manager, too_long) is None
    assert admit(manager, longest) is not None
    assert 0 not in ids(manager, longest)
    assert manager.usage == 1.0


def test_32_computed_tokens_and_3_blocks_need_no_block_for_one_more_token() -> None:
    manager = ledger(usable=9, block_size=16)
    running = admitted(manager, "running", 33)
    running.num_computed_tokens = 32
    assert len(ids(manager, running)) == 3
    blocks = manager.allocate_slots(running, 1)
    assert blocks is not None
    assert blocks.is_empty()
    running.num_computed_tokens = 33
    assert decode(manager, running, 15) == []
    assert running.num_tokens == 48
    assert decode(manager, running, 1) == [4]
    assert running.num_tokens == 49


def test_usage_of_a_tenth_while_the_hit_rate_falls() -> None:
    manager = ledger(usable=10)
    old = admitted(manager, "old", other(13, 1))
    leave(manager, old)
    admitted(manager, "running", 3)
    hits = [hit(manager, request("again", other(13, 1)))]
    for family in range(2, 5):
        passing = request(f"passing {family}", other(12, family))
        admit(manager, passing)
        leave(manager, passing)
        assert round(manager.usage, 2) == 0.1
        hits.append(hit(manager, request("again", other(13, 1))))
    # 9 blocks are left over: 3 of them cache `old`, 6 are unused and go first; then its tail goes, then its head.
    assert hits == [12, 12, 12, 0]


@pytest.mark.parametrize("gate", [True, False])
def test_three_free_hits_and_one_more_block_do_not_fit_three_free_blocks(gate: bool) -> None:
    manager = ledger(usable=3, block_size=16)
    first = admitted(manager, "first", 48)
    leave(manager, first)
    assert manager.num_free_blocks == 3
    new = request("new", list(range(48)) + other(16))
    found = manager.get_computed_blocks(new)
    assert found.num_tokens == 48
    before = snapshot(pool_of(manager))
    # 1 new block + 3 free hits = 4 > 3: with the full-sequence gate, and without it by the second check.
    assert manager.allocate_slots(new, 16, found, admission=AdmissionRule(full_sequence_must_fit=gate)) is None
    assert manager.allocate_slots(new, 16, found) is None
    assert snapshot(pool_of(manager)) == before
    # Three new tokens in a pool of four do.
    roomy = ledger(usable=4, block_size=16)
    admit(roomy, request("first", 48))
    leave(roomy, request("first", 48))
    assert admit(roomy, new, admission=AdmissionRule(full_sequence_must_fit=gate)) is not None
    assert roomy.num_free_blocks == 0


def test_free_hits_are_only_counted_while_nobody_holds_them() -> None:
    manager = ledger(usable=4, block_size=16)
    admit(manager, request("first", 48))
    new = request("new", list(range(48)) + other(16))
    assert admit(manager, new, admission=AdmissionRule()) is not None
    assert manager.num_free_blocks == 0


def test_a_step_without_tokens_is_a_value_error() -> None:
    manager = ledger(usable=4)
    a = request("a", 5)
    for num_new_tokens in (0, -1):
        with pytest.raises(ValueError, match=f"num_new_tokens={num_new_tokens}: "):
            manager.allocate_slots(a, num_new_tokens)
    admit(manager, a)
    with pytest.raises(RequestError, match="needs a token to compute"):
        manager.allocate_slots(a, 0)
    assert ids(manager, a) == [1, 2]


def test_a_step_that_only_adopts_computed_tokens_is_fine() -> None:
    manager = ledger(usable=6)
    admit(manager, request("a", 8))
    b = request("b", 9)
    assert admit(manager, b, 0) is not None
    assert ids(manager, b) == [1, 2]
    c = request("c", other(9))
    assert admit(manager, c, 0, num_external_computed_tokens=8, delay_cache_blocks=True) is not None
    assert ids(manager, c) == [3, 4]


def test_asking_the_pool_for_more_than_is_free_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="num_blocks=5") as caught:
        pool_of(ledger(usable=4)).get_new_blocks(5)
    assert isinstance(caught.value, OutOfBlocksError)


def test_reset_while_blocks_are_in_use_warns_and_returns_false() -> None:
    journal = Journal()
    manager = ledger(usable=4, observer=journal)
    a = admitted(manager, "a", 5)
    assert not manager.reset_prefix_cache()
    assert journal.refused == [2]
    leave(manager, a)
    assert manager.reset_prefix_cache()
    assert journal.num_resets == 1


def test_only_new_blocks_come_back_from_a_call() -> None:
    manager = ledger(usable=8)
    admit(manager, request("a", 8))
    b = request("b", 14)
    blocks = admit(manager, b)
    assert blocks is not None
    assert blocks.get_block_ids() == ([3, 4],)
    assert manager.get_block_ids("b") == ([1, 2, 3, 4],)


def test_without_caching_nothing_is_looked_up_or_kept() -> None:
    manager = ledger(usable=4, enable_caching=False)
    a = admitted(manager, "a", 9)
    leave(manager, a)
    assert hit(manager, request("b", 9)) == 0
    assert cached_ids(manager) == []
    assert free_order(manager) == [3, 2, 1, 4]
