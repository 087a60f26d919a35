"""Opening a trace as a stream of lines: files, pipes and standard input; plain, .gz, .xz, .zst; JSON arrays, parquet.

What a file is packed with is seen by its first bytes, so that it works for pipes as well, whatever the name says. A
JSON array becomes one line an element, and a parquet file one JSON object a row: readers see lines alone.
"""

import io
import json
import lzma
import re
import sys
import zlib
from codecs import getincrementaldecoder
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, BinaryIO, Final, Protocol, cast

from kvledger.traces.trace_request import TraceError

# A session of a thousand prompts with a thousand ids each has about 6 MB.
MAX_LINE_BYTES: Final = 32 << 20
_CHUNK_BYTES: Final = 1 << 20
_GZIP: Final = b"\x1f\x8b"
_XZ: Final = b"\xfd7zXZ\0"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_PARQUET: Final = b"PAR1"
# Between two elements of an array.
_BETWEEN: Final = re.compile(r"[ \t\r\n,]*")
_BOM: Final = b"\xef\xbb\xbf"


class LineStream(Protocol):
    """What is read by lines. A line that is longer than the limit comes without its end."""

    def readline(self, limit: int, /) -> bytes: ...

    def close(self) -> None: ...


def open_raw(path: str) -> io.BufferedReader:
    """TraceError for what cannot be opened. `-`: standard input."""
    if path == "-":
        return cast(io.BufferedReader, sys.stdin.buffer)
    try:
        return open(path, "rb")
    except (OSError, ValueError) as failed:
        reason = getattr(failed, "strerror", None) or str(failed)
        raise TraceError(f"{path}: cannot be read ({reason}); give the path of a trace file") from failed


def open_lines(path: str, raw: io.BufferedReader) -> LineStream:
    """The lines in a file. TraceError where a package is missing that can read it."""
    magic = raw.peek(len(_XZ))[: len(_XZ)]
    if magic.startswith(_PARQUET):
        return _GivenLines(_parquet_rows(path, raw))
    stream = _decompressed(path, raw, magic)
    first = stream.peek(_CHUNK_BYTES)
    if first.startswith(_BOM):
        stream.read(len(_BOM))
        first = first[len(_BOM) :]
    if first.lstrip()[:1] == b"[":
        return _GivenLines(_array_items(stream))
    return stream


def _decompressed(path: str, raw: io.BufferedReader, magic: bytes) -> io.BufferedReader:
    unpacked: Any
    if magic.startswith(_GZIP):
        unpacked = GzipStream(raw)
    elif magic.startswith(_XZ):
        unpacked = lzma.LZMAFile(raw)  # noqa: SIM115 (closed with the stream)
    elif magic.startswith(_ZSTD):
        unpacked = _zstd_stream(path, raw)
    else:
        return raw
    return io.BufferedReader(unpacked, _CHUNK_BYTES)


def _zstd_stream(path: str, raw: BinaryIO) -> Any:
    if find_spec("compression") is not None and find_spec("compression.zstd") is not None:
        return import_module("compression.zstd").ZstdFile(raw)
    if find_spec("zstandard") is None:
        raise TraceError(f"{path}: packed with zstd, which needs a package: pip install 'kvledger[traces]'")
    return import_module("zstandard").ZstdDecompressor().stream_reader(raw, read_across_frames=True)


class GzipStream(io.RawIOBase):
    """Members of a gzip file, one after another. Of a file that ends inside one, all that can be unpacked comes before
    the EOFError; Python's own reader drops the last of it.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw: Final = raw
        self._packed: bytes = b""
        self._member: Any = zlib.decompressobj(wbits=31)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while True:
            if self._member.eof:
                # Zeros may fill the file up.
                self._packed = self._packed.lstrip(b"\0")
                if not (self._packed or self._read()):
                    return 0
                self._member = zlib.decompressobj(wbits=31)
            piece = self._member.decompress(self._packed, len(buffer))
            is_whole = self._member.eof
            self._packed = self._member.unused_data if is_whole else self._member.unconsumed_tail
            if piece:
                buffer[: len(piece)] = piece
                return len(piece)
            if not is_whole and not self._packed and not self._read():
                raise EOFError("it ends inside a packed part")

    def _read(self) -> bool:
        self._packed = self._raw.read(_CHUNK_BYTES)
        return len(self._packed) > 0


class _GivenLines:
    """A stream over lines that something else makes."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines: Final = lines

    def readline(self, limit: int, /) -> bytes:
        return next(self._lines, b"")[:limit]

    def close(self) -> None:
        """Nothing is open here."""


def _array_items(stream: io.BufferedReader) -> Iterator[bytes]:
    """The elements of a JSON array, one after another; of what is broken the rest as it stands, for its reader."""
    decoder = json.JSONDecoder()
    # A character may lie across the end of a chunk.
    characters = getincrementaldecoder("utf-8")("replace")
    text = characters.decode(stream.read(_CHUNK_BYTES)).lstrip()[1:]
    start = 0
    while True:
        start = _BETWEEN.match(text, start).end()  # type: ignore[union-attr]
        if text.startswith("]", start):
            return
        try:
            _, end = decoder.raw_decode(text, start)
            is_whole = end < len(text)
        except (ValueError, RecursionError):
            end, is_whole = len(text), False
        if not is_whole:
            # Cut off at the end of what is read so far, or broken; a number may go on as well.
            text, start = text[start:], 0
            more = stream.read(_CHUNK_BYTES) if len(text) <= MAX_LINE_BYTES else b""
            if more:
                text += characters.decode(more)
                continue
            if text:
                yield text.encode() + b"\n"
            return
        yield text[start:end].encode() + b"\n"
        start = end


def _parquet_rows(path: str, raw: io.BufferedReader) -> Iterator[bytes]:
    if find_spec("pyarrow") is None:
        raise TraceError(f"{path}: a parquet file, which needs a package: pip install 'kvledger[traces]'")
    if not raw.seekable():
        raise TraceError(f"{path}: a parquet file cannot be read from a pipe; give the path of a file")
    parquet = import_module("pyarrow.parquet")
    errors = import_module("pyarrow").ArrowException
    try:
        for batch in parquet.ParquetFile(raw).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield json.dumps(row, default=_as_text).encode() + b"\n"
    except (errors, OSError, ValueError) as broken:
        raise TraceError(f"{path}: the parquet file is damaged: {broken}") from None


def _as_text(value: Any) -> str:
    """Times in ISO 8601, bytes in hexadecimal, whatever else as it prints."""
    if isinstance(value, bytes):
        return value.hex()
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)
