"""`kvledger plan` as a user meets it: output, JSON, exit codes, errors."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvledger.cli import main
from kvledger.cli.engine_options import CARD, PANELS
from kvledger.cli.plan_options import OUTPUT, PlanOptions

LLAMA = "meta-llama/Llama-3.1-8B"
SLEEP = "--enable-sleep-mode is not modelled: its allocator may take more memory"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    _, out, _ = run(capsys, "--json", *arguments)
    return json.loads(out)


def test_two_lines_of_vllm_and_a_typical_request(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, LLAMA, "--kv-cache-memory-bytes", "58625884160")
    assert code == 0
    assert "GPU KV cache size: 447,280 tokens" in out
    assert "Maximum concurrency for 131,072 tokens per request: 3.41x" in out
    assert "157 blocks" in out
    assert "0.56%" in out


def test_json_has_what_replay_needs(capsys: pytest.CaptureFixture[str]) -> None:
    plan = as_json(capsys, LLAMA, "--kv-cache-memory-bytes", "58625884160", "--prompt", "2000", "--output", "500")
    assert (plan["block_size"], plan["num_blocks"], plan["kv_cache_tokens"]) == (16, 27_955, 447_280)
    assert plan["max_concurrency"] == pytest.approx(3.4125, abs=1e-4)
    assert plan["bytes_per_block"] == 2_097_152
    (group,) = plan["groups"]
    assert (group["kind"], group["layers"], group["spec"]["num_kv_heads"]) == ("FullAttentionSpec", 32, 8)
    assert plan["request"]["blocks"] == 157
    assert "error" not in plan


def test_failure_is_data_and_exit_code_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "Qwen/Qwen3-32B", "--gpu", "A100", "--json")
    error = json.loads(out)["error"]
    assert code == 1
    assert error["kind"] == "request_does_not_fit"
    assert "39," in error["message"]
    assert any("--kv-cache-dtype fp8" in way for way in error["ways_out"])


def test_refusal_is_data_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "Qwen/Qwen2-7B", "--gpu", "H100", "--tp", "8", "--json")
    answer = json.loads(out)
    assert code == 1
    assert answer["error"]["kind"] == "heads_not_divisible"
    assert answer["fits"] is False


def test_every_answer_says_which_release_it_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan, a refusal, the lines of a sweep and the answers to a need."""
    qwen = ("Qwen/Qwen3-8B", "--gpu", "H100", "--vllm-version", "0.32.1")
    _, out, _ = run(capsys, *qwen)
    assert out.splitlines()[0].endswith(", vLLM 0.32")
    assert as_json(capsys, *qwen)["vllm_version"] == "0.32"
    refused = ("Qwen/Qwen2-7B", "--gpu", "H100", "--tp", "8", "--vllm-version", "0.32")
    _, out, _ = run(capsys, *refused)
    assert "refused (vLLM 0.32): " in out
    assert json.loads(run(capsys, *refused, "--json")[1])["vllm_version"] == "0.32"
    _, out, _ = run(capsys, *qwen, "--sweep", "max-model-len=8k,400k")
    assert out.splitlines()[0] == "Qwen/Qwen3-8B, vLLM 0.32"
    rows = as_json(capsys, *qwen, "--sweep", "max-model-len=8k,400k")
    assert [(row["vllm_version"], row["fits"]) for row in rows] == [("0.32", True), ("0.32", False)]
    assert as_json(capsys, *qwen, "--need", "users=2,context=4k")["vllm_version"] == "0.32"


def test_text_of_a_failure_lists_the_ways_out(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "Qwen/Qwen3-32B", "--gpu", "A100")
    assert code == 1
    assert "does not fit" in out
    assert "tp 2 fits" in out


def test_pasted_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    plan = as_json(capsys, "--gpu", "H100", "--json", "--", "vllm", "serve", "Qwen/Qwen3-8B", "-tp", "2", "--port", "1")
    assert (plan["model"], plan["tensor_parallel_size"]) == ("Qwen/Qwen3-8B", 2)
    assert "--port: no change to the plan (the server and its API)" in plan["notes"]
    assert plan["not_modelled"] == []


def test_what_is_not_modelled_is_loud_and_with_strict_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    pasted = ("--gpu", "H100", "--", "vllm", "serve", "Qwen/Qwen3-8B", "--enable-sleep-mode", "--seed", "1")
    code, out, _ = run(capsys, *pasted)
    assert code == 0
    assert f"warning: {SLEEP}" in out
    assert run(capsys, "--strict", *pasted)[0] == 3
    assert run(capsys, "--strict", *pasted[:-3])[0] == 0
    assert as_json(capsys, *pasted)["not_modelled"] == [
        "--enable-sleep-mode is not modelled: its allocator may take more memory"
    ]


