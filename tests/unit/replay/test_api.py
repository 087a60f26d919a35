"""replay() for programs: the same as the command, by the same names."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvledger.cli import main
from kvledger.errors import ConfigError
from kvledger.replay import RequestTable, replay
from kvledger.replay.layout import InputError
from kvledger.traces.formats import open_trace
from kvledger.traces.trace_request import TraceRequest
from tests.unit.traces.recordings import agent_request, mooncake, session, write

# Of this machine.
WALL = ("wall_seconds", "requests_per_wall_second", "tokens_per_wall_second")


def plain(result: Any) -> dict[str, Any]:
    return {key: value for key, value in msgspec.to_builtins(result).items() if key not in WALL}


def printed(*arguments: str) -> dict[str, Any]:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["replay", *arguments, "--json"]) == 0
    return {key: value for key, value in json.loads(out.getvalue()).items() if key not in WALL}


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"limit": 40, "hash": "none"}, ("--limit", "40", "--hash", "none")),
        (
            {"limit": 40, "hash": "none", "sequential": True, "model": "openai/gpt-oss-120b", "tp": 2,
             "num_blocks": 9000},
            ("--limit", "40", "--hash", "none", "--sequential", "--model", "openai/gpt-oss-120b", "--tp", "2",
             "--num-blocks", "9000"),
        ),
        (
            {"limit": 40, "hash": "none", "gpu": "L40S", "kv_cache_dtype": "fp8", "max_num_seqs": 8,
             "policy": "priority", "slo": "ttft=1s", "max_model_len": 32768, "vllm_version": "0.32"},
            ("--limit", "40", "--hash", "none", "--gpu", "L40S", "--kv-cache-dtype", "fp8", "--max-num-seqs", "8",
             "--policy", "priority", "--slo", "ttft=1s", "--max-model-len", "32768", "--vllm-version", "0.32"),
        ),
    ],
)  # fmt: skip
def test_it_is_the_command(options: dict[str, Any], arguments: tuple[str, ...]) -> None:
    assert plain(replay(**options)) == printed(*arguments)


def test_a_trace_may_be_a_path_a_reader_or_requests(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(0), mooncake(10), mooncake(20, 1000, 3, [0, 7]))
    requests = [TraceRequest(0.0, 600, 5, [0, 1], 512), TraceRequest(0.01, 600, 5, [0, 1], 512),
                TraceRequest(0.02, 1000, 3, [0, 7], 512)]  # fmt: skip
    results = [replay(source, hash="none") for source in (path, Path(path), open_trace(path), iter(requests))]
    for result in results:
        result.trace = result.format = ""
    assert plain(results[0]) == plain(results[1]) == plain(results[2]) == plain(results[3])
    # Both later prompts find the 512 tokens that they share with the first; the second was not computed yet when the
    # first was at work, so how much it hits is the scheduler's.
    assert results[0].num_finished == 3


def test_a_plan_may_be_text_or_a_file(tmp_path: Path) -> None:
    out = io.StringIO()
    with redirect_stdout(out):
        main(["plan", "meta-llama/Llama-3.1-8B", "--gpu", "H100", "--json"])
    path = tmp_path / "plan.json"
    path.write_text(out.getvalue())
    of_file = plain(replay(plan=str(path), limit=5, hash="none"))
    assert plain(replay(plan=out.getvalue().encode(), limit=5, hash="none")) == of_file
    assert of_file["num_gpus"] == 1


def test_a_row_for_every_request() -> None:
    table = RequestTable()
    result = replay(limit=30, hash="none", listeners=[table])
    assert len(table.columns["request"]) == result.num_finished == 30
    assert result.ttft_seconds is not None
    assert max(table.columns["ttft"]) == pytest.approx(result.ttft_seconds.max)
    assert sum(table.columns["hit_tokens"]) == result.prefix_cache.num_hit_tokens


def test_a_notebook_shows_the_report() -> None:
    shown = replay(limit=5, hash="none")._repr_html_()
    assert shown.startswith("<pre")
    assert "Prefix cache" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_block": 5}, "num_block=5: no such option; did you mean num_blocks"),
        ({"colour": "red"}, "colour='red': no such option; the names are those of `kvledger replay --help`"),
        ({"policy": "lifo"}, "policy='lifo': not known; use one of fcfs, priority"),
        ({"hash": "md5"}, "hash='md5': not known"),
        ({"speed_up": 0.0}, "speed_up=0.0: must be above 0"),
        ({"session_gap": float("nan")}, "session_gap=nan: not a number from 0 on"),
        ({"limit": 0}, "limit=0: out of range"),
        ({"sequential": True, "speed_up": 2.0}, "speed_up=2.0: no time passes in sequence"),
        ({"sequential": True, "policy": "priority"}, "policy='priority': nobody competes in sequence"),
        ({"slo": "fast"}, "slo='fast'"),
        ({"plan": b"{}", "model": "gpt2"}, "model='gpt2': plan is given too"),
        ({"plan": b"{}", "block_size": 32}, "block_size=32: --plan says so itself"),
        ({"trace": [], "closed_loop": True}, "closed_loop=True: requests on one clock have no sessions"),
        ({"trace": [], "format": "azure"}, "format='azure': the trace is open already"),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        replay(**options)
    assert message in str(raised.value)


def test_an_engine_that_would_not_start_is_refused() -> None:
    with pytest.raises(InputError, match="num-blocks or --kv-cache-memory-bytes"):
        replay(model="meta-llama/Llama-3.1-70B", gpu="L4")


def test_sessions_in_a_closed_loop(tmp_path: Path) -> None:
    path = write(tmp_path, session(agent_request(0, 130, [1, 2]), agent_request(5, 200, [1, 2, 3], think_time=2.0)))
    table = RequestTable()
    replay(path, closed_loop=True, hash="none", listeners=[table])
    end, arrival = table.columns["end"][0], table.columns["arrival"][1]
    assert arrival == pytest.approx(end + 2.0)
