"""Events over ZeroMQ sockets, in vLLM 0.32's protocol, so that subscribers written for vLLM read them.

    endpoint            PUB: each batch as frames (topic, 8 bytes of its number, payload); numbers from 0, big-endian
    replay_endpoint     ROUTER: asked (empty, 8 bytes of a number), it answers with each batch from that number on that
                        the buffer still has, as (empty, topic, number, payload), and ends with
                        (empty, empty, number -1, empty)
    snapshot_endpoint   ROUTER, beyond vLLM: asked (empty, anything), it answers in the same frames with batches that
                        rebuild everything: AllBlocksCleared, then BlockStored with parents first. All carry the
                        number of the last batch that they contain; the next one that counts is number + 1. When
                        nothing was published yet, only the end comes.

A tcp port is shifted by the data parallel rank, as in vLLM. An endpoint with "*" or "::", ipc and inproc are bound,
others are connected to.
"""

from collections import deque
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

import msgspec

from kvledger.core.units import require_not_negative, require_positive
from kvledger.errors import ConfigError, wrong_value
from kvledger.events.event_sink import EventSink, Snapshot
from kvledger.events.event_types import KVEventBatch

END_SEQ: Final = (-1).to_bytes(8, "big", signed=True)
# How long close() lets the system deliver what was sent.
_LINGER_MS: Final = 2000
_LAST_PORT: Final = 65_535


@dataclass(frozen=True)
class ZmqOptions:
    """vLLM's names and defaults. `buffer_steps`: batches kept for replay; `hwm`: messages that ZeroMQ queues for a
    subscriber before it drops them, 0: no limit.
    """

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    snapshot_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        require_positive("buffer_steps", self.buffer_steps)
        require_not_negative("hwm", self.hwm)
        require_not_negative("data_parallel_rank", self.data_parallel_rank)
        for name in ("endpoint", "replay_endpoint", "snapshot_endpoint"):
            endpoint = getattr(self, name)
            if endpoint is not None:
                require_endpoint(name, endpoint)


class ZmqSink(EventSink):
    """ConfigError when a socket cannot be opened, or pyzmq is missing."""

    def __init__(self, options: ZmqOptions) -> None:
        zmq = import_zmq()
        self._again: Final = zmq.Again
        self._not_waiting: Final = zmq.NOBLOCK
        self._encode: Final = msgspec.msgpack.Encoder().encode
        self._topic: Final = options.topic.encode()
        self._buffer: Final[deque[tuple[int, bytes]]] = deque(maxlen=options.buffer_steps)
        # Of the last batch that was sent: number, time.
        self._last: tuple[int, float] | None = None
        self.data_parallel_rank = options.data_parallel_rank
        self._sockets: Final[list[Any]] = []
        self._bound: Final[list[Any]] = []
        self.has_subscriber: bool = False
        endpoints = (options.endpoint, options.replay_endpoint, options.snapshot_endpoint)
        # Within a process, only sockets of one context find each other.
        self._is_shared: Final = any(endpoint is not None and endpoint.startswith("inproc") for endpoint in endpoints)
        self._context: Final = zmq.Context.instance() if self._is_shared else zmq.Context()
        try:
            # A PUB that also tells of subscriptions. A ROUTER drops what is above its limit, so these have none.
            self._publish: Final = self._open(zmq.XPUB, "endpoint", options.endpoint, options.hwm)
            self._replay: Final = self._open_router("replay_endpoint", options.replay_endpoint)
            self._snapshot: Final = self._open_router("snapshot_endpoint", options.snapshot_endpoint)
        except ConfigError:
            self.close()
            raise

    @property
    def endpoints(self) -> list[str]:
        """The addresses in use, with ports that the system chose: of events, then of replay and snapshots."""
        return [socket.last_endpoint.decode().rstrip("\0") for socket in self._sockets]

    def send(self, seq: int, batch: KVEventBatch) -> None:
        payload = self._encode(batch)
        self._publish.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))
        self._last = seq, batch.ts
        if self._replay is not None:
            self._buffer.append((seq, payload))

    def serve(self, snapshot: Snapshot) -> None:
        while self._receive(self._publish) is not None:
            self.has_subscriber = True
        self._serve_replays()
        self._serve_snapshots(snapshot)

    def close(self) -> None:
        if self._is_shared:
            # A closed socket lets go of its address when it has sent the rest; the next owner need not wait for that.
            for socket in self._bound:
                socket.unbind(socket.last_endpoint)
        for socket in self._sockets:
            socket.close(linger=_LINGER_MS)
        if not self._is_shared:
            # Returns when the rest is sent, or after the linger time: a process that ends at once would lose it.
            self._context.term()

    def _serve_replays(self) -> None:
        if self._replay is None:
            return
        while (frames := self._receive(self._replay)) is not None:
            # What is no request is passed over, as vLLM does.
            if len(frames) == 3:
                first = int.from_bytes(frames[2], "big")
                for seq, payload in self._buffer:
                    if seq >= first:
                        self._answer(self._replay, frames[0], seq, payload)
                self._replay.send_multipart((frames[0], b"", b"", END_SEQ, b""))

    def _serve_snapshots(self, snapshot: Snapshot) -> None:
        if self._snapshot is None:
            return
        while (frames := self._receive(self._snapshot)) is not None:
            if len(frames) == 3:
                if self._last is not None:
                    seq, ts = self._last
                    for events in snapshot():
                        payload = self._encode(KVEventBatch(ts, events, self.data_parallel_rank))
                        self._answer(self._snapshot, frames[0], seq, payload)
                self._snapshot.send_multipart((frames[0], b"", b"", END_SEQ, b""))

    def _answer(self, socket: Any, client: bytes, seq: int, payload: bytes) -> None:
        socket.send_multipart((client, b"", self._topic, seq.to_bytes(8, "big"), payload))

    def _receive(self, socket: Any) -> list[bytes] | None:
        try:
            frames: list[bytes] = socket.recv_multipart(self._not_waiting)
        except self._again:
            return None
        return frames

    def _open_router(self, name: str, endpoint: str | None) -> Any:
        return None if endpoint is None else self._open(import_zmq().ROUTER, name, endpoint, 0)

    def _open(self, kind: int, name: str, endpoint: str, hwm: int) -> Any:
        zmq = import_zmq()
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(hwm)
        address = _shifted(endpoint, self.data_parallel_rank)
        try:
            if name != "endpoint" or _is_bound(address):
                socket.bind(address)
                self._bound.append(socket)
            else:
                socket.connect(address)
        except zmq.ZMQError as failed:
            raise wrong_value(name, address, f"cannot be opened ({failed})", "give a free address") from None
        return socket


def import_zmq() -> ModuleType:
    """ConfigError where pyzmq is missing."""
    if find_spec("zmq") is None:
        raise ConfigError("events over sockets need the pyzmq package; pip install 'kvledger[events]'")
    return import_module("zmq")


def require_endpoint(name: str, endpoint: str) -> None:
    """ConfigError for what ZeroMQ knows no transport for, or a tcp address without its port."""
    transport, _, address = endpoint.partition("://")
    is_right = transport in ("tcp", "ipc", "inproc") and address != ""
    if transport == "tcp":
        port = address.rpartition(":")[2]
        is_right = port.isdigit() and int(port) <= _LAST_PORT
    if not is_right:
        raise wrong_value(name, endpoint, "no address of a socket", "give one like tcp://*:5557 or ipc:///tmp/events")


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _shifted(endpoint: str, rank: int) -> str:
    """The endpoint of that data parallel rank, where every rank has its own."""
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return endpoint if int(port) == 0 else f"{host}:{int(port) + rank}"
