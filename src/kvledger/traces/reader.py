"""TraceReader: what every trace format has in common. A reader makes requests, or sessions of them, out of lines."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final

import msgspec

from kvledger.files.decoding import decode
from kvledger.traces.lines import TraceLines
from kvledger.traces.trace_request import TraceRequest, TraceSession

_ANYTHING: Final[msgspec.json.Decoder[object]] = msgspec.json.Decoder()


class TraceReader(ABC):
    """Reads one format. `block_size`: tokens of a trace block; 0 for a format without hash ids."""

    name: str
    # What recognises the format in its first record, for error messages.
    mark: str
    block_size: int = 0

    def __init__(self, lines: TraceLines, block_size: int | None) -> None:
        self.lines: Final = lines
        if block_size is not None:
            self.block_size = block_size

    @staticmethod
    @abstractmethod
    def recognises(first_line: bytes) -> bool:
        """Whether this first line is one of this format."""

    def requests(self) -> Iterator[TraceRequest]:
        """All requests in the order of arrival. For formats without sessions."""
        raise NotImplementedError

    def sessions(self) -> Iterator[TraceSession] | None:
        """All sessions, in the order of the file; None for a format without sessions."""
        return None


def has_key(line: bytes, key: str) -> bool:
    """Whether the line is a JSON object with that key."""
    try:
        record = decode(_ANYTHING, line)
    except msgspec.DecodeError:
        return False
    return isinstance(record, dict) and key in record
