"""`kvledger curve`: every pool size in one pass, equal to replays one after another."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.cli import main
from kvledger.cli.curve import parse_sizes
from kvledger.replay import replay
from kvledger.traces.trace_curve import trace_curve
from kvledger.traces.trace_request import TraceRequest
from tests.unit.traces.recordings import agent_request, mooncake, session, write


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["curve", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_points_are_of_the_sizes_that_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # a, b, and a again, up to its last block: an endless pool hits a's two full blocks.
    lines = [mooncake(0, 1100, ids=[1, 2, 3]), mooncake(1, 600, ids=[7, 8]), mooncake(2, 1100, ids=[1, 2, 4])]
    trace = write(tmp_path, *lines)
    code, out, err = run(capsys, trace, "--block-size", "512", "--at", "4,6,1k", "--json")
    assert (code, err) == (0, "")
    curve = json.loads(out)
    assert [point["num_blocks"] for point in curve["points"]] == [4, 6, 1000]
    assert curve["points"][2] == {"num_blocks": 1000, "num_hit_tokens": 1024, "token_hit_rate": 1024 / 2800}
    for point in curve["points"]:
        told = replay(trace, sequential=True, num_blocks=point["num_blocks"], block_size=512)
        assert point["num_hit_tokens"] == told.prefix_cache.num_hit_tokens
    assert curve["ceiling"]["num_hit_tokens"] == 1024
    assert curve["smallest"]["num_blocks"] == 4


def test_the_table_marks_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--limit", "300", "--num-blocks", "30k")
    assert code == 0
    for words in ("holds the longest prompt", "today's pool", "90 % of the ceiling", "knee", "ceiling", "30,000"):
        assert words in out
    assert "300 requests, one after another" in out


def test_sessions_without_a_clock_are_taken_one_after_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = session(agent_request(0.0, 128, [1, 2]), agent_request(5.0, 192, [1, 2, 3]))
    code, out, _ = run(capsys, write(tmp_path, first, first), "--block-size", "64", "--json")
    assert code == 0
    curve = json.loads(out)
    assert any("no common clock" in note for note in curve["notes"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--at", "0"), "--at 0: no size of a pool"),
        (("--at", "many"), "--at"),
        (("--block-size", "0"), "--block-size 0: out of range"),
        (("--num-blocks", "1"), "--num-blocks 1: out of range"),
    ],
)
def test_what_is_wrong_is_named(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())


def test_a_trace_without_ids_has_no_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(
        tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44", name="azure.csv"
    )
    code, _, err = run(capsys, trace)
    assert code == 2
    assert "no ids" in err


def test_sizes_as_words() -> None:
    assert parse_sizes("1000, 5k") == [1000, 5000]


@given(st.integers(0, 10_000))
@settings(max_examples=12)
def test_random_traffic_against_replays(seed: int) -> None:
    """Whole prompts and shared beginnings: a replay may have a block less to work with for each counted duplicate."""
    rng = random.Random(seed)
    requests = []
    for number in range(rng.randint(1, 25)):
        length = rng.randint(1, 6)
        ids = [rng.randint(0, 1) * 10 + depth for depth in range(length)]
        requests.append(TraceRequest(float(number), length * 16 - rng.choice([0, 1, 9]), 1, ids, 16))
    smallest = max(-(-request.num_prompt_tokens // 16) for request in requests) + 1
    sizes = [smallest + rng.randint(0, 20) for _ in range(3)]

    def hits(sizes: list[int]) -> tuple[list[int], int]:
        curve = trace_curve(requests, block_size=16, sizes=sizes, today=None, trace="t", format="f", notes=[])
        return [point.num_hit_tokens for point in curve.points], curve.num_duplicates

    most, num_duplicates = hits(sizes)
    least, _ = hits([max(2, size - num_duplicates) for size in sizes])
    for size, low, high in zip(sizes, least, most, strict=True):
        told = replay(requests, sequential=True, num_blocks=size, block_size=16, hash="none", block_by_block=True)
        assert low <= told.prefix_cache.num_hit_tokens <= high
