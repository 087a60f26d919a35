"""Who reads events, and what they can make the publisher hold: addresses, keys, salts, clients that do not read."""

import contextlib
import logging
import socket as sockets
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvledger import KVCacheManager, Request
from kvledger.errors import ConfigError
from kvledger.events import (
    BlockStored,
    EventError,
    EventStyle,
    EventSubscriber,
    FileSink,
    KVEventBatch,
    LedgerEvents,
    NullSink,
    SaltRule,
    ZmqOptions,
    ZmqSink,
    read_events,
)
from kvledger.events.answers import MESSAGES_AHEAD
from kvledger.events.endpoints import is_public
from kvledger.events.replay_buffer import ReplayBuffer
from tests.helpers import kv_config

zmq = pytest.importorskip("zmq")


def free_port() -> int:
    with sockets.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def opened(options: ZmqOptions) -> Iterator[ZmqSink]:
    sink = ZmqSink(options)
    try:
        yield sink
    finally:
        sink.close()


# Addresses


def test_the_default_is_for_this_machine_alone() -> None:
    assert ZmqOptions().endpoint == "tcp://127.0.0.1:5557"
    assert ZmqOptions().public_endpoints == []


@pytest.mark.parametrize(
    ("endpoint", "public"),
    [
        ("tcp://127.0.0.1:5557", False),
        ("tcp://127.8.8.8:5557", False),
        ("tcp://localhost:5557", False),
        ("tcp://[::1]:5557", False),
        ("ipc:///tmp/events", False),
        ("inproc://events", False),
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://10.0.0.1:5557", True),
        ("tcp://eth0:5557", True),
    ],
)
def test_what_other_machines_reach_is_public(endpoint: str, public: bool) -> None:
    assert is_public(endpoint) is public


def test_a_public_bind_is_one_warning_and_a_private_one_is_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvledger.events"):
        with opened(ZmqOptions(f"tcp://127.0.0.1:{free_port()}", "inproc://quiet")):
            assert caplog.messages == []
        endpoint = f"tcp://*:{free_port()}"
        with opened(ZmqOptions(endpoint, "tcp://*:0")):
            (message,) = caplog.messages
    assert message.startswith(
        f"KV events at {endpoint}, tcp://*:0: every host that reaches this one can read the tokens"
    )


def test_an_address_with_a_host_is_bound() -> None:
    """A publisher that connected would wait for ever for a collector that nobody spoke of."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with opened(ZmqOptions(endpoint)) as sink, EventSubscriber(endpoint) as subscriber:
        while not sink.has_subscriber:
            sink.serve(lambda: iter(()))
        sink.send(0, KVEventBatch(1.0, []))
        assert subscriber.receive(10) == [KVEventBatch(1.0, [])]


@pytest.mark.parametrize("bind", [False, None])
def test_a_publisher_connects_to_a_collector_on_request_and_by_vllms_rule(bind: bool | None) -> None:
    collector = zmq.Context.instance().socket(zmq.SUB)
    port = collector.bind_to_random_port("tcp://127.0.0.1")
    collector.setsockopt(zmq.SUBSCRIBE, b"")
    try:
        with opened(ZmqOptions(f"tcp://127.0.0.1:{port}", bind=bind)) as sink:
            while not sink.has_subscriber:
                # The collector tells a new peer of its subscription when it is asked for something.
                collector.poll(1)
                sink.serve(lambda: iter(()))
            sink.send(7, KVEventBatch(1.0, []))
            assert collector.poll(10_000)
            assert collector.recv_multipart()[1] == (7).to_bytes(8, "big")
    finally:
        collector.close(linger=0)


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint", "snapshot_endpoint"])
def test_a_port_that_is_taken_is_named_at_once(name: str) -> None:
    with sockets.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        taken = f"tcp://127.0.0.1:{owner.getsockname()[1]}"
        options = ZmqOptions(**{"endpoint": f"tcp://127.0.0.1:{free_port()}", name: taken})
        with pytest.raises(ConfigError, match=rf"^{name}='{taken}': cannot be opened \(Address already in use"):
            ZmqSink(options)


# Snapshots


def test_a_public_snapshot_needs_a_key() -> None:
    with pytest.raises(ConfigError, match=r"snapshot_endpoint='tcp://\*:5559': every host could ask for the tokens"):
        ZmqOptions(snapshot_endpoint="tcp://*:5559")
    assert ZmqOptions(snapshot_endpoint="tcp://*:5559", snapshot_key=b"open sesame").snapshot_key == b"open sesame"


def test_who_does_not_know_the_key_gets_no_snapshot() -> None:
    options = ZmqOptions("inproc://kept", snapshot_endpoint="inproc://kept-snapshot", snapshot_key=b"open sesame")
    events = LedgerEvents(kv_config(8), ZmqSink(options))
    manager = KVCacheManager(kv_config(8), max_model_len=64, observer=events.observer)
    request = Request("r", list(range(8)))
    manager.allocate_slots(request, 8, manager.get_computed_blocks(request))
    events.end_step(1.0)
    while events.num_batches == 0:
        time.sleep(0.001)
    addresses = {"endpoint": "inproc://kept", "snapshot_endpoint": "inproc://kept-snapshot"}
    with EventSubscriber(**addresses, snapshot_key=b"open sesame") as friend:
        assert [len(batch.events) for batch in friend.catch_up()] == [2]
    for guess in (b"", b"open", b"open sesame\0"):
        with EventSubscriber(**addresses, snapshot_key=guess) as stranger:
            assert stranger.catch_up() == []
    events.close()


# Salts


def told_keys(tmp_path: Any, **options: Any) -> list[tuple[Any, ...] | None]:
    """extra_keys of two tenants' prompts of two blocks."""
    path = str(tmp_path / "events.msgpack")
    config = kv_config(8)
    events = LedgerEvents(config, FileSink(path), **options)
    manager = KVCacheManager(config, max_model_len=64, observer=events.observer)
    for name in ("ada", "bob"):
        request = Request(name, list(range(8)), cache_salt=f"{name}'s secret")
        manager.allocate_slots(request, 8, manager.get_computed_blocks(request))
        events.end_step(1.0)
    events.close()
    keys: list[tuple[Any, ...] | None] = []
    for _, batch in read_events(path):
        for event in batch.events:
            assert isinstance(event, BlockStored)
            keys += event.extra_keys or []
    return keys


