"""TraceReader: what every trace format has in common. A reader makes requests, or sessions of them, out of lines."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final

import msgspec

from kvledger.traces.lines import TraceLines
from kvledger.traces.trace_request import TraceRequest, TraceSession


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
        record = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return False
    return isinstance(record, dict) and key in record


def describe(error: msgspec.DecodeError) -> tuple[str, str]:
    """A decoder's message as (field, problem), in the words of this tool."""
    message = str(error)
    path = re.search(r" - at `\$\.?(.*?)`$", message)
    field = path.group(1) if path else ""
    message = message[: path.start()] if path else message
    missing = re.fullmatch(r"Object missing required field `(.*)`", message)
    if missing:
        field = f"{field}.{missing.group(1)}" if field else missing.group(1)
        return field, "missing; expected a value"
    expected = re.fullmatch(r"Expected `(.*?)`( .*?)?(?:, got `(.*)`)?", message)
    if expected:
        got = f", got {expected.group(3)}" if expected.group(3) else ""
        return field, f"expected {expected.group(1)}{expected.group(2) or ''}{got}"
    return field, f"not a record: {message[:1].lower()}{message[1:]}"
