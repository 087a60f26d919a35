"""Numbers and prompts as callers bring them: the same is accepted, and the same refused, in both builds.

What is out of range, or no integer, is named with its field and changes nothing. Where a parameter says int, a compiled
function refuses other types with a TypeError, and so does an interpreted one.
"""

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvledger import KVCacheConfig, KVCacheManager, Request, pack_tokens
from kvledger.core.requests.tokens import TokenBuffer
from kvledger.errors import ConfigError, KVLedgerError, RequestError
from kvledger.scheduler import SchedulerConfig
from tests.groups import full, groups_of
from tests.helpers import admitted, ids, ledger, pool_of, request, snapshot

TOO_LARGE = [2**31, 2**32 + 1, 2**63 - 1, 2**63, 2**64, 2**100]
NO_INTEGERS: list[Any] = [1.5, 1.0, "1", None, np.float64(1)]


def running() -> tuple[KVCacheManager, Request]:
    """A request of 10 tokens in blocks of 4, the last of which is to be computed."""
    manager = ledger(usable=8)
    req = admitted(manager, "a", 9)
    req.append_token(7)
    return manager, req


Door = Callable[[KVCacheManager, Request, Any], object]
LEDGER_DOORS: dict[str, Door] = {
    "num_new_tokens": lambda manager, req, value: manager.allocate_slots(req, value),
    "num_lookahead_tokens": lambda manager, req, value: manager.allocate_slots(req, 1, num_lookahead_tokens=value),
    "num_external_computed_tokens": lambda manager, req, value: manager.allocate_slots(
        request("b", 9), 1, num_external_computed_tokens=value
    ),
    "num_computed_tokens": lambda manager, req, value: manager.cache_blocks(req, value),
}


@pytest.mark.parametrize("field", LEDGER_DOORS)
@pytest.mark.parametrize("value", [*TOO_LARGE, -1, -(2**63), *NO_INTEGERS])
def test_the_ledger_names_the_field_and_changes_nothing(field: str, value: Any):
    manager, req = running()
    before = snapshot(pool_of(manager))
    with pytest.raises(RequestError, match=f"^{field}="):
        LEDGER_DOORS[field](manager, req, value)
    assert snapshot(pool_of(manager)) == before
    assert manager.allocate_slots(req, 1) is not None
    manager.check()


@pytest.mark.parametrize("number", [np.int64(1), np.uint8(1), np.int32(1)])
def test_numpy_integers_are_numbers(number: Any):
    manager, req = running()
    assert manager.allocate_slots(req, number, num_lookahead_tokens=number) is not None
    manager.cache_blocks(req, number)
    assert manager.allocate_running([req], [1], num_lookahead_tokens=number).num_allocated == 1
    assert Request("b", [1], max_tokens=number, num_encoder_tokens=number).max_tokens == 1
    manager.check()


@pytest.mark.parametrize("value", [*TOO_LARGE, 0, -1])
def test_a_number_of_a_batch_that_is_out_of_range_is_refused(value: int):
    manager, req = running()
    before = snapshot(pool_of(manager))
    with pytest.raises(RequestError):
        manager.allocate_running([req], [value])
    with pytest.raises(RequestError, match="num_lookahead_tokens="):
        manager.allocate_running([req], [1], num_lookahead_tokens=value or -1)
    assert snapshot(pool_of(manager)) == before


@pytest.mark.parametrize("values", [[1.5], ["1"], [None], [np.int64(1)], np.array([1]), (1,)])
def test_a_batch_is_a_list_of_ints(values: Any):
    manager, req = running()
    with pytest.raises(TypeError):
        manager.allocate_running([req], values)
    manager.check()


@pytest.mark.parametrize("position", [2**63 - 1, 2**62, 2**31, -1, -(2**63)])
def test_a_position_beyond_any_sequence_does_not_wrap_round(position: int):
    manager, req = running()
    req.num_computed_tokens = position
    with pytest.raises(RequestError, match=f"'a': num_computed_tokens={position}: not an integer from 0"):
        manager.allocate_slots(req, 1)
    with pytest.raises(RequestError, match="num_computed_tokens="):
        manager.allocate_slots(req, 1, num_lookahead_tokens=3)
    with pytest.raises(RequestError, match="num_computed_tokens="):
        manager.allocate_running([req], [1])
    req.num_computed_tokens = 9
    manager.check()
    assert ids(manager, req) == [1, 2, 3]


