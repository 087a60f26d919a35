"""What `kvledger trace` finds in a trace, and the trace in our own format."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.cli import main
from kvledger.core.watch.hit_curve import HitCurve
from kvledger.replay import replay
from kvledger.traces.answers import AnswerCeiling
from kvledger.traces.formats import open_trace
from kvledger.traces.reader import TraceReader
from kvledger.traces.summary import TraceSummary
from kvledger.traces.trace_request import TraceRequest
from tests.unit.traces import samples
from tests.unit.traces.recordings import agent_request, mooncake, session, write
from tests.unit.traces.words import tokenizer_file

Seen = list[tuple[float, int, int, list[int], int, int, int, float]]


def summarized(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["trace", *arguments, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_counts_times_and_sharing_of_three_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """600 tokens; the same 10 ms later: 599 tokens can be hit, 37 blocks; then 1,000, of which 512 are known."""
    found = summarized(capsys, write(tmp_path, *samples.MOONCAKE))
    assert (found["num_requests"], found["num_prompt_tokens"], found["num_output_tokens"]) == (3, 2200, 13)
    assert (found["seconds"], found["requests_per_second"]) == (0.02, 150.0)
    sharing = found["sharing"]
    assert isinstance(sharing, dict)
    assert sharing["num_hit_tokens"] == 37 * 16 + 512
    assert sharing["ceiling"] == (37 * 16 + 512) / 2200
    # 37 full blocks, then 32 known ones and 30 new.
    assert sharing["num_distinct_blocks"] == 67
    assert sharing["ceiling_within_sessions"] is None
    assert found["timeline"] == {"interval": 0.25, "requests": [3], "prompt_tokens": [2200], "output_tokens": [13]}
    assert found["gap_variation"] == 0.0


def test_sessions_and_what_they_share_with_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two sessions with the same first block; one goes on with its own."""
    sessions = [
        session(agent_request(0, 130, [1, 2]), agent_request(5, 200, [1, 2, 3], think_time=2.0), scope="global"),
        session(agent_request(0, 70, [1]), scope="global"),
    ]
    found = summarized(capsys, write(tmp_path, *sessions))
    assert (found["clock"], found["seconds"], found["num_sessions"]) == ("session", None, 2)
    sharing, thinks = found["sharing"], found["think_seconds"]
    assert isinstance(sharing, dict)
    assert isinstance(thinks, dict)
    assert (sharing["num_hit_tokens"], sharing["ceiling"]) == (128 + 64, 192 / 400)
    assert sharing["ceiling_within_sessions"] == 128 / 400
    assert sharing["pools"] == []
    assert thinks["mean"] == 2.0


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_the_ceiling_is_what_an_endless_pool_hits(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Against the replay of the real ledger: every pool of the table hits what it says."""
    random = Random(seed)
    prompts = [[random.randrange(4) if depth else 0 for depth in range(random.randrange(1, 5))] for _ in range(12)]
    lines = [
        mooncake(10.0 * number, random.randrange(32 * len(ids) - 31, 32 * len(ids) + 1), 1, ids)
        for number, ids in enumerate(prompts)
    ]
    path = write(tmp_path_factory.mktemp("ceiling"), *lines)

    def printed(*arguments: str) -> dict[str, object]:
        out = io.StringIO()
        with redirect_stdout(out):
            assert main([*arguments, "--json", "--trace-block-size", "32", "--block-size", "16"]) == 0
        result: dict[str, object] = json.loads(out.getvalue())
        return result

    sharing = printed("trace", path)["sharing"]
    assert isinstance(sharing, dict)
    pools = [(10_000, sharing["num_hit_tokens"])]
    if not sharing["num_duplicates"]:
        # Duplicates make a small difference in small pools.
        pools += [(point["num_blocks"], point["num_tokens"]) for point in sharing["pools"]]
    for num_blocks, expected in pools:
        result = printed("replay", path, "--sequential", "--num-blocks", str(num_blocks), "--hash", "none")
        cache = result["prefix_cache"]
        assert isinstance(cache, dict)
        assert cache["num_hit_tokens"] == expected


def test_answers_that_come_back_are_hits_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """32 tokens and an answer of 33, which fills two blocks; then all of it and one token more."""
    lines = [
        samples.line(session_id="a", timestamp=0, text_input="a " * 32, output_length=33),
        samples.line(session_id="a", delay=1000, text_input="b", output_length=1),
    ]
    found = summarized(capsys, write(tmp_path, *lines), "--tokenizer", str(tokenizer_file(tmp_path)))
    sharing = found["sharing"]
    assert isinstance(sharing, dict)
    assert (sharing["ceiling"], sharing["ceiling_with_answers"]) == (32 / 98, 64 / 98)


@settings(max_examples=100)
@given(
    work=st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(0, 2), max_size=5)), min_size=1, max_size=8),
    block_size=st.sampled_from([4, 8, 16, 3]),
)
def test_without_answers_both_ways_to_count_agree(work: list[tuple[int, list[int]]], block_size: int) -> None:
    """Of prompts in trace blocks of 8 tokens."""
    answers, curve = AnswerCeiling(block_size), HitCurve(block_size, 8)
    for num_tokens, ids in work:
        ids = ids[: -(-num_tokens // 8)]
        answers.add(TraceRequest(0.0, num_tokens, 1, ids, 8))
        curve.add(num_tokens, ids)
    assert answers.num_hit_tokens == curve.num_hit_tokens(10_000)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_the_ceiling_with_answers_is_what_an_endless_pool_hits(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Against a replay in which every turn waits for the answer before it."""
    random = Random(seed)
    lines = []
    for session_id in range(3):
        for turn in range(3):
            text = "a " * 20 * (turn == 0) + "b " * random.randrange(1, 30)
            lines.append(
                samples.line(session_id=session_id, delay=9000, text_input=text, output_length=random.randrange(1, 50))
            )
    folder = tmp_path_factory.mktemp("answers")
    path, words = write(folder, *lines), str(tokenizer_file(folder))
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["trace", path, "--tokenizer", words, "--json"]) == 0
    found = json.loads(out.getvalue())
    result = replay(path, tokenizer=words, closed_loop=True, block_size=16, hash="none", session_gap=1e5)
    assert result.prefix_cache.token_hit_rate == pytest.approx(found["sharing"]["ceiling_with_answers"] or 0.0)


