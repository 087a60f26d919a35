"""TraceLines: the numbered lines of a trace file, and what to do about broken ones."""

import gzip
import lzma
import os
import sys
import zlib
from collections.abc import Iterator
from typing import BinaryIO, Final, NoReturn, cast

from kvledger.traces.trace_request import TraceError

# A session of a thousand prompts with a thousand ids each has about 6 MB.
MAX_LINE_BYTES: Final = 32 << 20


class TraceLines:
    """Streams a file, plain or .gz or .xz, or standard input (-). Every broken line is an error, or counted when
    `skip_bad`; one that is longer than MAX_LINE_BYTES is always an error.
    """

    def __init__(self, path: str, skip_bad: bool = False) -> None:
        self.path: Final = path
        self.num_bad: int = 0
        self._skip_bad: Final = skip_bad
        self._raw: Final = _open(path)
        # 0 for what has no size, such as a pipe.
        self.num_bytes: Final = os.fstat(self._raw.fileno()).st_size if self._raw.seekable() else 0
        self._stream: Final = _decompressed(path, self._raw)
        self._line: int = 0
        self._first: bytes | None = None

    def close(self) -> None:
        self._stream.close()
        self._raw.close()

    @property
    def num_bytes_read(self) -> int:
        """How far the file is read, in bytes of the file as it lies on the disk; 0 for what has no size."""
        return 0 if self.num_bytes == 0 or self._raw.closed else self._raw.tell()

    def peek(self) -> bytes:
        """The first line that is not empty. TraceError for a file without one."""
        if self._first is None:
            for line in self._read():
                self._first = line
                return line
            raise TraceError(f"{self.path}: the trace is empty; expected at least one record")
        return self._first

    def __iter__(self) -> Iterator[bytes]:
        """Lines that are not empty, from the first one on."""
        if self._first is not None:
            yield self._first
        yield from self._read()

    def bad(self, field: str, problem: str) -> None:
        """Reports the line that was yielded last as broken: raises TraceError, or counts it when skip_bad."""
        if not self._skip_bad:
            self.fail(field, problem)
        self.num_bad += 1

    def fail(self, field: str, problem: str) -> NoReturn:
        where = f", field {field}" if field else ""
        raise TraceError(f"{self.path}, line {self._line}{where}: {problem}")

    def _read(self) -> Iterator[bytes]:
        readline = self._stream.readline
        try:
            while line := readline(MAX_LINE_BYTES + 1):
                self._line += 1
                if len(line) > MAX_LINE_BYTES:
                    self.fail("", f"longer than {MAX_LINE_BYTES >> 20} MiB; expected one record a line")
                if not line.isspace():
                    yield line
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as broken:
            raise TraceError(f"{self.path}, after line {self._line}: the file is damaged: {broken}") from broken


def _open(path: str) -> BinaryIO:
    if path == "-":
        return sys.stdin.buffer
    try:
        return open(path, "rb")
    except (OSError, ValueError) as failed:
        reason = getattr(failed, "strerror", None) or str(failed)
        raise TraceError(f"{path}: cannot be read ({reason}); give the path of a trace file") from failed


def _decompressed(path: str, raw: BinaryIO) -> BinaryIO:
    if path.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if path.endswith(".xz"):
        return cast(BinaryIO, lzma.LZMAFile(raw))
    return raw
