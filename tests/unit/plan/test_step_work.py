"""What a step costs, in numbers of published model cards and by hand."""

from typing import Any

import pytest

from kvledger.plan.work import step_work
from tests.unit.plan.planning import plan


def work(name: str, **options: int) -> dict[str, Any]:
    return dict(step_work(plan(name, gpu="H200", **options)))


def test_a_dense_model_passes_every_weight() -> None:
    found = work("meta-llama/Llama-3.1-8B")
    assert found["num_parameters"] == found["num_active_parameters"] == 8_030_257_152
    assert found["weight_bytes"] == pytest.approx(2 * 8.03e9, rel=0.001)
    # 32 layers x 4 x 32 heads x 128; 32 layers x 2 x 8 heads x 128 x 2 bytes.
    entry = {"window": 0, "chunk": 0, "flops_per_pair": 524_288.0, "bytes_per_token": 131_072.0}
    assert found["attention"] == [entry]


@pytest.mark.parametrize(
    ("name", "total", "active", "share"),
    [
        # Billions by the model cards; gpt-oss counts without embeddings, which are 1.2 here (input and output).
        ("deepseek-ai/DeepSeek-V3", 671, 37.5, 8 / 256),
        ("openai/gpt-oss-120b", 117, 5.7, 4 / 128),
        ("Qwen/Qwen3-235B-A22B", 235, 22, 8 / 128),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 108, 17.2, 1 / 16),
    ],
)
def test_a_token_passes_the_active_parameters(name: str, total: float, active: float, share: float) -> None:
    found = work(name, tensor_parallel_size=8 if "gpt" not in name else 2)
    assert found["num_parameters"] == pytest.approx(total * 1e9, rel=0.01)
    assert found["num_active_parameters"] == pytest.approx(active * 1e9, rel=0.02)
    assert found["expert_share"] == share


def test_windows_chunks_and_sparse_layers_are_entries_of_their_own() -> None:
    # 18 of 36 layers have a window of 128; 64 heads of 64: 4 x 64 x 64 flops, 2 x 8 heads x 64 x 2 bytes a layer.
    full, window = work("openai/gpt-oss-120b", tensor_parallel_size=2)["attention"]
    assert (full["window"], window["window"]) == (0, 128)
    assert full["flops_per_pair"] == window["flops_per_pair"] == 18 * 4 * 64 * 64
    assert full["bytes_per_token"] == window["bytes_per_token"] == 18 * 2 * 8 * 64 * 2
    _, chunk = work("meta-llama/Llama-4-Scout-17B-16E-Instruct", tensor_parallel_size=8, max_model_len=8192)[
        "attention"
    ]
    assert (chunk["chunk"], chunk["flops_per_pair"]) == (8192, 36 * 4 * 40 * 128)
    # The indexer reads every token, the layers the 2,048 that it picks.
    indexer, layers = work("deepseek-ai/DeepSeek-V3.2", tensor_parallel_size=8)["attention"]
    assert (indexer["window"], layers["window"]) == (0, 2048)


def test_latents_are_read_on_every_rank_unless_tokens_are_shared_out() -> None:
    # 61 layers x 576 values x 2 bytes, whole on each of 8 GPUs. 128 heads of (128 + 64) and 128 values.
    (entry,) = work("deepseek-ai/DeepSeek-V3", tensor_parallel_size=8)["attention"]
    assert (entry["bytes_per_token"], entry["flops_per_pair"]) == (8 * 61 * 1152, 61 * 2 * 128 * 320)
    shared = work("deepseek-ai/DeepSeek-V3", tensor_parallel_size=8, decode_context_parallel_size=8)["attention"]
    assert shared[0]["bytes_per_token"] == 61 * 1152


def test_states_are_counted_for_one_request_over_all_ranks() -> None:
    # 48 layers: 48 heads x 128 x 128 x 4 bytes, and 3 x 10,240 x 2 of the convolution.
    assert work("Qwen/Qwen3.5-27B", tensor_parallel_size=2)["state_bytes"] == 48 * (48 * 128 * 128 * 4 + 3 * 10_240 * 2)
