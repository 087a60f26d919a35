"""The two ledgers in the same state: same pool, same block size, same prompts. vLLM's come from tests/side_by_side."""

import random

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager as TheirManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request as TheirRequest

from kvledger import KVCacheManager, Request, make_block_hasher
from tests.side_by_side import reference
from tests.side_by_side.layouts import Group, Layout

BLOCK_SIZE = 16
MAX_MODEL_LEN = 65_536
LAYOUT = Layout("1 group", (Group("full", BLOCK_SIZE),))
# Gemma 3's shape: one group of full attention, five of windows that the benchmark's prompts have outgrown.
HYBRID = Layout("6 groups", (Group("full", BLOCK_SIZE), *[Group("window", BLOCK_SIZE, window=128)] * 5))
# Our name of a hash function -> vLLM's.
HASHES = {"sha256": "sha256", "xxh3": "xxhash"}


def our_manager(num_blocks: int, hash_name: str = "sha256", layout: Layout = LAYOUT) -> KVCacheManager:
    hasher = make_block_hasher(hash_name, BLOCK_SIZE)
    return KVCacheManager(layout.our_config(num_blocks), MAX_MODEL_LEN, hasher=hasher)


def their_manager(num_blocks: int, layout: Layout = LAYOUT) -> TheirManager:
    return reference.make_manager(layout, num_blocks, MAX_MODEL_LEN)


def their_factory(hash_name: str = "sha256") -> reference.RequestFactory:
    factory = reference.RequestFactory(BLOCK_SIZE)
    factory._hasher = get_request_block_hasher(BLOCK_SIZE, get_hash_fn_by_name(HASHES[hash_name]))
    return factory


def prompts(num_prompts: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Random prompts that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(100_000) for _ in range(num_tokens)] for _ in range(num_prompts)]


def decoding_prompts(num_running: int) -> list[list[int]]:
    """Prompts of requests at all phases of a block, so that in every decode step one in BLOCK_SIZE starts a block."""
    rng = random.Random(num_running)
    return [[rng.randrange(100_000) for _ in range(256 + index % BLOCK_SIZE)] for index in range(num_running)]


def our_admit(manager: KVCacheManager, request: Request) -> None:
    hit = manager.get_computed_blocks(request)
    if manager.allocate_slots(request, request.num_tokens - hit.num_tokens, hit) is None:
        raise RuntimeError("the benchmark's pool is too small")
    request.num_computed_tokens = request.num_tokens


def their_admit(manager: TheirManager, request: TheirRequest) -> None:
    blocks, num_hit, *_ = manager.get_computed_blocks(request)
    new = manager.allocate_slots(
        request, request.num_tokens - num_hit, num_new_computed_tokens=num_hit, new_computed_blocks=blocks
    )
    if new is None:
        raise RuntimeError("the benchmark's pool is too small")
    request.num_computed_tokens = request.num_tokens
