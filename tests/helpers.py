"""The words that the tests are written in.

manager = ledger(usable=8)            a KVCacheManager with 8 usable blocks of 4 tokens
a = request("a", 10)                  a request with the prompt 0 .. 9
admit(manager, a)                     looked up, given slots for the rest of its prompt, and computed
a = admitted(manager, "a", 10)        both in one
decode(manager, a)                    one more token: appended, given a slot, computed
ids(manager, a), hit(manager, b)      its block ids; how many tokens of b the prefix cache has
leave(manager, a)                     finished or preempted: its blocks go back
"""

from typing import Any

from kvledger import (
    BlockPool,
    EvictionCause,
    FullAttentionSpec,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    LedgerObserver,
    PrefixHit,
    Request,
)

BLOCK_SIZE = 4


def kv_config(usable: int, block_size: int = BLOCK_SIZE) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8)
    return KVCacheConfig(usable + 1, (KVCacheGroupSpec(("layer.0",), spec),))


def ledger(usable: int, block_size: int = BLOCK_SIZE, max_model_len: int = 4096, **options: Any) -> KVCacheManager:
    """A manager over `usable` blocks; the null block comes on top of them."""
    return KVCacheManager(kv_config(usable, block_size), max_model_len, **options)


def request(request_id: str, prompt: int | list[int] | bytes, **options: Any) -> Request:
    """A request; a number stands for the prompt 0, 1, 2, ... of that length, so equal prompts share."""
    return Request(request_id, list(range(prompt)) if isinstance(prompt, int) else prompt, **options)


def other(num_tokens: int, family: int = 1) -> list[int]:
    """A prompt that shares nothing with the prompts of other families (a plain number is family 0)."""
    return [family * 100_000 + position for position in range(num_tokens)]


def admit(
    manager: KVCacheManager, req: Request, num_new: int | None = None, *, found: PrefixHit | None = None, **options: Any
) -> KVCacheBlocks | None:
    """Looks the request up and computes num_new tokens of it, or all that are left. None when they do not fit."""
    if found is None:
        found = manager.get_computed_blocks(req)
    if num_new is None:
        num_new = req.num_tokens - found.num_tokens - options.get("num_external_computed_tokens", 0)
    blocks = manager.allocate_slots(req, num_new, found, **options)
    if blocks is not None:
        req.num_computed_tokens = found.num_tokens + options.get("num_external_computed_tokens", 0) + num_new
    return blocks


def admitted(manager: KVCacheManager, request_id: str, prompt: int | list[int] | bytes, **options: Any) -> Request:
    """A request whose prompt was just computed whole."""
    req = request(request_id, prompt, **options)
    assert admit(manager, req) is not None, "the pool is full"
    return req


def decode(manager: KVCacheManager, req: Request, num_tokens: int = 1, first_token: int = 900_000) -> list[int]:
    """Decodes one token after the other. Returns the ids of blocks that this took."""
    taken: list[int] = []
    for _ in range(num_tokens):
        req.append_token(first_token + req.num_tokens)
        blocks = manager.allocate_slots(req, 1)
        assert blocks is not None, "the pool is full"
        req.num_computed_tokens += 1
        taken += blocks.get_block_ids()[0]
    return taken


def draft(manager: KVCacheManager, req: Request, num_drafts: int, num_accepted: int) -> KVCacheBlocks | None:
    """One decode step that verifies drafts: the sampled token is appended, drafts are computed and partly kept."""
    req.append_token(900_000 + req.num_tokens)
    blocks = manager.allocate_slots(req, 1 + num_drafts)
    if blocks is not None:
        req.num_computed_tokens += 1 + num_accepted
        for _ in range(num_accepted):
            req.append_token(900_000 + req.num_tokens)
    return blocks


def leave(manager: KVCacheManager, req: Request) -> None:
    manager.free(req)
    req.num_computed_tokens = 0


def ids(manager: KVCacheManager, req: Request) -> list[int]:
    return manager.get_block_ids(req.request_id)[0]


def hit(manager: KVCacheManager, req: Request) -> int:
    """Tokens of the request that the prefix cache has."""
    return manager.get_computed_blocks(req).num_tokens


def pool_of(manager: KVCacheManager) -> BlockPool:
    return manager._pool


def free_order(manager: KVCacheManager) -> list[int]:
    """Ids of the free blocks, the next to be reused first."""
    return pool_of(manager).free_queue.block_ids()


def ref_cnts(manager: KVCacheManager, block_ids: list[int]) -> list[int]:
    return [int(pool_of(manager).blocks[block_id].ref_cnt) for block_id in block_ids]


def cached_ids(manager: KVCacheManager) -> list[int]:
    """Ids of all blocks that carry a hash."""
    return [int(block.block_id) for block in pool_of(manager).blocks if block.block_hash is not None]


def snapshot(pool: BlockPool) -> tuple[object, ...]:
    """Everything that a failed call must leave as it was."""
    blocks = [(int(b.ref_cnt), b.block_hash, int(b.group_id), int(b.num_hash_tokens)) for b in pool.blocks]
    indexes = [
        {key: [int(block.block_id) for block in found] for key, found in index.blocks().items()}
        for index in pool.indexes
    ]
    return blocks, pool.free_queue.block_ids(), pool.free_queue.num_free_blocks, indexes, pool.occupancy()


class Journal(LedgerObserver):
    """Writes down what the ledger reports."""

    def __init__(self) -> None:
        self.cached: list[tuple[str, list[int]]] = []
        self.evicted: list[tuple[int, EvictionCause]] = []
        self.num_resets = 0
        self.refused: list[int] = []

    def blocks_cached(self, request: Request, group_id: int, blocks: list[KVCacheBlock]) -> None:
        self.cached.append((request.request_id, [int(block.block_id) for block in blocks]))
        # Drafts are not in num_tokens, so whatever is indexed is accepted.
        assert all(block.num_hash_tokens <= request.num_tokens for block in blocks)

    def blocks_evicted(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> None:
        assert blocks
        assert all(block.block_hash is not None for block in blocks)
        self.evicted.extend((int(block.block_id), cause) for block in blocks)

    def prefix_cache_reset(self) -> None:
        self.num_resets += 1

    def prefix_cache_reset_refused(self, num_held_blocks: int) -> None:
        self.refused.append(num_held_blocks)
