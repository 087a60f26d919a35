"""Both managers with their events on: the same calls, and after each the same events, byte for byte on the wire.

Our side is given vLLM's hashes, so that nothing has to be translated.
"""

import msgspec
from vllm.distributed.kv_events import BlockStored as TheirStored
from vllm.distributed.kv_events import KVCacheEvent, KVEventBatch, ZmqEventPublisher
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import hash_block_tokens

from kvledger import Adapter, BlockHasher, GivenBlockHasher, KVCacheManager, MultiModalItem, Request
from kvledger.core.watch.cache_changes import CacheChange, CacheChanges
from kvledger.events import CacheView, EventBuilder, EventStyle, LedgerEvents, ZmqOptions, ZmqSink
from kvledger.events.event_types import AnyEvent, BlockRemoved, BlockStored
from kvledger.events.event_types import KVEventBatch as OurBatch
from kvledger.events.group_labels import group_labels
from tests.side_by_side.layouts import Layout
from tests.side_by_side.ledger_pair import LedgerPair, Pair, make_ours
from tests.side_by_side.scheduler_pair import Limits, SchedulerPair

HAS_FEWER_FIELDS = len(TheirStored.__struct_fields__) < len(BlockStored.__struct_fields__)


class EventPair(LedgerPair):
    """LedgerPair with adapters and multimodal items among its requests, that compares events too."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.changes = CacheChanges()
        super().__init__(layout, seed)
        self.theirs.block_pool.enable_kv_cache_events = True
        labels = group_labels(self.ours.config)
        self.as_vllm = EventBuilder(labels, EventStyle.VLLM)
        self.distinct = EventBuilder(labels, int_hashes=False)
        self.view = CacheView()
        self.num_events = 0

    def make_ours(self, num_blocks: int, watermark: float) -> KVCacheManager:
        hasher = GivenBlockHasher(self.layout.unit)
        return make_ours(self.layout, num_blocks, watermark, hasher=hasher, observer=self.changes)

    def make_pair(self, request_id: str, prompt: list[int], salt: str) -> Pair:
        rng = self.rng
        number = rng.choice([0, 0, 0, 1, 2])
        item = None
        if rng.random() < 0.2 and len(prompt) > 2:
            start = rng.randrange(len(prompt) - 1)
            item = (rng.choice(["cat", "dog"]), start, rng.randint(1, len(prompt) - start))
        theirs = self.factory.make(
            request_id,
            prompt,
            cache_salt=salt,
            lora_request=LoRARequest(f"adapter {number}", number, "somewhere") if number else None,
            mm_features=[MultiModalFeatureSpec(None, "image", item[0], PlaceholderRange(*item[1:]))] if item else None,
        )
        ours = Request(
            request_id,
            prompt,
            cache_salt=salt,
            num_encoder_tokens=rng.randint(1, 64) if self.has_encoder else 0,
            adapter=Adapter(f"adapter {number}", number) if number else None,
            multimodal=(MultiModalItem(*item),) if item else (),
        )
        # One list: theirs appends to it whenever a block becomes full.
        ours.block_hashes = theirs.block_hashes
        return Pair(ours, theirs)

    def evict(self) -> None:
        usable = self.ours.num_usable_blocks
        ids = {self.rng.randint(1, usable) for _ in range(self.rng.randint(1, 4))}
        self.ours.evict_blocks([*ids])
        self.theirs.evict_blocks(ids)
        self.compare()

    def compare(self) -> None:
        super().compare()
        changes = self.changes.take().changes()
        theirs = self.theirs.take_events()
        self.num_events += len(theirs)
        same_events(self.as_vllm.build(changes), theirs)
        self.same_index(changes)

    def same_index(self, changes: list[CacheChange]) -> None:
        """What a consumer of the other style knows is the index itself."""
        self.view.apply(self.distinct.build(changes))
        indexes = [manager.pool.indexes[manager.group_id] for manager in self.ours._coordinator.managers]
        keys = {(group_id, block_hash) for group_id, index in enumerate(indexes) for block_hash in index.blocks()}
        assert self.view.blocks.keys() == keys


class PublishedPair(EventPair):
    """The same through sockets: vLLM's own publisher beside ours, one batch a call."""

    def __init__(self, layout: Layout, seed: int, endpoint: str) -> None:
        sink = ZmqSink(ZmqOptions(f"{endpoint}-ours", f"{endpoint}-ours-replay"))
        config = layout.our_config(2)  # for the groups' names
        self.events = LedgerEvents(config, sink, style=EventStyle.VLLM, waits_when_full=True)
        self.publisher = ZmqEventPublisher(0, f"{endpoint}-theirs", f"{endpoint}-theirs-replay")
        self.num_batches = 0
        super().__init__(layout, seed)

    def make_ours(self, num_blocks: int, watermark: float) -> KVCacheManager:
        hasher = GivenBlockHasher(self.layout.unit)
        return make_ours(self.layout, num_blocks, watermark, hasher=hasher, observer=self.events.observer)

    def compare(self) -> None:
        LedgerPair.compare(self)
        ts = float(self.num_calls)
        self.events.end_step(ts)
        theirs = self.theirs.take_events()
        if theirs:
            self.publisher.publish(KVEventBatch(ts=ts, events=theirs))
            self.num_batches += 1

    def close(self) -> None:
        self.events.close()
        self.publisher.shutdown()


