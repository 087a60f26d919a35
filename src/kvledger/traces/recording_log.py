"""RecordingLog: writes a recording while an engine runs. Whoever serves requests hands over what ended and goes on.

A thread gives block hashes their numbers, packs rows, and appends them to the file as complete gzip members: what was
flushed can be read, however the process ends. What goes wrong with the file is said once and counted; nothing raises.
"""

import gzip
import logging
import os
import re
import secrets
from collections.abc import Callable
from hashlib import blake2b
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic, time
from typing import Final, cast

import msgspec

from kvledger.core.requests.siphash import KEY_BYTES, SipHash
from kvledger.traces.recording import FORMAT, VERSION, Header, Mark, Row, Timed, TimedStep

# Requests that ended and are not written yet; more are dropped.
MAX_WAITING: Final = 20_000
FLUSH_SECONDS: Final = 1.0
_FLUSH_BYTES: Final = 4 << 20
# Of a name's digest: too few to tell what was named, enough to tell prefixes apart.
_ID_BYTES: Final = 6
_DECIMALS: Final = 6
_logger = logging.getLogger("kvledger.recording")


class Ended:
    """A request that ended, as the server knows it: times by time.monotonic(), names as they are.

    `hashes`: of the blocks that it filled, its prompt's first. `scope`, `session`: opaque names; empty: none.
    """

    def __init__(
        self,
        arrival: float,
        num_prompt_tokens: int,
        num_output_tokens: int,
        hashes: list[bytes],
        *,
        scope: str = "",
        session: str = "",
        priority: int = 0,
        first_token: float | None = None,
        end: float | None = None,
        num_hit_tokens: int | None = None,
        num_preemptions: int = 0,
        step: int | None = None,
        finish: str = "",
    ) -> None:
        self.arrival: Final = arrival
        self.num_prompt_tokens: Final = num_prompt_tokens
        self.num_output_tokens: Final = num_output_tokens
        self.hashes: Final = hashes
        self.scope: Final = scope
        self.session: Final = session
        self.priority: Final = priority
        self.first_token: Final = first_token
        self.end: Final = end
        self.num_hit_tokens: Final = num_hit_tokens
        self.num_preemptions: Final = num_preemptions
        self.step: Final = step
        self.finish: Final = finish


class Numbering:
    """Numbers in the place of names, under a secret key: the same in every file of that key, and nothing to others.

    `secret`: any text; None for a key that nobody knows, not even this server when it starts again.
    """

    def __init__(self, secret: str | None = None) -> None:
        if secret is None:
            key = secrets.token_bytes(KEY_BYTES)
        else:
            key = blake2b(secret.encode(), digest_size=KEY_BYTES, person=b"kvledger ids").digest()
        self._hash: Final[Callable[[bytes], bytes]] = SipHash(key).digest
        # Who numbered: files of one name can be joined.
        self.name: Final = blake2b(key, digest_size=8, person=b"kvledger name").hexdigest()

    def block(self, block_hash: bytes) -> int:
        return int.from_bytes(self._hash(block_hash)[:_ID_BYTES], "little")

    def named(self, name: str) -> int:
        """0 for no name, which is a number of nothing else."""
        return 1 + int.from_bytes(self._hash(name.encode())[:_ID_BYTES], "little") if name else 0