def read(path: str, name: str | None, folder: Path) -> tuple[Seen, TraceReader]:
    reader = open_trace(path, name, tokenizer=str(tokenizer_file(folder)) if name in samples.TEXTS else None)
    requests: list[TraceRequest] = []
    if reader.has_clock:
        requests = list(reader.requests())
    else:
        for one in reader.sessions():
            requests += one.requests
            for request in one.requests:
                request.arrival_time += one.start or 0.0
    reader.close()
    requests.sort(key=lambda request: (request.arrival_time, request.num_prompt_tokens))
    return [
        (
            round(request.arrival_time, 6),
            request.num_prompt_tokens,
            request.num_output_tokens,
            request.hash_ids,
            request.block_size if request.hash_ids else 0,
            request.scope,
            max(0, request.session),
            round(request.think_time, 6),
        )
        for request in requests
    ], reader


@pytest.mark.parametrize("name", samples.SAMPLES)
def test_every_format_is_the_same_traffic_in_ours(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target = write(tmp_path, *samples.SAMPLES[name]), str(tmp_path / "ours.jsonl.gz")
    texts = ["--tokenizer", str(tokenizer_file(tmp_path))] if name in samples.TEXTS else []
    assert main(["trace", path, "--format", name, "--to", target, *texts]) == 0
    before, reader = read(path, name, tmp_path)
    after, again = read(target, None, tmp_path)
    assert [row[:5] for row in after] == [row[:5] for row in before]
    assert _sharing(after) == _sharing(before)
    if reader.has_sessions:
        assert [row[7] for row in after] == [row[7] for row in before]
    assert again.needs_closed_loop == reader.needs_closed_loop
    assert "requests written to" in capsys.readouterr().err


def _sharing(rows: Seen) -> list[tuple[int, int]]:
    """Scopes and sessions by the place where each comes first."""
    scopes = [row[5] for row in rows]
    sessions = [row[6] for row in rows]
    return [
        (scopes.index(scope), sessions.index(one) if one else -1) for scope, one in zip(scopes, sessions, strict=True)
    ]


def test_an_anonymous_copy_has_numbers_of_its_own_and_shares_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target = write(tmp_path, *samples.OURS_FINISHED, *samples.OURS_OTHER), tmp_path / "clean.jsonl"
    assert main(["trace", path, "--to", str(target), "--anonymize"]) == 0
    header, *rows = map(json.loads, target.read_text().splitlines())
    assert header == {"format": "kvledger.trace", "version": 1, "block_size": 16}
    assert [row.get("ids") for row in rows] == [[1, 2], [1], [3], [1], [4]]
    assert {field for row in rows for field in row} == {"t", "in", "out", "ids", "session", "think", "block"}
    capsys.readouterr()
    before, after = summarized(capsys, path), summarized(capsys, str(target))
    assert before["sharing"] == after["sharing"]


def test_a_sample_keeps_sessions_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sessions = [session(agent_request(0, 64, [1]), agent_request(5, 128, [1, 2])) for _ in range(200)]
    path = write(tmp_path, *sessions)
    tenth = summarized(capsys, path, "--sample", "0.1")
    assert 5 <= int(str(tenth["num_sessions"])) <= 40
    assert tenth["num_requests"] == 2 * int(str(tenth["num_sessions"]))
    assert summarized(capsys, path, "--sample", "0.1") == tenth
    assert summarized(capsys, path, "--sample", "0.1", "--seed", "5") != tenth
    assert summarized(capsys, path, "--sessions", "7")["num_requests"] == 14
    assert summarized(capsys, path, "--sessions", "7", "--limit", "3")["num_requests"] == 3


def test_what_fails_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = write(tmp_path, mooncake(0), "broken"), tmp_path / "ours.jsonl"
    assert main(["trace", path, "--to", str(target)]) == 1
    assert "line 2" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sample", "0"), "--sample 0.0: no share of a trace"),
        (("--anonymize",), "--anonymize True: nothing is written; give --to as well"),
        (("--to", "-", "--json"), "--json True: standard output is the trace's"),
        (("--block-size", "0"), "--block-size 0: out of range"),
        (("--to", "/nowhere/x.jsonl"), "there is no directory /nowhere"),
        (("--sessions", "0"), "--sessions 0: out of range"),
        (("--limit", "0"), "--limit 0: out of range"),
    ],
)
def test_what_cannot_work_is_said(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_file_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, mooncake(0))
    assert main(["trace", path, "--to", path]) == 2
    assert "is there already" in " ".join(capsys.readouterr().err.split())
    assert main(["trace", path, "--to", path, "--overwrite"]) == 0
    assert json.loads(Path(path).read_text().splitlines()[0])["format"] == "kvledger.trace"


