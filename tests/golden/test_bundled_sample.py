"""The bundled sample in both modes: exact decisions, so that no change of them goes unnoticed."""

import pytest

from tests.golden.replay_runs import replay


def test_sequential(capsys: pytest.CaptureFixture[str]) -> None:
    result = replay(capsys, "--sequential", "--block-size", "512", "--num-blocks", "5000", "--hash", "none")
    cache = result["prefix_cache"]
    assert result["num_finished"] == 1500
    assert (cache["num_hit_tokens"], cache["num_query_tokens"]) == (2_505_216, 20_981_721)
    assert (cache["num_hit_blocks"], cache["num_query_blocks"], cache["num_evictions"]) == (4_893, 41_702, 30_313)


@pytest.mark.parametrize("hash_name", ["none", "sha256"])
def test_scheduled_on_a_pool_that_is_short(hash_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = replay(capsys, "--limit", "300", "--num-blocks", "20000", "--hash", hash_name, "--tp", "2")
    cache = result["prefix_cache"]
    assert result["num_finished"] == 300
    assert (cache["num_hit_tokens"], cache["num_query_tokens"], cache["num_evictions"]) == (153_088, 4_269_971, 244_389)
    assert (result["num_preemptions"], result["num_recomputed_tokens"], result["num_steps"]) == (6, 2_906, 6_935)
    assert result["num_output_tokens"] == 113_079
    assert result["usage"]["peak"] == 1.0
    assert result["ttft_seconds"]["p50"] == pytest.approx(21.002910, abs=1e-6)
    assert result["inter_token_seconds"]["p99"] == pytest.approx(0.247552, abs=1e-6)
    assert result["simulated_seconds"] == pytest.approx(163.519706, abs=1e-6)
