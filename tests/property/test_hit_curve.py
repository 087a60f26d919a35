"""The curve against the real ledger: requests one after another through pools of many sizes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger import FullAttentionSpec, GivenBlockHasher, KVCacheConfig, KVCacheGroupSpec, KVCacheManager, Request
from kvledger.core.watch.hit_curve import HitCurve

MAX_MODEL_LEN = 1000


def ledger_hits(requests: list[tuple[int, list[int], int]], block_size: int, chunk_size: int, num_blocks: int) -> int:
    """Hit tokens of a pool, by the manager itself. A chunk's content is its id and all ids before it."""
    group = KVCacheGroupSpec(("layer",), FullAttentionSpec(block_size, 1, 8))
    manager = KVCacheManager(KVCacheConfig(num_blocks, (group,)), MAX_MODEL_LEN, hasher=GivenBlockHasher(block_size))
    hit_tokens = 0
    for number, (num_tokens, chunk_ids, scope) in enumerate(requests):
        request = Request(str(number), [0] * num_tokens)
        request.block_hashes = [
            repr((scope, chunk_ids[: -(-end // chunk_size)], end)).encode()
            if end <= len(chunk_ids) * chunk_size
            else repr((number, end)).encode()
            for end in range(block_size, num_tokens + 1, block_size)
        ]
        hit = manager.get_computed_blocks(request)
        hit_tokens += hit.num_tokens
        assert manager.allocate_slots(request, num_tokens - hit.num_tokens, hit) is not None
        manager.free(request)
        manager.check()
    return hit_tokens


@st.composite
def traces(draw: st.DrawFn, whole_blocks: bool) -> tuple[int, int, list[tuple[int, list[int], int]]]:
    """(block size, chunk size, requests). Few ids, so that prompts share beginnings; prompts of whole blocks or not."""
    block_size = draw(st.sampled_from([2, 3, 4]))
    chunk_size = draw(st.sampled_from([2, 4, 6, 8]))
    requests = []
    for _ in range(draw(st.integers(1, 14))):
        ids = draw(st.lists(st.integers(0, 2), max_size=5))
        num_tokens = draw(st.integers(1, max(1, len(ids) * chunk_size + 3)))
        if not whole_blocks and num_tokens % block_size == 0:
            num_tokens += 1
        requests.append((num_tokens, ids, draw(st.integers(0, 1))))
    return block_size, chunk_size, requests


def curve_of(block_size: int, chunk_size: int, requests: list[tuple[int, list[int], int]]) -> HitCurve:
    curve = HitCurve(block_size, chunk_size)
    for num_tokens, ids, scope in requests:
        curve.add(num_tokens, ids, scope)
        curve.check()
    return curve


@given(trace=traces(whole_blocks=False))
@settings(max_examples=150, deadline=None)
def test_every_pool_hits_what_the_curve_says(trace: tuple[int, int, list[tuple[int, list[int], int]]]) -> None:
    block_size, chunk_size, requests = trace
    curve = curve_of(block_size, chunk_size, requests)
    assert curve.num_duplicates == 0
    smallest = curve.num_blocks_of_longest + 1
    sizes = [*range(smallest, smallest + 12), 500]
    assert curve.hit_tokens_at(sizes) == [ledger_hits(requests, block_size, chunk_size, size) for size in sizes]


@given(trace=traces(whole_blocks=True))
@settings(max_examples=150, deadline=None)
def test_only_duplicates_make_a_difference(trace: tuple[int, int, list[tuple[int, list[int], int]]]) -> None:
    """Each takes one block from the others for as long as both copies stay, so a pool that is smaller by all of them
    hits no more."""
    block_size, chunk_size, requests = trace
    curve = curve_of(block_size, chunk_size, requests)
    smallest = curve.num_blocks_of_longest + 1
    for size in (smallest, smallest + 1, smallest + 3, smallest + 8, 500):
        hits = ledger_hits(requests, block_size, chunk_size, size)
        assert curve.num_hit_tokens(size - curve.num_duplicates) <= hits <= curve.num_hit_tokens(size)
