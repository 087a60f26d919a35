"""Events over ZeroMQ sockets, in vLLM 0.32's protocol, so that subscribers written for vLLM read them.

    endpoint            PUB: each batch as frames (topic, 8 bytes of its number, payload); numbers from 0, big-endian
    replay_endpoint     ROUTER: asked (empty, 8 bytes of a number), it answers with each batch from that number on that
                        the buffer still has, as (empty, topic, number, payload), and ends with
                        (empty, empty, number -1, empty)
    snapshot_endpoint   ROUTER, beyond vLLM: asked (empty, snapshot_key or anything), it answers in the same frames with
                        batches that rebuild everything: AllBlocksCleared, then BlockStored with parents first. All
                        carry the number of the last batch that they contain; the next one that counts is number + 1.
                        When nothing was published yet, or the key is wrong, only the end comes.

A tcp port is shifted by the data parallel rank, as in vLLM. Endpoints are bound, and those of the default are loopback
addresses: whoever reaches a socket reads the tokens of all prompts. A public one is said once in the log
(docs/security.md).
"""

import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

import msgspec

from kvledger.core.units import require_not_negative, require_positive
from kvledger.errors import ConfigError, wrong_value
from kvledger.events.answers import AnswerSocket, Parts
from kvledger.events.endpoints import is_bound_in_vllm, is_ipv6, is_public, require_endpoint, shifted
from kvledger.events.event_sink import EventSink, Snapshot
from kvledger.events.event_types import KVEventBatch
from kvledger.events.replay_buffer import ReplayBuffer

_LOGGER: Final = logging.getLogger("kvledger.events")
# How long close() lets the system deliver what was sent.
_LINGER_MS: Final = 2000
# Replays and snapshots under way, each; whoever asks beyond that waits. Who asks between two batches gets the same
# snapshot, so that so many are the most that is held at a time.
_MAX_REPLAYS: Final = 64
_MAX_SNAPSHOTS: Final = 4
# Subscriptions are short; longer ones are not read.
_MAX_TOPIC_BYTES: Final = 4096


@dataclass(frozen=True)
class ZmqOptions:
    """vLLM's names. `buffer_steps` and `buffer_bytes`: batches kept for replay, and how much memory they may take;
    `hwm`: messages that ZeroMQ queues for a subscriber before it drops them, 0: no limit.

    `bind`: True binds `endpoint`; False connects it to a collector that is bound there; None is vLLM's rule, which
    binds addresses with "*" or "::", ipc and inproc, and connects to others. `snapshot_key`: what a question for a
    snapshot must say; needed at a public endpoint, where b"" lets everybody ask. `answer_timeout`: seconds after which
    a client that does not read its replay or snapshot gets no more of it.
    """

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    snapshot_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 10_000
    topic: str = ""
    data_parallel_rank: int = 0
    buffer_bytes: int = 256 << 20
    bind: bool | None = True
    snapshot_key: bytes | None = None
    answer_timeout: float = 5.0

    def __post_init__(self) -> None:
        require_positive("buffer_steps", self.buffer_steps)
        require_positive("buffer_bytes", self.buffer_bytes)
        require_not_negative("hwm", self.hwm)
        require_not_negative("data_parallel_rank", self.data_parallel_rank)
        if not 0.0 < self.answer_timeout < float("inf"):
            raise wrong_value("answer_timeout", self.answer_timeout, "no time to wait", "give seconds above 0")
        for name in ("endpoint", "replay_endpoint", "snapshot_endpoint"):
            endpoint = getattr(self, name)
            if endpoint is not None:
                require_endpoint(name, endpoint)
        if self.snapshot_endpoint is not None and is_public(self.snapshot_endpoint) and self.snapshot_key is None:
            raise wrong_value(
                "snapshot_endpoint",
                self.snapshot_endpoint,
                "every host could ask for the tokens of all prompts that are cached",
                "bind 127.0.0.1, or give snapshot_key, which questions must carry (b'' lets everybody ask)",
            )

    @property
    def is_bound(self) -> bool:
        """Whether `endpoint` is bound."""
        return is_bound_in_vllm(self.endpoint) if self.bind is None else self.bind

    @property
    def public_endpoints(self) -> list[str]:
        """The bound addresses that other hosts may reach."""
        bound = [self.endpoint if self.is_bound else None, self.replay_endpoint, self.snapshot_endpoint]
        return [endpoint for endpoint in bound if endpoint is not None and is_public(endpoint)]


