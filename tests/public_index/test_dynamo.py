"""Dynamo's index of our events, after thousands of random operations and lost messages, is our prefix index.

Twice: its standalone indexer, which subscribes to our sockets and asks for replays by itself; and its radix tree in a
test behind our subscriber, whose publisher's buffer is so short that only snapshots help.
"""

import json
import random
from collections.abc import Iterable

import pytest
from dynamo.llm import RadixTree, compute_block_hash_for_seq

from kvledger import KVCacheManager, Request
from kvledger.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventSubscriber,
    LedgerEvents,
    ZmqOptions,
    ZmqSink,
)
from kvledger.events.event_types import AnyEvent
from tests.helpers import kv_config
from tests.public_index.indexer import Indexer, free_port, wait_for
from tests.public_index.relay import LossyRelay
from tests.unit.events.random_life import ADAPTERS, SALTS, RandomLife

BLOCK_SIZE = 4
NUM_BLOCKS = 300
OPERATIONS_A_STEP = 10
WORKER = 1


class Engine:
    """A ledger in random use that publishes over sockets. Without evict_blocks, which leaves orphans behind."""

    def __init__(self, seed: int, salts: tuple[str, ...], **options: object) -> None:
        self.replay_port = free_port()
        self.options = ZmqOptions(endpoint="inproc://engine", replay_endpoint=f"tcp://*:{self.replay_port}", **options)
        self.sink = ZmqSink(self.options)
        config = kv_config(NUM_BLOCKS, BLOCK_SIZE)
        self.events = LedgerEvents(config, self.sink, waits_when_full=True)
        self.manager = KVCacheManager(config, 4096, observer=self.events.observer)
        self.life = RandomLife(self.manager, random.Random(seed), num_texts=40, evicts=False, salts=salts)
        self.num_operations = 0

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.events.close()

    def operate(self, num_operations: int) -> None:
        for _ in range(num_operations):
            self.life.act()
            self.num_operations += 1
            if self.num_operations % OPERATIONS_A_STEP == 0:
                self.events.end_step(float(self.num_operations))

    def admit_new(self) -> None:
        """A step that certainly says something."""
        before = len(self.life.running)
        while len(self.life.running) == before:
            self.life.texts.append([self.life.rng.randrange(1 << 20) for _ in range(40)])
            request = Request(f"new {self.num_operations}", self.life.texts[-1])
            self.num_operations += 1
            if self.manager.allocate_slots(request, 40, self.manager.get_computed_blocks(request)) is None:
                self.life.leave()
                before = len(self.life.running)
                continue
            request.num_computed_tokens = 40
            self.life.running.append(request)
        self.events.end_step(float(self.num_operations))

    def hashes(self) -> set[int]:
        return {int.from_bytes(block_hash[-8:], "big") for _, block_hash in self.life.cached_keys()}

    def num_cached_tokens(self, request: Request) -> int:
        """All that the index has of it; get_computed_blocks leaves the last token out."""
        return self.manager.get_computed_blocks(request).num_tokens


def probes(engine: Engine) -> list[Request]:
    """Requests that go on from running ones, and requests about any text; one token longer than whole blocks."""
    rng = engine.life.rng
    asked: list[Request] = []
    for number in range(100):
        running = rng.choice(engine.life.running)
        tokens = running.tokens.token_ids(0, running.num_tokens)
        asked.append(Request(f"going on {number}", [*tokens, 1][: BLOCK_SIZE * 9 + 1], adapter=running.adapter))
        text = rng.choice(engine.life.texts)[: BLOCK_SIZE * rng.randint(1, 9) + 1]
        asked.append(Request(f"any {number}", text, adapter=rng.choice(ADAPTERS)))
    return asked


