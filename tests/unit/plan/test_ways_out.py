"""Ways out are computed: what they say fits does fit."""

import pytest

from kvledger.plan.ask import answer
from kvledger.plan.memory import MeasuredMemory
from kvledger.plan.options import EngineOptions
from kvledger.plan.plan import Plan
from kvledger.plan.refusal import Refusal
from kvledger.plan.ways_out import changed
from tests.unit.plan.planning import facts, gib, plan, request


def ways(result: Plan | Refusal) -> tuple[str, ...]:
    refusal = result.error if isinstance(result, Plan) else result
    assert refusal is not None
    return refusal.ways_out


def test_ways_out_of_a_full_card() -> None:
    listed = ways(answer(request(facts("Qwen/Qwen3-32B"), gpu="A100", max_num_seqs=1024)))
    assert any(way.startswith("max_model_len ") for way in listed)
    assert any(way.startswith("fp8 KV fits 40,960") for way in listed)
    assert any(way.startswith("tp 2 fits") for way in listed)
    assert any(way.startswith("utilization 0.9") for way in listed)


def test_suggested_length_fits() -> None:
    made = answer(request(facts("meta-llama/Llama-3.1-8B"), kv_cache_memory_bytes=gib(8)))
    (way,) = [way for way in ways(made) if way.startswith("max_model_len")]
    length = int(way.split("--max-model-len ")[1])
    assert plan("meta-llama/Llama-3.1-8B", kv_cache_memory_bytes=gib(8), max_model_len=length).error is None


def test_suggested_utilization_is_the_smallest() -> None:
    listed = ways(answer(request(facts("Qwen/Qwen3-32B"), gpu="A100")))
    (way,) = [way for way in listed if way.startswith("utilization")]
    share = float(way.split()[1])
    model = facts("Qwen/Qwen3-32B")
    assert plan(model, gpu="A100", gpu_memory_utilization=share).error is None
    assert plan(model, gpu="A100", gpu_memory_utilization=round(share - 0.01, 2)).error is not None


def test_given_memory_suggests_no_utilization() -> None:
    listed = ways(answer(request(facts("meta-llama/Llama-3.1-8B"), kv_cache_memory_bytes=gib(8))))
    assert not any("utilization" in way or "--gpu " in way for way in listed)


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ("Qwen/Qwen2-7B", {"tensor_parallel_size": 8}, "--tensor-parallel-size 4"),
        ("google/gemma-2-9b", {"max_model_len": 32768}, "--max-model-len 8192"),
        ("Qwen/Qwen3.5-27B", {"disable_hybrid_kv_cache_manager": True}, "leave --disable-hybrid-kv-cache-manager out"),
        ("nvidia/GLM-5-NVFP4", {}, "--kv-cache-dtype bfloat16"),
    ],
)
def test_ways_out_of_a_refusal(model: str, options: dict[str, object], expected: str) -> None:
    assert any(expected in way for way in ways(answer(request(facts(model), **options))))


def test_measured_weights_are_shared_by_more_ranks_and_stages() -> None:
    """61 GiB on one card are not 61 GiB on each of two."""
    model = facts("Qwen/Qwen3-32B")
    measured = MeasuredMemory(weight_bytes=gib(66), other_bytes=gib(1))
    listed = ways(answer(request(model, gpu="A100", stages=(measured,))))
    assert any(way.startswith("tp 2 fits") for way in listed)
    assert any(way.startswith("pp 2 fits") for way in listed)
    # Larger weights than counted stay larger by as much: 66 of 61 GiB.
    shared = changed(request(model, gpu="A100", stages=(measured,)), EngineOptions(tensor_parallel_size=2))
    assert shared.measured[0].weight_bytes == pytest.approx(gib(33), rel=0.01)
    assert shared.measured[0].other_bytes is None


def test_another_card_has_the_weights_and_not_the_rest() -> None:
    measured = MeasuredMemory(total_bytes=gib(79.25), weight_bytes=gib(66), activation_bytes=gib(9))
    listed = ways(answer(request(facts("Qwen/Qwen3-32B"), gpu="A100", stages=(measured,))))
    assert any("--gpu " in way for way in listed), listed
