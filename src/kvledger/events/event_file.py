"""Events in a file.

    .jsonl     one batch a line: {"seq": 0, "ts": 1.5, "events": [{"type": ...}, ...], "data_parallel_rank": 0}
    .msgpack   for each batch 8 bytes of its number and 4 of its length, big-endian, then the payload as on the wire

Whole digests are base64 in JSON. read_events gives both back.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from kvledger.errors import wrong_value
from kvledger.events.event_sink import EventSink
from kvledger.events.event_types import AnyEvent, KVEventBatch, decode_batch

SUFFIXES: Final = (".jsonl", ".msgpack")
_SEQ_BYTES: Final = 8
_LENGTH_BYTES: Final = 4


class _Line(msgspec.Struct):
    seq: int
    ts: float
    events: list[AnyEvent]
    data_parallel_rank: int | None = None


class FileSink(EventSink):
    """Writes the file anew."""

    def __init__(self, path: str) -> None:
        self._is_json: Final = _suffix(path) == ".jsonl"
        try:
            self._file: Final[IO[bytes]] = open(path, "wb")  # noqa: SIM115 (closed in close)
        except OSError as failed:
            problem = f"cannot be written ({failed.strerror or failed})"
            raise wrong_value("events", path, problem, "give the path of a file") from None

    def send(self, seq: int, batch: KVEventBatch) -> None:
        if self._is_json:
            line = _Line(seq, batch.ts, list(batch.events), batch.data_parallel_rank)
            self._file.write(msgspec.json.encode(line) + b"\n")
            return
        payload = msgspec.msgpack.encode(batch)
        self._file.write(seq.to_bytes(_SEQ_BYTES, "big") + len(payload).to_bytes(_LENGTH_BYTES, "big") + payload)

    def close(self) -> None:
        self._file.close()


def read_events(path: str) -> Iterator[tuple[int, KVEventBatch]]:
    """Number and batch of everything in a file of FileSink. In JSON, hashes must be numbers.

    ConfigError for another suffix or a file that cannot be opened, msgspec.DecodeError for content that is none of it,
    or cut off.
    """
    is_json = _suffix(path) == ".jsonl"
    try:
        opened = Path(path).open("rb")  # noqa: SIM115 (closed by the with below)
    except OSError as failed:
        problem = f"cannot be read ({failed.strerror or failed})"
        raise wrong_value("events", path, problem, "give the path of a file of events") from None
    with opened as file:
        yield from _read_lines(file) if is_json else _read_records(file)


def _read_lines(file: IO[bytes]) -> Iterator[tuple[int, KVEventBatch]]:
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Line)
    for text in file:
        line = decoder.decode(text)
        yield line.seq, KVEventBatch(line.ts, line.events, line.data_parallel_rank)


def _read_records(file: IO[bytes]) -> Iterator[tuple[int, KVEventBatch]]:
    while head := file.read(_SEQ_BYTES + _LENGTH_BYTES):
        length = int.from_bytes(head[_SEQ_BYTES:], "big")
        yield int.from_bytes(head[:_SEQ_BYTES], "big"), decode_batch(file.read(length))


def _suffix(path: str) -> str:
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise wrong_value("events", path, "neither a socket nor a known kind of file", "end it in .jsonl or .msgpack")
    return suffix
