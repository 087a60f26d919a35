"""A log, and what the user asks besides: the plan changes from the log's own terms."""

import dataclasses
from typing import Any

import pytest

from kvledger.errors import ConfigError
from kvledger.plan.ask import Asked, build_request
from kvledger.plan.calibration import calibrate, changed_cache, changed_terms
from kvledger.plan.from_log import LogQuestion, asked_by_log, calibrated
from kvledger.plan.log_checks import check_log
from kvledger.plan.logs import LogFacts, read_log
from kvledger.plan.options import EngineOptions
from kvledger.plan.plan import Plan, make_plan
from kvledger.plan.terms import Term

GIB = 1 << 30
START = """
(APIServer pid=1) INFO 05-14 [utils.py:1] vLLM API server version 0.33.0
(APIServer pid=1) INFO 05-14 [utils.py:1] non-default args: {'model': 'Qwen/Qwen2.5-7B-Instruct', \
'max_model_len': 8192, 'gpu_memory_utilization': 0.95}
(EngineCore pid=2) INFO [core.py:1] Initializing a V1 LLM engine (v0.33.0) with config: \
model='Qwen/Qwen2.5-7B-Instruct', speculative_config=None, dtype=torch.bfloat16, max_seq_len=8192, \
tensor_parallel_size=1, pipeline_parallel_size=1, enforce_eager=False, kv_cache_dtype=auto, device_config=cuda
(EngineCore pid=2) INFO Model loading took 14.25 GiB memory and 3.0 seconds
(EngineCore pid=2) INFO Estimated CUDA graph memory: 0.38 GiB total
(EngineCore pid=2) INFO Available KV cache memory: 58.15 GiB
(EngineCore pid=2) INFO GPU KV cache size: 1,088,834 tokens, Maximum concurrency for 8,192 tokens per request: 132.92x
(EngineCore pid=2) INFO Free memory on device (78.6/79.19 GiB) on startup. Desired GPU memory utilization is (0.95, \
75.23 GiB). Actual usage is 14.6 GiB for consumed memory (weights + non-torch), 2.46 GiB for peak activation, and 0.35 \
GiB for CUDAGraph memory.
"""
# What a CPU server of vLLM 0.32 printed.
PROCESSOR = """
(MainProcess pid=964) INFO 12-01 [api_utils.py:286] non-default args: {'max_model_len': 1024, 'max_num_seqs': 64, \
'disable_log_stats': True, 'enforce_eager': True, 'model': 'HuggingFaceTB/SmolLM2-135M'}
(EngineCore pid=1021) INFO 12-01 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: \
model='HuggingFaceTB/SmolLM2-135M', speculative_config=None, dtype=torch.bfloat16, max_seq_len=1024, \
tensor_parallel_size=1, device_config=cpu
(Worker pid=1031) INFO 12-01 [cpu_worker.py:260] Explicitly set (1.0/18.96) GiB for KV cache on node 0.
(EngineCore pid=1021) INFO 12-01 [kv_cache_utils.py:2327] CPU KV cache size: 46,592 tokens, Maximum concurrency for \
1,024 tokens per request: 45.50x
"""
# Its model: 30 layers, 3 key/value heads of 64.
SMOL = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}


def question(
    text: str, gpu: str | None = None, model: str | None = None, **options: Any
) -> tuple[LogQuestion, LogFacts]:
    facts = read_log(text)
    asked = Asked(model, gpu, None, EngineOptions(**options), given=frozenset(options))
    return asked_by_log(asked, facts), facts


def what_if(text: str, gpu: str | None = None, **options: Any) -> tuple[Plan, Plan]:
    """The plan of the log, and the changed one."""
    found, facts = question(text, gpu, **options)
    start = make_plan(build_request(found.start))
    return start, make_plan(build_request(calibrated(found, facts, start)))


def gib(plan: Plan) -> dict[str, float]:
    budget = plan.budgets[0]
    return {term.name: round(term.bytes / GIB, 2) for term in (*budget.terms, budget.cache)}


