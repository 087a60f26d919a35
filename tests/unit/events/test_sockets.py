"""Events over sockets: vLLM's protocol, and catching up after a loss."""

import itertools
import re
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from kvledger.errors import ConfigError
from kvledger.events import CacheView, EventSubscriber, KVEventBatch, LedgerEvents, ZmqOptions, ZmqSink, decode_batch
from tests.helpers import admitted, kv_config, leave, ledger, other

zmq = pytest.importorskip("zmq")
_NUMBERS = itertools.count()


class Publisher:
    """A ledger of 8 blocks whose events go out over sockets inside this process."""

    def __init__(self, *, replay: bool = True, snapshot: bool = True, buffer_steps: int = 100, topic: str = "") -> None:
        name = f"inproc://events-{next(_NUMBERS)}"
        self.endpoints = {
            "endpoint": name,
            "replay_endpoint": f"{name}-replay" if replay else None,
            "snapshot_endpoint": f"{name}-snapshot" if snapshot else None,
        }
        options = ZmqOptions(**self.endpoints, buffer_steps=buffer_steps, topic=topic)
        self.sink = ZmqSink(options)
        self.events = LedgerEvents(kv_config(8), self.sink)
        self.manager = ledger(8, observer=self.events.observer)
        self.num_steps = 0

    def step(self) -> None:
        """A new prompt of one block comes and goes; in a pool of 8 the ninth evicts the first."""
        leave(self.manager, admitted(self.manager, str(self.num_steps), other(4, self.num_steps)))
        self.events.end_step(float(self.num_steps))
        self.num_steps += 1

    def cached(self) -> set[tuple[int, int]]:
        (index,) = self.manager._pool.indexes
        return {(0, int.from_bytes(block_hash[-8:], "big")) for block_hash in index.blocks()}


@pytest.fixture
def publishers() -> Iterator[list[Publisher]]:
    made: list[Publisher] = []
    yield made
    for publisher in made:
        publisher.events.close()


def subscribed(publisher: Publisher, topic: str = "") -> EventSubscriber:
    subscriber = EventSubscriber(**publisher.endpoints, topic=topic)
    deadline = time.monotonic() + 10
    while not publisher.sink.has_subscriber and time.monotonic() < deadline:
        time.sleep(0.001)
    assert publisher.sink.has_subscriber
    return subscriber


def receive(subscriber: EventSubscriber, last_seq: int) -> list[KVEventBatch]:
    """Everything up to the batch of that number."""
    batches: list[KVEventBatch] = []
    while subscriber.last_seq < last_seq:
        received = subscriber.receive(10)
        assert received, "nothing comes any more"
        batches += received
    return batches


def lose(subscriber: EventSubscriber, num_batches: int) -> None:
    """Takes batches out of the subscriber's socket before it sees them."""
    for _ in range(num_batches):
        assert subscriber._events.poll(10_000)
        subscriber._events.recv_multipart()


def test_what_is_sent_arrives(publishers: list[Publisher]) -> None:
    publishers.append(publisher := Publisher())
    with subscribed(publisher) as subscriber:
        publisher.step()
        publisher.step()
        view = CacheView()
        for batch in receive(subscriber, 1):
            view.apply(batch.events)
        assert view.blocks.keys() == publisher.cached()
        assert (subscriber.num_catch_ups, subscriber.num_lost) == (0, 0)


def test_the_frames_are_topic_number_and_payload(publishers: list[Publisher]) -> None:
    publishers.append(publisher := Publisher(topic="kv"))
    with subscribed(publisher, "kv") as subscriber:
        publisher.step()
        publisher.step()
        lose(subscriber, 1)
        topic, number, payload = subscriber._events.recv_multipart()
        assert (topic, number) == (b"kv", b"\0\0\0\0\0\0\0\1")
        assert decode_batch(payload).ts == 1.0


def test_a_replay_ends_with_number_minus_one(publishers: list[Publisher]) -> None:
    publishers.append(publisher := Publisher())
    with subscribed(publisher) as subscriber:
        for _ in range(3):
            publisher.step()
        receive(subscriber, 2)
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.connect(publisher.endpoints["replay_endpoint"])
    socket.send((2).to_bytes(8, "big"))
    topic, number, payload = socket.recv_multipart()
    socket.close(linger=0)
    assert (topic, number, decode_batch(payload).ts) == (b"", (2).to_bytes(8, "big"), 2.0)
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.connect(publisher.endpoints["replay_endpoint"])
    socket.send((3).to_bytes(8, "big"))
    assert socket.recv_multipart() == [b"", b"\xff" * 8, b""]
    socket.close(linger=0)


