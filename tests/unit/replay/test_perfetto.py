"""Steps and requests as a timeline for Perfetto."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger.errors import ConfigError
from kvledger.replay import replay
from kvledger.replay.perfetto import PerfettoLog, phases
from kvledger.replay.records import RequestRecord


def record(arrival: float, end: float, **more: Any) -> RequestRecord:
    return RequestRecord(0, 0, 0, arrival, end, 8, 3, "finished", **more)


@pytest.mark.parametrize(
    ("given_record", "expected"),
    [
        (record(0, 9, admitted=1.0, first_token=4.0), [(0, 1, "waiting"), (1, 4, "prefill"), (4, 9, "decode")]),
        (
            record(0, 9, admitted=0.0, first_token=2.0, away=[(3.0, 5.0)]),
            [(0, 2, "prefill"), (2, 3, "decode"), (3, 5, "preempted"), (5, 9, "decode")],
        ),
        # Away before its first token; then in the step that computed its prompt again.
        (
            record(0, 9, admitted=0.0, first_token=7.0, away=[(2.0, 4.0), (5.0, 6.0)]),
            [(0, 2, "prefill"), (2, 4, "preempted"), (4, 5, "prefill"), (5, 6, "preempted"), (6, 7, "prefill"),
             (7, 9, "decode")],
        ),
        (record(0, 3), [(0, 3, "waiting")]),
        (record(2, 2), []),
        (record(0, 4, admitted=0.0, first_token=4.0), [(0, 4, "prefill")]),
    ],
)  # fmt: skip
def test_phases_of_a_request(given_record: RequestRecord, expected: list[tuple[float, float, str]]) -> None:
    assert phases(given_record) == expected


def events(path: Path) -> list[dict[str, Any]]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: list[dict[str, Any]] = json.loads(content)["traceEvents"]
    return found


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_every_step_and_every_request_is_a_slice(name: str, tmp_path: Path) -> None:
    log = PerfettoLog(str(tmp_path / name))
    result = replay(limit=60, hash="none", num_blocks=12_000, tp=1, listeners=[log])
    log.close()
    slices = [event for event in events(tmp_path / name) if event["ph"] == "X"]
    steps = [event for event in slices if event["pid"] == 1]
    assert len(steps) == result.num_steps
    assert max(step["ts"] + step["dur"] for step in steps) == pytest.approx(result.simulated_seconds * 1e6, abs=0.01)
    assert sum(step["args"]["preempted"] for step in steps) == result.num_preemptions > 0
    requests = [event for event in slices if event["name"].startswith("request ")]
    assert len(requests) == 60
    assert sum(event["args"]["output tokens"] for event in requests) == result.num_output_tokens
    counters = [
        event["args"] for event in events(tmp_path / name) if event["ph"] == "C" and event["name"] == "requests"
    ]
    assert max(counter["waiting"] for counter in counters) == max(result.timeline.waiting)


@given(
    spans=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), min_size=1, max_size=30),
)
def test_requests_of_a_lane_do_not_overlap(
    spans: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lanes") / "run.json"
    log = PerfettoLog(str(path))
    made = sorted([(float(start + length), float(start)) for start, length in spans])
    for end, start in made:
        log.ended(record(start, end))
    log.close()
    lanes: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events(path):
        if event["ph"] == "X" and event["name"].startswith("request "):
            lanes[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, lanes.values())) == len(spans)
    for lane in lanes.values():
        lane.sort(key=lambda span: (span[1], span[0]))
        assert all(before[1] <= after[0] for before, after in pairwise(lane))
    # No more lanes than requests at the same time, those that only touch among them.
    most = max(sum(start <= at <= end for end, start in made) for at, _ in made)
    assert len(lanes) <= most


@pytest.mark.parametrize(("name", "message"), [("run.txt", "end it in .json"), ("no/run.json", "cannot be written")])
def test_a_file_that_cannot_be_written_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        PerfettoLog(str(tmp_path / name))