def test_without_anything_else_the_plan_is_the_logs_with_its_terms() -> None:
    start, same = what_if(START)
    assert (start.num_blocks, same.num_blocks) == (68_052, 68_052)
    # 2.46 GiB count the graphs of 0.38; 14.6 the weights of 14.25; 0.95 * 79.19 - 58.15 leaves 0.02 of rounding.
    terms = {"weights": 14.25, "activation peak": 2.08, "CUDA graphs": 0.38, "other": 0.37, "KV cache": 58.15}
    assert gib(same) == terms
    assert sum(terms.values()) == pytest.approx(0.95 * 79.19, abs=0.01)


def test_a_larger_share_gives_the_cache_what_the_share_is_larger() -> None:
    start, changed = what_if(START, gpu_memory_utilization=0.97)
    assert gib(changed)["KV cache"] == pytest.approx(58.15 + 0.02 * 79.19, abs=0.01)
    assert {**gib(changed), "KV cache": 0} == {**gib(what_if(START)[1]), "KV cache": 0}
    assert changed.num_blocks > start.num_blocks


def test_keys_of_one_byte_are_twice_as_many_in_the_same_memory() -> None:
    start, changed = what_if(START, kv_cache_dtype="fp8")
    assert changed.num_blocks == 2 * start.num_blocks
    assert gib(changed)["KV cache"] == 58.15


def test_eager_gives_back_what_the_log_set_aside_for_graphs() -> None:
    _, changed = what_if(START, enforce_eager=True)
    assert gib(changed)["KV cache"] == pytest.approx(58.15 + 0.38, abs=0.01)


def test_the_graphs_of_a_release_that_did_not_take_them_off_are_no_gain() -> None:
    older = START.replace("0.33.0", "0.20.0")
    _, changed = what_if(older, enforce_eager=True)
    assert gib(changed)["KV cache"] == pytest.approx(58.15, abs=0.01)


def test_more_ranks_share_the_weights_that_were_loaded() -> None:
    _, changed = what_if(START, tensor_parallel_size=4)
    terms = gib(changed)
    # A quarter of 14.25, and norms; another machine of this kind had 67.34 GiB left (0.19, whose graphs came on top).
    assert terms["weights"] == pytest.approx(14.25 / 4, abs=0.05)
    cache = changed.budgets[0].cache
    assert cache.low / GIB < 67.34 - 0.38 < cache.high / GIB


def test_another_card_has_another_memory_and_the_same_terms() -> None:
    found, _ = question(START, "H200")
    assert [str(change) for change in found.changes] == [
        "--gpu NVIDIA H100 80GB HBM3 (SXM) -> NVIDIA H200 (SXM) / H200 NVL"
    ]
    start, changed = what_if(START, "H200")
    more = changed.budgets[0].requested_bytes - start.budgets[0].requested_bytes
    assert changed.budgets[0].cache.bytes / GIB == pytest.approx(58.15 + more / GIB, abs=0.6)


def test_the_card_of_the_log_is_no_change() -> None:
    assert question(START, "H100")[0].changes == ()
    assert question(START, "A100")[0].changes == ()


def test_an_option_that_the_log_does_not_state_describes_it() -> None:
    short = "INFO Model loading took 14.25 GiB\nINFO Available KV cache memory: 58.15 GiB\n"
    described, _ = question(short, model="Qwen/Qwen3-8B", tensor_parallel_size=2, kv_cache_dtype="fp8")
    assert described.changes == ()
    assert described.start.options.tensor_parallel_size == 2
    stated, _ = question(START, tensor_parallel_size=2, max_num_seqs=64)
    assert [str(change) for change in stated.changes] == ["--max-num-seqs None -> 64", "--tensor-parallel-size 1 -> 2"]


def test_a_share_of_an_unknown_card_is_refused_with_what_is_missing() -> None:
    text = "INFO non-default args: {'model': 'Qwen/Qwen3-8B'}\nINFO Available KV cache memory: 58.15 GiB\n"
    with pytest.raises(ConfigError, match="does not say how much memory its card has; give --gpu"):
        what_if(text, gpu_memory_utilization=0.97)
    start, changed = what_if(text, "H100", gpu_memory_utilization=0.97)
    more = changed.budgets[0].requested_bytes - start.budgets[0].requested_bytes
    assert changed.budgets[0].cache.bytes == pytest.approx(58.15 * GIB + more, abs=GIB / 100)


