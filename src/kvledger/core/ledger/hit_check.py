"""Whether a prefix hit that somebody hands in is still one.

Between a lookup and its allocation blocks may have been reused, the cache may have been reset, or the hit was never
this request's or this ledger's. To take it then would give a request somebody else's KV values. While no block has lost
its hashes since a hit was found, two comparisons pass it; of any other each block is asked for its hash.
"""

from kvledger.core.blocks.kv_cache_blocks import PrefixHit
from kvledger.core.ledger.coordinator import KVCacheCoordinator
from kvledger.core.requests.request import Request
from kvledger.core.units import cdiv
from kvledger.errors import RequestError


def require_current(coordinator: KVCacheCoordinator, request: Request, hit: PrefixHit, num_external: int) -> None:
    """RequestError when a block of the hit does not cache these tokens of the request here and now. REQUIRES the
    request's hashes. `num_external`: tokens behind it that come from outside, with the states at their end."""
    hashes = request.block_hashes
    if hit.age == coordinator.age() and hit.hashes is hashes:
        return
    tables = hit.blocks.blocks
    if len(tables) != len(coordinator.managers):
        raise _stale(request, f"it has {len(tables)} groups and the ledger {len(coordinator.managers)}")
    for group_id, manager in enumerate(coordinator.managers):
        blocks = tables[group_id]
        first = 0
        if num_external > 0 and manager.hit_may_lag():
            # What comes before its end is never read.
            first = max(0, manager.num_skipped_tokens(hit.num_tokens + num_external)) // manager.block_size
        elif len(blocks) < cdiv(hit.num_tokens, manager.block_size) and manager.spec.prefix_cacheable:
            raise _stale(request, f"it counts {hit.num_tokens} tokens and has {len(blocks)} blocks in group {group_id}")
        for index in range(first, len(blocks)):
            block = blocks[index]
            if block is manager.pool.null_block:
                continue
            if not manager.still_has(block, index, hit, hashes):
                raise _stale(request, f"block {block.block_id} of group {group_id} does not cache these tokens")


def _stale(request: Request, problem: str) -> RequestError:
    return RequestError(
        f"hit: not one of request {request.request_id!r} in this ledger now: {problem}; call "
        "get_computed_blocks again, nothing was changed"
    )
