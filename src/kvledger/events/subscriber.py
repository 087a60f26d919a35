"""EventSubscriber: batches from a publisher (ours or vLLM's), in order and without gaps.

Batches are numbered, so a lost one shows. It is asked for at the replay endpoint; where that does not have it any more,
a snapshot is taken; and where neither is to be had, the batch before the gap's end says AllBlocksCleared, because what
is behind the gap is not known.
"""

from types import TracebackType
from typing import Any, Final

import msgspec

from kvledger.errors import ConfigError, wrong_value
from kvledger.events.answers import END_SEQ
from kvledger.events.endpoints import require_endpoint
from kvledger.events.event_types import AllBlocksCleared, KVEventBatch, decode_batch
from kvledger.events.zmq_sink import import_zmq

# How long an answer may take.
_ANSWER_MS: Final = 5000


class EventSubscriber:
    """A consumer's end. To be closed; also a context manager."""

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        snapshot_endpoint: str | None = None,
        topic: str = "",
        snapshot_key: bytes = b"",
    ) -> None:
        """`snapshot_key`: the publisher's, where it has one."""
        zmq = import_zmq()
        _require_address("endpoint", endpoint)
        for name, address in (("replay_endpoint", replay_endpoint), ("snapshot_endpoint", snapshot_endpoint)):
            if address is not None:
                _require_address(name, address)
        self._endpoint: Final = endpoint
        self._events: Final = _connect(zmq.SUB, endpoint)
        self._events.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._replay_endpoint: Final = replay_endpoint
        self._snapshot_endpoint: Final = snapshot_endpoint
        self._snapshot_key: Final = snapshot_key
        # Number of the last batch that was given out, and of the last that came by itself.
        self._last_seq: int = -1
        self._last_live_seq: int = -1
        self.num_lost: int = 0
        self.num_catch_ups: int = 0

    def __enter__(self) -> "EventSubscriber":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def last_seq(self) -> int:
        """Number of the last batch given out; -1 before the first."""
        return self._last_seq

    def receive(self, timeout: float) -> list[KVEventBatch]:
        """The next batches, or none when nothing new comes for `timeout` seconds. Several after a gap.

        ConfigError, with nothing changed, for a message or an answer that is no batch of events: somebody else
        publishes there.
        """
        _require_timeout(timeout)
        batches: list[KVEventBatch] = []
        # What is behind a gap may have come with the catch-up already.
        while not batches and self._events.poll(timeout * 1000):
            # topic, number, payload
            seq, batch = _decode("endpoint", self._endpoint, self._events.recv_multipart(), 3)
            before = self._last_seq, self._last_live_seq
            try:
                batches = self._take(seq, batch)
            except ConfigError:
                # The next message shows the same gap, or the same restart, again.
                self._last_seq, self._last_live_seq = before
                raise
        return batches

    def catch_up(self) -> list[KVEventBatch]:
        """Asks for what was published already: for a consumer that starts late. [] where there is nothing to ask."""
        return self._replay_from(self._last_seq + 1) or self._take_snapshot()

    def close(self) -> None:
        self._events.close(linger=0)

    def _take(self, seq: int, batch: KVEventBatch) -> list[KVEventBatch]:
        """What a batch that came by itself gives out: itself, behind whatever is missing before it."""
        batches: list[KVEventBatch] = []
        if seq <= self._last_live_seq:
            # The publisher started anew: nothing of what it said before holds.
            self._last_seq = -1
            batches.append(_cleared(batch.ts))
        self._last_live_seq = seq
        if seq > self._last_seq + 1:
            batches += self._catch_up(seq)
        if seq == self._last_seq + 1:
            batches.append(batch)
            self._last_seq = seq
        return batches

    def _catch_up(self, seq: int) -> list[KVEventBatch]:
        """Everything before batch `seq` that is missing, so that it can follow."""
        self.num_catch_ups += 1
        batches = self._replay_from(self._last_seq + 1)
        if self._last_seq < seq - 1:
            batches = self._take_snapshot()
        if self._last_seq < seq - 1:
            self.num_lost += seq - 1 - self._last_seq
            self._last_seq = seq - 1
            batches = [_cleared(0.0)]
        return batches

    def _replay_from(self, first: int) -> list[KVEventBatch]:
        """The batches from that number on, if the first of them is still to be had."""
        answers = _ask("replay_endpoint", self._replay_endpoint, first.to_bytes(8, "big"))
        if not answers or [seq for seq, _ in answers] != list(range(first, first + len(answers))):
            return []
        self._last_seq = answers[-1][0]
        return [batch for _, batch in answers]

    def _take_snapshot(self) -> list[KVEventBatch]:
        answers = _ask("snapshot_endpoint", self._snapshot_endpoint, self._snapshot_key)
        if answers:
            self._last_seq = answers[-1][0]
        return [batch for _, batch in answers]


def _ask(name: str, endpoint: str | None, question: bytes) -> list[tuple[int, KVEventBatch]]:
    """All numbered batches of the answer. [] without an endpoint, or when no whole answer comes in time."""
    if endpoint is None:
        return []
    # A socket for this question alone, so that the answer cannot be a late one to another.
    socket = _connect(import_zmq().DEALER, endpoint)
    try:
        socket.send_multipart((b"", question))
        answers: list[tuple[int, KVEventBatch]] = []
        while socket.poll(_ANSWER_MS):
            frames = socket.recv_multipart()
            if len(frames) == 4 and frames[2] == END_SEQ:
                return answers
            answers.append(_decode(name, endpoint, frames, 4))
        return []
    finally:
        socket.close(linger=0)


def _require_timeout(timeout: object) -> None:
    """ConfigError for what is no number of seconds."""
    # Written so that a NaN is refused as well.
    if not (isinstance(timeout, int | float) and timeout >= 0.0):
        raise wrong_value("timeout", timeout, "no time to wait", "give seconds, or 0 to look only")


def _decode(name: str, endpoint: str, frames: list[bytes], num_frames: int) -> tuple[int, KVEventBatch]:
    """Number and batch of a message, its last two frames."""
    fix = "give the address of a publisher of KV events"
    if len(frames) != num_frames:
        raise wrong_value(name, endpoint, f"sends {len(frames)} frames and not the {num_frames} of a batch", fix)
    try:
        return int.from_bytes(frames[-2], "big"), decode_batch(frames[-1])
    except msgspec.DecodeError as wrong:
        raise wrong_value(name, endpoint, f"sends what is no batch of events ({wrong})", fix) from None


def _require_address(name: str, endpoint: str) -> None:
    """ConfigError for what is no address to connect to, such as the one that a publisher binds."""
    require_endpoint(name, endpoint)
    if endpoint.startswith("tcp://*"):
        raise wrong_value(name, endpoint, "names no host", "give the publisher's, like tcp://127.0.0.1:5557")


def _connect(kind: int, endpoint: str) -> Any:
    socket = import_zmq().Context.instance().socket(kind)
    # What waits in line is the publisher's to bound.
    socket.set_hwm(0)
    socket.connect(endpoint)
    return socket


def _cleared(ts: float) -> KVEventBatch:
    return KVEventBatch(ts, [AllBlocksCleared()])
