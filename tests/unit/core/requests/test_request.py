"""Requests: their tokens, counters and twins."""

import pytest

from kvledger import Adapter, MultiModalItem, RequestStatus, Sha256BlockHasher, pack_tokens
from kvledger.errors import RequestError
from tests.helpers import request


def test_a_prompt_may_be_packed() -> None:
    assert request("a", pack_tokens([5, 6])).tokens.token_ids(0, 2) == [5, 6]


def test_a_prompt_has_a_token_and_something_to_generate() -> None:
    with pytest.raises(RequestError, match="request 'a': the prompt is empty"):
        request("a", [])
    with pytest.raises(RequestError, match="max_tokens=0: out of range; give an integer from 1"):
        request("a", 3, max_tokens=0)


def test_generated_tokens_are_output() -> None:
    a = request("a", 3)
    a.append_token(9)
    a.append_token(8)
    assert (a.num_prompt_tokens, a.num_output_tokens, a.num_tokens) == (3, 2, 5)
    assert a.output_token_ids() == [9, 8]


def test_finished_is_every_finished_status() -> None:
    a = request("a", 3)
    finished = []
    for status in RequestStatus:
        a.status = status
        if a.is_finished:
            finished.append(status.name)
    assert finished == ["FINISHED_STOPPED", "FINISHED_LENGTH", "FINISHED_ABORTED", "FINISHED_ERROR"]


def test_an_item_has_content_and_a_range() -> None:
    with pytest.raises(RequestError, match="content_hash=''"):
        MultiModalItem("", 0, 1)
    with pytest.raises(RequestError, match="start=-1"):
        MultiModalItem("cat", -1, 1)
    with pytest.raises(RequestError, match="num_tokens=0"):
        MultiModalItem("cat", 0, 0)


def test_a_twin_is_the_same_sequence_that_has_computed_nothing() -> None:
    adapter = Adapter("a", 1)
    a = request("a", 5, max_tokens=9, priority=2, arrival_time=3.0, adapter=adapter, cache_salt="s")
    a.append_token(77)
    a.num_computed_tokens = 5
    Sha256BlockHasher(2).refresh(a)
    twin = a.twin("b")
    assert twin.tokens.token_ids(0, 6) == [0, 1, 2, 3, 4, 77]
    assert (twin.request_id, twin.num_prompt_tokens, twin.num_tokens) == ("b", 5, 6)
    assert (twin.max_tokens, twin.priority, twin.arrival_time, twin.cache_salt) == (9, 2, 3.0, "s")
    assert twin.adapter is adapter
    assert twin.num_computed_tokens == 0
    assert twin.block_hashes == a.block_hashes
    twin.append_token(1)
    twin.block_hashes.append(b"")
    assert (a.num_tokens, len(a.block_hashes)) == (6, 3)


def test_truncating_cuts_tokens_and_hashes_and_makes_the_rest_the_prompt() -> None:
    a = request("a", 4)
    for token_id in (4, 5, 6, 7):
        a.append_token(token_id)
    Sha256BlockHasher(2).refresh(a)
    a.truncate(5)
    assert (a.num_tokens, a.num_prompt_tokens, len(a.block_hashes)) == (5, 5, 2)
    a.truncate(3)
    assert (a.num_tokens, a.num_prompt_tokens, len(a.block_hashes)) == (3, 3, 1)
    assert a.tokens.token_ids(0, 3) == [0, 1, 2]


def test_truncating_drops_hashes_that_the_caller_gave() -> None:
    req = request("a", 10)
    req.block_hashes = [b"first", b"second"]
    req.truncate(8)
    assert (req.num_tokens, req.block_hashes) == (8, [])


def test_truncating_is_refused_while_running_and_beyond_the_tokens() -> None:
    a = request("a", 4)
    for num_tokens in (0, 5):
        with pytest.raises(RequestError, match=f"num_tokens={num_tokens}: request 'a' has 4 tokens"):
            a.truncate(num_tokens)
    a.status = RequestStatus.RUNNING
    with pytest.raises(RequestError, match="request 'a' is running"):
        a.truncate(2)
