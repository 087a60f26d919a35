"""RecordingLog: a recording that an engine writes while it serves, whatever becomes of the engine or the disk."""

import errno
import gzip
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from kvledger.traces import recording_log
from kvledger.traces.formats import open_trace
from kvledger.traces.reader import TraceReader
from kvledger.traces.recording_log import Ended, Numbering, RecordingLog, marked
from kvledger.traces.trace_request import TraceRequest


def names(*contents: str) -> list[bytes]:
    """Hashes as an engine has them."""
    return [content.encode().ljust(32, b".") for content in contents]


def ended(arrival: float, num_prompt: int = 33, num_output: int = 20, *contents: str, **known: Any) -> Ended:
    return Ended(arrival, num_prompt, num_output, names(*contents), **known)


def read(path: Path) -> tuple[list[TraceRequest], TraceReader]:
    with closing(open_trace(str(path))) as reader:
        return list(reader.requests()), reader


def log_of(path: Path, secret: str | None = None, **options: Any) -> RecordingLog:
    return RecordingLog(str(path), 16, Numbering(secret), flush_seconds=0.01, **options)


def test_what_ended_is_read_back_in_the_order_of_arrival(tmp_path: Path) -> None:
    log = log_of(tmp_path / "t.jsonl.gz", steps=True)
    start = monotonic()
    log.add(ended(start + 2, 33, 20, "a", "b", "c", priority=1, step=7, session="chat", scope="salt"), start + 1)
    log.add(ended(start + 1, 40, 3, "a", "x", step=4), start + 3)
    log.close()
    (first, second), reader = read(tmp_path / "t.jsonl.gz")
    assert reader.has_steps
    assert (first.num_prompt_tokens, first.num_output_tokens, first.step, first.session) == (40, 3, 4, 0)
    assert (second.num_prompt_tokens, second.num_output_tokens, second.step, second.priority) == (33, 20, 7, 1)
    assert second.arrival_time - first.arrival_time == pytest.approx(1.0, abs=1e-5)
    assert second.session > 0
    assert second.scope > 0
    # 33 tokens have two whole blocks; the answer fills the third one, which the prompt begins.
    assert len(second.hash_ids) == 2
    assert len(second.output_ids) == 1
    assert first.hash_ids[0] == second.hash_ids[0]
    assert first.hash_ids[1] != second.hash_ids[1]
    assert log.num_written == 2


def test_names_are_numbers_under_a_key(tmp_path: Path) -> None:
    files = []
    for number, secret in enumerate(["ours", "ours", "theirs", None, None]):
        path = tmp_path / f"{number}.jsonl"
        log = log_of(path, secret)
        log.add(ended(monotonic(), 32, 1, "a", "b", scope="tenant"), 0.0)
        log.close()
        assert b"tenant" not in path.read_bytes()
        files.append(read(path)[0][0])
    assert files[0].hash_ids == files[1].hash_ids
    assert files[0].scope == files[1].scope
    assert len({tuple(each.hash_ids) for each in files}) == 4


def test_servers_of_one_key_are_joined(tmp_path: Path) -> None:
    for rank in range(2):
        log = log_of(tmp_path / f"t.dp{rank}.jsonl.gz", "ours")
        log.add(ended(monotonic(), 32, 1, "a", "b"), 0.0)
        log.close()
    requests, reader = read(tmp_path)
    assert requests[0].hash_ids == requests[1].hash_ids
    assert requests[0].scope == requests[1].scope
    assert reader.notes == ["2 recordings, merged by time"]


def test_blocks_without_names_are_nobodys(tmp_path: Path) -> None:
    log = log_of(tmp_path / "t.jsonl")
    log.add(ended(monotonic(), 48, 1, "a"), 0.0)
    log.add(ended(monotonic(), 48, 1), 0.0)
    log.close()
    named, unnamed = read(tmp_path / "t.jsonl")[0]
    assert len(set(named.hash_ids)) == 3
    assert unnamed.hash_ids == []


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl.gz").write_bytes(b"somebody else's")
    log = log_of(tmp_path / "t.jsonl.gz")
    log.add(ended(monotonic()), 0.0)
    log.close()
    assert (tmp_path / "t.jsonl.gz").read_bytes() == b"somebody else's"
    assert log.file == str(tmp_path / "t.1.jsonl.gz")
    assert len(read(tmp_path / "t.1.jsonl.gz")[0]) == 1
    assert (tmp_path / "t.1.jsonl.gz").stat().st_mode & 0o077 == 0


def test_a_large_recording_is_several_files(tmp_path: Path) -> None:
    log = log_of(tmp_path / "t.jsonl.gz", max_bytes=100)
    for _ in range(4):
        num_written = log.num_written
        for _ in range(20):
            log.add(ended(monotonic(), 33, 20, "a", "b", "c"), monotonic())
        while log.num_written < num_written + 20:
            time.sleep(0.005)
    log.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["t.1.jsonl.gz", "t.2.jsonl.gz", "t.3.jsonl.gz", "t.jsonl.gz"]
    requests, _ = read(tmp_path)
    assert len(requests) == 80
    assert len({tuple(request.hash_ids) for request in requests}) == 1


