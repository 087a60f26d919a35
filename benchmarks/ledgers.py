"""The ledgers that features are measured on: blocks of 16 tokens, full pools, many running requests."""

import random

from kvledger import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    LedgerObserver,
    Request,
    make_block_hasher,
)
from kvledger.scheduler import Scheduler

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1 << 20
NUM_RUNNING = 1024
# The step in which all of their prompts are computed.
PREFILL_TOKENS = NUM_RUNNING * 512
FULL = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=8, head_size=128)


def make_manager(
    num_blocks: int, spec: KVCacheSpec = FULL, *, hash_name: str = "sha256", observer: LedgerObserver | None = None
) -> KVCacheManager:
    config = KVCacheConfig(num_blocks, (KVCacheGroupSpec(("layer.0",), spec),))
    return KVCacheManager(config, MAX_MODEL_LEN, hasher=make_block_hasher(hash_name, BLOCK_SIZE), observer=observer)


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(100_000) for _ in range(num_tokens)]


def admit(manager: KVCacheManager, request: Request) -> None:
    """A prompt's whole way: looked up, counted, allocated, freed."""
    hit = manager.get_computed_blocks(request)
    if manager.allocate_slots(request, request.num_tokens - hit.num_tokens, hit) is None:
        raise RuntimeError("the benchmark's pool is too small")
    manager.record_prefix_lookup(request, hit.num_tokens, hit)
    manager.free(request)


def fill(manager: KVCacheManager, num_blocks: int) -> None:
    """Leaves so many cached blocks behind, of prompts that nobody sends again."""
    rng = random.Random(1)
    for number in range(num_blocks // 256):
        admit(manager, Request(f"fill{number}", prompt(rng, 256 * BLOCK_SIZE)))


def blocks_for_decoding(num_steps: int) -> int:
    """Blocks for NUM_RUNNING requests that decode for so many steps."""
    return NUM_RUNNING * (16 + (num_steps + BLOCK_SIZE) // BLOCK_SIZE + 2) + 1


def start_decoding(scheduler: Scheduler) -> list[int]:
    """NUM_RUNNING requests, at all phases of a block, run. Returns a sampled token for each of them."""
    rng = random.Random(2)
    for index in range(NUM_RUNNING):
        scheduler.add_request(Request(f"r{index}", prompt(rng, 240 + index % BLOCK_SIZE), max_tokens=10_000))
    sampled = [7] * NUM_RUNNING
    scheduler.update_from_tokens(scheduler.schedule(), sampled)
    if scheduler.num_running != NUM_RUNNING:
        raise RuntimeError("not everything runs")
    return sampled
