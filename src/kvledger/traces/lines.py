"""TraceLines: the numbered lines of a trace file, and what to do about broken ones."""

import io
import lzma
import os
import zlib
from collections.abc import Iterator
from typing import Final, NoReturn

from kvledger.traces.opened import MAX_LINE_BYTES, LineStream, open_lines, open_raw
from kvledger.traces.trace_request import TraceError


class TraceLines:
    """Streams a file. Every broken line is an error, or counted when `skip_bad`; one that is longer than
    MAX_LINE_BYTES is always an error.

    A file whose writer was killed ends inside a line or inside a packed part. That is an error too, unless the format
    allows it (allow_cut): then it ends there, and is_cut says so.
    """

    def __init__(self, path: str, skip_bad: bool = False) -> None:
        self.path: Final = path
        self.num_bad: int = 0
        self.is_cut: bool = False
        self._skip_bad: Final = skip_bad
        self._allows_cut: bool = False
        self._raw: Final = open_raw(path)
        # 0 for what has no size, such as a pipe.
        self.num_bytes: Final = _size(self._raw)
        self._stream: LineStream | None = None
        self._line: int = 0
        self._first: bytes | None = None

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._raw.close()

    @property
    def num_bytes_read(self) -> int:
        """How far the file is read, in bytes of the file as it lies on the disk; 0 for what has no size."""
        return 0 if self.num_bytes == 0 or self._raw.closed else self._raw.tell()

    def allow_cut(self) -> None:
        """The file may end anywhere."""
        self._allows_cut = True

    def peek(self) -> bytes:
        """The first line that is not empty. TraceError for a file without one."""
        if self._first is None:
            for line in self._read():
                self._first = line
                return line
            raise TraceError(f"{self.path}: the trace is empty; expected at least one record")
        return self._first

    def take_first(self) -> bytes:
        """The first line, which is no record: iteration begins behind it."""
        first = self.peek()
        self._first = b""
        return first

    def __iter__(self) -> Iterator[bytes]:
        """Lines that are not empty, from the first one on."""
        if self._first:
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
        try:
            if self._stream is None:
                self._stream = open_lines(self.path, self._raw)
            readline = self._stream.readline
            while line := readline(MAX_LINE_BYTES + 1):
                self._line += 1
                if len(line) > MAX_LINE_BYTES:
                    self.fail("", f"longer than {MAX_LINE_BYTES >> 20} MiB; expected one record a line")
                if self._allows_cut and not line.endswith(b"\n"):
                    self.is_cut = True
                    return
                if not line.isspace():
                    yield line
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as broken:
            if self._allows_cut and isinstance(broken, EOFError):
                self.is_cut = True
                return
            raise TraceError(f"{self.path}, after line {self._line}: the file is damaged: {broken}") from broken


def _size(raw: io.BufferedReader) -> int:
    try:
        return os.fstat(raw.fileno()).st_size if raw.seekable() else 0
    except OSError:
        return 0