@pytest.mark.parametrize("num_lost", [1, 2, 7])
def test_b64_what_was_lost_is_replayed(publishers: list[Publisher], num_lost: int) -> None:
    publishers.append(publisher := Publisher())
    view = CacheView()
    with subscribed(publisher) as subscriber:
        for _ in range(12):
            publisher.step()
        view.apply(receive(subscriber, 0)[0].events)
        lose(subscriber, num_lost)
        for batch in receive(subscriber, 11):
            view.apply(batch.events)
        assert view.blocks.keys() == publisher.cached()
        assert (subscriber.num_catch_ups, subscriber.num_lost) == (1, 0)


def test_b64_beyond_the_buffer_a_snapshot_helps(publishers: list[Publisher]) -> None:
    publishers.append(publisher := Publisher(buffer_steps=2))
    view = CacheView()
    with subscribed(publisher) as subscriber:
        for _ in range(12):
            publisher.step()
        view.apply(receive(subscriber, 0)[0].events)
        lose(subscriber, 5)
        for batch in receive(subscriber, 11):
            view.apply(batch.events)
        assert view.blocks.keys() == publisher.cached()
        publisher.step()
        for batch in receive(subscriber, 12):
            view.apply(batch.events)
        assert view.blocks.keys() == publisher.cached()
        assert (subscriber.num_catch_ups, subscriber.num_lost) == (1, 0)


def test_b64_with_neither_the_consumer_knows_that_it_does_not_know(publishers: list[Publisher]) -> None:
    publishers.append(publisher := Publisher(replay=False, snapshot=False))
    view = CacheView()
    with subscribed(publisher) as subscriber:
        for _ in range(6):
            publisher.step()
        view.apply(receive(subscriber, 1)[0].events)
        lose(subscriber, 2)
        for batch in receive(subscriber, 5):
            view.apply(batch.events)
        assert subscriber.num_lost == 2
        assert view.blocks.keys() < publisher.cached()
        assert len(view.blocks) == 2


def test_who_comes_late_catches_up_at_once(publishers: list[Publisher]) -> None:
    publishers.append(publisher := Publisher(replay=False))
    for _ in range(12):
        publisher.step()
    while publisher.events.num_batches < 12:
        time.sleep(0.001)
    with EventSubscriber(**publisher.endpoints) as subscriber:
        view = CacheView()
        for batch in subscriber.catch_up():
            view.apply(batch.events)
        assert view.blocks.keys() == publisher.cached()
        assert subscriber.last_seq == 11


def test_a_snapshot_before_anything_was_published_is_empty(publishers: list[Publisher]) -> None:
    publishers.append(publisher := Publisher(replay=False))
    with EventSubscriber(**publisher.endpoints) as subscriber:
        assert subscriber.catch_up() == []
        assert subscriber.receive(0.0) == []


def test_a_publisher_that_starts_anew_is_noticed(publishers: list[Publisher]) -> None:
    options = ZmqOptions(endpoint=f"inproc://anew-{next(_NUMBERS)}")
    sink = ZmqSink(options)
    with EventSubscriber(options.endpoint) as subscriber:
        while not sink.has_subscriber:
            sink.serve(lambda: iter(()))
        for number in (0, 1, 0):
            sink.send(number, KVEventBatch(float(number), [], 0))
        assert [len(subscriber.receive(10)) for _ in range(3)] == [1, 1, 2]
    sink.close()


def test_every_rank_has_its_own_sockets() -> None:
    sink = ZmqSink(ZmqOptions(endpoint="inproc://ranks", replay_endpoint="tcp://*:0", data_parallel_rank=2))
    events, replay = sink.endpoints
    assert events == "inproc://ranks_dp2"
    assert replay.startswith("tcp://0.0.0.0:")
    sink.close()


