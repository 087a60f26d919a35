"""CsvReader: a CSV file whose header names the columns, one request a row, in the order of arrival."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping

from kvledger.traces.first_record import csv_cells
from kvledger.traces.reader import TraceReader, on_one_clock
from kvledger.traces.trace_request import MAX_TOKENS, TraceRequest


class CsvReader(TraceReader):
    """Times count from the first row's."""

    columns: tuple[str, ...]
    time_column: str

    @abstractmethod
    def request(self, row: Mapping[str, str]) -> TraceRequest | None:
        """The request of a row at its time in seconds, by column. None when it is none, or broken."""

    def requests(self) -> Iterator[TraceRequest]:
        lines = self.lines
        header = csv_cells(lines.peek())
        if not set(self.columns) <= set(header):
            lines.fail("", f"expected {self.mark}")
        return on_one_clock(self._rows(header), lines, self.time_column, None)

    def _rows(self, header: tuple[str, ...]) -> Iterator[TraceRequest | None]:
        for line in self.lines:
            cells = csv_cells(line)
            if cells == header:
                continue
            if len(cells) != len(header):
                self.lines.bad("", f"expected {len(header)} comma-separated values, got {len(cells)}")
                continue
            yield self.request(dict(zip(header, cells, strict=True)))

    def count(self, row: Mapping[str, str], column: str, minimum: int) -> int | None:
        """A number of tokens; reports the row if it is none."""
        cell = row[column].strip()
        # No more digits than the largest number that counts.
        is_short = cell.isascii() and cell.isdigit() and len(cell) <= len(str(MAX_TOKENS))
        if is_short and minimum <= int(cell) <= MAX_TOKENS:
            return int(cell)
        self.lines.bad(column, f"expected int from {minimum} to {MAX_TOKENS}, got {cell[:40]}")
        return None
