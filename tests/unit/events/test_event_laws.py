"""Laws of the stream, over random use of ledgers of every shape.

A consumer's (group, hash) pairs are the prefix index; a hash is announced once before it is removed; every announced
block carries its own tokens; where every token is read, parents come before children; a snapshot says the same.
"""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger import KVCacheConfig, KVCacheManager, KVCacheSpec, Sha256BlockHasher, unpack_tokens
from kvledger.core.watch.cache_changes import CacheChanges
from kvledger.events import AllBlocksCleared, BlockStored, CacheView, EventBuilder, EventStyle
from kvledger.events.event_types import AnyEvent
from kvledger.events.group_labels import group_labels
from tests.groups import chunked, full, groups_of, mla, state, window
from tests.unit.events.random_life import RandomLife

SHAPES: list[tuple[KVCacheSpec, ...]] = [
    (full(),),
    (mla(),),
    (window(10),),
    (chunked(16),),
    (full(), window(8)),
    (full(), window(8), window(16)),
    (full(4), window(8, block_size=8)),
    (full(16), window(4)),
    (full(), state()),
    (full(8), state(16), state(16)),
    (full(), chunked(16)),
]
READS_ALL = ("full_attention", "mla_attention")


class Life:
    """A random life, and what consumers make of it."""

    def __init__(self, shape: tuple[KVCacheSpec, ...], seed: int, style: EventStyle, evicts: bool = True) -> None:
        rng = random.Random(seed)
        config = KVCacheConfig(rng.choice([16, 40]) * len(shape) + 1, groups_of(*shape))
        unit = 4
        self.changes = CacheChanges()
        manager = KVCacheManager(config, 4096, hasher=Sha256BlockHasher(unit), observer=self.changes)
        self.ledger = RandomLife(manager, rng, evicts=evicts)
        self.builder = EventBuilder(group_labels(config), style, int_hashes=False)
        self.view = CacheView()

    def step(self) -> list[AnyEvent]:
        for _ in range(8):
            self.ledger.act()
        events = self.builder.build(self.changes.take().changes())
        self.view.apply(events)
        return events


lives = given(st.sampled_from(SHAPES), st.integers(0, 1 << 32))


@lives
@settings(max_examples=40, deadline=None)
def test_the_view_of_either_stream_is_the_prefix_index(shape: tuple[KVCacheSpec, ...], seed: int) -> None:
    for style in EventStyle:
        life = Life(shape, seed, style)
        for _ in range(30):
            life.step()
            assert life.view.blocks.keys() == life.ledger.cached_keys()


@lives
@settings(max_examples=40, deadline=None)
def test_every_hash_is_stored_once_before_it_is_removed(shape: tuple[KVCacheSpec, ...], seed: int) -> None:
    life = Life(shape, seed, EventStyle.DISTINCT)
    known: set[tuple[int | None, int | bytes]] = set()
    for _ in range(30):
        for event in life.step():
            if isinstance(event, AllBlocksCleared):
                known.clear()
                continue
            keys = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
            assert len(keys) == len(event.block_hashes) > 0
            if isinstance(event, BlockStored):
                assert not keys & known
                known |= keys
            else:
                assert keys <= known
                known -= keys


@lives
@settings(max_examples=40, deadline=None)
def test_announced_tokens_make_up_the_sequences(shape: tuple[KVCacheSpec, ...], seed: int) -> None:
    life = Life(shape, seed, EventStyle.DISTINCT)
    # hash -> all tokens up to its end, for every hash of every request.
    prefixes: dict[bytes, list[int]] = {}
    for _ in range(30):
        events = life.step()
        for request in life.ledger.running:
            for index, block_hash in enumerate(request.block_hashes):
                prefixes[block_hash] = unpack_tokens(request.tokens.pack(0, (index + 1) * 4))
        for event in events:
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                before = [] if event.parent_block_hash is None else prefixes.get(event.parent_block_hash)
                last = prefixes.get(event.block_hashes[-1])
                if before is not None and last is not None:  # else of a request that left within the step
                    assert before + event.token_ids == last


@lives
@settings(max_examples=40, deadline=None)
def test_parents_come_first_and_go_last_where_every_token_is_read(shape: tuple[KVCacheSpec, ...], seed: int) -> None:
    # Without evict_blocks: it may take a block out of the middle of a sequence.
    life = Life(shape, seed, EventStyle.DISTINCT, evicts=False)
    view = CacheView()
    for _ in range(30):
        for event in life.step():
            view.apply([event])
            for (group_id, _), block in view.blocks.items():
                if block.kind in READS_ALL and block.parent is not None:
                    assert (group_id, block.parent) in view.blocks


@lives
@settings(max_examples=20, deadline=None)
def test_a_snapshot_says_what_the_stream_has_said(shape: tuple[KVCacheSpec, ...], seed: int) -> None:
    life = Life(shape, seed, EventStyle.DISTINCT)
    for _ in range(10):
        life.step()
        newcomer = CacheView()
        for events in life.builder.snapshot():
            newcomer.apply(events)
        assert newcomer.blocks == life.view.blocks
