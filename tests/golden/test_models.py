"""The bundled sample over the groups of real models: exact decisions, so that no change of them goes unnoticed."""

import pytest

from tests.golden.replay_runs import replay


@pytest.mark.parametrize(
    ("model", "num_blocks", "decisions", "seconds", "limited", "lost"),
    [
        # Tokens hit, evictions, preemptions, steps; of each kind of group: hits limited and tokens lost.
        ("google/gemma-3-4b-it-text-only", 15_000, (26_112, 308_023, 0, 3_073), 28.269432, [8, 52], [4_096, 0]),
        ("openai/gpt-oss-120b", 5_000, (28_160, 76_091, 0, 4_932), 52.217034, [3, 56], [1_536, 0]),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 700, (17_600, 2_512, 1, 3_257), 18.859177, [4, 56], [1_280, 0]),
    ],
)
def test_sample_over_a_model(
    model: str,
    num_blocks: int,
    decisions: tuple[int, ...],
    seconds: float,
    limited: list[int],
    lost: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    num_gpus = "4" if "Next" in model else "1"
    options = ("--model", model, "--num-blocks", str(num_blocks), "--tp", num_gpus)
    result = replay(capsys, "--limit", "60", "--hash", "none", *options)
    cache = result["prefix_cache"]
    figures = (cache["num_hit_tokens"], cache["num_evictions"], result["num_preemptions"], result["num_steps"])
    assert figures == decisions
    assert result["simulated_seconds"] == pytest.approx(seconds, abs=1e-6)
    groups = result["groups"]
    assert [groups[0]["num_limited_hits"], groups[-1]["num_limited_hits"]] == limited
    assert [groups[0]["num_lost_tokens"], groups[-1]["num_lost_tokens"]] == lost
