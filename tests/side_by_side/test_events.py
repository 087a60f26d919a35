"""Our KV events and vLLM's: the same stream from the same calls, byte for byte, in every layout."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from tests.side_by_side.event_pair import HAS_FEWER_FIELDS, EventPair, PublishedPair, ScheduledPair
from tests.side_by_side.layouts import MODEL_LAYOUTS, Layout, random_layout
from tests.side_by_side.test_manager import CALLS_PER_SEED, one_group, seeds
from tests.side_by_side.test_scheduler import can_be_scheduled_there, random_limits, random_work

CACHED_LAYOUTS = [layout for layout in MODEL_LAYOUTS if layout.enable_caching]


def drive(layouts: Iterator[tuple[Layout, int]], num_calls: int) -> None:
    num_done = num_events = 0
    while num_done < num_calls:
        layout, seed = next(layouts)
        if not layout.enable_caching:
            continue
        pair = EventPair(layout, seed)
        try:
            pair.run(CALLS_PER_SEED)
        except Exception as difference:
            raise AssertionError(f"seed {seed}, call {pair.num_calls}, {layout}") from difference
        num_done += pair.num_calls
        num_events += pair.num_events
    assert num_events > 0


def test_one_group(request: pytest.FixtureRequest) -> None:
    drive(((one_group(seed), seed) for seed in seeds(request)), request.config.getoption("--calls") // 10)


@pytest.mark.parametrize("layout", CACHED_LAYOUTS, ids=lambda layout: layout.name)
def test_model_layout(layout: Layout, request: pytest.FixtureRequest) -> None:
    num_calls = request.config.getoption("--calls") // 10 // len(CACHED_LAYOUTS)
    drive(((layout, seed) for seed in seeds(request)), num_calls)


def test_random_layouts(request: pytest.FixtureRequest) -> None:
    layouts = ((random_layout(random.Random(seed)), seed) for seed in seeds(request))
    drive(layouts, request.config.getoption("--calls") // 10)


@pytest.mark.parametrize("seed", range(12))
def test_each_step_of_the_scheduler_publishes_the_same_batch(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    layout = random_layout(rng)
    while not layout.enable_caching or not can_be_scheduled_there(layout):
        layout = random_layout(rng)
    limits = random_limits(rng, layout)
    pair = ScheduledPair(limits, str(tmp_path), seed)
    texts = [[rng.randrange(100) for _ in range(40)] for _ in range(3)]
    for number in range(80):
        pair.add(random_work(rng, number, limits, texts))
        pair.step()
    pair.drain()
    assert pair.num_batches > 0


def comparable(messages: list[list[bytes]]) -> list[list[Any]]:
    """Frames as they came; beside a release whose events have fewer fields, with the payload decoded."""
    if not HAS_FEWER_FIELDS:
        return messages
    return [[*message[:-1], message[-1] and msgspec.msgpack.decode(message[-1])] for message in messages]


def subscribe(endpoint: str) -> zmq.Socket:
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(endpoint)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    return socket


def frames(socket: zmq.Socket, num_messages: int) -> list[list[bytes]]:
    received: list[list[bytes]] = []
    while len(received) < num_messages:
        assert socket.poll(10_000), "nothing comes any more"
        received.append(socket.recv_multipart())
    socket.close(linger=0)
    return received


def replayed(endpoint: str, first: int) -> list[list[bytes]]:
    """The whole answer, the end with its number -1 included."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send_multipart((b"", first.to_bytes(8, "big")))
    received: list[list[bytes]] = []
    while not received or received[-1][-1]:
        assert socket.poll(10_000), "nothing comes any more"
        received.append(socket.recv_multipart())
    socket.close(linger=0)
    return received


@pytest.mark.parametrize("layout", CACHED_LAYOUTS[:7], ids=lambda layout: layout.name)
def test_a_subscriber_of_vllm_receives_the_same_frames(layout: Layout) -> None:
    endpoint = f"inproc://{layout.name.replace(' ', '-')}"
    pair = PublishedPair(layout, 7, endpoint)
    sockets = [subscribe(f"{endpoint}-{side}") for side in ("ours", "theirs")]
    pair.run(400)
    ours, theirs = (frames(socket, pair.num_batches) for socket in sockets)
    assert comparable(ours) == comparable(theirs)
    assert len(ours) > 0
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    events: list[Any] = [event for _, _, payload in ours for event in decoder.decode(payload).events]
    assert any(isinstance(event, BlockStored) for event in events)
    for first in (0, len(ours) - 3, len(ours)):
        our_answer, their_answer = (replayed(f"{endpoint}-{side}-replay", first) for side in ("ours", "theirs"))
        assert comparable(our_answer) == comparable(their_answer)
    pair.close()
