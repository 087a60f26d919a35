"""What is announced, event by event. Blocks of 4 tokens; hashes are told apart by the letters a, b, c ... in order."""

import msgspec
import pytest

from kvledger import Adapter, GivenBlockHasher, KVCacheConfig, KVCacheManager, MultiModalItem, Request
from kvledger.core.watch.cache_changes import CacheChanges
from kvledger.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBuilder, EventStyle, KVEventBatch
from kvledger.events.event_types import AnyEvent
from kvledger.events.group_labels import group_labels
from tests.groups import chunked, cross, full, groups_of, host, mla, sink, state, window, window_mla
from tests.helpers import admit, admitted, decode, kv_config, leave, ledger, other, request


class Listener:
    """A ledger's changes as events, one call at a time."""

    def __init__(self, config: KVCacheConfig, style: EventStyle = EventStyle.DISTINCT, **options: bool) -> None:
        self.changes = CacheChanges()
        self.builder = EventBuilder(group_labels(config), style, **options)

    def heard(self) -> list[AnyEvent]:
        return self.builder.build(self.changes.take().changes())

    def stored(self) -> list[BlockStored]:
        events = self.heard()
        assert all(isinstance(event, BlockStored) for event in events)
        return events


def named(letters: str, req: Request) -> Request:
    """The request with these hashes, one letter each; as numbers on the wire they are the letters' codes."""
    req.block_hashes = [letter.encode() for letter in letters]
    return req


def listening(usable: int, *specs: object, **options: object) -> tuple[KVCacheManager, Listener]:
    config = KVCacheConfig(usable + 1, groups_of(*(specs or (full(),))))
    listener = Listener(config, **options)
    unit = min(spec.block_size for spec in specs) if specs else 4
    return KVCacheManager(config, 4096, hasher=GivenBlockHasher(unit), observer=listener.changes), listener


A, B, C, D, E, F = (ord(letter) for letter in "abcdef")


