"""Our blocks, pool and coordinator as vLLM's code sees them."""

from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as theirs
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

from kvledger.core.groups import spec as ours
from kvledger.errors import BlockError
from kvledger.integrations.vllm.manager import VllmKVCacheManager
from kvledger.integrations.vllm.specs import our_spec
from tests.plugin.manager_pair import Collector, make_managers
from tests.side_by_side.layouts import Group, Layout
from tests.side_by_side.reference import RequestFactory

FULL = Layout("full", (Group("full", 4),))
HYBRID = Layout("hybrid", (Group("full", 4), Group("window", 4, window=8)))


def start(manager: Any, layout: Layout = FULL, num_tokens: int = 10, request_id: str = "r") -> Any:
    """A request of 10 tokens that runs: two full blocks of 4 and one in part."""
    request = RequestFactory(layout).make(request_id, list(range(num_tokens)))
    found, num_hit, _ = manager.get_computed_blocks(request)
    manager.allocate_slots(request, num_tokens - num_hit, num_new_computed_tokens=num_hit, new_computed_blocks=found)
    request.num_computed_tokens = num_tokens
    return request


def make(layout: Layout = FULL, **changes: Any) -> VllmKVCacheManager:
    return make_managers(layout, 20, **changes)[1]


def test_block_ids_are_fresh_lists_that_the_runner_may_extend() -> None:
    manager = make()
    start(manager)
    ids = manager.get_blocks("r").get_block_ids()
    ids[0].append(99)
    assert manager.get_block_ids("r") == ([1, 2, 3],)


def test_a_step_within_its_blocks_gets_the_shared_empty_answer() -> None:
    manager = make()
    request = start(manager)
    request.append_output_token_ids(7)
    assert manager.allocate_slots(request, 1) is manager.empty_kv_cache_blocks
    assert manager.empty_kv_cache_blocks.get_block_ids() == ([],)
    assert manager.empty_kv_cache_blocks.get_block_ids(allow_none=True) is None


def test_results_pass_for_vllms_class() -> None:
    manager = make()
    start(manager)
    assert isinstance(manager.get_blocks("r"), KVCacheBlocks)
    assert isinstance(manager.empty_kv_cache_blocks, KVCacheBlocks)
    joined = manager.get_blocks("r") + manager.empty_kv_cache_blocks
    assert joined.get_block_ids() == ([1, 2, 3],)


def test_some_groups_only() -> None:
    manager = make(HYBRID)
    start(manager, HYBRID)
    both = manager.get_block_ids("r")
    assert manager.get_blocks("r").get_block_ids(group_ids=[1]) == (both[1],)


def test_blocks_have_vllms_attributes() -> None:
    manager = make()
    request = start(manager)
    full, _, last = manager.get_blocks("r").blocks[0]
    assert (full.block_id, full.ref_cnt, full.is_null, full.block_hash_num_tokens) == (1, 1, False, 4)
    assert get_block_hash(full.block_hash) == request.block_hashes[0]
    assert get_group_id(full.block_hash) == 0
    assert (last.block_hash, last.block_hash_num_tokens) == (None, None)
    assert manager.get_blocks("r").get_unhashed_block_ids() == [3]


def test_one_view_a_block() -> None:
    manager = make()
    start(manager)
    assert manager.block_pool.blocks[1] is manager.get_blocks("r").blocks[0][0]
    assert manager.block_pool.null_block.is_null


def test_a_pinned_block_is_not_handed_out() -> None:
    manager = make()
    request = start(manager)
    pool = manager.block_pool
    pool.touch([pool.blocks[1]])
    manager.free(request)
    assert pool.blocks[1].ref_cnt == 1
    manager.ledger.check()
    pool.free_blocks(block for block in [pool.blocks[1]])
    assert pool.blocks[1].ref_cnt == 0
    assert pool.get_num_free_blocks() == 19


