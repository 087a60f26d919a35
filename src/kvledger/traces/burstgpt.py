"""Reader of the BurstGPT traces: CSV, one request a row, without any content.

    Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
    5,ChatGPT,472,18,490,Conversation log

Timestamp: seconds since the trace began. Releases with the columns "Session ID" and "Elapsed time" (seconds that the
answer took) have sessions. A row without response tokens is a request that failed: it is left out, and counted. There
are no hash ids, so every prompt is unique: such a trace measures load, never sharing.
"""

from collections.abc import Iterator, Mapping

from kvledger.traces.csv_rows import CsvReader
from kvledger.traces.first_record import FirstRecord, csv_cells
from kvledger.traces.lines import TraceLines
from kvledger.traces.reader import is_time, sessions_of
from kvledger.traces.trace_request import TraceRequest, TraceSession

_SESSION = "Session ID"
_ELAPSED = "Elapsed time"


class BurstGptReader(CsvReader):
    name = "burstgpt"
    mark = "the header Timestamp,Model,Request tokens,Response tokens,..."
    columns = ("Timestamp", "Request tokens", "Response tokens")
    time_column = "Timestamp"

    def __init__(self, lines: TraceLines, block_size: int | None) -> None:
        super().__init__(lines, block_size)
        self.num_failed: int = 0
        self._numbers: dict[str, int] = {}
        # Session -> when its last answer was there.
        self._ends: dict[int, float] = {}
        self.has_sessions = _SESSION in csv_cells(lines.peek())

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return set(BurstGptReader.columns) <= set(first.columns)

    def requests(self) -> Iterator[TraceRequest]:
        yield from super().requests()
        if self.num_failed:
            self.notes.append(f"{self.num_failed:,} requests without an answer (they failed) are left out")

    def sessions(self) -> Iterator[TraceSession]:
        return sessions_of(self.requests())

    def request(self, row: Mapping[str, str]) -> TraceRequest | None:
        seconds = _seconds(row["Timestamp"])
        if seconds is None:
            self.lines.bad("Timestamp", f"expected seconds, got {row['Timestamp'][:40]}")
            return None
        num_prompt = self.count(row, "Request tokens", 0)
        num_output = self.count(row, "Response tokens", 0) if num_prompt is not None else None
        if num_prompt is None or num_output is None:
            return None
        if num_prompt == 0 or num_output == 0:
            self.num_failed += 1
            return None
        key = row.get(_SESSION, "").strip()
        session = self._numbers.setdefault(key, len(self._numbers) + 1) if key else 0
        end = self._ends.get(session)
        elapsed = _seconds(row.get(_ELAPSED, ""))
        if session and elapsed is not None:
            self._ends[session] = seconds + elapsed
        think_time = 0.0 if end is None else max(0.0, seconds - end)
        return TraceRequest(seconds, num_prompt, num_output, [], 0, session=session, think_time=think_time)


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if is_time(seconds) else None
