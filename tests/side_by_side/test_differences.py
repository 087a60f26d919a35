"""Rows of docs/differences.md that say what vLLM does where the pairs cannot go: vLLM is run, and so is the ledger."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager as TheirManager
from vllm.v1.request import Request as TheirRequest

from kvledger import AdmissionRule, KVCacheManager, Request
from kvledger.errors import BlockError, RequestError, UnknownRequestError
from kvledger.scheduler import Scheduler, SchedulerConfig
from tests.side_by_side import reference
from tests.side_by_side.layouts import FULL4, Group, Layout
from tests.side_by_side.ledger_pair import make_ours

PROMPT = list(range(33))


class Both:
    """vLLM's manager and ours, and one request on each."""

    def __init__(self, layout: Layout, num_blocks: int = 30) -> None:
        self.theirs: TheirManager = reference.make_manager(layout, num_blocks, 160)
        self.ours: KVCacheManager = make_ours(layout, num_blocks)
        self.factory = reference.RequestFactory(layout)

    def requests(self, name: str, prompt: list[int]) -> tuple[TheirRequest, Request]:
        return self.factory.make(name, prompt), Request(name, prompt)

    def compute(self, name: str, prompt: list[int]) -> tuple[TheirRequest, Request]:
        """Both compute it whole, and hold it."""
        theirs, ours = self.requests(name, prompt)
        found, num_hit, _ = self.theirs.get_computed_blocks(theirs)
        self.theirs.allocate_slots(theirs, len(prompt) - num_hit, num_hit, found)
        hit = self.ours.get_computed_blocks(ours)
        self.ours.allocate_slots(ours, len(prompt) - hit.num_tokens, hit)
        theirs.num_computed_tokens = ours.num_computed_tokens = len(prompt)
        return theirs, ours

    def hits(self, name: str, prompt: list[int]) -> tuple[tuple[int, Any], tuple[int, Any]]:
        """(tokens, block ids) of a lookup: vLLM's, ours."""
        theirs, ours = self.requests(name, prompt)
        found, num_hit, _ = self.theirs.get_computed_blocks(theirs)
        hit = self.ours.get_computed_blocks(ours)
        return (num_hit, found.get_block_ids()), (hit.num_tokens, hit.blocks.get_block_ids())


def test_a_window_of_one_token() -> None:
    """Its only token is the one that is computed. vLLM caches none of its blocks, and then misses one."""
    both = Both(Layout("window of 1", (FULL4, Group("window", 4, window=1))))
    a = both.compute("a", PROMPT)
    both.theirs.free(a[0])
    both.ours.free(a[1])
    assert both.hits("b", PROMPT) == ((0, ([], [])), (32, ([1, 2, 3, 4, 5, 6, 7, 8], [0] * 8)))


def test_a_chunk_that_does_not_end_with_a_block() -> None:
    """Chunks of 6: token 4 reads tokens 0 to 3, for which vLLM hands out the null block."""
    both = Both(Layout("chunks of 6", (FULL4, Group("chunked", 4, window=6))))
    a = both.compute("a", PROMPT[:12])
    both.theirs.free(a[0])
    both.ours.free(a[1])
    assert both.hits("b", PROMPT[:12]) == ((8, ([1, 2], [0, 5])),) * 2
    both.theirs.evict_blocks({5})
    both.ours.evict_blocks([5])
    assert both.hits("c", PROMPT[:12]) == ((4, ([1], [0])), (4, ([1], [4])))


def test_a_state_that_a_connector_delivers() -> None:
    """Of five blocks that it needs, four are free. vLLM counts four, and fails with blocks of both groups taken."""
    both = Both(Layout("states", (FULL4, Group("mamba_align", 4))), num_blocks=5)
    theirs, ours = both.requests("a", PROMPT[:12])
    found, _, _ = both.theirs.get_computed_blocks(theirs)
    with pytest.raises(ValueError, match="Cannot get 1 free blocks"):
        both.theirs.allocate_slots(theirs, 4, 0, found, num_external_computed_tokens=8)
    assert both.theirs.get_block_ids("a") == ([1, 2, 4], [0, 3])
    hit = both.ours.get_computed_blocks(ours)
    assert both.ours.allocate_slots(ours, 4, hit, num_external_computed_tokens=8) is None
    assert both.ours.num_free_blocks == 4