def test_a_cut_file_is_read_up_to_the_cut_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    log = log_of(path)
    for number in range(3):
        log.add(ended(monotonic(), 32, 1, str(number)), monotonic())
        while log.num_written <= number:
            time.sleep(0.005)
    log.close()
    path.write_bytes(path.read_bytes()[:-7])
    requests, reader = read(path)
    assert len(requests) >= 2
    assert any("is cut at its end" in note for note in reader.notes)


_SERVER = """
import sys, time
from kvledger.traces.recording_log import Ended, Numbering, RecordingLog
log = RecordingLog(sys.argv[1], 16, Numbering(), flush_seconds=0.01)
number = 0
while True:
    log.add(Ended(time.monotonic(), 32, 1, [number.to_bytes(32, "little")] * 2), time.monotonic())
    number += 1
    if log.num_written > 50:
        print(log.num_written, flush=True)
    time.sleep(0.001)
"""


def test_a_server_that_is_killed_leaves_what_was_flushed(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    with subprocess.Popen([sys.executable, "-c", _SERVER, str(path)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        num_flushed = int(server.stdout.readline())
        os.kill(server.pid, signal.SIGKILL)
    assert len(read(path)[0]) >= num_flushed


def test_a_full_disk_is_said_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, is_full = os.write, True

    def limited(descriptor: int, data: memoryview) -> int:
        if is_full:
            write(descriptor, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(recording_log.os, "write", limited)
    path = tmp_path / "t.jsonl.gz"
    log = log_of(path)
    for number in range(3):
        log.add(ended(monotonic(), 32, 1, "lost"), monotonic())
        while log.num_dropped <= number:
            time.sleep(0.005)
    is_full = False
    log.add(ended(monotonic(), 32, 2, "kept"), monotonic())
    log.close()
    assert (log.num_dropped, log.num_written) == (3, 1)
    assert [request.num_output_tokens for request in read(path)[0]] == [2]
    assert [record.message for record in caplog.records] == [
        f"{path}: requests are not recorded (No space left on device)",
        f"{path}: requests are recorded again; 3 are missing",
    ]
    gzip.decompress(path.read_bytes())  # nothing of what did not fit


def test_a_directory_that_is_not_there_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = log_of(tmp_path / "none" / "t.jsonl.gz")
    log.add(ended(monotonic()), 0.0)
    log.close()
    assert (log.num_dropped, log.num_written) == (1, 0)
    assert "requests are not recorded (No such file or directory)" in caplog.text


def test_who_is_too_fast_loses_requests_not_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_log, "MAX_WAITING", 5)
    log = log_of(tmp_path / "t.jsonl")
    log._queue.put((None, 0.0))  # type: ignore[arg-type]  # nothing that can be written: it is passed over
    num_added = 200
    for _ in range(num_added):
        log.add(ended(monotonic(), 32, 1, "a"), 0.0)
    log.close()
    assert log.num_written + log.num_dropped == num_added + 1
    assert len(read(tmp_path / "t.jsonl")[0]) == log.num_written


@pytest.mark.parametrize("harm", ["moved", "moved and replaced", "emptied", "removed"])
def test_a_file_that_somebody_takes_is_followed_by_another(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "t.jsonl.gz"
    log = log_of(path)
    log.add(ended(monotonic(), 32, 1, "a"), monotonic())
    while log.num_written < 1:
        time.sleep(0.005)
    if harm == "emptied":
        path.write_bytes(b"")
    elif harm == "removed":
        path.unlink()
    else:
        path.rename(tmp_path / "taken.jsonl.gz")
        assert len(read(tmp_path / "taken.jsonl.gz")[0]) == 1
    if harm == "moved and replaced":
        path.write_bytes(b"x" * 5000)
    log.add(ended(monotonic(), 32, 2, "a"), monotonic())
    log.close()
    assert (log.num_written, log.num_dropped) == (2, 0)
    # The first name is free again where it was moved; the numbers go on all the same.
    assert log.file == str(tmp_path / "t.1.jsonl.gz")
    assert [request.num_output_tokens for request in read(tmp_path / "t.1.jsonl.gz")[0]] == [2]


def test_a_directory_that_comes_late_has_the_name_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "late" / "t.jsonl.gz"
    log = log_of(path)
    for number in range(3):
        log.add(ended(monotonic()), 0.0)
        while log.num_dropped <= number:
            time.sleep(0.005)
    path.parent.mkdir()
    log.add(ended(monotonic()), 0.0)
    log.close()
    assert (log.file, log.num_written) == (str(path), 1)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/d/traffic.jsonl.gz", "/d/traffic.1.jsonl.gz"),
        ("a.b.jsonl", "a.b.1.jsonl"),
        ("v0.33/run.gz", "v0.33/run.1.gz"),
        ("plain", "plain.1"),
    ],
)
def test_numbers_stand_before_the_suffixes(path: str, expected: str) -> None:
    assert marked(path, "1") == expected
