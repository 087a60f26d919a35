"""Keys and values in the ledger's blocks are those that transformers' own cache holds."""

import pytest
import torch

from tests.torch.models import FAMILIES, WINDOW, cached_values, prompt
from tests.torch.rig import Rig

# Sums are added up in another order when the batch is another one, and nothing else differs.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def expect_cached_values(rig: Rig, request_id: str) -> None:
    request = rig.requests[request_id]
    token_ids = request.tokens.token_ids(0, request.num_computed_tokens)
    for layer, (keys, values) in enumerate(cached_values(rig.family, token_ids)):
        first, found_keys, found_values = rig.values(request_id, layer)
        torch.testing.assert_close(found_keys, keys[first:], **TOLERANCE)
        torch.testing.assert_close(found_values, values[first:], **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_after_chunks_and_decodes(family: str) -> None:
    rig = Rig(family, block_size=4, chunk=7)
    rig.add("a", prompt(23, seed=1), 9)
    rig.add("b", prompt(6, seed=2), 9)
    for _ in range(9):
        rig.step()
    assert rig.requests["a"].num_output_tokens > 3
    expect_cached_values(rig, "a")
    expect_cached_values(rig, "b")


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_behind_a_prefix_hit(family: str) -> None:
    """The second request's first 32 tokens were computed by the first one."""
    rig = Rig(family, block_size=4)
    rig.add("a", prompt(35, seed=3), 2)
    rig.run()
    rig.add("b", prompt(35, seed=3) + prompt(4, seed=4), 4)
    output = rig.step()
    assert list(output.num_computed_tokens) == [32]
    expect_cached_values(rig, "b")


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_after_rejected_drafts(family: str) -> None:
    rig = Rig(family, num_speculative_tokens=4)
    rig.add("a", prompt(10, seed=5), 12)
    rig.step()
    for _ in range(3):
        rig.scheduler.update_draft_tokens("a", [2, 2, 2, 2])
        rig.step()
    expect_cached_values(rig, "a")


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_forks_that_go_different_ways(family: str) -> None:
    """Children draw other tokens than their parent, so each must write to a tail of its own."""
    rig = Rig(family, block_size=4)
    rig.add("a", prompt(9, seed=6), 8, temperature=2.0)
    rig.step()
    rig.step()
    rig.fork("a", "b", "c")
    for _ in range(3):
        rig.step()
    assert len({tuple(rig.tokens(request_id)) for request_id in "abc"}) == 3
    for request_id in "abc":
        assert rig.tokens(request_id)[:2] == rig.tokens("a")[:2]
        expect_cached_values(rig, request_id)


def test_windowed_layers_are_compared_where_they_keep_something() -> None:
    """The comparison above sees a whole window of a windowed layer, and everything of a full one."""
    rig = Rig("gemma3", block_size=4)
    rig.add("a", prompt(30, seed=7), 3)
    rig.step()
    windowed, full = rig.values("a", 0), rig.values("a", 1)
    # 30 computed tokens: the next one reads the last 8 of them and itself.
    assert (windowed[0], windowed[1].shape) == (30 - WINDOW + 1, (8, 2, 8))
    assert (full[0], full[1].shape) == (0, (30, 2, 8))