class TheirHasher(BlockHasher):
    """vLLM's hashes, for requests that nothing but tokens tells apart."""

    def extend(self, request: Request) -> None:
        hashes = request.block_hashes
        size, num_ahead = self.block_size, self.num_lookahead_tokens
        for start in range(len(hashes) * size, request.num_tokens - num_ahead - size + 1, size):
            end = start + size
            keys = (None, *request.tokens.token_ids(end, end + num_ahead)) if num_ahead else None
            parent = hashes[-1] if hashes else None
            hashes.append(hash_block_tokens(sha256, parent, request.tokens.token_ids(start, end), keys))


class ScheduledPair(SchedulerPair):
    """SchedulerPair that compares what vLLM's scheduler publishes in each step."""

    def __init__(self, limits: Limits, directory: str, seed: int) -> None:
        self.changes = CacheChanges()
        super().__init__(limits, directory, seed)
        self.theirs.kv_cache_manager.block_pool.enable_kv_cache_events = True
        self.published: list[KVCacheEvent] = []
        self.theirs.kv_event_publisher = self
        self.as_vllm = EventBuilder(group_labels(self.ours.manager.config), EventStyle.VLLM)
        self.num_batches = 0

    def make_ours(self) -> KVCacheManager:
        limits = self.limits
        hasher = TheirHasher(limits.layout.unit)
        return make_ours(
            limits.layout,
            limits.num_blocks,
            limits.watermark,
            limits.max_model_len,
            hasher=hasher,
            observer=self.changes,
        )

    def publish(self, batch: KVEventBatch) -> None:
        """vLLM's scheduler calls this at most once a step, and only when there are events."""
        assert not self.published
        self.published = batch.events

    def close(self) -> None:
        super().close()
        ours = self.as_vllm.build(self.changes.take().changes())
        self.num_batches += bool(ours)
        same_events(ours, self.published)
        self.published = []


def same_events(ours: list[AnyEvent], theirs: list[KVCacheEvent]) -> None:
    """The same bytes on the wire; from a release whose events have fewer fields, all but the size of the map."""
    our_bytes = msgspec.msgpack.encode(OurBatch(1.5, _in_order(ours), 0))
    their_bytes = msgspec.msgpack.encode(KVEventBatch(ts=1.5, events=_in_order(theirs), data_parallel_rank=0))
    if our_bytes != their_bytes:
        assert [msgspec.to_builtins(event) for event in _in_order(ours)] == [
            msgspec.to_builtins(event) for event in _in_order(theirs)
        ]
    assert our_bytes == their_bytes or HAS_FEWER_FIELDS


def _in_order(events: list) -> list:
    """vLLM keeps the hashes of a block that has several in a set: removals that follow each other are sorted."""
    ordered: list = []
    run: list = []
    for event in [*events, None]:
        if type(event).__name__ == BlockRemoved.__name__:
            run.append(event)
            continue
        ordered += sorted(run, key=lambda removed: (removed.group_idx, removed.block_hashes))
        ordered += [event]
        run = []
    return ordered[:-1]