def test_an_address_in_use_is_named_and_nothing_stays_open() -> None:
    sink = ZmqSink(ZmqOptions(endpoint="inproc://taken"))
    with pytest.raises(ConfigError, match=r"snapshot_endpoint='inproc://taken': cannot be opened \(Address already in"):
        ZmqSink(ZmqOptions(endpoint="inproc://free", snapshot_endpoint="inproc://taken"))
    ZmqSink(ZmqOptions(endpoint="inproc://free")).close()
    sink.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "5557"}, r"endpoint='5557': no address of a socket; give one like tcp://127"),
        ({"endpoint": "tcp://*:70000"}, r"endpoint='tcp://\*:70000': no address of a socket"),
        ({"endpoint": "tcp://*"}, r"endpoint='tcp://\*': no address of a socket"),
        ({"replay_endpoint": "udp://*:1"}, r"replay_endpoint='udp://\*:1': no address of a socket"),
        ({"buffer_steps": 0}, r"buffer_steps=0: "),
        ({"hwm": -1}, r"hwm=-1: "),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ZmqOptions(**options)


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint", "snapshot_endpoint"])
@pytest.mark.parametrize("wrong", ["nonsense", "tcp://127.0.0.1", "tcp://*:5557"])
def test_a_subscriber_names_the_address_that_is_wrong(name: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}='{re.escape(wrong)}': .*; give"):
        EventSubscriber(**{"endpoint": "tcp://127.0.0.1:5557", name: wrong})


def test_a_subscriber_waits_for_a_time() -> None:
    with (
        EventSubscriber("inproc://nobody") as subscriber,
        pytest.raises(ConfigError, match=r"timeout=-1: no time to wait"),
    ):
        subscriber.receive(-1)
    with (
        EventSubscriber("inproc://nobody") as subscriber,
        pytest.raises(ConfigError, match=r"timeout=None: no time to wait; give seconds"),
    ):
        subscriber.receive(None)  # type: ignore[arg-type]


def test_an_endpoint_that_answers_something_else_is_named_and_the_gap_is_seen_again() -> None:
    name = f"inproc://foreign-{next(_NUMBERS)}"
    sink = ZmqSink(ZmqOptions(endpoint=name))
    foreign = zmq.Context.instance().socket(zmq.ROUTER)
    foreign.setsockopt(zmq.RCVTIMEO, 10_000)
    foreign.bind(f"{name}-answers")

    def answer() -> None:
        foreign.send_multipart([foreign.recv_multipart()[0], b"rain"])

    try:
        with EventSubscriber(name, replay_endpoint=f"{name}-answers") as subscriber:
            while not sink.has_subscriber:
                sink.serve(lambda: iter(()))
            for number in (0, 2, 3):
                sink.send(number, KVEventBatch(float(number), [], 0))
            assert [batch.ts for batch in subscriber.receive(10)] == [0.0]
            # Batch 1 is missing before 2, and still before 3.
            for _ in range(2):
                answers = threading.Thread(target=answer)
                answers.start()
                with pytest.raises(
                    ConfigError, match=rf"^replay_endpoint='{name}-answers': sends 1 frames and not the 4"
                ):
                    subscriber.receive(10)
                answers.join()
                assert subscriber.last_seq == 0
    finally:
        foreign.close(linger=0)
        sink.close()


def test_a_publisher_of_something_else_is_named_and_a_batch_after_it_is_taken() -> None:
    endpoint = f"inproc://foreign-{next(_NUMBERS)}"
    socket = zmq.Context.instance().socket(zmq.XPUB)
    socket.bind(endpoint)
    try:
        with EventSubscriber(endpoint) as subscriber:
            assert socket.poll(10_000), "nobody subscribed"
            first = (0).to_bytes(8, "big")
            for frames, problem in (
                ([b"weather: rain"], r"sends 1 frames and not the 3 of a batch"),
                ([b"", first, b"rain"], r"sends what is no batch of events \("),
            ):
                socket.send_multipart(frames)
                with pytest.raises(ConfigError, match=rf"^endpoint='{endpoint}': {problem}"):
                    subscriber.receive(10)
            socket.send_multipart([b"", first, msgspec.msgpack.encode(KVEventBatch(1.5, []))])
            assert subscriber.receive(10) == [KVEventBatch(1.5, [])]
            assert (subscriber.num_lost, subscriber.last_seq) == (0, 0)
    finally:
        socket.close(linger=0)
