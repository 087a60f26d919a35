"""Packed token ids: 4 bytes a token, little-endian."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger import pack_tokens, unpack_tokens
from kvledger.core.requests.tokens import TokenBuffer
from kvledger.errors import RequestError

TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def buffer(head: list[int], tail: list[int]) -> TokenBuffer:
    tokens = TokenBuffer(pack_tokens(head))
    for token_id in tail:
        tokens.append(token_id)
    return tokens


def test_four_bytes_a_token_lowest_first() -> None:
    assert pack_tokens([1, 258, 2**32 - 1]) == bytes([1, 0, 0, 0, 2, 1, 0, 0, 255, 255, 255, 255])


@given(TOKEN_IDS)
def test_unpacking_gives_back_what_was_packed(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert packed == b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)
    assert unpack_tokens(packed) == token_ids


@pytest.mark.parametrize("token_id", [-1, 2**32, 2**70])
def test_a_value_that_is_no_token_id_is_named_with_its_position(token_id: int) -> None:
    with pytest.raises(RequestError, match=rf"token_ids\[2\]={token_id}.*0 to 2\*\*32 - 1"):
        pack_tokens([0, 1, token_id, 3])


def test_packed_bytes_must_be_whole_tokens() -> None:
    with pytest.raises(RequestError, match="7 bytes are no multiple of 4"):
        TokenBuffer(bytes(7))


@given(TOKEN_IDS, TOKEN_IDS, st.data())
def test_a_buffer_is_its_head_and_tail_in_one(head: list[int], tail: list[int], data: st.DataObject) -> None:
    tokens = buffer(head, tail)
    start = data.draw(st.integers(0, len(head + tail)))
    end = data.draw(st.integers(start, len(head + tail)))
    assert len(tokens) == len(head + tail)
    assert tokens.token_ids(start, end) == (head + tail)[start:end]
    assert tokens.pack(start, end) == pack_tokens((head + tail)[start:end])


@given(TOKEN_IDS, TOKEN_IDS, st.data())
def test_a_truncated_buffer_goes_on_from_its_cut(head: list[int], tail: list[int], data: st.DataObject) -> None:
    tokens = buffer(head, tail)
    cut = data.draw(st.integers(0, len(head + tail)))
    tokens.truncate(cut)
    tokens.append(7)
    assert tokens.token_ids(0, len(tokens)) == [*(head + tail)[:cut], 7]


def test_a_copy_grows_on_its_own() -> None:
    tokens = buffer([1, 2], [3])
    twin = tokens.copy()
    tokens.append(4)
    twin.append(5)
    assert tokens.token_ids(0, 4) == [1, 2, 3, 4]
    assert twin.token_ids(0, 4) == [1, 2, 3, 5]
