"""One row for every request: RequestLog in a CSV or parquet file, RequestTable in memory."""

import csv
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from kvledger.errors import wrong_value
from kvledger.replay.records import ReplayListener, RequestRecord

# Column -> whether it is a number of seconds, an integer or text.
COLUMNS: Final = {
    "request": int, "session": int, "priority": int, "outcome": str, "prompt_tokens": int, "output_tokens": int,
    "hit_tokens": int, "preemptions": int, "arrival": float, "admitted": float, "first_token": float, "end": float,
    "ttft": float, "itl": float, "e2e": float,
}  # fmt: skip
_BATCH: Final = 8192
# Seconds are written to the nanosecond.
_DECIMALS: Final = 9


class RequestTable(ReplayListener):
    """The same rows in memory, by column: pandas.DataFrame(table.columns)."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}

    def ended(self, record: RequestRecord) -> None:
        for column, value in zip(self.columns.values(), _row(record), strict=True):
            column.append(value)


class RequestLog(ReplayListener):
    """Rows come in the order in which requests end. Close it."""

    def __init__(self, path: str) -> None:
        """ConfigError for a name that ends in neither .csv nor .parquet, and for a file that cannot be written."""
        self._rows: list[tuple[Any, ...]] = []
        if not path.endswith((".csv", ".parquet")):
            raise wrong_value("requests", path, "not a known kind of file", "end it in .csv or .parquet")
        self._file: Final = _CsvFile(path) if path.endswith(".csv") else _ParquetFile(path)

    def ended(self, record: RequestRecord) -> None:
        self._rows.append(_row(record))
        if len(self._rows) == _BATCH:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        self._file.write(self._rows)
        self._rows = []


def _row(record: RequestRecord) -> tuple[Any, ...]:
    times = (
        record.arrival, record.admitted, record.first_token, record.end, record.ttft, record.itl, record.e2e
    )  # fmt: skip
    return (
        record.number,
        record.session,
        record.priority,
        record.outcome,
        record.num_prompt_tokens,
        record.num_output_tokens,
        record.num_hit_tokens,
        len(record.away),
        *[None if seconds is None else round(seconds, _DECIMALS) for seconds in times],
    )


class _CsvFile:
    def __init__(self, path: str) -> None:
        try:
            self._file: Final = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115
        except OSError as failed:
            raise wrong_value("requests", path, f"cannot be written ({failed.strerror})", "name another file") from None
        self._writer: Final = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(COLUMNS)

    def write(self, rows: list[tuple[Any, ...]]) -> None:
        self._writer.writerows(rows)

    def close(self) -> None:
        self._file.close()


class _ParquetFile:
    def __init__(self, path: str) -> None:
        if find_spec("pyarrow") is None:
            raise wrong_value(
                "requests", path, "parquet needs a package", "pip install 'kvledger[traces]', or end it in .csv"
            )
        self._arrow: Final = import_module("pyarrow")
        types = {int: self._arrow.int64(), float: self._arrow.float64(), str: self._arrow.string()}
        self._schema: Final = self._arrow.schema([(name, types[kind]) for name, kind in COLUMNS.items()])
        try:
            self._writer: Final = import_module("pyarrow.parquet").ParquetWriter(path, self._schema)
        except OSError as failed:
            raise wrong_value("requests", path, f"cannot be written ({failed})", "name another file") from None

    def write(self, rows: list[tuple[Any, ...]]) -> None:
        columns = [[row[column] for row in rows] for column in range(len(COLUMNS))]
        arrays = [self._arrow.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._writer.write_table(self._arrow.Table.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        self._writer.close()
