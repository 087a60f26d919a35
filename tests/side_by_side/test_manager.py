"""Our KVCacheManager and vLLM's, call by call: same answers, same ids, same queue, same index."""

import pytest

from tests.side_by_side.ledger_pair import LedgerPair

CALLS_PER_SEED = 2_000


def test_same_calls_same_ledger(request: pytest.FixtureRequest) -> None:
    num_calls = request.config.getoption("--calls")
    first_seed = request.config.getoption("--first-seed")
    num_done = 0
    seed = first_seed
    while num_done < num_calls:
        pair = LedgerPair(seed)
        try:
            pair.run(CALLS_PER_SEED)
        except AssertionError as difference:
            raise AssertionError(f"seed {seed}, call {pair.num_calls}") from difference
        num_done += pair.num_calls
        seed += 1
    assert num_done >= num_calls