# What does not start, in three ways: refused by vLLM, too small, and not known.
@pytest.mark.parametrize(
    "words",
    [
        ("Qwen/Qwen2-7B", "-tp", "8"),
        ("Qwen/Qwen3-32B", "--gpu-memory-utilization", "0.8"),
        ("no/such/model.json",),
        ("Qwen/Qwen3-8B", "--hf-overrides", "[]"),
    ],
)
def test_notes_survive_every_refusal(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--gpu", "A100", "--", "vllm", "serve", *words, "--enable-sleep-mode", "--port", "1")
    assert code == 1
    assert "--enable-sleep-mode is not modelled" in out + err
    assert "--port: no change to the plan" in out + err


def test_refusals_have_notes_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    answer = as_json(capsys, "--gpu", "A100", "--", "vllm", "serve", "Qwen/Qwen2-7B", "-tp", "8", "--enable-sleep-mode")
    assert (answer["fits"], answer["error"]["kind"]) == (False, "heads_not_divisible")
    assert answer["not_modelled"] == [SLEEP]


def test_a_typo_in_a_pasted_line_is_an_error_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--gpu", "H100", "--", "vllm", "serve", LLAMA, "--max-num-sequences", "4")
    assert (code, out) == (1, "")
    assert "--max-num-sequences: vllm serve of release 0.33 has no such option; did you mean --max-num-seqs" in err


def test_overrides_change_the_config_that_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    pasted = ("--gpu", "H100", "--", "vllm", "serve", LLAMA)
    plan = as_json(capsys, *pasted, "--hf-overrides", '{"num_hidden_layers": 8, "max_position_embeddings": 4096}')
    assert (plan["groups"][0]["layers"], plan["max_model_len"]) == (8, 4096)
    assert "--hf-overrides: num_hidden_layers, max_position_embeddings" in plan["notes"]
    # A nested config is changed field by field.
    model, option = "google/gemma-3n-E4B", "--hf-overrides.text_config.sliding_window=256"
    nested = as_json(capsys, *pasted[:-1], model, option)
    assert {group["spec"].get("sliding_window") for group in nested["groups"]} <= {None, 0, 256}


def test_a_longer_length_where_the_environment_allows_it(capsys: pytest.CaptureFixture[str]) -> None:
    pasted = ("vllm", "serve", "Qwen/Qwen3-8B", "--max-model-len", "100000")
    assert as_json(capsys, "--gpu", "H100", "--", *pasted)["error"]["kind"] == "max_model_len_too_long"
    plan = as_json(capsys, "--gpu", "H100", "--", "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1", *pasted)
    assert plan["max_model_len"] == 100_000


@pytest.mark.parametrize("written", ["-O0", "--enforce-eager", "-cc.cudagraph_mode=NONE", "-O0 --enforce-eager"])
def test_without_cuda_graphs_their_memory_is_the_caches(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    pasted = ("--gpu", "H100", "--", "vllm", "serve", LLAMA)
    graphs = {term["name"]: term["bytes"] for term in as_json(capsys, *pasted)["memory"][0]["terms"]}
    plan = as_json(capsys, *pasted, *written.split())
    terms = {term["name"]: term["bytes"] for term in plan["memory"][0]["terms"]}
    assert terms["CUDA graphs"] == 0
    assert terms["KV cache"] - graphs["KV cache"] == graphs["CUDA graphs"] > 0
    # A mode that was asked for goes before the level's.
    kept = as_json(capsys, *pasted, "-O0", "-cc.cudagraph_mode=PIECEWISE")["memory"][0]["terms"]
    # Half of them: 51 of mixed batches, and none of those that only decode.
    assert 2 * {term["name"]: term["bytes"] for term in kept}["CUDA graphs"] == graphs["CUDA graphs"]


def test_log_is_explained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(
        "vLLM API server version 0.19.0\nnon-default args: {'model': 'google/gemma-2-9b'}\n"
        "Available KV cache memory: 54.12 GiB\nGPU KV cache size: 168,880 tokens\n"
        "Maximum concurrency for 8,192 tokens per request: 20.60x\n"
    )
    code, out, _ = run(capsys, "--from-log", str(log))
    assert code == 0
    assert out.count("agrees") == 2
    log.write_text(log.read_text().replace("20.60", "24.60"))
    code, out, _ = run(capsys, "--from-log", str(log))
    assert code == 1
    assert "differs" in out


def test_a_log_and_another_option_is_a_what_if(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(
        "vLLM API server version 0.33.0\n"
        "non-default args: {'model': 'Qwen/Qwen2.5-7B-Instruct', 'max_model_len': 8192, "
        "'gpu_memory_utilization': 0.9}\n"
        "Model loading took 14.25 GiB\nAvailable KV cache memory: 54.00 GiB\n"
        "Free memory on device (78.6/79.19 GiB) on startup.\n"
    )
    code, out, _ = run(capsys, "--from-log", str(log), "--gpu-memory-utilization", "0.97", "--kv-cache-dtype", "fp8")
    assert code == 0
    assert "from the log: --kv-cache-dtype auto -> fp8, --gpu-memory-utilization 0.9 -> 0.97" in out
    found = as_json(capsys, "--from-log", str(log), "--gpu-memory-utilization", "0.97")
    assert found["what_if"]["changes"] == ["--gpu-memory-utilization 0.9 -> 0.97"]
    # 0.07 * 79.19 GiB more, in blocks of 896 KiB: 28 layers * 16 tokens * 2 * 4 heads * 128 * 2 bytes.
    more = (found["kv_cache_memory_bytes"] - 54 * 2**30) / 2**30
    assert more == pytest.approx(0.07 * 79.19, abs=0.01)
    assert found["num_blocks"] - found["what_if"]["before"]["num_blocks"] == pytest.approx(more * 2**20 / 896, abs=2)
    same = as_json(capsys, "--from-log", str(log), "--gpu-memory-utilization", "0.9")
    assert "what_if" not in same
    assert same["num_blocks"] == found["what_if"]["before"]["num_blocks"]


def test_sweep_is_one_line_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "Qwen/Qwen3-8B", "--gpu", "H100", "--sweep", "max-model-len=8k,16k,32k")
    assert out.splitlines()[:2] == ["Qwen/Qwen3-8B, vLLM 0.33", ""]
    assert len(out.strip().splitlines()) == 6
    rows = as_json(capsys, "Qwen/Qwen3-8B", "--sweep", "gpu=L4,H100")
    assert [row["gpu"] for row in rows] == ["L4", "H100"]


def test_a_need_is_answered_with_cards_counts_and_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("Qwen/Qwen3-32B", "--need", "users=50,context=32k", "--gpu", "H100,H200", "--prices", "H100=2.5,H200=3.5")
    code, out, _ = run(capsys, *asked)
    assert code == 0
    assert "Qwen/Qwen3-32B, vLLM 0.33: 50 users at a time, 32,000 tokens each" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("NVIDIA")]
    assert [float(row[-1]) for row in rows] == sorted(float(row[-1]) for row in rows)
    found = as_json(capsys, *asked)
    assert found["need"] == {"users": 50, "context": 32_000}
    best = found["answers"][0]
    ranks = best["tensor_parallel_size"] * best["pipeline_parallel_size"] * best["data_parallel_size"]
    assert best["num_gpus"] == ranks
    assert best["users"] >= 50
    assert best["command"] in out.replace(" \n", " ")
    assert best["command"].startswith("vllm serve Qwen/Qwen3-32B --max-model-len 32000")


def test_a_need_keeps_the_notes_of_a_pasted_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--need",
        "users=5,context=4k",
        "--gpu",
        "H100",
        "--",
        "vllm",
        "serve",
        LLAMA,
        "--enable-sleep-mode",
        "--port",
        "1",
    )
    _, out, _ = run(capsys, *words)
    assert "warning: --enable-sleep-mode is not modelled" in out
    found = as_json(capsys, *words)
    assert "--port: no change to the plan (the server and its API)" in found["notes"]
    assert found["not_modelled"] == [SLEEP]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--need", "users=2,context=4k", "--sweep", "gpu"), "--sweep='gpu': --need is given too"),
        (("--need", "users=2,context=4k", "--from-log", "x"), "--from-log='x': --need is given too"),
        (("--prices", "H100=2"), "--prices='H100=2': nothing is ranked without --need"),
    ],
)
def test_a_need_stands_alone(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, LLAMA, *words)
    assert (code, out) == (1, "")
    assert message in err


