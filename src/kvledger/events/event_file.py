"""Events in a file.

    .jsonl     one batch a line: {"seq": 0, "ts": 1.5, "events": [{"type": ...}, ...], "data_parallel_rank": 0}
    .msgpack   for each batch 8 bytes of its number and 4 of its length, big-endian, then the payload as on the wire

Whole digests are base64 in JSON. read_events gives both back. A file whose writer was stopped, or whose disk was full,
is read up to where it is cut; a batch is at most MAX_BATCH_BYTES long.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from kvledger.errors import wrong_value
from kvledger.events.event_sink import EventError, EventSink
from kvledger.events.event_types import AnyEvent, KVEventBatch, decode_batch

SUFFIXES: Final = (".jsonl", ".msgpack")
_SEQ_BYTES: Final = 8
_LENGTH_BYTES: Final = 4
# A step of a million tokens takes a few MB.
MAX_BATCH_BYTES: Final = 256 << 20


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

    ConfigError for another suffix or a file that cannot be opened; EventError, after all batches before it, for the
    first one that is cut off or is no batch.
    """
    is_json = _suffix(path) == ".jsonl"
    try:
        opened = Path(path).open("rb")  # noqa: SIM115 (closed by the with below)
    except OSError as failed:
        problem = f"cannot be read ({failed.strerror or failed})"
        raise wrong_value("events", path, problem, "give the path of a file of events") from None
    num_batches = 0
    with opened as file:
        try:
            for batch in _read_lines(file) if is_json else _read_records(file):
                yield batch
                num_batches += 1
        # msgspec decodes what is nested too deeply by recursion, and text by its own rules.
        except (OSError, ValueError, RecursionError) as broken:
            problem = str(broken) or "nested too deeply"
            raise EventError(f"{path}: {num_batches} batches are whole, and the next is broken ({problem})") from None


def _read_lines(file: IO[bytes]) -> Iterator[tuple[int, KVEventBatch]]:
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Line)
    while text := file.readline(MAX_BATCH_BYTES + 1):
        if len(text) > MAX_BATCH_BYTES:
            raise ValueError(f"longer than {MAX_BATCH_BYTES:,} bytes")
        if not text.endswith(b"\n"):
            raise ValueError("cut off at the end of the file")
        line = decoder.decode(text)
        yield line.seq, KVEventBatch(line.ts, line.events, line.data_parallel_rank)


def _read_records(file: IO[bytes]) -> Iterator[tuple[int, KVEventBatch]]:
    while head := file.read(_SEQ_BYTES + _LENGTH_BYTES):
        length = int.from_bytes(head[_SEQ_BYTES:], "big")
        if length > MAX_BATCH_BYTES:
            raise ValueError(f"longer than {MAX_BATCH_BYTES:,} bytes")
        payload = file.read(length)
        if len(head) < _SEQ_BYTES + _LENGTH_BYTES or len(payload) < length:
            raise ValueError("cut off at the end of the file")
        yield int.from_bytes(head[:_SEQ_BYTES], "big"), decode_batch(payload)


def _suffix(path: str) -> str:
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise wrong_value("events", path, "neither a socket nor a known kind of file", "end it in .jsonl or .msgpack")
    return suffix
