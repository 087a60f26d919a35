"""`kvledger replay` from outside: exit codes, what goes to stdout and to stderr, errors in the words of the options."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from kvledger.cli import main
from kvledger.cli.replay_options import ReplayOptions
from kvledger.core.groups.decisions import LATEST_RELEASE, RELEASES
from kvledger.plan.versions import NEWEST_VERSION, VERSIONS
from tests.unit.traces.recordings import agent_request, mooncake, session, write

QUICK = ("--hash", "none")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command line."""
    code = main(["replay", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_without_a_trace_the_bundled_sample_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--limit", "20", *QUICK)
    assert (code, err) == (0, "")
    assert "bundled sample" in out
    for words in ("hit rate, tokens", "preemptions", "usage peak", "time to first token", "Waiting requests"):
        assert words in out


def test_json_is_one_object_with_the_promised_keys_in_both_modes(capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ((), ("--sequential",)):
        code, out, _ = run(capsys, "--limit", "5", "--json", *mode, *QUICK)
        result = json.loads(out)
        assert code == 0
        assert {"num_requests", "num_finished", "num_preemptions", "wall_seconds"} <= result.keys()
        assert {"token_hit_rate", "block_hit_rate"} <= result["prefix_cache"].keys()
        assert result["usage"]["peak"] > 0


def test_the_sequential_report_has_no_latencies(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--limit", "20", "--sequential", *QUICK)
    assert "hit rate, tokens" in out
    assert "time to first token" not in out


def test_an_output_that_cannot_take_block_characters_gets_tables_only() -> None:
    command = [sys.executable, "-m", "kvledger", "replay", "--limit", "5", *QUICK]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert "usage peak" in done.stdout
    assert "Waiting requests" not in done.stdout


def test_check_proves_the_invariants_of_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = run(capsys, "--limit", "2", "--check", "--num-blocks", "1000", "--max-model-len", "7300", *QUICK)
    assert code == 0


def test_agent_sessions_run_in_a_closed_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, session(agent_request(0.0, 64, [1]), agent_request(9.0, 64, [1], think_time=100.0)))
    code, out, _ = run(capsys, path, "--closed-loop", "--json", *QUICK)
    assert code == 0
    assert json.loads(out)["simulated_seconds"] == pytest.approx(100.0, abs=0.2)


def test_what_was_refused_is_reported_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, mooncake(), mooncake(prompt=1000))
    code, out, _ = run(capsys, path, "--num-blocks", "50", *QUICK)
    assert code == 0
    assert "prompt larger than the whole pool" in out


def test_the_report_says_what_was_cut_skipped_and_switched_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, mooncake(output=500), "{")
    code, out, _ = run(capsys, path, "--skip-bad", "--max-model-len", "700", "--no-prefix-caching", *QUICK)
    assert code == 0
    for words in ("cut at max_model_len", "broken lines skipped", "off, or never asked", "hash off"):
        assert words in out


def test_a_narrow_terminal_gets_no_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "25")
    code, out, _ = run(capsys, write(tmp_path, mooncake()), *QUICK)
    assert code == 0
    assert "Waiting" not in out


def test_a_long_replay_is_reported_in_minutes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, write(tmp_path, mooncake(0), mooncake(3_600_000)), *QUICK)
    assert "60.0 min" in out


def test_when_nothing_finishes_the_exit_code_is_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, write(tmp_path, mooncake()), "--num-blocks", "5", "--json", *QUICK)
    assert code == 1
    assert json.loads(out)["refused"] == {"prompt_exceeds_pool": 1}
    assert err == "kvledger: none of the 1 requests finished\n"


def test_a_broken_line_ends_with_one_line_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, mooncake(), mooncake(ids=[]))
    code, out, err = run(capsys, path, *QUICK)
    assert (code, out) == (1, "")
    assert err.startswith(f"kvledger: {path}, line 2, field hash_ids: expected 2 ids")
    assert err.count("\n") == 1


def test_skip_bad_goes_on_and_says_how_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, mooncake(), "{", mooncake())
    code, out, _ = run(capsys, path, "--skip-bad", "--json", *QUICK)
    assert code == 0
    assert json.loads(out)["num_bad_lines"] == 1


def test_a_missing_file_is_an_input_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "no-such-file")
    assert code == 1
    assert "no-such-file: cannot be read" in err


