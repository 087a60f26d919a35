"""FieldsReader: any file of rows, by a map from fields of a request to the names that they have there.

    timestamp=ts:ms,input_length=n_in,output_length=n_out,hash_ids=blocks,session=user

Rows are JSON objects or of a CSV file with a header; `usage.prompt_tokens` reaches into an object. A time has its unit
behind a colon: s, ms, us, ns, or iso for a date. hash_ids: numbers or texts, a list, or in CSV text with spaces between
them; they need --trace-block-size. Only input_length must be there.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Final

import msgspec

from kvledger.core.units import cdiv
from kvledger.errors import wrong_value
from kvledger.files.decoding import decode, describe
from kvledger.traces.clock import iso_seconds
from kvledger.traces.first_record import FirstRecord, csv_cells
from kvledger.traces.lines import TraceLines
from kvledger.traces.reader import TraceReader, falls, is_time, sessions_of
from kvledger.traces.trace_request import MAX_TOKENS, TraceRequest, TraceSession

_FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids", "session", "priority")
_UNITS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_FIX: Final = "give pairs like timestamp=ts:ms,input_length=n_in,output_length=n_out,hash_ids=blocks,session=user"
_ANYTHING: Final[msgspec.json.Decoder[object]] = msgspec.json.Decoder()


@dataclass(frozen=True)
class FieldMap:
    """`names`: of a field of a request, its name in the file. `unit`: of times; "iso" for dates."""

    names: Mapping[str, str]
    unit: str = "s"


def parse_fields(text: str) -> FieldMap:
    """ConfigError for what is no map."""
    names: dict[str, str] = {}
    unit = ""
    for pair in text.split(","):
        field, equals, name = (part.strip() for part in pair.partition("="))
        if not equals or field not in _FIELDS or not name:
            raise wrong_value("fields", text, f"{pair!r} is no pair of a field ({', '.join(_FIELDS)}) and a name", _FIX)
        if field == "timestamp":
            name, colon, unit = name.rpartition(":")
            if not colon or (unit not in _UNITS and unit != "iso"):
                problem = "a time needs its unit, timestamp=NAME:UNIT"
                raise wrong_value("fields", text, problem, f"use one of {', '.join(_UNITS)}, or iso for a date")
        names[field] = name
    if "input_length" not in names:
        raise wrong_value("fields", text, "input_length is missing", _FIX)
    return FieldMap(names, unit or "s")


class FieldsReader(TraceReader):
    """Not among the formats that are recognised: it is made for a map."""

    name = "fields"
    mark = "a map of fields"
    takes_block_size = True

    def __init__(self, lines: TraceLines, block_size: int | None, fields: FieldMap) -> None:
        super().__init__(lines, block_size)
        self._fields: Final = fields
        self._numbers: Final[defaultdict[Hashable, int]] = defaultdict(count(1).__next__)
        self.has_sessions = "session" in fields.names
        if "hash_ids" in fields.names and not self.block_size:
            raise wrong_value("trace_block_size", None, "hash_ids need it", "say how many tokens an id stands for")
        if "timestamp" not in fields.names:
            self.notes.append("the trace has no times: all requests arrive at once")

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return False

    def sessions(self) -> Iterator[TraceSession]:
        return sessions_of(self.requests())

    def requests(self) -> Iterator[TraceRequest]:
        start: float | None = None
        latest = -math.inf
        for row in self._rows():
            request = self._request(row)
            if request is None:
                continue
            start = request.arrival_time if start is None else start
            request.arrival_time -= start
            if request.arrival_time < latest:
                self.lines.bad(self._fields.names["timestamp"], falls(latest - request.arrival_time))
                continue
            latest = request.arrival_time
            yield request

    def _rows(self) -> Iterator[Mapping[str, object]]:
        is_json = self.lines.peek().lstrip().startswith(b"{")
        header = () if is_json else csv_cells(self.lines.take_first())
        for line in self.lines:
            if is_json:
                try:
                    record = decode(_ANYTHING, line)
                except msgspec.DecodeError as error:
                    self.lines.bad(*describe(error))
                    continue
                if isinstance(record, dict):
                    yield record
                else:
                    self.lines.bad("", "expected an object")
                continue
            cells = csv_cells(line)
            if len(cells) == len(header):
                yield dict(zip(header, cells, strict=True))
            else:
                self.lines.bad("", f"expected {len(header)} comma-separated values, got {len(cells)}")

    def _request(self, row: Mapping[str, object]) -> TraceRequest | None:
        num_prompt = self._tokens(row, "input_length", 1)
        num_output = self._tokens(row, "output_length", 0)
        seconds = self._seconds(row)
        if num_prompt is None or num_output is None or seconds is None:
            return None
        ids = self._ids(row, num_prompt)
        if ids is None:
            return None
        priority = self._value(row, "priority")
        session = self._value(row, "session")
        return TraceRequest(
            seconds,
            num_prompt,
            max(1, num_output),
            ids,
            self.block_size,
            session=0 if session in (None, "") else self._numbers["session", str(session)],
            priority=priority if isinstance(priority, int) and abs(priority) < 1 << 31 else 0,
        )

    def _value(self, row: Mapping[str, object], field: str) -> object:
        """What stands there; None where nothing does."""
        name = self._fields.names.get(field)
        if name is None:
            return None
        if name in row:
            return row[name]
        value: object = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def _tokens(self, row: Mapping[str, object], field: str, minimum: int) -> int | None:
        if field not in self._fields.names:
            return 1
        number = _number(self._value(row, field))
        if number is not None and number == int(number) and minimum <= number <= MAX_TOKENS:
            return int(number)
        self.lines.bad(
            self._fields.names[field],
            f"expected int from {minimum} to {MAX_TOKENS}, got {self._value(row, field)!r:.40}",
        )
        return None

    def _seconds(self, row: Mapping[str, object]) -> float | None:
        if "timestamp" not in self._fields.names:
            return 0.0
        value, unit = self._value(row, "timestamp"), self._fields.unit
        number = iso_seconds(value) if unit == "iso" and isinstance(value, str) else None
        if unit != "iso":
            given = _number(value)
            number = None if given is None else given * _UNITS[unit]
        if number is None or not is_time(number):
            self.lines.bad(self._fields.names["timestamp"], f"expected a time in {unit}, got {value!r:.40}")
            return None
        return number

    def _ids(self, row: Mapping[str, object], num_prompt: int) -> list[int] | None:
        given = self._value(row, "hash_ids")
        if given is None:
            return []
        listed = given.split() if isinstance(given, str) else given
        most = cdiv(num_prompt, self.block_size)
        if not isinstance(listed, list) or not num_prompt // self.block_size <= len(listed) <= most:
            got = f"{len(listed)}" if isinstance(listed, list) else f"{given!r:.40}"
            self.lines.bad(
                self._fields.names["hash_ids"],
                f"expected {most} ids for {num_prompt} tokens in blocks of {self.block_size}, got {got}",
            )
            return None
        return [self._numbers["id", str(name)] for name in listed]


def _number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if abs(value) < 1e30 else None
    try:
        number = float(str(value)) if isinstance(value, str) and len(value) < 40 else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None