def test_a_prompt_is_one_event_and_a_block_that_decode_fills_another() -> None:
    manager, listener = listening(8)
    a = named("abc", request("a", 10))
    admit(manager, a)
    (stored,) = listener.stored()
    assert stored == BlockStored(
        block_hashes=[A, B],
        parent_block_hash=None,
        token_ids=[0, 1, 2, 3, 4, 5, 6, 7],
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None, None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    decode(manager, a, 2, first_token=100)
    (grown,) = listener.stored()
    assert (grown.block_hashes, grown.parent_block_hash, grown.token_ids) == ([C], B, [8, 9, 110, 111])


def test_hits_are_not_announced_again() -> None:
    manager, listener = listening(8)
    admit(manager, named("ab", request("a", 9)))
    listener.heard()
    admit(manager, named("abc", request("b", 12)))
    (stored,) = listener.stored()
    assert (stored.block_hashes, stored.parent_block_hash) == ([C], B)


def test_a_hash_that_two_blocks_carry_goes_with_the_second() -> None:
    # Both are computed before either could hit the other: blocks 1 2 and 3 4 carry a b.
    manager, listener = listening(4)
    a, b = named("ab", request("a", 8)), named("ab", request("b", 8))
    misses = [manager.get_computed_blocks(req) for req in (a, b)]
    for req, miss in zip((a, b), misses, strict=True):
        admit(manager, req, found=miss)
    assert [event.block_hashes for event in listener.stored()] == [[A, B]]
    leave(manager, a)
    leave(manager, b)
    admit(manager, named("cd", request("c", other(8))))
    assert [type(event) for event in listener.heard()] == [BlockStored]  # c took 2 1; 4 3 still serve a b
    admit(manager, named("ef", request("d", other(8, 2))))
    removed, stored = listener.heard()
    assert (removed.block_hashes, removed.group_idx, removed.medium) == ([B, A], 0, "GPU")
    assert stored.block_hashes == [E, F]


def test_vllm_tells_of_every_carrier() -> None:
    manager, listener = listening(4, style=EventStyle.VLLM)
    a, b = named("ab", request("a", 8)), named("ab", request("b", 8))
    misses = [manager.get_computed_blocks(req) for req in (a, b)]
    for req, miss in zip((a, b), misses, strict=True):
        admit(manager, req, found=miss)
    assert [event.block_hashes for event in listener.stored()] == [[A, B], [A, B]]
    leave(manager, a)
    admit(manager, named("cd", request("c", other(8))))
    assert listener.heard()[:2] == [BlockRemoved([B], "GPU", 0), BlockRemoved([A], "GPU", 0)]


def test_resetting_is_one_event() -> None:
    manager, listener = listening(8)
    a = named("ab", request("a", 8))
    admit(manager, a)
    leave(manager, a)
    listener.heard()
    assert manager.reset_prefix_cache()
    assert listener.heard() == [AllBlocksCleared()]
    admit(manager, named("ab", request("b", 8)))
    assert [event.block_hashes for event in listener.stored()] == [[A, B]]


def test_a_reset_of_device_and_host_memory_is_one_event_too() -> None:
    manager, listener = listening(8, full(), host(8))
    a = named("ab", request("a", 8))
    admit(manager, a)
    assert [(event.medium, event.block_hashes) for event in listener.stored()] == [("GPU", [A, B]), ("CPU", [A, B])]
    leave(manager, a)
    assert manager.reset_prefix_cache()
    assert listener.heard() == [AllBlocksCleared()]


def test_a_refused_reset_and_an_empty_step_say_nothing() -> None:
    manager, listener = listening(8)
    admit(manager, named("", request("a", 3)))
    assert not manager.reset_prefix_cache()
    assert listener.heard() == []


def test_b62_blocks_around_a_null_block_carry_only_their_own_tokens() -> None:
    # A window of 4 tokens: hits end at multiples of 12, where the other group's blocks end, and need one block.
    manager, listener = listening(20, full(12), window(4))
    # Of the blocks a .. i of 4 tokens, only c, f and i can serve a hit of the window's group.
    admit(manager, named("abcdefghi", request("x", 37)), 36)
    wide, *narrow = listener.stored()
    assert (wide.block_hashes, wide.block_size, len(wide.token_ids), wide.group_idx) == ([C, F, ord("i")], 12, 36, 0)
    assert [(event.block_hashes, event.parent_block_hash, event.token_ids) for event in narrow] == [
        ([C], B, [8, 9, 10, 11]),
        ([F], E, [20, 21, 22, 23]),
        ([ord("i")], ord("h"), [32, 33, 34, 35]),
    ]
    assert {(event.block_size, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in narrow} == {
        (4, "sliding_window", 4)
    }


def test_b62_as_vllm_has_it_the_tokens_span_the_null_blocks() -> None:
    manager, listener = listening(20, full(12), window(4), style=EventStyle.VLLM)
    admit(manager, named("abcdefghi", request("x", 37)), 36)
    _, narrow = listener.stored()
    assert (narrow.block_hashes, narrow.parent_block_hash) == ([C, F, ord("i")], None)
    assert narrow.token_ids == list(range(36))


def test_b65_a_block_of_many_hash_units_is_one_entry_of_its_own_size() -> None:
    # Hash units of 4 tokens, blocks of 16: one hash a block, that of its last unit.
    config = KVCacheConfig(21, groups_of(full(16), state(16)))
    listener = Listener(config)
    manager = KVCacheManager(config, 4096, hasher=GivenBlockHasher(4), observer=listener.changes)
    prompt = named("abcdefghijk", request("x", 47))
    hit = manager.get_computed_blocks(prompt)
    manager.allocate_slots(prompt, 32, hit)
    full_blocks = [event for event in listener.stored() if event.group_idx == 0]
    assert [(event.block_hashes, event.block_size) for event in full_blocks] == [([D, ord("h")], 16)]
    # The prompt ends inside its third block: an entry of the 12 tokens that whole hash units cover.
    prompt.num_computed_tokens = 32
    manager.allocate_slots(prompt, 15)
    tails = [event for event in listener.stored() if event.group_idx == 0]
    assert [(event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size) for event in tails] == [
        ([ord("k")], ord("h"), list(range(32, 44)), 12)
    ]


def test_adapter_salt_and_images_are_the_extra_keys() -> None:
    manager, listener = listening(8)
    image = MultiModalItem("cat", start=2, num_tokens=4)
    req = request("a", 12, adapter=Adapter("law", 7), cache_salt="tenant", multimodal=(image,))
    admit(manager, named("abc", req))
    (stored,) = listener.stored()
    assert (stored.lora_id, stored.lora_name) == (7, "law")
    assert stored.extra_keys == [("law", ("cat", 2), "tenant"), ("law", ("cat", -2)), ("law",)]


def test_whole_digests_instead_of_numbers() -> None:
    manager, listener = listening(8, int_hashes=False)
    admit(manager, named("ab", request("a", 8)))
    (stored,) = listener.stored()
    assert stored.block_hashes == [b"a", b"b"]


def test_numbers_are_the_low_64_bits_of_the_digest() -> None:
    manager, listener = listening(8)
    req = request("a", 4)
    req.block_hashes = [bytes(range(32))]
    admit(manager, req)
    (stored,) = listener.stored()
    assert stored.block_hashes == [0x18191A1B1C1D1E1F]


def test_every_kind_of_group_has_vllms_name() -> None:
    specs = (
        full(), mla(), sink(), window(8), window_mla(9), chunked(16), state(), cross(), host(5),
    )  # fmt: skip
    labels = group_labels(KVCacheConfig(100, groups_of(*specs)))
    assert [(label.kind, label.sliding_window, label.medium) for label in labels] == [
        ("full_attention", None, "GPU"),
        ("mla_attention", None, "GPU"),
        ("sink_full_attention", None, "GPU"),
        ("sliding_window", 8, "GPU"),
        ("sliding_window_mla", 9, "GPU"),
        ("chunked_local_attention", None, "GPU"),
        ("mamba", None, "GPU"),
        ("cross_attention", None, "GPU"),
        ("full_attention", None, "CPU"),
    ]


def test_a_snapshot_rebuilds_everything_with_parents_first() -> None:
    manager, listener = listening(20)
    a = named("abc", request("a", 12))
    admit(manager, a)
    admit(manager, named("abef", request("b", [*range(8), *other(8)])))
    manager.evict_blocks(manager.get_block_ids("a")[0][2:])  # c goes
    listener.heard()
    (events,) = listener.builder.snapshot()
    cleared, stored = events
    assert cleared == AllBlocksCleared()
    assert (stored.block_hashes, stored.parent_block_hash) == ([A, B, E, F], None)
    assert stored.token_ids == [*range(8), *other(8)]


def test_a_snapshot_names_parents_that_are_gone() -> None:
    manager, listener = listening(20)
    admit(manager, named("abc", request("a", 12)))
    manager.evict_blocks(manager.get_block_ids("a")[0][1:2])  # b goes
    listener.heard()
    ((_, *stored),) = listener.builder.snapshot()
    assert [(event.block_hashes, event.parent_block_hash) for event in stored] == [([A], None), ([C], B)]


def test_a_batch_on_the_wire_byte_by_byte() -> None:
    batch = KVEventBatch(1.5, [BlockRemoved([A], "GPU", 0), AllBlocksCleared()], 0)
    removed = {"type": "BlockRemoved", "block_hashes": [A], "medium": "GPU", "group_idx": 0}
    expected = [1.5, [removed, {"type": "AllBlocksCleared"}], 0]
    assert msgspec.msgpack.encode(batch) == msgspec.msgpack.encode(expected)


@pytest.mark.parametrize("style", EventStyle)
def test_a_moved_hash_says_nothing_and_goes_with_its_new_block(style: EventStyle) -> None:
    # A state in a block of 16 that the request goes on writing: the copy takes over its hashes.
    config = KVCacheConfig(21, groups_of(full(4), state(16)))
    listener = Listener(config, style)
    manager = KVCacheManager(config, 4096, hasher=GivenBlockHasher(4), observer=listener.changes)
    req = named("abcde", request("a", 9))
    manager.allocate_slots(req, 8, manager.get_computed_blocks(req))
    req.num_computed_tokens = 8
    states = [event for event in listener.stored() if event.group_idx == 1]
    assert [event.block_hashes for event in states] == [[B]]
    before = manager.get_block_ids("a")[1]
    manager.start_step()
    manager.allocate_slots(req, 1)
    assert listener.heard() == []
    (copy,) = manager.take_block_copies()
    assert copy.source_block_id == before[0]
    manager.evict_blocks([copy.target_block_id])
    assert listener.heard() == [BlockRemoved([B], "GPU", 1)]


def test_the_default_manager_hashes_with_sha256() -> None:
    listener = Listener(kv_config(8))
    manager = ledger(8, observer=listener.changes)
    a = admitted(manager, "a", 4)
    (stored,) = listener.stored()
    assert stored.block_hashes == [int.from_bytes(a.block_hashes[0][-8:], "big")]