def test_attention_behind_sinks_cannot_be_built() -> None:
    layout = Layout("sinks", (Group("sink", 4),))
    with pytest.raises(TypeError):
        reference.make_manager(layout, 10, 160)
    assert make_ours(layout, 10).num_free_blocks == 9


def test_misuse_of_a_manager() -> None:
    both = Both(Layout("full", (FULL4,)))
    a = both.compute("a", PROMPT[:8])
    unknown = both.requests("unknown", PROMPT)
    both.theirs.free(unknown[0])
    assert both.theirs.get_block_ids("unknown") == ([],)
    for call in (lambda: both.ours.free(unknown[1]), lambda: both.ours.get_block_ids("unknown")):
        with pytest.raises(UnknownRequestError):
            call()
    # A running request finds its own blocks.
    assert both.theirs.get_computed_blocks(a[0])[1] == 4
    with pytest.raises(RequestError):
        both.ours.get_computed_blocks(a[1])
    # -28 of 30 blocks is the third one, counted from the end: a's second block.
    both.theirs.evict_blocks({-28})
    assert both.theirs.block_pool.blocks[2].block_hash is None
    with pytest.raises(BlockError):
        both.ours.evict_blocks([-28])
    # 12 tokens of a request that has 8, and slots for 12.
    both.theirs.allocate_slots(a[0], 1, num_lookahead_tokens=3)
    both.ours.allocate_slots(a[1], 1, num_lookahead_tokens=3)
    # 0.33 caches what has its hash.
    with pytest.raises(IndexError) if reference.RELEASE == "0.32" else nullcontext():
        both.theirs.cache_blocks(a[0], 12)
    with pytest.raises(RequestError):
        both.ours.cache_blocks(a[1], 12)


def test_a_block_freed_twice() -> None:
    both = Both(Layout("full", (FULL4,)))
    their_pool, our_pool = both.theirs.block_pool, both.ours.block_pool
    (theirs,), (ours,) = their_pool.get_new_blocks(1), our_pool.get_new_blocks(1)
    their_pool.free_blocks([theirs])
    our_pool.free_blocks([ours])
    their_pool.free_blocks([theirs])
    assert theirs.ref_cnt == -1
    with pytest.raises(BlockError):
        our_pool.free_blocks([ours])


def test_several_draft_modules_beside_states(tmp_path: Path) -> None:
    """Blocks of 16, 12 tokens a step, a prompt of 20, and a draft that looks 8 tokens ahead. 8 tokens are left after
    the first chunk. The next one should end at 16, a block's end, and 4 tokens earlier, because only 4 were left: vLLM
    takes none, in every step."""
    layout = Layout("modules", (Group("full", 16), Group("mamba_align", 16)), num_draft_lookahead=8)
    theirs = reference.make_scheduler(
        str(tmp_path), layout=layout, num_blocks=30, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=12
    )
    theirs.num_prefill_lookahead = 8
    theirs.add_request(reference.RequestFactory(layout).make("a", PROMPT[:20]))
    assert [dict(theirs.schedule().num_scheduled_tokens) for _ in range(3)] == [{"a": 12}, {}, {}]
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12, max_steps_in_flight=2)
    ours = Scheduler(make_ours(layout, 30, max_model_len=64), config)
    ours.add_request(Request("a", PROMPT[:20]))
    assert [ours.schedule().num_tokens_by_request() for _ in range(2)] == [{"a": 12}, {"a": 8}]


def test_a_prompt_that_the_pool_can_never_hold(tmp_path: Path) -> None:
    layout = Layout("full", (FULL4,))
    theirs = reference.make_scheduler(
        str(tmp_path), layout=layout, num_blocks=5, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64
    )
    factory = reference.RequestFactory(layout)
    for name, prompt in (("long", PROMPT), ("short", PROMPT[:4])):
        theirs.add_request(factory.make(name, prompt))
    assert [theirs.schedule().total_num_scheduled_tokens for _ in range(3)] == [0, 0, 0]
    assert [request.request_id for request in theirs.waiting] == ["long", "short"]
    ours = make_ours(layout, 5, max_model_len=64)
    rule = AdmissionRule()
    assert ours.allocate_slots(Request("long", PROMPT), 33, admission=rule) is None
    assert ours.num_blocks_for(33) == 9 > ours.num_usable_blocks
