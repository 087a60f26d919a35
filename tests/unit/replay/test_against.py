"""A replay beside what a server did: its metrics, its log, a recording of it."""

import json
from pathlib import Path

import pytest

from kvledger.replay import RequestTable, replay
from kvledger.replay.layout import InputError
from kvledger.replay.measured import read_measured
from kvledger.replay.result import ReplayResult
from tests.unit.traces.recordings import write

pytest.importorskip("prometheus_client")


def scrape(
    queries: float = 1000,
    hits: float = 400,
    requests: tuple[int, int] = (7, 3),
    preemptions: int = 2,
    first: float = 1.0,
) -> str:
    """Of two engines with one model. All first tokens came after 0.5 to 1 times `first` seconds."""
    number = sum(requests)
    lines = [
        "# TYPE vllm:prefix_cache_queries_total counter",
        f'vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {queries / 2}',
        f'vllm:prefix_cache_queries_total{{engine="1",model_name="m"}} {queries / 2}',
        "# TYPE vllm:prefix_cache_hits_total counter",
        f'vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}',
        "# TYPE vllm:num_preemptions_total counter",
        f'vllm:num_preemptions_total{{engine="0",model_name="m"}} {preemptions}',
        "# TYPE vllm:request_success_total counter",
        f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} {requests[0]}',
        f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="m"}} {requests[1]}',
        "# TYPE vllm:time_to_first_token_seconds histogram",
        f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="{first / 2}",model_name="m"}} 0',
        f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="{first}",model_name="m"}} {number}',
        f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} {number}',
        f'vllm:time_to_first_token_seconds_count{{engine="0",model_name="m"}} {number}',
        f'vllm:time_to_first_token_seconds_sum{{engine="0",model_name="m"}} {0.75 * first * number}',
    ]
    return "\n".join(lines) + "\n"


def file(directory: Path, name: str, content: str) -> str:
    path = directory / name
    path.write_text(content)
    return str(path)


def test_two_scrapes_are_subtracted(tmp_path: Path) -> None:
    before = file(tmp_path, "before", scrape(1000, 400, (7, 3), 2, 1.0))
    after = file(tmp_path, "after", scrape(3000, 1000, (17, 3), 5, 1.0))
    measured = read_measured(f"{before},{after}")
    assert (measured.kind, measured.num_requests, measured.num_preemptions) == ("metrics", 10, 3)
    assert measured.token_hit_rate == 600 / 2000
    assert measured.ttft is not None
    assert (measured.ttft.mean, measured.ttft.range_of(0.5)) == (0.75, (0.5, 1.0))
    assert (measured.itl, measured.notes) == (None, [])


def test_one_scrape_is_from_the_start_on(tmp_path: Path) -> None:
    measured = read_measured(file(tmp_path, "scrape", scrape()))
    assert (measured.num_requests, measured.token_hit_rate) == (10, 0.4)
    assert measured.notes == ["one scrape: counts are from the start of the server on"]


LOG = """INFO 12-01 09:00:00 [loggers.py:1] Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 2 reqs, Waiting: 0 reqs, GPU KV cache usage: 40.0%, Prefix cache hit rate: 20.0%
INFO 12-01 09:00:10 [loggers.py:1] Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 4 reqs, Waiting: 3 reqs, Preemptions: 3, GPU KV cache usage: 80.0%, Prefix cache hit rate: 30.0%, External prefix cache hit rate: 90.0%
INFO something else
INFO 12-01 09:00:20 [loggers.py:1] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.0%, Prefix cache hit rate: 30.0%
"""  # noqa: E501


def test_a_log_says_hits_preemptions_and_usage(tmp_path: Path) -> None:
    measured = read_measured(file(tmp_path, "log", LOG))
    assert (measured.kind, measured.num_requests, measured.num_preemptions) == ("log", None, 3)
    assert measured.token_hit_rate == pytest.approx(0.3)
    assert measured.usage_mean == pytest.approx(0.6)