def test_references_that_nobody_took_cannot_be_dropped() -> None:
    manager = make()
    start(manager)
    with pytest.raises(BlockError, match="is not held outside the ledger"):
        manager.block_pool.free_blocks([manager.block_pool.blocks[1]])
    assert manager.block_pool.blocks[1].ref_cnt == 1


def test_a_request_that_ends_while_a_step_writes_leaves_its_blocks_to_the_scheduler() -> None:
    manager = make()
    request = start(manager)
    blocks = manager.pop_blocks_for_free(request)
    assert [block.block_id for block in blocks] == [1, 2, 3]
    assert manager.get_block_ids("r") == ([],)
    assert manager.block_pool.get_num_free_blocks() == 16
    manager.block_pool.free_blocks(reversed(blocks))
    assert manager.block_pool.get_num_free_blocks() == 19
    manager.ledger.check()


def test_walking_the_free_blocks_in_the_order_of_reuse() -> None:
    manager = make()
    queue = manager.block_pool.free_block_queue
    walk = [block.block_id for block in queue.iter_blocks_after(None)]
    assert walk == list(range(1, 20))
    assert [block.block_id for block in queue.iter_blocks_after(manager.block_pool.blocks[17])] == [18, 19]
    start(manager)
    assert list(queue.iter_blocks_after(manager.block_pool.blocks[1])) == []


def test_looking_up_a_hash_in_some_groups() -> None:
    manager = make(HYBRID)
    request = start(manager, HYBRID)
    found = manager.block_pool.get_cached_block(request.block_hashes[0], [0, 1])
    assert [block.block_id for block in found] == [ids[0] for ids in manager.get_block_ids("r")]
    assert manager.block_pool.get_cached_block(b"never seen", [0, 1]) is None


def test_what_the_stand_ins_lack_is_said_plainly() -> None:
    manager = make()
    with pytest.raises(AttributeError, match="PoolView has no 'cache_full_blocks': kvledger shows of vLLM's KV cache"):
        manager.block_pool.cache_full_blocks(None)


def test_calls_for_a_request_that_holds_nothing() -> None:
    manager = make()
    request = RequestFactory(FULL).make("unknown", [1, 2, 3])
    manager.free(request)
    manager.cache_blocks(request, 3)
    manager.remove_skipped_blocks("unknown", 3)
    manager.record_blocks_for_zeroing("unknown", 0)
    assert manager.pop_blocks_for_free(request) == []
    assert manager.get_blocks("unknown") is manager.empty_kv_cache_blocks
    assert manager.estimate_cached_tokens(request) == 0


def test_the_free_queue_from_end_to_end() -> None:
    manager = make()
    start(manager, num_tokens=4 * 16)
    queue, blocks = manager.block_pool.free_block_queue, manager.block_pool.blocks
    # 16 of 19 blocks are held.
    forwards = [queue.fake_free_list_head.next_free_block]
    while forwards[-1] is not queue.fake_free_list_tail:
        forwards.append(forwards[-1].next_free_block)
    assert [block.block_id for block in forwards] == [17, 18, 19, -1]
    assert queue.fake_free_list_tail.prev_free_block is blocks[19]
    assert blocks[17].prev_free_block is queue.fake_free_list_head
    assert blocks[1].next_free_block is None
    taken = manager.block_pool.get_new_blocks(3)
    assert taken == [blocks[17], blocks[18], blocks[19]]
    assert queue.fake_free_list_head.next_free_block is queue.fake_free_list_tail
    manager.ledger.check()
    manager.block_pool.free_blocks(taken)
    assert manager.block_pool.get_num_free_blocks() == 3


