"""Public start-up logs: every number of a log whose model is known lies in the range that its rounding allows."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvledger.models.facts import model_facts
from kvledger.models.sources import find_in_catalogue, from_catalogue
from kvledger.plan.ask import Asked
from kvledger.plan.from_log import asked_by_log
from kvledger.plan.gpus import GIB, find_gpu
from kvledger.plan.log_checks import check_log
from kvledger.plan.logs import LogFacts
from kvledger.plan.memory import NOTHING_MEASURED
from kvledger.plan.options import EngineOptions
from kvledger.plan.plan import PlanRequest, make_plan
from kvledger.plan.versions import VERSIONS, version_rules

LOGS = Path(__file__).parent / "data" / "public-logs.jsonl.gz"

# A model of a log -> the bundled config with the same layers (fine-tunes and quantized copies share them).
SAME_LAYERS = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "Meta-Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "Llama-3.1-8B class": "meta-llama/Meta-Llama-3.1-8B",
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": "meta-llama/Meta-Llama-3.1-8B",
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": "meta-llama/Meta-Llama-3.1-8B",
    "neuralmagic/Meta-Llama-3.1-70B-Instruct-quantized.w8a8": "meta-llama/Llama-3.1-70B-Instruct",
    "redhatai/Llama-3.3-70B-Instruct-quantized.w8a8": "meta-llama/Llama-3.1-70B-Instruct",
    "Llama-3-70B class TP4 (81920 B/token/rank)": "meta-llama/Meta-Llama-3-70B-Instruct",
    "Llama-3-70B": "meta-llama/Meta-Llama-3-70B-Instruct",
    "Llama-2-7B": "meta-llama/Llama-2-7b-hf",
    "Qwen/Qwen2.5-7B-Instruct": "Qwen/Qwen2-7B",
    "Qwen2.5-0.5B-Instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen2.5-32B-Instruct-AWQ": "Qwen/Qwen2.5-32B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": "Qwen/Qwen2.5-14B",
    "Qwen/Qwen3-8B": "Qwen/Qwen3-8B",
    "Qwen3-8B-Base": "Qwen/Qwen3-8B",
    "Qwen3-8B AWQ": "Qwen/Qwen3-8B",
    "Qwen/Qwen3-1.7B": "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-32B": "Qwen/Qwen3-32B",
    "RedHatAI/Qwen3-32B-quantized.w4a16": "Qwen/Qwen3-32B",
    "Qwen3-235B-A22B-FP8": "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": "Qwen/Qwen3-235B-A22B",
    "Qwen3-30B-A3B family": "Qwen/Qwen3-30B-A3B",
    "Qwen3-30B-A3B FP8 (E=128,N=768)": "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8": "Qwen/Qwen3-30B-A3B",
    "Qwen3-Coder-30B-A3B class": "Qwen/Qwen3-30B-A3B",
    "Qwen3-VL-30B-A3B-FP8": "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "google/gemma-2-27b-it": "google/gemma-2-27b-it",
    "google/gemma-2-9b-it": "google/gemma-2-9b",
    "google/gemma-3-4b-it": "google/gemma-3-4b-it-text-only",
    "MiniMaxAI/MiniMax-M2.5": "MiniMaxAI/MiniMax-M2.5",
    "MiniMax-M2.5 FP8": "MiniMaxAI/MiniMax-M2.5",
    "DeepSeek-V3/R1": "deepseek-ai/DeepSeek-V3",
    "GLM-4.6/4.7 class (92 layers)": "zai-org/GLM-4.5",
    "openai/gpt-oss-120b": "openai/gpt-oss-120b",
    "qwen3.6-35b-a3b-nvfp4": "nvidia/Qwen3.6-35B-A3B-NVFP4",
    "Qwen3.6-35B-A3B NVFP4": "nvidia/Qwen3.6-35B-A3B-NVFP4",
    "qwen3.5-35b": "Qwen/Qwen3.5-35B-A3B",
    "40-layer GDN hybrid, 2 kv heads, head 256 (Qwen3.5/3.6-35B-A3B class)": "Qwen/Qwen3.5-35B-A3B",
    "Qwen3.5-27B (title box says 35B-A3B)": "Qwen/Qwen3.5-27B",
    "kaitchup/Qwen3.5-27B-autoround-W4A16": "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.8-27B-FP8": "Qwen/Qwen3.5-27B",
    "Qwen 27B GDN hybrid FP8": "Qwen/Qwen3.5-27B",
    "Qwen3.5-122B-A10B class (compressed-tensors)": "Qwen/Qwen3.5-122B-A10B",
    "Qwen3-Next-80B-A3B (quantised)": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Zyphra/Zamba2-2.7B": "Zyphra/Zamba2-2.7B",
}
# What a log shows without stating it.
SHOWN: dict[str, dict[str, Any]] = {
    "L050": {"kv_cache_dtype": "fp8"},  # 148,816 tokens are whole blocks of 2,096, the size of an fp8 cache
    "L061": {"kv_cache_dtype": "fp8"},
    "L154": {"enable_prefix_caching": False},  # 0.19 left it off for hybrids: one state a request
    "L260": {"enable_prefix_caching": False},  # 0.12 left it off for hybrids: 748 / (43 + 6) = 15.27
}
# Logs that do not agree, with the reason.
EXCEPTIONS = {
    "L007": "a bug of that build: the need of all 48 layers was compared with the poorest rank's memory (B70)",
    "L008": "the same bug: 71.16 GiB are all 92 layers, charged to one pipeline rank",
    "L009": "the memory and the tokens are printed by different ranks; the pool is the least of four",
    "L156": "the memory and the tokens are printed by different ranks; the pool is the least of four",
    "L189": "the memory is one pipeline rank's; the pool is the least of four",
    "L075": "has a draft layer that the thread does not state: 17 layers a group",
    "L242": "has a separate draft model of 5 windowed layers, which is not planned",
}


def logs() -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(LOGS.read_bytes()).splitlines()]


def known_logs() -> list[dict[str, Any]]:
    engines = ("vllm", "vllm V0", "vllm V1", "vllm CPU")
    return [log for log in logs() if log["engine"] in engines and log["model"] in SAME_LAYERS]


def number(value: object) -> float | None:
    """A number as printed, None for ranges and words."""
    text = str(value).replace(",", "")
    return float(text) if re.fullmatch(r"-?\d+(\.\d+)?", text) else None


def whole(value: object) -> int | None:
    found = number(value)
    return None if found is None else int(found)


def facts_of(log: dict[str, Any]) -> LogFacts:
    extra = log["extra"] or {}
    caching = {"True": True, "False": False}.get(str(extra.get("prefix_caching")))
    version = log["version"] if log["version"] and re.match(r"\d+\.\d+", log["version"]) else None
    with_length = log["max_model_len"] is not None
    return LogFacts(
        version=version,
        dtype=(log["dtype"] or "").removeprefix("torch.") or None,
        kv_cache_dtype="fp8" if str(log["kv_cache_dtype"]).startswith("fp8") else None,
        max_model_len=log["max_model_len"],
        tensor_parallel_size=log["tp"],
        pipeline_parallel_size=log["pp"],
        max_num_batched_tokens=whole(extra.get("max_num_batched_tokens")),
        enable_prefix_caching=caching,
        available_gib=number(log["available_kv_gib"]),
        num_gpu_blocks=log["num_gpu_blocks"] if isinstance(log["num_gpu_blocks"], int) else None,
        kv_cache_tokens=whole(log["kv_tokens"]),
        max_concurrency=number(log["max_concurrency"]) if with_length else None,
        needed_gib=number(log["needed_gib"]),
        estimated_max_len=whole(log["estimated_max_len"]),
        attention_block_size=log["attn_block_size"],
        mamba_padding_percent=number(log["mamba_pad_pct"]),
        padding_layers=log["padding_layers"],
    )


def request_of(log: dict[str, Any], facts: LogFacts) -> PlanRequest:
    name = SAME_LAYERS[log["model"]]
    row = find_in_catalogue(name)
    assert row is not None
    config = from_catalogue(row)
    for where in (config.root, config.text):
        assert isinstance(where, dict)
        where.pop("quantization_config", None)
    asked = asked_by_log(Asked(name, None, "0.32", EngineOptions()), facts).start
    options = replace(asked.options, block_size=log["block_size"], **SHOWN.get(log["id"], {}))
    model = model_facts(config)
    # Logs of fine-tunes go beyond the length of the config that they share layers with.
    model = replace(model, context=replace(model.context, longest=1 << 30))
    release = asked.vllm_version if asked.vllm_version in VERSIONS else "0.32"
    return PlanRequest(model, options, (find_gpu("H100"),), version_rules(release), (asked.measured,))


@pytest.mark.parametrize("log", known_logs(), ids=lambda log: f"{log['id']}-{log['model']}")
def test_log_agrees(log: dict[str, Any]) -> None:
    facts = facts_of(log)
    differing = [check for check in check_log(request_of(log, facts), facts) if not check.agrees]
    if log["id"] in EXCEPTIONS:
        assert differing, f"{log['id']} agrees by now: take it out of the exceptions"
    else:
        assert not differing, f"{log['source_url']}: {differing}"


def test_most_known_logs_have_numbers_to_compare() -> None:
    compared = [log for log in known_logs() if check_log(request_of(log, facts := facts_of(log)), facts)]
    assert len(compared) >= 60
    assert len(EXCEPTIONS) <= 7


def detailed_logs() -> list[dict[str, Any]]:
    """Logs of known models that print every term of the memory, from releases whose profile run is today's."""
    return [
        log
        for log in known_logs()
        if (log["extra"] or {}).get("torch_peak_gib") and str(log["version"]) >= "0.17" and "0.11" not in log["version"]
    ]


@pytest.mark.parametrize("log", detailed_logs(), ids=lambda log: f"{log['id']}-{log['model']}")
def test_estimates_cover_the_logged_terms(log: dict[str, Any]) -> None:
    request = request_of(log, facts_of(log))
    utilization = replace(request.options, gpu_memory_utilization=float(log["gpu_memory_utilization"]))
    budget = make_plan(replace(request, options=utilization, measured=(NOTHING_MEASURED,))).budgets[0]
    terms = {term.name: term for term in budget.terms}
    for name, field in (("activation peak", "torch_peak_gib"), ("CUDA graphs", "cudagraph_gib")):
        printed = (log["extra"] or {}).get(field)
        if printed is not None:
            assert terms[name].low <= float(printed) * GIB <= terms[name].high, f"{name}: {printed} GiB logged"
    # A single pipeline rank without communication buffers of its own may have less.
    if log["pp"] in (None, 1):
        assert terms["other"].low * 0.9 <= float(log["extra"]["non_torch_gib"]) * GIB <= terms["other"].high
