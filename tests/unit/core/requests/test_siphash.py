"""SipHash-2-4-128 against the published vectors, both of its bodies against each other, and as names of blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger import SipHashBlockHasher, make_block_hasher
from kvledger.core.requests.siphash import SipHash
from kvledger.errors import ConfigError
from tests.helpers import request

KEY = bytes(range(16))
# Of the authors' reference implementation (vectors.h), which OpenSSL gives too:
#   openssl mac -macopt hexkey:000102030405060708090a0b0c0d0e0f -macopt size:16 -in FILE SIPHASH
VECTORS = {
    0: "a3817f04ba25a8e66df67214c7550293",
    1: "da87c1d86b99af44347659119b22fc45",
    7: "a1f1ebbed8dbc153c0b84aa61ff08239",
    8: "3b62a9ba6258f5610f83e264f31497b4",
}


@pytest.mark.parametrize("num_bytes", VECTORS)
def test_the_published_vectors(num_bytes: int) -> None:
    assert SipHash(KEY).digest(bytes(range(num_bytes))).hex() == VECTORS[num_bytes]


@given(key=st.binary(min_size=16, max_size=16), data=st.binary(max_size=300))
def test_native_and_masked_integers_agree(key: bytes, data: bytes) -> None:
    assert SipHash(key).digest(data) == SipHash(key).masked_digest(data)


def test_equal_keys_name_equal_blocks_and_other_keys_do_not() -> None:
    ours, same, other = request("a", 8), request("b", 8), request("c", 8)
    make_block_hasher("siphash", 4, KEY).refresh(ours)
    SipHashBlockHasher(4, KEY).refresh(same)
    SipHashBlockHasher(4, bytes(16)).refresh(other)
    assert ours.block_hashes == same.block_hashes
    assert [len(name) for name in ours.block_hashes] == [16, 16]
    assert not set(ours.block_hashes) & set(other.block_hashes)


def test_without_a_key_there_is_no_siphash() -> None:
    with pytest.raises(ConfigError, match=r"takes a key of 16 bytes, not 0.*secrets\.token_bytes"):
        make_block_hasher("siphash", 16)