# Option, wrong value, what the message says besides both.
WRONG_VALUES = [
    ("--format", "csv", "use one of mooncake, timed-trace"),
    ("--trace-block-size", "0", "give 1 to"),
    ("--limit", "0", "give 1 to"),
    ("--session-gap", "-1", "give 0 or a positive number"),
    ("--speed-up", "0", "give a positive number"),
    ("--speed-up", "nan", "not a finite number"),
    ("--seed", "-1", "less than nothing"),
    ("--model", "no-such-model", "no such file, directory or catalogue entry"),
    ("--layout", "no-such-layout", "cannot be read"),
    ("--plan", "no-such-plan", "cannot be read"),
    ("--drafts", "-1", "less than nothing"),
    ("--retention-interval", "0", "no group keeps windows or states"),
    ("--remember-evictions", "-1", "less than nothing"),
    ("--kv-cache-memory-bytes", "12parsec", "give one like 40GiB"),
    ("--kv-cache-memory-bytes", "0", "must be at least 1"),
    ("--num-gpu-blocks-override", "1", "give 2 to"),
    ("--num-blocks", "many", "not a whole number"),
    ("--block-size", "0", "must be at least 1"),
    ("--max-model-len", "0", "must be at least 1"),
    ("--dtype", "int3", "use one of auto, bfloat16, float16, half"),
    ("--kv-cache-dtype", "int3", "use one of auto, bfloat16"),
    ("--kv-cache-dtype-skip-layers", "windows", "give numbers of layers from 0 on, or sliding_window"),
    ("--gpu-memory-utilization", "1.5", "at most 1"),
    ("--tensor-parallel-size", "0", "must be at least 1"),
    ("--tp", "two", "not a whole number"),
    ("--pipeline-parallel-size", "0", "must be at least 1"),
    ("--pp-layer-partition", "16", "add up to the model's layers"),
    ("--data-parallel-size", "0", "must be at least 1"),
    ("--decode-context-parallel-size", "3", "use a divisor"),
    ("--mamba-ssm-cache-dtype", "int3", "use one of auto, float32, float16, bfloat16"),
    ("--quantization", "int3", "fp8_per_tensor"),
    ("--entry-point", "door", "use one of server, llm"),
    ("--prefill-context-parallel-size", "0", "must be at least 1"),
    ("--performance-mode", "slow", "use one of balanced"),
    ("--optimization-level", "4", "use one of 0, 1, 2, 3"),
    ("--compilation-config", "{", "not JSON"),
    ("--attention-backend", "MAGIC", "use one of AUTO, FLASH_ATTN"),
    ("--hf-overrides", "[1]", "not a JSON object"),
    ("--speculative-config", "{", "not JSON"),
    ("--max-loras", "0", "must be at least 1"),
    ("--cudagraph-capture-sizes", "two", "not a whole number"),
    ("--max-cudagraph-capture-size", "0", "must be at least 1"),
    ("--max-lora-rank", "3", "use one of 1, 8, 16"),
    ("--lora-dtype", "int3", "use one of auto, float16"),
    ("--cpu-offload-gb", "-1", "less than nothing"),
    ("--offload-group-size", "-1", "less than nothing"),
    ("--offload-num-in-group", "0", "must be at least 1"),
    ("--offload-prefetch-step", "0", "must be at least 1"),
    ("--kv-offloading-size", "-1", "less than nothing"),
    ("--spec-method", "guess", "use one of mtp"),
    ("--spec-model", "nowhere", "no such file"),
    ("--spec-tokens", "0", "must be at least 1"),
    ("--mamba-cache-dtype", "int3", "use one of auto, float32"),
    ("--mamba-block-size", "0", "must be at least 1"),
    ("--vllm-version", "0.5", "use 0.33 or 0.32"),
    ("--gpu-memory-gib", "much", "not a number"),
    ("--weights-gib", "much", "not a number"),
    ("--activation-gib", "much", "not a number"),
    ("--cuda-graphs-gib", "much", "not a number"),
    ("--other-gib", "much", "not a number"),
    ("--watermark", "2", "give 0.0 up to below 1.0"),
    ("--hash", "md5", "'sha256', 'siphash', 'xxh3', 'none'"),
    ("--max-num-seqs", "0", "must be at least 1"),
    ("--max-num-batched-tokens", "0", "must be at least 1"),
    ("--policy", "lifo", "'fcfs', 'priority'"),
    ("--gpu", "abacus", "not in the table"),
    ("--peak-tflops", "0", "give a positive number"),
    ("--bandwidth", "inf", "not a finite number"),
    ("--step-overhead", "-1", "give 0 or a positive number"),
    ("--log-interval", "-1", "give 0 or a positive number"),
    ("--fields", "tokens=n", "is no pair of a field"),
    ("--tokenizer", "nowhere", "a mooncake trace has no texts"),
    ("--step-time", "steps.csv", "cannot be read"),
    ("--against", "metrics.txt", "cannot be read"),
    ("--slo", "ttft=5", "is no time with its unit"),
    ("--requests", "requests.txt", "end it in .csv or .parquet"),
    ("--perfetto", "run.txt", "end it in .json or .json.gz"),
    ("--report", "report.txt", "end it in .html"),
    ("--events", "events.txt", "end it in .jsonl or .msgpack"),
]