def test_the_report_is_words_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--limit", "300"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("bundled sample mooncake format", "requests 300", "ceiling of the hit rate",
                  "The smallest pool", "Requests per second", "Prompt tokens per second"):  # fmt: skip
        assert words in out
    assert main(["trace", write(tmp_path, *samples.AZURE_2024)]) == 0
    assert "The trace has no ids" in capsys.readouterr().out


def test_every_key_and_every_option_is_in_the_guide() -> None:
    from dataclasses import fields

    from kvledger.cli.trace_options import TraceOptions
    from kvledger.traces.formats import FORMATS
    from kvledger.traces.recording import Header, Row
    from kvledger.traces.summary import PoolPoint, Sharing, TrafficTimeline

    guide = (Path(__file__).parents[3] / "docs" / "traces.md").read_text("utf-8")
    structs = (TraceSummary, Sharing, PoolPoint, TrafficTimeline)
    keys = [key for struct in structs for key in struct.__struct_fields__]
    keys += [*Header.__struct_encode_fields__, *Row.__struct_encode_fields__, *FORMATS]
    assert [key for key in keys if f"`{key}`" not in guide] == []
    options = {f"--{field.name.replace('_', '-')}" for field in fields(TraceOptions)} - {"--trace"}
    assert [option for option in options if f"`{option}`" not in guide] == []