def recorded(tmp_path: Path, slower: float = 1.0) -> tuple[str, ReplayResult]:
    """A recording of what a replay did, its times longer by a factor."""
    table = RequestTable()
    result = replay(limit=60, hash="none", num_blocks=20_000, tp=1, listeners=[table])
    rows = [json.dumps({"format": "kvledger.trace", "version": 1, "block_size": 16})]
    columns = table.columns
    for i in sorted(range(60), key=columns["request"].__getitem__):
        arrival = columns["arrival"][i]
        rows.append(
            json.dumps(
                {
                    "t": arrival,
                    "in": columns["prompt_tokens"][i],
                    "out": columns["output_tokens"][i],
                    "hit": columns["hit_tokens"][i],
                    "preempted": columns["preemptions"][i],
                    "first": arrival + slower * columns["ttft"][i],
                    "end": arrival + slower * columns["e2e"][i],
                }
            )
        )
    return write(tmp_path, *rows, name="recording.jsonl"), result


def compared(path: str, **options: object) -> ReplayResult:
    return replay(limit=60, hash="none", num_blocks=20_000, tp=1, against=path, **options)


def test_a_replay_agrees_with_a_recording_of_itself(tmp_path: Path) -> None:
    path, _ = recorded(tmp_path)
    against = compared(path).against
    assert against is not None
    assert against.kind == "recording"
    rows = {row.quantity: row for row in against.rows}
    for quantity in ("requests finished", "hit rate, tokens", "preemptions"):
        assert rows[quantity].replayed == rows[quantity].low
    for quantity in ("time to first token, p99", "from arrival to end, mean", "between tokens, mean"):
        assert rows[quantity].replayed == pytest.approx(rows[quantity].low)
    assert {row.verdict for row in against.rows} == {"agrees"}
    # A recording knows the mean of each request, not single gaps.
    assert "between tokens, p99" not in rows
    assert "hits as the server did" in against.verdict
    assert "mean times are within 25%" in against.verdict


def test_a_server_of_half_the_speed_is_seen(tmp_path: Path) -> None:
    path, _ = recorded(tmp_path, slower=2.0)
    against = compared(path).against
    assert against is not None
    rows = {row.quantity: row for row in against.rows}
    assert rows["time to first token, mean"].verdict == "faster"
    assert rows["hit rate, tokens"].verdict == "agrees"
    assert "time to first token, mean is 0.5 times the server's" in against.verdict
    assert against.verdict.endswith("Step times of your own (--step-time) set the clock.")


def test_another_pool_hits_and_preempts_otherwise(tmp_path: Path) -> None:
    path, result = recorded(tmp_path)
    against = replay(limit=60, hash="none", num_blocks=12_000, tp=1, against=path).against
    assert against is not None
    rows = {row.quantity: row for row in against.rows}
    assert rows["preemptions"].low == result.num_preemptions
    assert rows["preemptions"].verdict == "more"
    assert "it preempts" in against.verdict


def test_other_traffic_is_not_compared(tmp_path: Path) -> None:
    against = replay(limit=3, hash="none", against=file(tmp_path, "scrape", scrape())).against
    assert against is not None
    assert against.verdict == "Not the same traffic: the server finished 10 requests, the replay 3."


def test_in_sequence_only_hits_are_compared(tmp_path: Path) -> None:
    against = replay(limit=10, hash="none", sequential=True, against=file(tmp_path, "scrape", scrape(hits=0))).against
    assert against is not None
    assert [row.quantity for row in against.rows] == ["requests finished", "hit rate, tokens"]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (["nothing 1"], "neither vLLM's log nor a scrape of its /metrics"),
        (["a{b"], "neither a scrape of /metrics nor vLLM's log"),
        ([scrape(3000), scrape(1000)], "the counters fell: before comes first"),
        ([scrape(), scrape(), scrape()], "expected one file, or two scrapes as before,after"),
        (['{"format": "kvledger.trace", "version": 1, "block_size": 16}\n{"t": 0, "in": 5, "out": 1}\n'],
         "nothing was measured in this trace"),
        (['{"format": "kvledger.trace", "version": 9, "block_size": 16}\n'], "against: "),
        (["[" * 9], "neither"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(contents: list[str], message: str, tmp_path: Path) -> None:
    paths = [file(tmp_path, str(number), content) for number, content in enumerate(contents)]
    with pytest.raises(InputError) as raised:
        read_measured(",".join(paths))
    assert message in str(raised.value)
