"""Reports from the field, section C: hits that must not be."""

import itertools
from typing import Any

from kvledger import (
    Adapter,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    MultiModalItem,
    Sha256BlockHasher,
    VerifiedBlockHasher,
)
from kvledger.scheduler import ExternalHit
from tests.engine import Engine
from tests.helpers import admit, admitted, cached_ids, hit, leave, ledger, other, request


def shares(first: dict[str, Any], second: dict[str, Any], **options: Any) -> bool:
    """Does a request with the second identity hit what one with the first has computed?"""
    manager = ledger(usable=8, **options)
    admit(manager, request("first", 9, **first))
    return hit(manager, request("second", 9, **second)) > 0


def test_b31_one_adapter_name_is_not_one_adapter() -> None:
    loaded = [Adapter("a", 1), Adapter("a", 2), Adapter("a", 1, generation=1)]
    for first, second in itertools.product(loaded, loaded):
        assert shares({"adapter": first}, {"adapter": second}) == (first is second)


def test_b32_no_field_can_pass_for_another() -> None:
    identities: list[dict[str, Any]] = [
        {},
        {"adapter": Adapter("X", 0)},
        {"adapter": Adapter("", 0)},
        {"cache_salt": "X"},
        {"multimodal": (MultiModalItem("X", 0, 4),)},
        {"multimodal": (MultiModalItem("X", 1, 3),)},
        {"adapter": Adapter("X", 0), "cache_salt": "Y"},
        {"adapter": Adapter("Y", 0), "cache_salt": "X"},
        {"adapter": Adapter("XY", 0)},
        {"cache_salt": "XY"},
    ]
    for first, second in itertools.product(range(len(identities)), repeat=2):
        assert shares(identities[first], identities[second]) == (first == second), (first, second)


def test_b34_a_secret_seed_changes_every_hash() -> None:
    plain, secret = request("a", 8), request("b", 8)
    Sha256BlockHasher(4).refresh(plain)
    Sha256BlockHasher(4, seed=b"secret").refresh(secret)
    assert not set(plain.block_hashes) & set(secret.block_hashes)
    assert {len(block_hash) for block_hash in plain.block_hashes} == {32}


def test_b34_a_weak_hash_is_verified_on_a_hit() -> None:
    manager = ledger(usable=8, hasher=VerifiedBlockHasher(4, lambda data: b"constant"))
    admit(manager, request("a", 9))
    assert hit(manager, request("b", other(9))) == 0
    assert hit(manager, request("c", 9)) == 8


def test_b35_salts_keep_tenants_apart_along_the_whole_chain() -> None:
    assert not shares({"cache_salt": "a"}, {"cache_salt": "b"})
    assert not shares({"cache_salt": "a"}, {})
    assert shares({"cache_salt": "a"}, {"cache_salt": "a"})
    assert shares({"cache_salt": ""}, {})
    a, b = request("a", 12, cache_salt="a"), request("b", 12, cache_salt="b")
    for each in (a, b):
        Sha256BlockHasher(4).refresh(each)
    assert not set(a.block_hashes) & set(b.block_hashes)


def test_b37_a_resumed_session_is_hashed_by_its_tokens() -> None:
    session = request("session", [1, 2, 3, 99])
    manager = ledger(usable=8)
    admit(manager, session)
    leave(manager, session)
    session.truncate(3)
    session.append_token(4)
    admit(manager, session)
    straight = request("straight", [1, 2, 3, 4])
    Sha256BlockHasher(4).refresh(straight)
    assert session.block_hashes == straight.block_hashes
    assert hit(manager, request("b", [1, 2, 3, 4, 5])) == 4
    assert hit(manager, request("c", [1, 2, 3, 99, 5])) == 4


def test_b38_a_new_epoch_means_no_hits() -> None:
    manager = ledger(usable=8)
    p = admitted(manager, "p", 9)
    leave(manager, p)
    assert hit(manager, request("again", 9)) == 8
    manager.start_epoch()
    assert hit(manager, request("again", 9)) == 0
    assert hit(manager, p) == 0


def test_b38_reset_fails_loudly_or_conserves_blocks_by_force() -> None:
    engine = Engine(8)
    engine.add("p", 9)
    engine.step()
    assert engine.scheduler.reset_prefix_cache() is False
    assert engine.journal.refused == [3]
    assert engine.scheduler.reset_prefix_cache(preempt_running=True) is True
    assert (engine.manager.num_free_blocks, cached_ids(engine.manager)) == (8, [])
    assert engine.step().ranges_by_request() == {"p": (0, 10)}
    engine.check()


def test_b39_a_block_is_named_by_all_the_hash_units_in_it() -> None:
    # Hash unit 4, groups with blocks of 4 and of 16 tokens: a hit is one for both groups.
    groups = tuple(KVCacheGroupSpec((f"layer.{size}",), FullAttentionSpec(size, 1, 8)) for size in (4, 16))
    manager = KVCacheManager(KVCacheConfig(40, groups), 4096, hasher=Sha256BlockHasher(4))
    first = admitted(manager, "first", 40)
    assert len(first.block_hashes) == 10
    assert [len(blocks) for blocks in manager.get_block_ids("first")] == [10, 3]
    assert hit(manager, request("twelve tokens", list(range(12)) + other(30))) == 0
    assert hit(manager, request("sixteen tokens", list(range(16)) + other(30))) == 16
    assert hit(manager, request("all", 41)) == 32
    named = {block.block_hash: int(block.num_hash_tokens) for block in manager.get_blocks("first").blocks[1][:2]}
    assert named == {first.block_hashes[3]: 16, first.block_hashes[7]: 32}


def test_b41_a_transfer_that_can_happen_once_is_not_waited_for_twice() -> None:
    engine = Engine(8)
    engine.source.offers["a"] = ExternalHit(8, asynchronous=True)
    engine.add("a", 9, max_tokens=4)
    engine.step()
    engine.load("a")
    engine.step()
    engine.source.offers["a"] = ExternalHit(0)
    engine.scheduler.reset_prefix_cache(preempt_running=True)
    output = engine.step()
    assert output.ranges_by_request() == {"a": (0, 10)}
    engine.run(max_steps=10)
    assert len(engine.tokens["a"]) == 4
