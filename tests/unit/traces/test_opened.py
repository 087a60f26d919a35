"""Whatever a trace is packed in: archives, arrays, tables, pipes."""

import gzip
import io
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvledger.traces.formats import open_trace
from kvledger.traces.lines import TraceLines
from kvledger.traces.opened import GzipStream
from kvledger.traces.trace_request import TraceError
from tests.unit.traces.recordings import mooncake
from tests.unit.traces.samples import MOONCAKE, SHAREGPT
from tests.unit.traces.words import tokenizer_file

CONTENT = "".join(f"{line}\n" for line in MOONCAKE).encode()


def arrivals(path: Path | str) -> list[float]:
    reader = open_trace(str(path))
    try:
        return [request.arrival_time for request in reader.requests()]
    finally:
        reader.lines.close()


def zstd(content: bytes) -> bytes:
    packed: bytes = pytest.importorskip("zstandard").compress(content)
    return packed


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, zstd])
@pytest.mark.parametrize("name", ["trace.jsonl", "trace.bin"])
def test_what_it_is_packed_with_is_seen_whatever_its_name(
    name: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / name
    # Two parts in one file, as a writer leaves them that was started twice.
    path.write_bytes(pack(CONTENT) + pack((mooncake(30) + "\n").encode()))
    assert arrivals(path) == [0.0, 0.01, 0.02, 0.03]


def test_standard_input_is_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BufferedReader(io.BytesIO(gzip.compress(CONTENT)))  # type: ignore[type-var]

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert arrivals("-") == [0.0, 0.01, 0.02]


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_its_elements(indent: int | None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([json.loads(line) for line in MOONCAKE], indent=indent))
    assert arrivals(path) == [0.0, 0.01, 0.02]


def test_an_array_that_is_longer_than_what_is_read_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    chats = [json.loads(SHAREGPT[0]) for _ in range(200)]
    chats[7]["conversations"][0]["value"] = "a " * 600_000
    path.write_text(json.dumps(chats))
    reader = open_trace(str(path), tokenizer=str(tokenizer_file(tmp_path)))
    lengths = [session.requests[0].num_prompt_tokens for session in reader.sessions()]
    reader.lines.close()
    assert lengths == [4] * 7 + [600_001] + [4] * 192


@pytest.mark.parametrize("cut", [3, 60, 150])
def test_an_array_that_is_cut_is_broken_there(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([json.loads(line) for line in MOONCAKE])[:-cut])
    with pytest.raises(TraceError, match="not a record"):
        arrivals(path)


def test_a_parquet_file_is_its_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "trace.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([json.loads(line) for line in MOONCAKE]), path)
    assert arrivals(path) == [0.0, 0.01, 0.02]
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(TraceError, match="the parquet file is damaged"):
        arrivals(path)


@pytest.mark.parametrize("length", [1, 7, 1000])
def test_of_a_cut_archive_everything_comes_that_can_be_unpacked(length: int) -> None:
    """Members of 100 lines each; the last is cut."""
    lines = [f"{number}\n".encode() for number in range(300)]
    packed = [gzip.compress(b"".join(lines[first : first + 100])) for first in (0, 100, 200)]
    whole = b"".join(packed)
    stream = io.BufferedReader(GzipStream(io.BytesIO(whole[: len(whole) - min(length, len(packed[2]) - 20)])), 64)  # type: ignore[type-var]
    seen: list[bytes] = []
    with pytest.raises(EOFError):
        seen.extend(iter(stream.readline, b""))
    assert seen[:200] == lines[:200]
    assert lines[: len(seen)] == seen


def test_a_character_across_two_chunks_of_an_array_stays_whole(tmp_path: Path) -> None:
    """Chunks have a mebibyte, and a character of two bytes lies at each place in turn."""
    path = tmp_path / "array.json"
    for shift in range(2):
        path.write_text("[" + " " * shift + '"' + "\u00fc" * (1 << 20) + '"]', encoding="utf-8")
        lines = TraceLines(str(path))
        assert [line.decode() for line in lines] == ['"' + "\u00fc" * (1 << 20) + '"\n']
        lines.close()
