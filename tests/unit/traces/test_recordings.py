"""Recordings of servers: rows in the order of their ends, parts one behind the other, files side by side."""

from pathlib import Path

import pytest

from kvledger.errors import ConfigError
from kvledger.traces.formats import open_trace
from kvledger.traces.trace_request import TraceError, TraceRequest
from tests.unit.traces import samples
from tests.unit.traces.recordings import write

RUN_7 = samples.OURS_FINISHED


def read(path: str) -> list[TraceRequest]:
    reader = open_trace(path)
    try:
        return list(reader.requests())
    finally:
        reader.close()


def times(requests: list[TraceRequest]) -> list[float]:
    return [request.arrival_time for request in requests]


def test_rows_in_the_order_of_their_ends_are_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    made = read(write(tmp_path, *RUN_7))
    assert times(made) == [0.5, 1.0, 3.5, 4.0]
    # The session's first answer was there at 2.5 s.
    assert [request.think_time for request in made] == [0.0, 0.0, 0.0, 1.5]


def test_a_row_that_a_mark_excludes_is_broken(tmp_path: Path) -> None:
    path = write(tmp_path, *RUN_7, '{"t": 2, "in": 20, "out": 3}')
    with pytest.raises(TraceError, match="line 7, field t: 1 s before the line above"):
        read(path)


def test_nothing_is_held_back_beyond_a_mark(tmp_path: Path) -> None:
    reader = open_trace(write(tmp_path, *RUN_7))
    requests = reader.requests()
    assert next(requests).arrival_time == 0.5
    # Up to the mark in line 4.
    with pytest.raises(TraceError, match=r"line 4: here"):
        reader.lines.fail("", "here")
    reader.close()


def test_parts_of_one_server_share_ids_and_sessions(tmp_path: Path) -> None:
    made = read(write(tmp_path, *RUN_7, *samples.OURS_ROTATED))
    assert times(made)[-2:] == [4.0, 60.0]
    assert (made[-1].scope, made[-1].session) == (made[-2].scope, made[-2].session)
    assert made[-1].think_time == 51.0


def test_parts_of_others_share_nothing(tmp_path: Path) -> None:
    made = read(write(tmp_path, *RUN_7, *samples.OURS_OTHER))
    assert times(made)[-1] == 31.0
    assert made[-1].block_size == 32
    assert (made[-1].scope == 0, made[-1].session == made[-2].session) == (False, False)


def test_a_part_says_when_it_started(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 5, field start: missing"):
        read(write(tmp_path, *samples.OURS, *samples.OURS_ROTATED))


def directory(tmp_path: Path, *files: list[str]) -> str:
    folder = tmp_path / "recordings"
    folder.mkdir()
    for number, lines in enumerate(files):
        write(folder, *lines, name=f"{number}.jsonl.gz")
    return str(folder)


def test_a_directory_is_merged_by_time(tmp_path: Path) -> None:
    path = directory(tmp_path, samples.OURS_ROTATED, RUN_7, samples.OURS_OTHER)
    made = read(path)
    assert times(made) == [0.5, 1.0, 3.5, 4.0, 31.0, 60.0]
    own = {request.scope for request in made if request.block_size == 16}
    assert len(own) == 1
    assert made[4].scope not in own
    assert made[3].session == made[5].session != made[4].session


def test_a_cut_file_of_several_is_named(tmp_path: Path) -> None:
    path = directory(tmp_path, RUN_7, samples.OURS_OTHER)
    cut = Path(path) / "1.jsonl.gz"
    cut.write_bytes(cut.read_bytes()[:-12])
    reader = open_trace(path)
    assert times(list(reader.requests()))[:2] == [0.5, 1.0]
    assert reader.notes[0] == "2 recordings, merged by time"
    assert reader.notes[1].startswith(f"{cut}: the recording is cut at its end")
    reader.close()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "0 files; expected 1 to 512 recordings"),
        ([RUN_7, samples.MOONCAKE], "line 1, field format: not a recording of kvledger"),
        ([RUN_7, samples.OURS], "line 1, field start: missing: recordings are merged by the clock"),
        ([RUN_7, []], "the trace is empty"),
    ],
)
def test_a_directory_of_something_else_is_refused(tmp_path: Path, files: list[list[str]], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read(directory(tmp_path, *files))


def test_a_directory_is_not_told_how_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a directory holds recordings"):
        open_trace(directory(tmp_path, RUN_7), trace_block_size=16)