@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_the_indexer_that_subscribes_knows_our_index(loss: float, request: pytest.FixtureRequest) -> None:
    # Without salts: this version of the indexer does not look for them where vLLM's events have them, so it takes equal
    # prompts of two tenants for one.
    num_operations = request.config.getoption("--operations", 5_000)
    relay_port = free_port()
    with (
        Indexer(BLOCK_SIZE) as indexer,
        Engine(seed=1, salts=("",)) as engine,
        LossyRelay("inproc://engine", f"tcp://*:{relay_port}", seed=2, loss=loss) as relay,
    ):
        indexer.subscribe(f"tcp://127.0.0.1:{relay_port}", f"tcp://127.0.0.1:{engine.replay_port}")
        wait_for("it has subscribed", lambda: relay.has_subscriber)
        for _ in range(10):
            engine.operate(num_operations // 10)
            # Nobody notices the loss of the last message before the next: that one gets through.
            sent = engine.events.num_batches
            wait_for("the relay has seen all", lambda sent=sent: relay.num_passed + relay.num_lost >= sent)
            relay.loss = 0.0
            engine.admit_new()
            wait_for("it knows what we know", lambda: indexer.hashes() == engine.hashes())
            relay.loss = loss
        assert (relay.num_lost > num_operations * loss / OPERATIONS_A_STEP / 4) == (loss > 0)
        found = {True: 0, False: 0}
        for probe in probes(engine):
            identity = {"lora_name": probe.adapter.name} if probe.adapter else {}
            num_cached = engine.num_cached_tokens(probe)
            found[num_cached > 0] += 1
            assert indexer.num_cached_tokens(probe.tokens.token_ids(0, probe.num_tokens), **identity) == num_cached
        assert min(found.values()) > 10  # hits and misses


class Tree:
    """The radix tree, fed as Dynamo feeds it from vLLM's events, and with the salts."""

    def __init__(self) -> None:
        self.tree = RadixTree()
        self.num_events = 0
        # Only the first block of a sequence carries the salt; later ones have their parent's.
        self.salts: dict[object, str] = {}

    def apply(self, events: Iterable[AnyEvent]) -> None:
        for event in events:
            self.num_events += 1
            data: object = "cleared"
            if isinstance(event, BlockStored):
                data = {"stored": {"parent_hash": event.parent_block_hash, "blocks": self._blocks(event)}}
            elif isinstance(event, BlockRemoved):
                data = {"removed": {"block_hashes": event.block_hashes}}
            else:
                assert isinstance(event, AllBlocksCleared)
            self.tree.apply_event(WORKER, json.dumps({"event_id": self.num_events, "data": data}).encode())

    def hashes(self) -> set[int]:
        stored = [json.loads(text)["event"]["data"]["stored"] for text in self.tree.dump_tree_as_events()]
        return {block["block_hash"] for blocks in stored for block in blocks["blocks"]}

    def _blocks(self, event: BlockStored) -> list[dict[str, object]]:
        salt = self.salts.get(event.parent_block_hash, "")
        if event.parent_block_hash is None:
            key = event.extra_keys[0] or ()
            salt = next((value for value in key if isinstance(value, str) and value != event.lora_name), "")
        self.salts |= dict.fromkeys(event.block_hashes, salt)
        names = compute_block_hash_for_seq(
            event.token_ids, event.block_size, lora_name=event.lora_name, cache_namespace=salt or None
        )
        return [
            {"block_hash": block_hash, "tokens_hash": name}
            for block_hash, name in zip(event.block_hashes, names, strict=True)
        ]


def test_the_tree_behind_our_subscriber_knows_our_index_by_snapshots(request: pytest.FixtureRequest) -> None:
    num_operations = request.config.getoption("--operations", 5_000)
    with (
        Engine(seed=3, salts=SALTS, buffer_steps=1, snapshot_endpoint="inproc://engine-snapshot") as engine,
        LossyRelay("inproc://engine", "inproc://relay", seed=4, loss=0.02) as relay,
        EventSubscriber(
            "inproc://relay",
            replay_endpoint=f"tcp://127.0.0.1:{engine.replay_port}",
            snapshot_endpoint="inproc://engine-snapshot",
        ) as subscriber,
    ):
        wait_for("it has subscribed", lambda: relay.has_subscriber)
        tree = Tree()
        for _ in range(10):
            engine.operate(num_operations // 10)
            sent = engine.events.num_batches
            wait_for("the relay has seen all", lambda sent=sent: relay.num_passed + relay.num_lost >= sent)
            relay.loss = 0.0
            engine.admit_new()
            relay.loss = 0.02
            while batches := subscriber.receive(0.5):
                for batch in batches:
                    tree.apply(batch.events)
            assert tree.hashes() == engine.hashes()
        assert subscriber.num_catch_ups > 0
        assert subscriber.num_lost == 0