@pytest.mark.parametrize(("option", "value", "allowed"), WRONG_VALUES)
def test_a_wrong_value_names_option_value_and_what_is_allowed(
    option: str, value: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, option, value)
    assert (code, out) == (2, "")
    for words in (option, value, allowed):
        assert words in err


def test_every_option_with_a_value_has_a_wrong_one_in_the_table() -> None:
    with_values = {
        "--" + option.name.replace("_", "-")
        for option in fields(ReplayOptions)
        if "bool" not in str(get_type_hints(ReplayOptions)[option.name])
    }
    assert with_values - {"--trace"} == {option for option, _, _ in WRONG_VALUES} - {
        "--num-blocks",
        "--tp",
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--model", "gpt2", "--plan", "p"), "--model 'gpt2': plan is given too; give one of the two"),
        (("--layout", "l", "--plan", "p"), "--layout 'l': plan is given too; give one of the two"),
        (("--plan", "p", "--block-size", "32"), "--block-size 32: --plan says so itself"),
        (("--plan", "p", "--tp", "1"), "--tensor-parallel-size 1: --plan says so itself"),
        (("--sequential", "--speed-up", "2"), "--speed-up 2.0: no time passes with --sequential; leave it out"),
        (("--sequential", "--step-overhead", "3"), "--step-overhead 3.0: no time passes with --sequential"),
        (("--sequential", "--policy", "priority"), "--policy 'priority': nobody competes with --sequential"),
        (("--sequential", "--watermark", "0.1"), "--watermark 0.1: nobody competes with --sequential"),
        (("--sequential", "--perfetto", "r.json"), "--perfetto 'r.json': no time passes with --sequential"),
        (("--sequential", "--slo", "ttft=1s"), "--slo 'ttft=1s': no time passes with --sequential"),
        (("--step-time", "s.csv", "--step-overhead", "3"), "--step-overhead 3.0: step_time says so itself"),
        (("--closed-loop",), "--closed-loop True: the mooncake format has no sessions"),
        (("--no-such-option",), "No such option: --no-such-option"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert expected in err


def test_without_options_it_is_a_planned_llama_8b_on_four_h100(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, mooncake())
    _, out, _ = run(capsys, path, "--json", *QUICK)
    _, named, _ = run(
        capsys, path, "--model", "meta-llama/Llama-3.1-8B", "--gpu", "H100", "--tp", "4", "--json", *QUICK
    )
    main(["plan", "meta-llama/Llama-3.1-8B", "--gpu", "H100", "--tp", "4", "--json"])
    plan = json.loads(capsys.readouterr().out)
    for result in map(json.loads, (out, named)):
        for name in ("num_blocks", "max_model_len", "model", "bytes_per_block"):
            assert result[name] == plan[name]
        assert (result["num_gpus"], result["gpu"]) == (4, plan["gpu"][0])


@pytest.mark.parametrize("names", [("a100", "a100-80gb", "A100-SXM4-80GB"), ("h100", "H100", "h100-sxm")])
def test_names_of_one_card_give_one_pool(
    names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, mooncake())
    results = [json.loads(run(capsys, path, "--gpu", name, "--json", *QUICK)[1]) for name in names]
    assert len({(result["gpu"], result["num_blocks"]) for result in results}) == 1


# Options of an engine, as both commands take them.
ENGINES = [
    ("--kv-cache-memory-bytes", "20GB"),
    ("--kv-cache-memory-bytes", "20GiB", "--block-size", "32", "--max-model-len", "32K"),
    ("--kv-cache-dtype", "fp8", "--gpu-memory-utilization", "0.8", "--max-num-seqs", "64"),
    ("--tp", "2", "--pp", "2", "--gpu", "L40S,A100", "--enforce-eager", "--entry-point", "llm"),
    ("--tp", "2", "--dcp", "2", "--model", "deepseek-ai/DeepSeek-V2-Lite", "--no-enable-prefix-caching"),
    ("--vllm-version", "0.32", "--weights-gib", "16", "--activation-gib", "2", "--max-num-batched-tokens", "4k"),
    ("--disable-hybrid-kv-cache-manager", "--model", "google/gemma-3-4b-it-text-only", "--no-async-scheduling"),
]


def test_the_release_has_one_meaning_and_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--vllm-version` is the ledger's releases, in plan and replay alike; a plan in a file carries it along."""
    assert (tuple(sorted(VERSIONS)), NEWEST_VERSION) == (RELEASES, LATEST_RELEASE)
    plan = tmp_path / "plan.json"
    quick = ("--limit", "3", *QUICK)
    assert main(["plan", "meta-llama/Llama-3.1-8B", "--gpu", "H100", "--vllm-version", "v0.32.1", "--json"]) == 0
    plan.write_text(capsys.readouterr().out)
    for options, release in (((), "0.33"), (("--vllm-version", "0.32"), "0.32"), (("--plan", str(plan)), "0.32")):
        _, out, _ = run(capsys, *quick, *options)
        assert f", vLLM {release}," in out
        assert json.loads(run(capsys, *quick, *options, "--json")[1])["vllm_version"] == release
    code, _, err = run(capsys, *quick, "--plan", str(plan), "--vllm-version", "0.33")
    assert code == 2
    assert "--plan says so itself" in err


@pytest.mark.parametrize("engine", ENGINES, ids=" ".join)
def test_plan_and_replay_make_the_same_engine_of_the_same_options(
    engine: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = list(engine)
    model = "meta-llama/Llama-3.1-8B"
    if "--model" in options:
        place = options.index("--model")
        model = options[place + 1]
        del options[place : place + 2]
    if "--gpu" not in options:
        options += ["--gpu", "H100"]
    main(["plan", model, *options, "--json"])
    plan = json.loads(capsys.readouterr().out)
    _, out, _ = run(capsys, write(tmp_path, mooncake()), "--model", model, *options, "--json", *QUICK)
    result = json.loads(out)
    for name in ("num_blocks", "max_model_len", "model", "bytes_per_block"):
        assert result[name] == plan[name]
    ranks = plan["decode_context_parallel_size"]
    sizes = [group["block_size"] * ranks for group in plan["groups"]]
    assert [group["block_size"] for group in result["groups"]] == sizes
    assert result["gpu"] == plan["gpu"][0]
    assert (result["hash"] == "off") == (not plan["enable_prefix_caching"])


def test_the_same_seed_gives_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, *[session(agent_request(0.0, 640, list(range(10)))) for _ in range(5)])

    def simulated(seed: str) -> float:
        _, out, _ = run(capsys, path, "--seed", seed, "--json", *QUICK)
        return float(json.loads(out)["simulated_seconds"])

    assert simulated("1") == simulated("1") != simulated("2")


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for option in fields(ReplayOptions):
        assert option.name.replace("_", "-").upper() in out.upper()


def test_files_besides_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them from one replay; what is there already stays as it is."""
    names = {"--requests": "requests.csv", "--perfetto": "run.json", "--report": "report.html"}
    arguments = [word for option, name in names.items() for word in (option, str(tmp_path / name))]
    code, out, _ = run(capsys, "--limit", "5", "--json", *QUICK, *arguments)
    assert (code, json.loads(out)["num_finished"]) == (0, 5)
    assert len((tmp_path / "requests.csv").read_text().splitlines()) == 6
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert "<!doctype html>" in (tmp_path / "report.html").read_text("utf-8")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    code, _, err = run(capsys, "--limit", "6", *QUICK, *arguments)
    assert (code, "is there already" in err) == (2, True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
