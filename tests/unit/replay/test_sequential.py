"""The sequential replay: what the prefix cache alone would give."""

import pytest

from kvledger.replay.config import ReplayConfig
from kvledger.replay.ledger import BlockLedger
from kvledger.replay.result import ReplayResult
from kvledger.replay.sequential import BlocksInTurn, SequentialReplay
from kvledger.traces.arrivals import RecordedArrivals
from kvledger.traces.prompts import make_prompt_maker
from kvledger.traces.trace_request import TraceRequest
from tests.unit.replay.engines import one_group


def replay(*prompts: tuple[int, list[int]], num_blocks: int, hash_name: str = "none") -> ReplayResult:
    """Prompts of (tokens, ids) in blocks of 16, every invariant checked after each."""
    requests = [TraceRequest(0.0, tokens, 100, ids, 16) for tokens, ids in prompts]
    config = ReplayConfig(num_blocks, one_group(), check=True)
    maker = make_prompt_maker(hash_name, 16)
    server = BlocksInTurn(config, BlockLedger(config, maker))
    return SequentialReplay(RecordedArrivals(iter(requests)), server, config).run(lambda done, arrived: None)


@pytest.mark.parametrize("hash_name", ["sha256", "none"])
def test_full_blocks_are_cached_and_the_last_token_is_always_computed(hash_name: str) -> None:
    # 40 tokens cache 2 blocks. The same again hits 2 of 3; 32 tokens of it hit 1 of 2, as a hit leaves one token over.
    result = replay((40, [1, 2, 3]), (40, [1, 2, 3]), (32, [1, 2]), num_blocks=100, hash_name=hash_name)
    cache = result.prefix_cache
    assert (cache.num_hit_tokens, cache.num_query_tokens) == (48, 112)
    assert (cache.num_hit_blocks, cache.num_query_blocks) == (3, 8)
    assert (result.num_finished, result.num_output_tokens) == (3, 0)


def test_the_least_recently_released_block_makes_room() -> None:
    # 3 usable blocks. A and B leave A, B cached; C D needs 2 blocks: the unused one, and A's. B is still there.
    result = replay((17, [1, 9]), (17, [2, 9]), (33, [3, 4, 9]), num_blocks=4)
    assert result.prefix_cache.num_evictions == 2
    result = replay((16, [1]), (16, [2]), (16, [3]), (16, [4]), (17, [2, 9]), num_blocks=4)
    assert result.prefix_cache.num_hit_tokens == 16


def test_a_prompt_larger_than_the_pool_is_refused() -> None:
    result = replay((49, [1, 2, 3, 4]), (16, [1]), num_blocks=4)
    assert (result.refused, result.num_finished) == ({"prompt_exceeds_pool": 1}, 1)


def test_no_time_passes() -> None:
    result = replay((16, [1]), num_blocks=4)
    assert result.mode == "sequential"
    assert result.ttft_seconds is result.inter_token_seconds is None
    assert (result.simulated_seconds, result.num_steps, result.num_preemptions) == (0.0, 0, 0)
    assert result.usage.peak == pytest.approx(1 / 3)
