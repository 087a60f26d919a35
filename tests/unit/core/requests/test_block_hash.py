"""Block hashes, recomputed here from the documented bytes alone."""

import struct
import subprocess
import sys
from hashlib import sha256
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger import (
    Adapter,
    BlockHasher,
    ChainedBlockHasher,
    GivenBlockHasher,
    MultiModalItem,
    Request,
    Sha256BlockHasher,
    make_block_hasher,
    pack_tokens,
)
from kvledger.errors import ConfigError, RequestError
from tests.helpers import other, request


def hashes(hasher: BlockHasher, req: Request) -> list[bytes]:
    hasher.refresh(req)
    return req.block_hashes


def digest(*parts: bytes) -> bytes:
    return sha256(b"".join(parts)).digest()


def root(block_size: int, epoch: int = 0, seed: bytes = b"") -> bytes:
    return digest(b"kvledger-block-hash-1", struct.pack("<IQ", block_size, epoch), seed)


def entry(tag: int, payload: bytes) -> bytes:
    return struct.pack("<BI", tag, len(payload)) + payload


def test_the_chain_starts_at_the_root_and_covers_every_full_block() -> None:
    first = digest(root(4), struct.pack("<4I", 0, 1, 2, 3))
    second = digest(first, struct.pack("<4I", 4, 5, 6, 7))
    assert hashes(Sha256BlockHasher(4), request("a", 7)) == [first]
    assert hashes(Sha256BlockHasher(4), request("a", 8)) == [first, second]
    assert hashes(Sha256BlockHasher(4), request("a", 3)) == []


def test_seed_and_epoch_are_in_the_root() -> None:
    hasher = Sha256BlockHasher(2, seed=b"secret")
    a = request("a", 2)
    assert hashes(hasher, a) == [digest(root(2, 0, b"secret"), struct.pack("<2I", 0, 1))]
    hasher.start_epoch()
    assert hashes(hasher, a) == [digest(root(2, 1, b"secret"), struct.pack("<2I", 0, 1))]


def test_a_hash_for_a_draft_covers_the_tokens_behind_its_block() -> None:
    hasher = Sha256BlockHasher(4)
    hasher.serve(2)
    first = digest(root(4), struct.pack("<4I", 0, 1, 2, 3), entry(4, struct.pack("<2I", 4, 5)))
    # The second block is full at 8 tokens, and named once tokens 8 and 9 are known.
    assert hashes(hasher, request("a", 5)) == []
    assert hashes(hasher, request("b", 9)) == [first]
    second = digest(first, struct.pack("<4I", 4, 5, 6, 7), entry(4, struct.pack("<2I", 8, 9)))
    assert hashes(hasher, request("c", 10)) == [first, second]


def test_a_hasher_serves_ledgers_of_one_kind() -> None:
    hasher = Sha256BlockHasher(4)
    hasher.serve(1)
    hasher.serve(1)
    with pytest.raises(ConfigError, match="hasher='Sha256BlockHasher': it hashes for a ledger with other drafts"):
        hasher.serve(0)


def test_adapter_and_salt_stand_in_block_0_only() -> None:
    a = request("a", 4, adapter=Adapter("zoë", 7, generation=3), cache_salt="tenant")
    extra = entry(1, struct.pack("<QQ", 7, 3) + "zoë".encode()) + entry(2, b"tenant")
    first = digest(root(2), struct.pack("<2I", 0, 1), extra)
    assert hashes(Sha256BlockHasher(2), a) == [first, digest(first, struct.pack("<2I", 2, 3))]


def test_in_which_order_items_are_listed_means_nothing() -> None:
    # Two images in one block, and a prompt of video frames that somebody lists from the last to the first.
    cat, dog, bird = MultiModalItem("cat", 0, 2), MultiModalItem("dog", 2, 2), MultiModalItem("bird", 5, 2)
    listed = [request(str(items), 8, multimodal=items) for items in permutations((cat, dog, bird))]
    assert len({tuple(hashes(Sha256BlockHasher(4), a)) for a in listed}) == 1
    assert {a.multimodal for a in listed} == {(cat, dog, bird)}


def test_a_multimodal_item_stands_in_every_block_it_overlaps_with_its_offset() -> None:
    # Blocks of 4: the item covers tokens 3 .. 8, so it starts at +3, -1 and -5 seen from blocks 0, 1 and 2.
    a = request("a", 16, multimodal=(MultiModalItem("cat", 3, 6),))
    expected = [digest(root(4), struct.pack("<4I", 0, 1, 2, 3), entry(3, struct.pack("<q", 3) + b"cat"))]
    for block, offset in ((1, -1), (2, -5)):
        tokens = struct.pack("<4I", *range(block * 4, block * 4 + 4))
        expected.append(digest(expected[-1], tokens, entry(3, struct.pack("<q", offset) + b"cat")))
    expected.append(digest(expected[-1], struct.pack("<4I", 12, 13, 14, 15)))
    assert hashes(Sha256BlockHasher(4), a) == expected


def test_two_items_in_one_block_are_two_entries() -> None:
    a = request("a", 4, multimodal=(MultiModalItem("cat", 0, 1), MultiModalItem("dog", 2, 2)))
    extra = entry(3, struct.pack("<q", 0) + b"cat") + entry(3, struct.pack("<q", 2) + b"dog")
    assert hashes(Sha256BlockHasher(4), a) == [digest(root(4), struct.pack("<4I", 0, 1, 2, 3), extra)]


def test_an_item_shifted_by_one_token_is_another_block() -> None:
    def at(start: int) -> list[bytes]:
        return hashes(Sha256BlockHasher(4), request("a", [9] * 8, multimodal=(MultiModalItem("cat", start, 2),)))

    assert at(0)[0] != at(1)[0]
    assert at(4)[0] == at(5)[0]
    assert at(4)[1] != at(5)[1]