def test_ranks_need_no_card() -> None:
    text = "INFO non-default args: {'model': 'Qwen/Qwen3-8B'}\nINFO Available KV cache memory: 5.15 GiB\n"
    start, changed = what_if(text, tensor_parallel_size=2)
    assert changed.budgets[0].cache.bytes > start.budgets[0].cache.bytes + 5 * GIB


def test_a_cache_that_was_given_stays() -> None:
    text = START.replace("Available KV cache memory: 58.15 GiB", "reserved 8.0 GiB memory for KV Cache as specified by "
                         "kv_cache_memory_bytes config")  # fmt: skip
    _, changed = what_if(text, gpu_memory_utilization=0.5, tensor_parallel_size=2)
    assert changed.budgets[0].cache.bytes == 8 * GIB


def test_options_of_the_log_that_no_plan_counts_are_named() -> None:
    text = START.replace("'max_model_len'", "'enable_sleep_mode': True, 'seed': 1, 'max_model_len'")
    assert question(text)[0].start.unmodelled == (
        "--enable-sleep-mode is not modelled: its allocator may take more memory",
    )


def test_arguments_with_values_that_are_no_literals_are_read_as_far_as_they_go() -> None:
    text = START.replace("'max_model_len'", "'kv_transfer_config': KVTransferConfig(kv_connector='X'), 'max_model_len'")
    found, facts = question(text)
    assert facts.args == {}
    assert found.start.options.gpu_memory_utilization == 0.95


def test_a_log_of_a_cpu_server() -> None:
    facts = read_log(PROCESSOR)
    assert (facts.available_gib, facts.total_gib, facts.kv_cache_tokens, facts.platform) == (1.0, 18.96, 46_592, "cpu")
    found, _ = question(PROCESSOR)
    start = dataclasses.replace(found.start, model=LLAMA, hf_overrides=SMOL)
    request = build_request(dataclasses.replace(start, hf_overrides={**SMOL, "head_dim": 64}))
    # 30 layers * 128 tokens * 2 * 3 heads * 64 * 2 bytes: 364 blocks of 1 GiB.
    plan = make_plan(request)
    assert (plan.block_size, plan.bytes_per_block, plan.num_blocks) == (128, 30 * 128 * 2 * 3 * 64 * 2, 364)
    assert all(check.agrees for check in check_log(request, facts))
    assert any("CPU server" in note for note in plan.facts.config.notes)


LLAMA = "meta-llama/Llama-3.1-8B"


def test_a_log_of_an_amd_card_is_planned_as_one() -> None:
    text = "INFO [__init__.py:1] Automatically detected platform rocm.\nINFO Available KV cache memory: 140.00 GiB\n"
    found, _ = question(text, model=LLAMA)
    assert found.start.card is not None
    assert found.start.card.name == "AMD Instinct MI300X"
    assert any("does not name its card" in remark for remark in found.start.remarks)
    assert any("rules of CUDA cards" in note for note in build_request(found.start).facts.config.notes)


@pytest.mark.parametrize("rest", [-3 * GIB, -1, 0, 1, 5 * GIB])
@pytest.mark.parametrize(
    "shown", [{}, {"weights": 15 * GIB}, {"weights": 15 * GIB, "activation peak": GIB, "other": 7}]
)
def test_a_start_that_is_calibrated_and_not_changed_is_itself(rest: int, shown: dict[str, int]) -> None:
    sizes = {"weights": 14 * GIB, "activation peak": 2 * GIB, "CUDA graphs": GIB, "other": GIB // 2}
    terms = [Term(name, size, size * 9 // 10, size * 2, "estimated", "") for name, size in sizes.items()]
    requested = 70 * GIB
    available = requested - sum(shown.get(name, size) for name, size in sizes.items()) - rest
    start = calibrate(terms, shown, requested, available, available)
    assert sum(start.shown.values()) + available == requested
    assert {name: start.shown[name] for name in shown if name != "other"} == {
        name: size for name, size in shown.items() if name != "other"
    }
    same = changed_terms(start, terms)
    assert changed_cache(start, same, requested).bytes == available
    assert changed_cache(start, same, requested + GIB).bytes == available + GIB
