"""Rows of any kind, by a map of their fields."""

from pathlib import Path

import pytest

from kvledger.errors import ConfigError
from kvledger.traces.formats import open_trace
from kvledger.traces.trace_request import TraceError, TraceRequest
from tests.unit.traces.recordings import write
from tests.unit.traces.samples import line


def read(path: str, fields: str, block_size: int | None = None, *, skip_bad: bool = False) -> list[TraceRequest]:
    reader = open_trace(path, None, block_size, skip_bad, fields=fields)
    try:
        return list(reader.requests())
    finally:
        reader.lines.close()


@pytest.mark.parametrize(
    ("unit", "stamps", "seconds"),
    [
        ("s", [1.5, 3], 1.5),
        ("ms", [1500, 3000], 1.5),
        ("us", [1_500_000, 3_000_000], 1.5),
        ("ns", ["1500000000", "3000000000"], 1.5),
        ("iso", ["2026-05-01T10:00:00.5Z", "2026-05-01T10:00:02Z"], 1.5),
    ],
)
def test_a_time_has_its_unit(unit: str, stamps: list[object], seconds: float, tmp_path: Path) -> None:
    path = write(tmp_path, *[line(ts=stamp, n=10) for stamp in stamps])
    assert [request.arrival_time for request in read(path, f"timestamp=ts:{unit},input_length=n")] == [0.0, seconds]


def test_everything_that_a_request_has(tmp_path: Path) -> None:
    rows = [line(at=0, usage={"prompt": 40, "answer": 7}, blocks=["x", "y", "z"], user="ada", p=2)]
    rows += [line(at=1, usage={"prompt": 32, "answer": 0}, blocks=["x", "q"], user="bob")]
    fields = (
        "timestamp=at:s,input_length=usage.prompt,output_length=usage.answer,hash_ids=blocks,session=user,priority=p"
    )
    one, two = read(write(tmp_path, *rows), fields, 16)
    assert (one.num_prompt_tokens, one.num_output_tokens, one.priority, one.block_size) == (40, 7, 2, 16)
    assert (two.num_output_tokens, two.priority) == (1, 0)
    assert one.hash_ids[0] == two.hash_ids[0]
    assert one.session != two.session


def test_a_csv_file_with_a_header(tmp_path: Path) -> None:
    path = write(tmp_path, 'when,"n, all",ids', '0.5,20,"a b"', "1.5,32,a c")
    with pytest.raises(TraceError, match="field n: expected int"):
        read(path, "timestamp=when:s,input_length=n")
    path = write(tmp_path, "when,n,ids", "0.5,20,a b", "1.5,32,a c")
    one, two = read(path, "timestamp=when:s,input_length=n,hash_ids=ids", 16)
    assert (one.arrival_time, two.arrival_time) == (0.0, 1.0)
    assert one.hash_ids[0] == two.hash_ids[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("timestamp=ts,input_length=n", "a time needs its unit, timestamp=NAME:UNIT; use one of s, ms, us, ns, or iso"),
        ("timestamp=ts:h,input_length=n", "a time needs its unit"),
        ("timestamp=ts:s", "input_length is missing; give pairs like"),
        ("input=n", "'input=n' is no pair of a field"),
        ("", "'' is no pair of a field"),
        ("input_length=n,hash_ids=b", "hash_ids need it; say how many tokens an id stands for"),
    ],
)
def test_a_map_that_is_none_is_refused(fields: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(write(tmp_path, line(n=1)), fields)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (line(ts=1, n="many"), "line 2, field n: expected int from 1 to 33554432, got 'many'"),
        (line(ts="noon", n=1), "line 2, field ts: expected a time in s, got 'noon'"),
        (line(ts=1), "line 2, field n: expected int from 1 to 33554432, got None"),
        (line(ts=-5, n=1), "line 2, field ts: 5 s before the line above"),
        (line(ts=1, n=1, b=[1, 2]), r"line 2, field b: expected 1 ids for 1 tokens in blocks of 16, got 2"),
        ("[]", "line 2: expected an object"),
    ],
)
def test_a_broken_row_is_named(row: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, line(ts=0, n=1), row, line(ts=2, n=1))
    with pytest.raises(TraceError, match=message):
        read(path, "timestamp=ts:s,input_length=n,hash_ids=b", 16)
    assert len(read(path, "timestamp=ts:s,input_length=n,hash_ids=b", 16, skip_bad=True)) == 2