def test_xxh3_follows_the_same_layout() -> None:
    xxhash = pytest.importorskip("xxhash")
    base = xxhash.xxh3_128_digest(b"kvledger-block-hash-1" + struct.pack("<IQ", 2, 0) + b"seed")
    first = xxhash.xxh3_128_digest(base + struct.pack("<2I", 0, 1))
    assert hashes(make_block_hasher("xxh3", 2, b"seed"), request("a", 2)) == [first]
    assert len(first) == 16


def test_unknown_hash_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"hash='md5'.*sha256, siphash, xxh3"):
        make_block_hasher("md5", 4)
    with pytest.raises(ConfigError, match="hash_block_size=0"):
        Sha256BlockHasher(0)


def test_make_block_hasher_makes_sha256() -> None:
    assert hashes(make_block_hasher("sha256", 4), request("a", 8)) == hashes(Sha256BlockHasher(4), request("b", 8))


def test_hashes_are_equal_in_every_process() -> None:
    program = (
        "from kvledger import *; h = Sha256BlockHasher(4, b'seed');"
        "r = Request('x', list(range(12)), adapter=Adapter('a', 1), cache_salt='s',"
        " multimodal=(MultiModalItem('cat', 2, 5),));"
        "h.refresh(r); print([x.hex() for x in r.block_hashes])"
    )
    seen = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    here = request("here", 12, adapter=Adapter("a", 1), cache_salt="s", multimodal=(MultiModalItem("cat", 2, 5),))
    assert seen == {f"{[block_hash.hex() for block_hash in hashes(Sha256BlockHasher(4, b'seed'), here)]}\n"}


def test_packed_and_listed_prompts_have_equal_hashes() -> None:
    prompt = other(32_768)
    listed, packed = request("a", prompt), request("b", pack_tokens(prompt))
    assert hashes(Sha256BlockHasher(16), listed) == hashes(Sha256BlockHasher(16), packed)
    assert len(listed.block_hashes) == 2048


@given(st.integers(1, 30), st.integers(0, 30))
def test_generated_tokens_are_hashed_like_prompt_tokens(num_prompt: int, num_output: int) -> None:
    hasher = Sha256BlockHasher(4)
    grown = request("a", num_prompt)
    hasher.refresh(grown)
    for token_id in range(num_prompt, num_prompt + num_output):
        grown.append_token(token_id)
        hasher.extend(grown)
    assert grown.block_hashes == hashes(hasher, request("b", num_prompt + num_output))


def test_refresh_keeps_hashes_of_this_epoch() -> None:
    hasher = Sha256BlockHasher(4)
    a = request("a", 8)
    before = hashes(hasher, a).copy()
    assert hashes(hasher, a) == before
    hasher.start_epoch()
    assert not set(hashes(hasher, a)) & set(before)


TEXT = st.text(max_size=8)
ADAPTERS = st.none() | st.tuples(TEXT, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
ITEMS = st.lists(st.tuples(st.text(min_size=1, max_size=8), st.integers(0, 7), st.integers(1, 4)), max_size=2)
IDENTITY = st.tuples(ADAPTERS, TEXT, ITEMS)


def identified(identity: tuple[tuple[str, int, int] | None, str, list[tuple[str, int, int]]]) -> Request:
    adapter, salt, items = identity
    return request(
        "x",
        8,
        adapter=None if adapter is None else Adapter(*adapter),
        cache_salt=salt,
        multimodal=tuple(MultiModalItem(*item) for item in items),
    )


@given(IDENTITY, IDENTITY)
def test_b32_different_identities_never_share_a_last_block(first: tuple, second: tuple) -> None:  # type: ignore[type-arg]
    a, b = hashes(Sha256BlockHasher(4), identified(first)), hashes(Sha256BlockHasher(4), identified(second))
    assert (a[-1] == b[-1]) == (first == second or _covers_alike(first, second))


def _covers_alike(first: tuple, second: tuple) -> bool:  # type: ignore[type-arg]
    """Equal but for how far an item reaches, while it shows in the same blocks; lengths are not part of the hash."""

    def blocks(items: list[tuple[str, int, int]]) -> list[tuple[str, int, bool, bool]]:
        return [(name, start, start < 4, start + length > 4) for name, start, length in items]

    return bool(first[:2] == second[:2] and blocks(first[2]) == blocks(second[2]))


@given(TEXT.filter(bool))
def test_b32_an_adapter_named_like_a_salt_is_no_salt(name: str) -> None:
    seen = {
        tuple(hashes(Sha256BlockHasher(4), identified(identity)))
        for identity in [((name, 0, 0), "", []), (None, name, []), (None, "", [(name, 0, 4)]), (None, "", [])]
    }
    assert len(seen) == 4


def test_given_hashes_are_used_as_they_are() -> None:
    hasher = GivenBlockHasher(4)
    a = request("a", 9)
    a.block_hashes = [b"first", b"second"]
    assert hashes(hasher, a) == [b"first", b"second"]
    for _ in range(3):
        a.append_token(5)
    with pytest.raises(RequestError, match="2 block hashes for 3 full blocks of 4 tokens"):
        hasher.extend(a)
    with pytest.raises(RequestError, match="start_epoch"):
        hasher.start_epoch()


def test_any_function_of_bytes_can_be_the_hash() -> None:
    hasher = ChainedBlockHasher(2, lambda data: data[-8:])
    assert hashes(hasher, request("a", 2)) == [struct.pack("<2I", 0, 1)]
