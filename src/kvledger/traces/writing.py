"""TraceWriter: any traffic in the format of kvledger's own traces (recording.py)."""

import gzip
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable
from itertools import count
from types import TracebackType
from typing import BinaryIO, Final, cast

import msgspec

from kvledger.errors import wrong_value
from kvledger.traces.recording import FIRST_OF_OTHERS, FORMAT, VERSION, Header, Row
from kvledger.traces.trace_request import TraceRequest

# Of a trace without ids, which needs none.
_NO_BLOCK_SIZE: Final = 16
_DECIMALS: Final = 6


class TraceWriter:
    """Writes a file, packed where the name ends in .gz. It has its name once it is whole: what fails leaves nothing.

    `anonymous`: ids, scopes and sessions are numbered anew in the order in which they come.
    """

    def __init__(self, path: str, *, clock: str, follows: bool, block_size: int, anonymous: bool, source: str) -> None:
        self._path: Final = path
        self._files: Final = _open(path)
        self._write: Final[Callable[[bytes], object]] = self._files[0].write
        self._encode: Final = msgspec.json.Encoder().encode
        self._block_size: Final = block_size or _NO_BLOCK_SIZE
        self._numbers: Final = _Numbers() if anonymous else None
        # Scopes and sessions of joined recordings, whose numbers are a reader's own.
        self._joined: Final[defaultdict[int, int]] = defaultdict(count(FIRST_OF_OTHERS // 2).__next__)
        self.num_requests: int = 0
        header = Header(
            FORMAT,
            VERSION,
            self._block_size,
            clock="session" if clock == "session" else "trace",
            turns="follow" if follows else "recorded",
            source=None if anonymous else source,
        )
        self._write(self._encode(header) + b"\n")

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path == "-":
            self._files[0].flush()
            return
        for file in self._files:
            file.close()
        if kind is None:
            os.replace(_part(self._path), self._path)
        else:
            os.unlink(_part(self._path))

    def add(self, time: float, request: TraceRequest) -> None:
        """The next request, at that time of the traffic's clock."""
        ids, scope, session = request.hash_ids, request.scope, request.session
        output_ids = request.output_ids
        if self._numbers is not None:
            ids, output_ids = self._numbers.ids(ids, scope), self._numbers.ids(output_ids, scope)
            scope, session = 0, self._numbers.session(session)
        has_own_size = bool(ids) and request.block_size != self._block_size
        row = Row(
            round(time, _DECIMALS),
            request.num_prompt_tokens,
            request.num_output_tokens,
            ids=ids,
            out_ids=output_ids,
            scope=self._own(scope),
            session=self._own(max(0, session)),
            priority=request.priority,
            think=round(request.think_time, _DECIMALS) if session > 0 and request.think_time else None,
            block=request.block_size if has_own_size else None,
        )
        self._write(self._encode(row) + b"\n")
        self.num_requests += 1

    def _own(self, number: int) -> int:
        return number if number < FIRST_OF_OTHERS else self._joined[number]


class _Numbers:
    """Numbers in the order in which things come. Ids of several scopes become ids of one."""

    def __init__(self) -> None:
        self._ids: Final[defaultdict[Hashable, int]] = defaultdict(count(1).__next__)
        self._sessions: Final[defaultdict[int, int]] = defaultdict(count(1).__next__)

    def ids(self, ids: list[int], scope: int) -> list[int]:
        numbers = self._ids
        return [numbers[scope, x] for x in ids]

    def session(self, session: int) -> int:
        return self._sessions[session] if session > 0 else 0


def _part(path: str) -> str:
    return f"{path}.part"


def _open(path: str) -> list[BinaryIO]:
    """What is written to, and what it writes to itself."""
    if path == "-":
        return [sys.stdout.buffer]
    try:
        file = open(_part(path), "wb")  # noqa: SIM115 (closed by whoever writes)
    except OSError as failed:
        raise wrong_value("to", path, f"cannot be written ({failed.strerror})", "name another file") from None
    if not path.endswith(".gz"):
        return [file]
    # Without name and time, so that equal traffic makes equal files.
    return [cast(BinaryIO, gzip.GzipFile("", "wb", fileobj=file, mtime=0)), file]
