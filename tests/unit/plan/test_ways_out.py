"""Ways out are computed: what they say fits does fit."""

import pytest

from kvledger.plan.ask import answer
from kvledger.plan.plan import Plan
from kvledger.plan.refusal import Refusal
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
