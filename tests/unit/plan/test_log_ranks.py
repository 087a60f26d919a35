"""Logs of several ranks, replicas, stages, nodes and starts: which of the printed numbers counts."""

from kvledger.plan.ask import Asked, build_request
from kvledger.plan.from_log import asked_by_log
from kvledger.plan.log_checks import check_log
from kvledger.plan.logs import read_log
from kvledger.plan.options import EngineOptions

RANKS = """
(Worker_TP0 pid=147) INFO 05-14 [gpu_model_runner.py:1] Model loading took 7.61 GiB memory and 3.1 seconds
(Worker_TP1 pid=148) INFO 05-14 [gpu_model_runner.py:1] Model loading took 7.64 GiB memory and 3.2 seconds
(Worker_TP0 pid=147) INFO 05-14 [gpu_worker.py:1] Available KV cache memory: 15.72 GiB
(Worker_TP1 pid=148) INFO 05-14 [gpu_worker.py:1] Available KV cache memory: 14.98 GiB
(Worker_TP0 pid=147) INFO 05-14 [gpu_worker.py:1] Estimated CUDA graph memory: 0.17 GiB total
"""
STAGES = """
(Worker_PP0_TP0 pid=1) INFO Available KV cache memory: 30.50 GiB
(Worker_PP0_TP1 pid=2) INFO Available KV cache memory: 30.10 GiB
(Worker_PP1_TP0 pid=3) INFO Available KV cache memory: 20.25 GiB
(Worker_PP1_TP1 pid=4) INFO Available KV cache memory: 20.75 GiB
"""
REPLICAS = """
(EngineCore_DP0 pid=1) INFO Available KV cache memory: 58.11 GiB
(EngineCore_DP1 pid=2) INFO Available KV cache memory: 57.90 GiB
(EngineCore_DP0 pid=1) INFO GPU KV cache size: 476,032 tokens
(EngineCore_DP1 pid=2) INFO GPU KV cache size: 474,304 tokens
"""
NODES = """
(RayWorkerWrapper pid=581, ip=10.225.128.18) INFO 09-28 [gpu_worker.py:1] Available KV cache memory: 8.61 GiB
(RayWorkerWrapper pid=583, ip=10.225.128.19) INFO 09-28 [gpu_worker.py:1] Available KV cache memory: 8.11 GiB
(RayWorkerWrapper pid=582, ip=10.225.128.18) INFO 09-28 [gpu_worker.py:1] Available KV cache memory: 8.55 GiB \
[repeated 14x across cluster]
"""
TWO_STARTS = """
INFO vLLM API server version 0.33.0
INFO non-default args: {'model': 'Qwen/Qwen3-8B', 'gpu_memory_utilization': 0.95}
INFO Available KV cache memory: 12.00 GiB
torch.OutOfMemoryError: CUDA out of memory
INFO vLLM API server version 0.33.0
INFO non-default args: {'model': 'Qwen/Qwen3-8B', 'gpu_memory_utilization': 0.9}
INFO Available KV cache memory: 10.00 GiB
"""


def test_the_poorest_rank_counts() -> None:
    facts = read_log(RANKS)
    assert (facts.available_gib, facts.weights_gib, facts.graphs_gib) == (14.98, 7.64, 0.17)


def test_the_poorest_rank_of_all_nodes_counts() -> None:
    assert read_log(NODES).available_gib == 8.11


def test_stages_have_their_own_memory_where_ranks_are_named() -> None:
    facts = read_log(STAGES)
    assert (facts.available_gib, facts.stage_gib) == (20.25, (30.10, 20.25))
    options = EngineOptions(pipeline_parallel_size=2, tensor_parallel_size=2)
    request = build_request(asked_by_log(Asked("Qwen/Qwen3-32B", "A100", None, options), facts).start)
    assert [stage.available_bytes for stage in request.measured] == [int(30.10 * 2**30), int(20.25 * 2**30)]


def test_stages_of_another_number_than_the_engines_are_not_taken_apart() -> None:
    request = build_request(
        asked_by_log(Asked("Qwen/Qwen3-32B", "A100", None, EngineOptions()), read_log(STAGES)).start
    )
    assert [stage.available_bytes for stage in request.measured] == [int(20.25 * 2**30)]


def test_numbers_of_one_replica_belong_together() -> None:
    facts = read_log(REPLICAS)
    # Llama-3.1-8B has 2 MiB a block: 57.90 GiB are 29,644 blocks, 474,304 tokens.
    assert (facts.available_gib, facts.kv_cache_tokens) == (57.90, 474_304)
    asked = Asked("meta-llama/Llama-3.1-8B", "H100", None, EngineOptions(max_model_len=8192))
    (check,) = check_log(build_request(asked_by_log(asked, facts).start), facts)
    assert check.agrees


def test_the_last_start_counts() -> None:
    facts = read_log(TWO_STARTS)
    assert (facts.available_gib, facts.gpu_memory_utilization) == (10.0, 0.9)


def test_a_start_that_did_not_come_to_its_memory_is_passed_over() -> None:
    facts = read_log(TWO_STARTS + "INFO vLLM API server version 0.33.0\nINFO non-default args: {'model': 'gpt2'}\n")
    assert (facts.model, facts.available_gib) == ("Qwen/Qwen3-8B", 10.0)


def test_colours_of_a_terminal_are_not_part_of_a_log() -> None:
    assert read_log("\x1b[36m(Worker_TP0 pid=1)\x1b[0;0m INFO Available KV cache memory: 3.50 GiB").available_gib == 3.5
