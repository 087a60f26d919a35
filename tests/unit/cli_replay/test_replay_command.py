"""`kvledger replay` from outside: exit codes, what goes to stdout and to stderr, errors in the words of the options."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from kvledger.cli import main
from kvledger.cli.replay_options import ReplayOptions
from tests.unit.replay.traces import agent_request, mooncake, session, write

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
    ("--format", "csv", "'mooncake', 'agent', 'azure'"),
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
    ("--kv-cache-memory-bytes", "3", "give more memory"),
    ("--num-blocks", "1", "give 2 to"),
    ("--memory", "12parsec", "give one like 40GiB"),
    ("--memory", "1000", "give more memory"),
    ("--bytes-per-token", "0", "give 1 to"),
    ("--block-size", "0", "give 1 to"),
    ("--block-size", "abc", "not a whole number"),
    ("--max-model-len", "1", "give 2 to"),
    ("--watermark", "2", "give 0.0 up to below 1.0"),
    ("--vllm-version", "0.1", "'0.32', '0.33'"),
    ("--hash", "md5", "'sha256', 'siphash', 'xxh3', 'none'"),
    ("--max-num-seqs", "0", "give 1 to"),
    ("--max-num-batched-tokens", "100", "raise it or lower max_num_seqs"),
    ("--policy", "lifo", "'fcfs', 'priority'"),
    ("--gpu", "gtx", "use one of a30, l4"),
    ("--num-gpus", "0", "give 1 to"),
    ("--peak-tflops", "0", "give a positive number"),
    ("--bandwidth", "inf", "not a finite number"),
    ("--step-overhead", "-1", "give 0 or a positive number"),
    ("--log-interval", "-1", "give 0 or a positive number"),
    ("--num-parameters", "many", "not a number"),
    ("--num-parameters", "9e12", "give more or larger GPUs"),
    ("--num-layers", "0", "give 1 to"),
    ("--num-heads", "0", "give 1 to"),
    ("--num-kv-heads", "0", "give 1 to"),
    ("--head-size", "0", "give 1 to"),
    ("--weight-dtype", "int3", "'bfloat16', 'float16'"),
    ("--kv-dtype", "int3", "'bfloat16', 'float16'"),
    ("--events", "events.txt", "end it in .jsonl or .msgpack"),
]


@pytest.mark.parametrize(("option", "value", "allowed"), WRONG_VALUES)
def test_a_wrong_value_names_option_value_and_what_is_allowed(
    option: str, value: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, option, value)
    assert (code, out) == (2, "")
    named = "--num-gpus" if value == "9e12" else option
    for words in (named, allowed):
        assert words in err
    assert value in err or value == "9e12"


def test_every_option_with_a_value_has_a_wrong_one_in_the_table() -> None:
    with_values = {
        "--" + option.name.replace("_", "-") for option in fields(ReplayOptions) if not isinstance(option.default, bool)
    }
    assert with_values - {"--trace"} == {option for option, _, _ in WRONG_VALUES}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--num-blocks", "10", "--memory", "4GiB"), "--memory 4294967296: num_blocks is given too"),
        (("--kv-cache-memory-bytes", "1", "--memory", "2"), "--kv-cache-memory-bytes 1: memory is given too"),
        (("--model", "gpt2", "--plan", "p"), "--plan 'p': model is given too; give one of the two"),
        (("--model", "gpt2", "--num-layers", "3"), "--num-layers 3: --model says so itself"),
        (("--plan", "p", "--block-size", "32"), "--block-size 32: --plan says so itself"),
        (("--layout", "l", "--num-layers", "3"), "--num-layers 3: --layout says so itself"),
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


def test_memory_and_bytes_per_token_make_the_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, mooncake())
    _, out, _ = run(capsys, path, "--memory", "1MiB", "--bytes-per-token", "512", "--json", *QUICK)
    # 2**20 / (16 x 512)
    assert json.loads(out)["num_blocks"] == 128


def test_the_default_pool_is_what_four_h100_leave_beside_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, write(tmp_path, mooncake()), "--json", *QUICK)
    # (0.9 x 4 x 79.10 GiB - 16.06 GB) / (16 x 131,072 bytes)
    assert json.loads(out)["num_blocks"] == 138_139


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