def test_sweeps_over_cards_and_over_requests_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, LLAMA, "--sweep", "cards=L4,H100")
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["gpu", "L4", "H100"]
    rows = as_json(capsys, LLAMA, "--gpu", "H100", "--sweep", "max-num-seqs=256,1024")
    # Sampling 1,024 sequences takes more than a pass over 8,192 tokens, so fewer of them leave more for the cache.
    assert rows[0]["num_blocks"] > rows[1]["num_blocks"] == 28_134


def test_every_step_is_explained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = run(capsys, "Qwen/Qwen3.5-27B", "--kv-cache-memory-bytes", "40GiB", "--explain")
    for formula in ("ceil(262,144 / 832)", "3*10240*2 + 48*128*128*4", "42,949,672,960 // 54,525,952", "787 / 325"):
        assert formula in out


def test_best_layout_says_what_vllms_costs(capsys: pytest.CaptureFixture[str]) -> None:
    plan = as_json(capsys, "google/gemma-3-4b-it-text-only", "--gpu", "H100", "--layout", "best")
    assert plan["layout"]["buckets"] == [29, 5]
    assert plan["layout"]["vllm"]["padding_layers"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "MODEL is missing"),
        ([LLAMA], "--gpu is missing"),
        ([LLAMA, "--gpu", "Abacus"], "--gpu='Abacus'"),
        ([LLAMA, "--gpu", "H100", "--kv-cache-dtype", "int4"], "--kv-cache-dtype='int4'"),
        ([LLAMA, "--gpu", "H100", "--sweep", "colour"], "--sweep='colour'"),
        ([LLAMA, "--gpu", "H100", "--sweep", "length=8k,long"], "--max-model-len='long'"),
        ([LLAMA, "--gpu", "H100", "--sweep", "gpu-memory-utilization=most"], "--gpu-memory-utilization='most'"),
        ([LLAMA, "--gpu", "H100", "--vllm-version", "0.5"], "--vllm-version='0.5'"),
        ([LLAMA, "--gpu", "H100,A100"], "2 cards for 1 pipeline stages"),
        (["no/such/model.json", "--gpu", "H100"], "no such file"),
    ],
)
def test_wrong_input_is_one_line_with_option_value_and_fix(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 1
    assert words in err
    assert out == ""
    assert len(err.strip().splitlines()) == 1


def test_help_groups_the_options_and_says_what_each_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    panels = [line.removesuffix(":") for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert sorted(panels) == sorted(["Arguments", *PANELS, CARD, OUTPUT, "Other options"])
    for option in fields(PlanOptions):
        assert option.name.replace("_", "-") in out.lower() or option.name in ("remark", "unmodelled")


def test_help_imports_none_of_what_plans() -> None:
    program = (
        "import sys; from kvledger.cli import main; main(['plan', '--help']); "
        "late = ('kvledger.plan', 'kvledger.models', 'rich', 'msgspec'); "
        "print([name for name in sys.modules if name.startswith(late)])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "words",
    [
        ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'),
        ("--speculative-config.method", "mtp", "--speculative-config.num_speculative_tokens", "2"),
        ("--spec-method", "mtp", "--spec-tokens", "2"),
    ],
)
def test_drafts_are_planned_from_a_pasted_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    pasted = ("--gpu", "H100", "--", "vllm", "serve", "Qwen/Qwen3.5-27B", "-tp", "2", *words)
    found = as_json(capsys, *pasted)
    draft = found["draft"]
    assert (draft["method"], draft["num_tokens"], draft["lookahead_slots"], draft["layers"]) == ("mtp", 2, 2, 1)
    # 424.7 million parameters of two bytes, on two ranks.
    assert draft["weight_bytes"] == pytest.approx(424_698_880, rel=0.01)
    assert [group["layers"] for group in found["groups"]] == [16, 16, 16, 17]
    assert found["not_modelled"] == []
    _, out, _ = run(capsys, *pasted)
    assert "mtp drafts 2" in out


@pytest.mark.parametrize(
    "words",
    [
        ("--cudagraph-capture-sizes", "1", "2", "4"),
        ("-cc", '{"cudagraph_capture_sizes": [1, 2, 4]}'),
        ("-cc.max_cudagraph_capture_size=4",),
        ("--max-cudagraph-capture-size", "4"),
    ],
)
def test_capture_sizes_are_read_from_a_pasted_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--gpu", "H100", "--", "vllm", "serve", LLAMA, *words)
    assert found["memory"][0]["terms"][2]["detail"] == "3 + 3 graphs of 32 layers"
    assert found["not_modelled"] == []