class ZmqSink(EventSink):
    """ConfigError when a socket cannot be opened, or pyzmq is missing."""

    def __init__(self, options: ZmqOptions) -> None:
        zmq = import_zmq()
        self._zmq: Final = zmq
        self._options: Final = options
        self._encode: Final = msgspec.msgpack.Encoder().encode
        self._topic: Final = options.topic.encode()
        self._buffer: Final = ReplayBuffer(options.buffer_steps, options.buffer_bytes)
        # Of the last batch that was sent: number, time.
        self._last: tuple[int, float] | None = None
        # The snapshot that was made last and is still being sent: its number, and its parts encoded.
        self._snapshot_seq: int = -1
        self._snapshot_parts: list[bytes] = []
        self._make_snapshot: Snapshot | None = None
        self.data_parallel_rank = options.data_parallel_rank
        self._sockets: Final[list[Any]] = []
        self._bound: Final[list[Any]] = []
        self.has_subscriber: bool = False
        endpoints = (options.endpoint, options.replay_endpoint, options.snapshot_endpoint)
        # Within a process, only sockets of one context find each other.
        self._is_shared: Final = any(endpoint is not None and endpoint.startswith("inproc") for endpoint in endpoints)
        self._context: Final = zmq.Context.instance() if self._is_shared else zmq.Context()
        try:
            # A PUB that also tells of subscriptions.
            self._publish: Final = self._open_publisher()
            self._replay: Final = self._open_answers(
                "replay_endpoint", options.replay_endpoint, self._replayed, _MAX_REPLAYS
            )
            self._snapshot: Final = self._open_answers(
                "snapshot_endpoint", options.snapshot_endpoint, self._snapshot_of, _MAX_SNAPSHOTS
            )
        except ConfigError:
            self.close()
            raise
        if options.public_endpoints:
            _LOGGER.warning(
                "KV events at %s: every host that reaches this one can read the tokens of all prompts; "
                "bind 127.0.0.1 unless that is meant (docs/security.md)",
                ", ".join(options.public_endpoints),
            )

    @property
    def endpoints(self) -> list[str]:
        """The addresses in use, with ports that the system chose: of events, then of replay and snapshots."""
        return [socket.last_endpoint.decode().rstrip("\0") for socket in self._sockets]

    @property
    def num_answers(self) -> int:
        """Replays and snapshots that clients have not read to their ends yet."""
        return sum(answers.num_answers for answers in (self._replay, self._snapshot) if answers is not None)

    @property
    def num_given_up(self) -> int:
        """Replays and snapshots that clients stopped reading."""
        return sum(answers.num_given_up for answers in (self._replay, self._snapshot) if answers is not None)

    def send(self, seq: int, batch: KVEventBatch) -> None:
        payload = self._encode(batch)
        self._publish.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))
        self._last = seq, batch.ts
        if self._replay is not None:
            self._buffer.append(seq, payload)

    def serve(self, snapshot: Snapshot) -> None:
        while self._has_subscription():
            self.has_subscriber = True
        if self._replay is not None:
            self._replay.serve()
        if self._snapshot is not None:
            self._make_snapshot = snapshot
            self._snapshot.serve()
            if self._snapshot.num_answers == 0:
                self._snapshot_parts = []

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

    # What is answered

    def _replayed(self, question: bytes) -> Parts:
        """The batches from that number on, up to the last one so far. It ends early where the buffer has moved on."""
        buffer = self._buffer
        seq = max(int.from_bytes(question, "big"), buffer.first_seq)
        end = buffer.next_seq
        while seq < end and (payload := buffer.get(seq)) is not None:
            yield seq, payload
            seq += 1

    def _snapshot_of(self, question: bytes) -> Parts:
        """Nothing before the first batch, and nothing to strangers."""
        key = self._options.snapshot_key
        if self._last is None or (key and not hmac.compare_digest(key, question)):
            return iter(())
        if self._last[0] != self._snapshot_seq or not self._snapshot_parts:
            assert self._make_snapshot is not None
            self._snapshot_seq, ts = self._last
            self._snapshot_parts = [
                self._encode(KVEventBatch(ts, events, self.data_parallel_rank)) for events in self._make_snapshot()
            ]
        seq = self._snapshot_seq
        return iter([(seq, payload) for payload in self._snapshot_parts])

    # Sockets

    def _has_subscription(self) -> bool:
        try:
            self._publish.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return False
        return True

    def _open_publisher(self) -> Any:
        zmq = self._zmq
        socket = self._new_socket(zmq.XPUB)
        socket.set_hwm(self._options.hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_TOPIC_BYTES)
        self._attach(socket, "endpoint", self._options.endpoint, is_bound=self._options.is_bound)
        return socket

    def _open_answers(
        self, name: str, endpoint: str | None, find: Callable[[bytes], Parts], most: int
    ) -> AnswerSocket | None:
        if endpoint is None:
            return None
        socket = self._new_socket(self._zmq.ROUTER)
        answers = AnswerSocket(socket, self._zmq, self._topic, find, most, self._options.answer_timeout)
        self._attach(socket, name, endpoint, is_bound=True)
        return answers

    def _new_socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        # A peer that vanished without a word gives its queue back.
        socket.setsockopt(self._zmq.TCP_KEEPALIVE, 1)
        return socket

    def _attach(self, socket: Any, name: str, endpoint: str, is_bound: bool) -> None:
        address = shifted(endpoint, self.data_parallel_rank)
        try:
            if is_ipv6(address):
                socket.setsockopt(self._zmq.IPV6, 1)
            if is_bound:
                socket.bind(address)
                self._bound.append(socket)
            else:
                socket.connect(address)
        except self._zmq.ZMQError as failed:
            raise wrong_value(name, address, f"cannot be opened ({failed})", "give a free address") from None


def import_zmq() -> ModuleType:
    """ConfigError where pyzmq is missing."""
    if find_spec("zmq") is None:
        raise ConfigError("events over sockets need the pyzmq package; pip install 'kvledger[events]'")
    return import_module("zmq")
