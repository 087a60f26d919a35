"""Reader of the Azure LLM inference traces: CSV, one request a line, without any content.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:17:03.9799600,4808,10

There are no hash ids, so every prompt is unique: such a trace measures load, never sharing.
"""

import math
from collections.abc import Iterator
from datetime import UTC, datetime

from kvledger.traces.reader import TraceReader
from kvledger.traces.trace_request import MAX_TOKENS, TraceRequest

_COLUMNS = (b"TIMESTAMP", b"ContextTokens", b"GeneratedTokens")


class AzureReader(TraceReader):
    name = "azure"
    mark = "the header TIMESTAMP,ContextTokens,GeneratedTokens"

    @staticmethod
    def recognises(first_line: bytes) -> bool:
        return tuple(first_line.strip().split(b",")) == _COLUMNS

    def requests(self) -> Iterator[TraceRequest]:
        lines = self.lines
        if not self.recognises(lines.peek()):
            lines.fail("", f"expected {self.mark}")
        start: float | None = None
        latest = -math.inf
        for line in lines:
            cells = line.strip().split(b",")
            if tuple(cells) == _COLUMNS:
                continue
            if len(cells) != len(_COLUMNS):
                lines.bad("", f"expected {len(_COLUMNS)} comma-separated values, got {len(cells)}")
                continue
            seconds = _seconds(cells[0])
            if seconds is None or seconds < latest:
                problem = "a time like 2023-11-16 18:17:03.97" if seconds is None else "times that do not decrease"
                lines.bad("TIMESTAMP", f"expected {problem}, got {cells[0].decode(errors='replace')}")
                continue
            num_prompt = self._count(cells, 1, 1)
            num_output = self._count(cells, 2, 0)
            if num_prompt is None or num_output is None:
                continue
            if start is None:
                start = seconds
            latest = seconds
            yield TraceRequest(seconds - start, num_prompt, max(1, num_output), [], 0)

    def _count(self, cells: list[bytes], column: int, minimum: int) -> int | None:
        cell = cells[column]
        # No more digits than the largest number that counts.
        if cell.isdigit() and len(cell) <= len(str(MAX_TOKENS)) and minimum <= int(cell) <= MAX_TOKENS:
            return int(cell)
        field = _COLUMNS[column].decode()
        self.lines.bad(field, f"expected int from {minimum} to {MAX_TOKENS}, got {cell[:40].decode(errors='replace')}")
        return None


def _seconds(cell: bytes) -> float | None:
    """Seconds since the epoch of a time with up to seven decimals; None when it is none."""
    whole, point, fraction = cell.partition(b".")
    if point and not fraction.isdigit():
        return None
    try:
        # Any one time zone will do: only differences matter.
        moment = datetime.fromisoformat(whole.decode()).replace(tzinfo=UTC)
        return moment.timestamp() + (float(b"0." + fraction) if fraction else 0.0)
    except ValueError:
        return None
