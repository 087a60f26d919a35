"""FirstRecord: the first line of a trace, looked at once by every format."""

import csv
from collections.abc import Mapping
from typing import Final

import msgspec

from kvledger.core.units import cdiv
from kvledger.files.decoding import decode

_ANYTHING: Final[msgspec.json.Decoder[object]] = msgspec.json.Decoder()


class FirstRecord:
    """`record`: the JSON object that the line is, empty if it is none. `columns`: its cells, if it is a CSV header."""

    def __init__(self, line: bytes) -> None:
        self.record: Final[Mapping[str, object]] = _json_object(line)
        self.columns: Final[tuple[str, ...]] = () if self.record else csv_cells(line)

    def has(self, *keys: str) -> bool:
        """Whether it has all of these fields."""
        return all(key in self.record for key in keys)

    def has_any(self, *keys: str) -> bool:
        return any(key in self.record for key in keys)

    def fits_blocks_of(self, block_size: int, ids: str = "hash_ids", tokens: str = "input_length") -> bool:
        """Whether it has as many ids as its tokens need in blocks of that size. True when that cannot be seen."""
        listed, num_tokens = self.record.get(ids), self.record.get(tokens)
        if not isinstance(listed, list) or not isinstance(num_tokens, int):
            return True
        return len(listed) == cdiv(num_tokens, block_size)


def csv_cells(line: bytes) -> tuple[str, ...]:
    """The cells of one row; none for what is no text. A quoted cell cannot go over the end of a line."""
    try:
        rows = list(csv.reader([line.decode("utf-8-sig").rstrip("\r\n")], strict=False))
    except (UnicodeDecodeError, csv.Error):
        return ()
    return tuple(rows[0]) if rows else ()


def _json_object(line: bytes) -> Mapping[str, object]:
    try:
        record = decode(_ANYTHING, line)
    except msgspec.DecodeError:
        return {}
    return record if isinstance(record, dict) else {}
