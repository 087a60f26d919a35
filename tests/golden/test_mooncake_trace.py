"""The whole Mooncake trace, one request after another, against numbers from three independent implementations."""

import pytest

from tests.golden.replay_runs import WHOLE_TRACE, replay

# Blocks of the pool -> share of prompt tokens hit, share of the trace's hash ids hit. 200,000 blocks never evict.
KNOWN = {
    1_000: (0.0459, 0.0450),
    5_000: (0.1209, 0.1185),
    20_000: (0.2995, 0.2935),
    50_000: (0.3632, 0.3561),
    200_000: (0.3734, 0.3660),
}


@pytest.mark.parametrize("num_blocks", KNOWN)
def test_hit_rates_of_a_pool_of_512_token_blocks(num_blocks: int, capsys: pytest.CaptureFixture[str]) -> None:
    result = replay(
        capsys, WHOLE_TRACE, "--sequential", "--block-size", "512", "--num-blocks", str(num_blocks), "--hash", "none"
    )
    cache = result["prefix_cache"]
    assert (round(cache["token_hit_rate"], 4), round(cache["block_hit_rate"], 4)) == KNOWN[num_blocks]
    assert result["num_requests"] == result["num_finished"] == 12_031
    assert result["num_prompt_tokens"] == 144_793_823
    assert cache["num_query_blocks"] == 288_500
    assert (cache["num_evictions"] == 0) == (num_blocks == 200_000)


def test_hashed_and_named_prompts_and_extents_find_the_same_hits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (WHOLE_TRACE, "--sequential", "--block-size", "512", "--num-blocks", "20000", "--limit", "4000")
    named = replay(capsys, *arguments, "--block-by-block", "--hash", "none")
    hashed = replay(capsys, *arguments, "--block-by-block", "--hash", "sha256")
    extents = replay(capsys, *arguments)
    assert (named["counting"], hashed["counting"], extents["counting"]) == ("blocks", "blocks", "extents")
    assert hashed["prefix_cache"] == named["prefix_cache"] == extents["prefix_cache"]
    assert hashed["why_missed"] == named["why_missed"] == extents["why_missed"]