@pytest.mark.parametrize("value", [*TOO_LARGE, -1, 0])
def test_a_configuration_counts_in_32_bits(value: int):
    groups = groups_of(full())
    with pytest.raises(ConfigError, match=f"^num_blocks={value}"):
        KVCacheConfig(value, groups)
    with pytest.raises(ConfigError, match=f"^max_model_len={value}"):
        KVCacheManager(KVCacheConfig(9, groups), value)
    with pytest.raises(ConfigError, match=f"^block_size={value}"):
        full(value)
    with pytest.raises(ConfigError, match=f"^max_num_seqs={value}"):
        SchedulerConfig(max_num_seqs=value)
    if value != 0:
        with pytest.raises(ConfigError, match=f"^num_lookahead_tokens={value}"):
            SchedulerConfig(num_lookahead_tokens=value)


@pytest.mark.parametrize("value", [*NO_INTEGERS, np.int64(4)])
def test_a_configuration_takes_no_other_numbers(value: Any):
    with pytest.raises((ConfigError, TypeError)):
        KVCacheConfig(value, groups_of(full()))
    with pytest.raises((ConfigError, TypeError)):
        KVCacheManager(KVCacheConfig(9, groups_of(full())), value)
    with pytest.raises((ConfigError, TypeError)):
        SchedulerConfig(max_num_seqs=value)


@pytest.mark.parametrize("value", [0, -1, 2**63, 2**64, *NO_INTEGERS])
def test_max_tokens_is_a_number_of_tokens(value: Any):
    with pytest.raises(RequestError, match="max_tokens="):
        Request("a", [1], max_tokens=value)


@pytest.mark.parametrize("num_tokens", [-1, 4, 2**31, 2**63])
def test_a_buffer_is_cut_within_its_length(num_tokens: int):
    tokens = TokenBuffer(pack_tokens([1, 2]))
    tokens.append(3)
    with pytest.raises((RequestError, OverflowError)):
        tokens.truncate(num_tokens)
    assert len(tokens) == 3
    assert tokens.token_ids(0, 3) == [1, 2, 3]


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 1), (0, 4), (4, 4)])
def test_a_buffer_is_read_within_its_length(start: int, end: int):
    tokens = TokenBuffer(pack_tokens([1, 2]))
    tokens.append(3)
    with pytest.raises(RequestError, match=rf"start={start}, end={end}: not within these 3 tokens"):
        tokens.token_ids(start, end)


@pytest.mark.parametrize("token_id", [*NO_INTEGERS, np.int64(7)])
def test_a_generated_token_is_an_int(token_id: Any):
    req = request("a", 3)
    with pytest.raises(TypeError):
        req.append_token(token_id)
    assert req.num_tokens == len(req.tokens) == 3


PROMPTS: list[Any] = [
    [5, 6, 7],
    (5, 6, 7),
    range(5, 8),
    array("I", [5, 6, 7]),
    array("q", [5, 6, 7]),
    np.array([5, 6, 7]),
    np.array([5, 6, 7], dtype=np.uint16),
    [np.int64(5), 6, np.uint8(7)],
    iter([5, 6, 7]),
    pack_tokens([5, 6, 7]),
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: type(prompt).__name__)
def test_a_prompt_is_any_sequence_of_integers(prompt: Any):
    req = Request("a", prompt)
    assert req.tokens.token_ids(0, 3) == [5, 6, 7]


NO_PROMPTS: list[Any] = [
    "567",
    {5, 6},
    {5: 6},
    bytearray(8),
    memoryview(bytes(8)),
    None,
    5,
    np.array(5),
    np.array([[5, 6]]),
    np.array([5.0]),
    [5.0],
    ["5"],
    [None],
    [-1],
    [2**32],
    array("q", [-1]),
    np.array([-1]),
    [],
    np.array([], dtype=np.int64),
    bytes(7),
]


@pytest.mark.parametrize("prompt", NO_PROMPTS, ids=range(len(NO_PROMPTS)))
def test_what_is_no_prompt_is_refused_with_a_line_that_says_what_to_give(prompt: Any):
    with pytest.raises(KVLedgerError, match=r"token_ids|the prompt is empty|packed tokens"):
        Request("a", prompt)
