"""Several recordings as one trace: the files in a directory, of ranks side by side or of one server's rotation."""

import os
from collections.abc import Iterator
from heapq import merge
from typing import Final

import msgspec

from kvledger.traces.first_record import FirstRecord
from kvledger.traces.lines import TraceLines
from kvledger.traces.reader import TraceReader, sessions_of
from kvledger.traces.recording import RecordingReader
from kvledger.traces.trace_request import TraceError, TraceRequest, TraceSession

# All are open at the same time.
MAX_FILES: Final = 512


class MergedRecordings(TraceReader):
    """The recordings in a directory, by time. Files whose headers name one source of ids share them."""

    name = "kvledger"
    mark = "a directory of recordings"
    has_sessions = True
    knows_answers = True

    def __init__(self, directory: str, skip_bad: bool = False) -> None:
        self._parts: Final = _open_all(directory, skip_bad)
        first = self._parts[0]
        super().__init__(first.lines, None)
        self.block_size = first.block_size
        # (who numbered, "scope" or "session", its number) -> a number of the whole trace.
        self._numbers: Final[dict[tuple[str, str, int], int]] = {}

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return False

    def requests(self) -> Iterator[TraceRequest]:
        starts = [part.header.start or 0.0 for part in self._parts]
        base = min(starts)
        placed = [
            self._placed(number, part, start - base)
            for number, (part, start) in enumerate(zip(self._parts, starts, strict=True))
        ]
        yield from merge(*placed, key=_arrival)
        self.notes.append(f"{len(self._parts)} recordings, merged by time")
        self.notes += [f"{part.lines.path}: {note}" for part in self._parts for note in part.notes]

    def sessions(self) -> Iterator[TraceSession]:
        return sessions_of(self.requests())

    def close(self) -> None:
        for part in self._parts:
            part.close()

    @property
    def num_bad(self) -> int:
        return sum(part.num_bad for part in self._parts)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)

    @property
    def num_bytes_read(self) -> int:
        return sum(part.num_bytes_read for part in self._parts)

    def _placed(self, number: int, part: RecordingReader, offset: float) -> Iterator[TraceRequest]:
        who = part.header.ids or f"file {number}"
        for request in part.requests():
            request.arrival_time += offset
            request.scope = self._number(who, "scope", request.scope)
            request.session = self._number(who, "session", request.session) if request.session else 0
            yield request

    def _number(self, who: str, kind: str, number: int) -> int:
        return self._numbers.setdefault((who, kind, number), len(self._numbers) + 1)


def _open_all(directory: str, skip_bad: bool) -> list[RecordingReader]:
    """TraceError for a directory without recordings, with other files, or with one whose clock is not known."""
    paths = sorted(entry.path for entry in os.scandir(directory) if entry.is_file())
    if not 0 < len(paths) <= MAX_FILES:
        raise TraceError(f"{directory}: {len(paths):,} files; expected 1 to {MAX_FILES} recordings")
    parts: list[RecordingReader] = []
    try:
        for path in paths:
            lines = TraceLines(path, skip_bad)
            try:
                if not RecordingReader.recognises(FirstRecord(lines.peek())):
                    lines.fail("format", "not a recording of kvledger; a directory holds recordings only")
                parts.append(RecordingReader(lines, None))
            except (TraceError, msgspec.DecodeError):
                lines.close()
                raise
            if len(paths) > 1 and parts[-1].header.start is None:
                lines.fail("start", "missing: recordings are merged by the clock that it starts")
    except TraceError:
        for part in parts:
            part.close()
        raise
    return parts


def _arrival(request: TraceRequest) -> float:
    return request.arrival_time