def test_who_holds_what_and_what_is_cached() -> None:
    for manager in make_managers(HYBRID, 40, enable_kv_cache_events=True):
        start(manager, HYBRID, 10)
        pool = manager.block_pool
        full, window = manager.coordinator.single_type_managers
        assert [block.block_id for block in full.req_to_blocks["r"]] == [1, 2, 3]
        assert (full.req_to_blocks["unknown"], full.num_cached_block["r"], window.num_cached_block["r"]) == ([], 2, 2)
        assert (manager.coordinator.scheduler_block_size, manager.coordinator.retention_interval) == (4, None)
        # Two full blocks in each of two groups.
        assert len(pool.cached_block_hash_to_block) == 4
        assert pool.cached_block_hash_to_block.get_one_block(pool.blocks[2].block_hash) is pool.blocks[2]
        assert len(pool.kv_event_queue) == 2
        manager.take_events()
        assert len(pool.kv_event_queue) == 0
    with pytest.raises(AttributeError):
        manager.coordinator.retention_interval = 0  # the ledger was made without


def test_a_lookup_with_a_limit() -> None:
    """vLLM 0.33 may ask for less than all but the last token."""
    manager = make()
    start(manager, num_tokens=16)
    request = RequestFactory(FULL).make("again", list(range(16)))
    assert manager.get_computed_blocks(request)[1] == 12
    blocks, num_tokens, _ = manager.get_computed_blocks(request, 7)
    assert (blocks.get_block_ids(), num_tokens) == (([1],), 4)


def test_only_states_may_lag_behind_a_hit() -> None:
    """A connector brings the states at its end, and nothing of a window that another request's hits stop short of."""
    layout = Layout("states and a window", (Group("full", 4), Group("mamba_align", 4), Group("window", 4, window=8)))
    for group_id, theirs_goes_on, ours_goes_on in ((1, True, True), (2, True, False)):
        found: list[tuple[int, bool]] = []
        for manager in make_managers(layout, 40):
            start(manager, layout, 16)
            manager.evict_blocks({manager.get_block_ids("r")[group_id][-1]})
            request = RequestFactory(layout).make("again", list(range(17)))
            _, num_tokens, _, diverged = manager.get_computed_blocks_for_connector(request)
            found.append((num_tokens, diverged))
        assert [found[0] == (16, True), found[1] == (16, True)] == [theirs_goes_on, ours_goes_on], (group_id, found)


def test_a_lookup_cut_short() -> None:
    both = make_managers(HYBRID, 40)
    for manager in both:
        start(manager, HYBRID, 16)
    request = RequestFactory(HYBRID).make("again", list(range(17)))
    cut = [manager.truncate_computed_blocks(manager.get_computed_blocks(request)[0], 8) for manager in both]
    assert cut[0].get_block_ids() == cut[1].get_block_ids()


def test_residency_is_told_as_by_vllm() -> None:
    told: list[list[tuple[str, int]]] = []
    for kind in (KVCacheManager, VllmKVCacheManager):
        collector = Collector()
        manager = next(m for m in make_managers(HYBRID, 40, metrics_collector=collector) if type(m) is kind)
        first = start(manager, HYBRID, 16, "first")
        manager.free(first)
        second = start(manager, HYBRID, 16, "second")
        manager.evict_blocks({2, 3})
        manager.free(second)
        manager.reset_prefix_cache()
        told.append(collector.told)
    assert told[0] == told[1]
    assert {what for what, _ in told[1]} == {"allocated", "accessed", "evicted", "reset"}


def test_specs_by_kind() -> None:
    heads = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    assert our_spec(theirs.FullAttentionSpec(**heads)) == ours.FullAttentionSpec(16, 2, 64, 64)
    assert our_spec(theirs.SlidingWindowSpec(**heads, sliding_window=128)) == ours.SlidingWindowSpec(
        16, 2, 64, 64, sliding_window=128
    )
    assert our_spec(theirs.MLAAttentionSpec(**{**heads, "num_kv_heads": 1})) == ours.MLAAttentionSpec(16, 64)
    fp8 = our_spec(theirs.FullAttentionSpec(**{**heads, "dtype": torch.float8_e4m3fn}))
    assert fp8 == ours.FullAttentionSpec(16, 2, 64, 64, dtype="uint8")
    state = our_spec(
        theirs.MambaSpec(block_size=32, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")
    )
    assert state == ours.MambaSpec(32, ((4, 8),), ("float32",), mamba_cache_mode="align")
