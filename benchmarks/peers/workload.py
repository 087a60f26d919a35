"""The workloads: the same prompts for every contestant, whatever its interpreter."""

import random
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.operation import num_runs

BLOCK_SIZE = 16
MAX_MODEL_LEN = 65_536
# No request reaches it while it is measured.
MAX_TOKENS = 10_000
# All prompts of the largest batch fit in one step.
TOKEN_BUDGET = 4096 * 512
# With several groups, the first keeps everything and the others this window, which decoding prompts have outgrown.
WINDOW = 128
# Blocks of the pool that admissions run in, all of them cached.
POOL_BLOCKS = 16_384
FILLER_TOKENS = 32_768
TABLE_ROWS = 256
TABLE_COLUMNS = 1024


def prompts(num_prompts: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Random prompts that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(100_000) for _ in range(num_tokens)] for _ in range(num_prompts)]


def decoding_prompts(num_running: int) -> list[list[int]]:
    """Prompts of requests at all phases of a block, so that in every decode step one in BLOCK_SIZE starts a block."""
    rng = random.Random(num_running)
    return [[rng.randrange(100_000) for _ in range(256 + index % BLOCK_SIZE)] for index in range(num_running)]


def blocks_for_decoding(case: dict[str, Any]) -> int:
    """Blocks for the decoding prompts of a case and for a token in every run."""
    num_tokens = 256 + num_runs(case["repeats"]) + 3 * BLOCK_SIZE
    return int(case["num_running"] * case["num_groups"] * num_tokens // BLOCK_SIZE + 1)


def fillers(num_blocks: int) -> Iterator[list[int]]:
    """Prompts that fill so many blocks. Each differs from all others in its first token, and so in every prefix."""
    num_tokens = num_blocks * BLOCK_SIZE
    for index, start in enumerate(range(0, num_tokens, FILLER_TOKENS)):
        yield [index, *range(min(FILLER_TOKENS, num_tokens - start) - 1)]


def traffic(num_tokens: int, hit_percent: int) -> Iterator[list[int]]:
    """Prompts of which that share, from the front, is cached once the first of them was admitted."""
    num_shared = num_tokens * hit_percent // 100
    shared = prompts(1, num_tokens, seed=1)[0][:num_shared]
    seed = 100
    while True:
        seed += 1
        yield shared + prompts(1, num_tokens - num_shared, seed)[0]


def table_ids(num_rows: int, num_ids: int) -> list[list[int]]:
    """Rows of block ids for a worker's table."""
    return [[(1 + row * 97 + index * 31) % 65_536 for index in range(num_ids)] for row in range(num_rows)]


def slot_batch(case: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """Rows, first positions and numbers of tokens of the requests of a batch."""
    rows = list(range(case["num_running"]))
    return rows, [5 * row for row in rows], [case["num_tokens"]] * len(rows)


def write_prompts(path: Path, all_tokens: list[list[int]]) -> None:
    """Token ids as machine integers of 4 bytes, each prompt after its length."""
    with path.open("wb") as file:
        for tokens in all_tokens:
            array("I", [len(tokens), *tokens]).tofile(file)


def read_prompts(path: str) -> list[list[int]]:
    """What write_prompts() wrote."""
    numbers = array("I", Path(path).read_bytes())
    found: list[list[int]] = []
    start = 0
    while start < len(numbers):
        end = start + 1 + numbers[start]
        found.append(numbers[start + 1 : end].tolist())
        start = end
    return found