class RecordingLog:
    """One recording, in one file or, where it grows beyond max_bytes, in several: traffic.jsonl.gz, traffic.1.jsonl.gz.

    A file that is there already is never written to, and one that is moved away or emptied is left to whoever did it.
    `source`: what it is of; for people. `steps`: every request has its step.
    """

    def __init__(
        self,
        path: str,
        block_size: int,
        numbering: Numbering,
        *,
        source: str | None = None,
        steps: bool = False,
        max_bytes: int = 1 << 30,
        flush_seconds: float = FLUSH_SECONDS,
    ) -> None:
        self._path: Final = path
        self._max_bytes: Final = max_bytes
        self._flush_seconds: Final = flush_seconds
        self._numbering: Final = numbering
        self._block_size: Final = block_size
        self._base: Final = monotonic()
        self._header: Final = Header(
            FORMAT, VERSION, block_size, start=time(), ids=numbering.name, order="finish", steps=steps, source=source
        )
        self._encode: Final = msgspec.json.Encoder().encode
        # Rows and, None, the end.
        self._queue: Final[SimpleQueue[tuple[Ended, float] | TimedStep | None]] = SimpleQueue()
        self._rows: list[bytes] = []
        self._num_requests_waiting: int = 0
        self._num_bytes_waiting: int = 0
        self._oldest: float = 0.0
        self._file: str = ""
        self._size: int = 0
        self._number: int = 0
        self._identity: tuple[int, int] = (0, 0)
        self._is_broken: bool = False
        self.num_written: int = 0
        self.num_dropped: int = 0
        self._thread: Final = Thread(target=self._run, name="kvledger recording", daemon=True)
        self._thread.start()

    def add(self, ended: Ended, oldest_arrival: float) -> None:
        """A request ended, and every one that arrived before `oldest_arrival` has. Returns at once, whatever the disk
        does; a request too many is dropped and counted."""
        if self._queue.qsize() >= MAX_WAITING:
            self.num_dropped += 1
        else:
            self._queue.put((ended, oldest_arrival))

    def add_step(self, step: TimedStep) -> None:
        """A step was measured; one too many is dropped without a word."""
        if self._queue.qsize() < MAX_WAITING:
            self._queue.put(step)

    def close(self) -> None:
        """Writes what is waiting, within a few seconds."""
        self._queue.put(None)
        self._thread.join(timeout=10.0)

    @property
    def file(self) -> str:
        """The file that is written to; empty before the first flush."""
        return self._file

    # In the thread

    def _run(self) -> None:
        deadline = 0.0
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, deadline - monotonic())) if self._rows else self._queue.get()
            except Empty:
                self._flush()
                continue
            if item is None:
                self._flush()
                return
            if not self._rows:
                deadline = monotonic() + self._flush_seconds
            try:
                if isinstance(item, TimedStep):
                    line = self._encode(Timed(item)) + b"\n"
                else:
                    line = self._encode(self._row(item[0])) + b"\n"
                    self._num_requests_waiting += 1
                    self._oldest = item[1]
            except Exception:  # whatever somebody else's request holds, the thread goes on
                self.num_dropped += 1
                _logger.warning("a request could not be recorded", exc_info=True)
                continue
            self._rows.append(line)
            self._num_bytes_waiting += len(line)
            if self._num_bytes_waiting >= _FLUSH_BYTES or monotonic() >= deadline:
                self._flush()

    def _row(self, ended: Ended) -> Row:
        block = self._numbering.block
        num_blocks = ended.num_prompt_tokens // self._block_size
        ids = [block(each) for each in ended.hashes]
        if len(ids) < num_blocks:
            # What was never named is nobody's: prefix caching is off, or the request ended before its hashes were made.
            ids = ids + [block(os.urandom(16)) for _ in range(num_blocks - len(ids))] if ids else []
        return Row(
            self._seconds(ended.arrival),
            ended.num_prompt_tokens,
            ended.num_output_tokens,
            ids=ids[:num_blocks],
            out_ids=ids[num_blocks:],
            scope=self._numbering.named(ended.scope),
            session=self._numbering.named(ended.session),
            priority=ended.priority,
            first=None if ended.first_token is None else self._seconds(ended.first_token),
            end=None if ended.end is None else self._seconds(ended.end),
            hit=ended.num_hit_tokens,
            preempted=ended.num_preemptions,
            step=ended.step,
            finish=ended.finish,
        )

    def _seconds(self, moment: float) -> float:
        return round(max(0.0, moment - self._base), _DECIMALS)

    def _flush(self) -> None:
        if not self._rows:
            return
        num_rows = self._num_requests_waiting
        mark = self._encode(Mark(self._seconds(self._oldest))) + b"\n"
        lines = b"".join([*self._rows, mark])
        self._rows = []
        self._num_requests_waiting = self._num_bytes_waiting = 0
        try:
            self._append(lines)
        except OSError as error:
            self.num_dropped += num_rows
            if not self._is_broken:
                _logger.warning("%s: requests are not recorded (%s)", self._file or self._path, error.strerror)
            self._is_broken = True
            return
        self.num_written += num_rows
        if self._is_broken:
            _logger.warning("%s: requests are recorded again; %d are missing", self._file, self.num_dropped)
            self._is_broken = False

    def _append(self, lines: bytes) -> None:
        """Adds one gzip member, whole or not at all."""
        if not self._file or self._size >= self._max_bytes or not self._is_ours():
            self._begin_file()
        if self._size == 0:
            lines = self._encode(self._header) + b"\n" + lines
        member = gzip.compress(lines, 6) if self._path.endswith(".gz") else lines
        descriptor = os.open(self._file, os.O_WRONLY)
        try:
            os.lseek(descriptor, self._size, os.SEEK_SET)
            num_done = 0
            while num_done < len(member):
                num_done += os.write(descriptor, memoryview(member)[num_done:])
        except OSError:
            os.ftruncate(descriptor, self._size)
            raise
        finally:
            os.close(descriptor)
        self._size += len(member)

    def _is_ours(self) -> bool:
        """Whether the file is still where it was begun, with all that was written to it: nobody moved or emptied it."""
        try:
            found = os.stat(self._file)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self._identity and found.st_size >= self._size

    def _begin_file(self) -> None:
        """Takes the next name that is free. Tenants' traffic is nobody else's: only the owner can read it."""
        number = self._number
        while True:
            file = marked(self._path, str(number)) if number else self._path
            number += 1
            try:
                descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                continue
            found = os.fstat(descriptor)
            os.close(descriptor)
            self._file, self._size, self._number = file, 0, number
            self._identity = (found.st_dev, found.st_ino)
            return


def marked(path: str, mark: str) -> str:
    """traffic.jsonl.gz with a mark before its suffixes: traffic.1.jsonl.gz."""
    directory, name = os.path.split(path)
    stem, suffixes = cast(re.Match[str], re.fullmatch(r"(.*?)((?:\.jsonl?)?(?:\.gz)?)", name, re.DOTALL)).groups()
    return os.path.join(directory, f"{stem}.{mark}{suffixes}")
