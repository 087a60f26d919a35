"""Start-up logs of several releases: what is read, and what a plan says to it."""

import pytest

from kvledger.errors import ConfigError
from kvledger.plan.ask import Asked, build_request
from kvledger.plan.from_log import asked_by_log
from kvledger.plan.log_checks import check_log
from kvledger.plan.logs import read_log
from kvledger.plan.options import EngineOptions

NEW = """
INFO 11-20 10:00:00 [api_server.py:1] vLLM API server version 0.33.0
INFO [utils.py:1] non-default args: {'model': 'Qwen/Qwen3.5-27B', 'max_model_len': 32768, 'tensor_parallel_size': 2}
INFO [core.py:1] Initializing a V1 LLM engine (v0.33.0) with config: model='Qwen/Qwen3.5-27B', dtype=torch.bfloat16, \
max_seq_len=32768, tensor_parallel_size=2, pipeline_parallel_size=1, kv_cache_dtype=auto, enable_prefix_caching=True
INFO [interface.py:1] Setting attention block size to 832 tokens to ensure that attention page size is >= mamba page.
INFO [gpu_model_runner.py:1] Model loading took 25.48 GiB and 12.1 seconds
INFO [gpu_worker.py:1] Available KV cache memory: 40.00 GiB
INFO [core.py:1] GPU KV cache size: 1,053,257 tokens, Maximum concurrency for 32,768 tokens per request: 32.14x
"""
OLD = """
INFO 07-01 [llm_engine.py:1] Initializing a V1 LLM engine (v0.19.0) with config: model='google/gemma-2-9b', \
dtype=torch.bfloat16, max_seq_len=8192
INFO Available KV cache memory: 54.12 GiB
INFO GPU KV cache size: 168,880 tokens
INFO Maximum concurrency for 8,192 tokens per request: 20.60x
"""
REFUSED = """
ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, which \
is larger than the available KV cache memory (3.81 GiB). Based on the available memory, the estimated maximum model \
length is 31184. Try increasing `gpu_memory_utilization`
"""


def agreeing(text: str, model: str | None = None) -> dict[str, bool]:
    facts = read_log(text)
    asked = asked_by_log(Asked(model, None, "0.33", EngineOptions()), facts).start
    return {check.name: check.agrees for check in check_log(build_request(asked), facts)}


def test_log_of_a_new_release() -> None:
    facts = read_log(NEW)
    assert (facts.version, facts.model, facts.tensor_parallel_size) == ("0.33.0", "Qwen/Qwen3.5-27B", 2)
    assert (facts.available_gib, facts.weights_gib, facts.kv_cache_tokens) == (40.0, 25.48, 1_053_257)
    assert (facts.max_concurrency, facts.max_model_len, facts.attention_block_size) == (32.14, 32_768, 832)
    checks = agreeing(NEW)
    assert set(checks) == {"maximum concurrency", "KV cache tokens", "attention block size"}
    assert all(checks.values())


def test_log_of_an_older_release_prints_tokens_of_one_group() -> None:
    checks = agreeing(OLD)
    assert set(checks) == {"maximum concurrency", "KV cache tokens"}
    assert all(checks.values())


def test_log_that_refused_gives_need_and_estimate() -> None:
    checks = agreeing(REFUSED, "meta-llama/Llama-3.1-8B")
    assert set(checks) == {"needed GiB", "estimated maximum length"}
    assert all(checks.values())


def test_number_that_differs_is_seen() -> None:
    assert not agreeing(OLD.replace("20.60x", "21.60x"))["maximum concurrency"]


def test_text_without_a_start_is_refused() -> None:
    with pytest.raises(ConfigError, match="Available KV cache memory"):
        read_log("INFO everything is fine")


def test_a_rank_whose_number_is_none_is_named() -> None:
    two_ranks = NEW.replace("took 25.48 GiB", "took 1.2.3 GiB") + "INFO Model loading took 25.48 GiB and 12.1 seconds\n"
    with pytest.raises(ConfigError, match="the log has a line that cannot be read"):
        read_log(two_ranks)
