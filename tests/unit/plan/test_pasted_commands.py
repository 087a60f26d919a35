"""Pasted command lines and the numbers on them."""

import pytest

from kvledger.errors import ConfigError
from kvledger.plan.command_line import parse_pasted


def test_serve_line_keeps_what_concerns_memory() -> None:
    line = "CUDA_VISIBLE_DEVICES=0,1 vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 32k --port 8000 --enforce-eager"
    pasted = parse_pasted(line.split())
    assert pasted.arguments == (
        "Qwen/Qwen3-8B", "--entry-point", "server", "--tensor-parallel-size", "2", "--max-model-len", "32k",
        "--enforce-eager",
    )  # fmt: skip
    assert pasted.remarks == ("--port does not change the plan",)


def test_line_breaks_and_equals_signs() -> None:
    pasted = parse_pasted(["vllm serve \\\n  Qwen/Qwen3-8B \\\n  --gpu-memory-utilization=0.9 --kv_cache_dtype fp8"])
    assert pasted.arguments[0] == "Qwen/Qwen3-8B"
    assert pasted.arguments[3:] == ("--gpu-memory-utilization", "0.9", "--kv-cache-dtype", "fp8")


def test_module_and_container_lines() -> None:
    for line in (
        "python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B",
        "docker run --gpus all vllm/vllm-openai:latest --model Qwen/Qwen3-8B",
    ):
        assert parse_pasted(line.split()).arguments[0] == "Qwen/Qwen3-8B"


def test_layer_partition_of_the_environment() -> None:
    pasted = parse_pasted(["VLLM_PP_LAYER_PARTITION=16,32", "vllm", "serve", "Qwen/Qwen3-30B-A3B", "-pp", "2"])
    assert pasted.arguments[3:5] == ("--pp-layer-partition", "16,32")


def test_what_is_not_modelled_is_said() -> None:
    pasted = parse_pasted(["vllm", "serve", "m", "--speculative-config", "{}", "--kv-transfer-config", "{}"])
    assert "draft model" in pasted.remarks[0]
    assert "hybrid manager" in pasted.remarks[1]


@pytest.mark.parametrize("line", ["ls -l", "vllm chat x", "vllm serve --port 1", "vllm serve m --block-size"])
def test_line_that_is_no_engine_is_refused(line: str) -> None:
    with pytest.raises(ConfigError):
        parse_pasted(line.split())