@pytest.mark.parametrize("style", list(EventStyle))
def test_salts_are_told_as_in_vllm_unless_something_else_is_asked_for(tmp_path: Any, style: EventStyle) -> None:
    assert told_keys(tmp_path, style=style) == [("ada's secret",), None, ("bob's secret",), None]


def test_hashed_salts_tell_tenants_apart_and_nothing_else(tmp_path: Any) -> None:
    ada, _, bob, _ = told_keys(tmp_path, salts=SaltRule.HASHED, salt_key=b"k")
    assert ada is not None
    assert bob is not None
    assert ada != bob
    assert len(ada[0]) == len(bob[0]) == 32
    assert told_keys(tmp_path, salts=SaltRule.HASHED, salt_key=b"k")[0] == ada, "another publisher of that key"
    assert told_keys(tmp_path, salts=SaltRule.HASHED)[0] != ada, "a key of its own"


def test_omitted_salts_leave_nothing(tmp_path: Any) -> None:
    assert told_keys(tmp_path, salts=SaltRule.OMITTED) == [None] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"salts": SaltRule.HASHED, "salt_key": b""}, r"salt_key='\(secret\)': 0 bytes are no key"),
        ({"salts": SaltRule.HASHED, "salt_key": b"x" * 65}, r"salt_key='\(secret\)': 65 bytes are no key"),
        ({"salt_key": b"x"}, r"salt_key='\(secret\)': nothing is hashed with salts plain; leave it out"),
    ],
)
def test_wrong_keys_are_named_and_not_shown(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LedgerEvents(kv_config(8), NullSink(), **options)


# Bounds


def test_the_buffer_is_bounded_in_batches_and_in_bytes() -> None:
    buffer = ReplayBuffer(max_batches=3, max_bytes=10)
    for seq, payload in enumerate([b"aaaa", b"bbbb", b"cc", b"d", b"e" * 9]):
        buffer.append(seq, payload)
        buffer.check()
    # 9 and 1 bytes fit; cc would be 12.
    assert (buffer.first_seq, buffer.next_seq, buffer.num_bytes) == (3, 5, 10)
    assert [buffer.get(seq) for seq in range(2, 6)] == [None, b"d", b"e" * 9, None]
    buffer.append(5, b"f" * 11)
    buffer.check()
    assert (len(buffer), buffer.num_bytes) == (1, 11), "the last batch is kept whatever its size"
    buffer.append(0, b"anew")
    assert (buffer.first_seq, buffer.next_seq) == (0, 1)


def memory_kib() -> int:
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmRSS")).split()[1])


def mute_clients(endpoint: str, number: int) -> list[Any]:
    """Clients that ask for everything and read nothing."""
    clients = []
    for _ in range(number):
        client = zmq.Context.instance().socket(zmq.DEALER)
        client.setsockopt(zmq.RCVHWM, 1)
        client.setsockopt(zmq.RCVBUF, 4096)
        client.connect(endpoint)
        client.send_multipart((b"", (0).to_bytes(8, "big")))
        clients.append(client)
    return clients


def serve_until(sink: ZmqSink, is_done: Any) -> None:
    deadline = time.monotonic() + 20
    while not is_done():
        assert time.monotonic() < deadline, "it never comes to that"
        sink.serve(lambda: iter(()))
        time.sleep(0.001)


def test_clients_that_do_not_read_hold_a_few_messages_each_and_are_given_up() -> None:
    port = free_port()
    options = ZmqOptions("inproc://mute", f"tcp://127.0.0.1:{port}", buffer_bytes=64 << 20, answer_timeout=0.2)
    with opened(options) as sink:
        # 4,000 batches of 4 KB: 16 MB in the buffer, and 192 MB if 12 clients had them queued.
        batch = KVEventBatch(1.0, [BlockStored([1], None, [70_000] * 800, 800, None, None, None)])
        for seq in range(4000):
            sink.send(seq, batch)
        before = memory_kib()
        clients = mute_clients(options.replay_endpoint or "", 12)
        try:
            serve_until(sink, lambda: sink.num_answers == 12)
            serve_until(sink, lambda: sink.num_given_up == 12)
            assert sink.num_answers == 0
            assert memory_kib() - before < 64 << 10
            # The others are served as before.
            answered = EventSubscriber("inproc://mute", replay_endpoint=options.replay_endpoint)
            reader = zmq.Context.instance().socket(zmq.DEALER)
            reader.connect(options.replay_endpoint)
            reader.send_multipart((b"", (3990).to_bytes(8, "big")))
            serve_until(sink, lambda: reader.poll(0))
            got = []
            while not got or got[-1] != b"\xff" * 8:
                serve_until(sink, lambda: reader.poll(0))
                got.append(reader.recv_multipart()[2])
            assert [int.from_bytes(number, "big") for number in got[:-1]] == list(range(3990, 4000))
            reader.close(linger=0)
            answered.close()
        finally:
            for client in clients:
                client.close(linger=0)


def test_a_slow_reader_gets_everything_in_order() -> None:
    port = free_port()
    num_batches = 20 * MESSAGES_AHEAD
    with opened(ZmqOptions("inproc://slow", f"tcp://127.0.0.1:{port}")) as sink:
        for seq in range(num_batches):
            sink.send(seq, KVEventBatch(float(seq), [BlockStored([1], None, [1] * 4000, 4000, None, None, None)]))
        (client,) = mute_clients(f"tcp://127.0.0.1:{port}", 1)
        numbers = []
        while len(numbers) <= num_batches:
            serve_until(sink, lambda: client.poll(0))
            numbers.append(int.from_bytes(client.recv_multipart()[2], "big", signed=True))
        assert numbers == [*range(num_batches), -1]
        assert sink.num_given_up == 0
        client.close(linger=0)


def test_a_giant_question_closes_its_connection_and_nothing_else() -> None:
    port = free_port()
    with opened(ZmqOptions("inproc://giant", f"tcp://127.0.0.1:{port}")) as sink:
        sink.send(0, KVEventBatch(1.0, []))
        giant = zmq.Context.instance().socket(zmq.DEALER)
        giant.connect(f"tcp://127.0.0.1:{port}")
        giant.send_multipart((b"", bytes(1 << 20)))
        (client,) = mute_clients(f"tcp://127.0.0.1:{port}", 1)
        serve_until(sink, lambda: client.poll(0))
        assert giant.poll(50) == 0
        giant.close(linger=0)
        client.close(linger=0)


# Recordings


def recording(path: str) -> bytes:
    sink = FileSink(path)
    for seq in range(3):
        sink.send(seq, KVEventBatch(float(seq), [BlockStored([seq], None, [1, 2], 2, None, "GPU", None)]))
    sink.close()
    with open(path, "rb") as file:
        return file.read()


@pytest.mark.parametrize("name", ["events.jsonl", "events.msgpack"])
def test_a_recording_that_is_cut_anywhere_is_read_up_to_the_cut(tmp_path: Any, name: str) -> None:
    path = tmp_path / name
    whole = recording(str(path))
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        seen: list[int] = []
        is_between = 3 * length % len(whole) == 0
        with contextlib.nullcontext() if is_between else pytest.raises(EventError, match="cut off"):
            # One by one: those before the cut are kept.
            for seq, _ in read_events(str(path)):
                seen.append(seq)
        assert seen == list(range(length * 3 // len(whole)))


@pytest.mark.parametrize("name", ["events.jsonl", "events.msgpack"])
@pytest.mark.parametrize(
    "content",
    [
        b"\0" * 100,
        b"[" * 100_000 + b"\n",
        b"\xff\xfe\n",
        b"{}\n",
        b"\xff" * 12,
        b"1\n",
        b"\0" * 11 + b"\5" + b"\x91" * 5,
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Any, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(EventError, match="0 batches are whole"):
        list(read_events(str(path)))


@pytest.mark.parametrize("name", ["events.jsonl", "events.msgpack"])
def test_a_full_disk_ends_the_events_and_says_so(tmp_path: Any, name: str) -> None:
    path = tmp_path / name
    path.symlink_to("/dev/full")
    events = LedgerEvents(kv_config(8), FileSink(str(path)))
    manager = KVCacheManager(kv_config(8), max_model_len=64, observer=events.observer)
    request = Request("r", list(range(8)))
    manager.allocate_slots(request, 8, manager.get_computed_blocks(request))
    events.end_step(1.0)
    with pytest.raises(EventError, match="No space left on device"):
        events.close()
