"""Rules that a ledger is told once: hash block size, drafts, retention, and managers for specs of one's own."""

from typing import Any

import pytest

from kvledger import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
)
from kvledger.core.groups.full_attention import FullAttentionManager
from kvledger.core.groups.policy import DraftRule
from kvledger.core.groups.registry import ManagerRegistry
from kvledger.errors import ConfigError
from tests.helpers import admit, admitted, hit, ids, kv_config, leave, ledger, request


def test_a_draft_model_gives_up_the_last_block_of_a_hit() -> None:
    manager = ledger(usable=8, drafts=DraftRule(hashes_ahead=False))
    leave(manager, admitted(manager, "a", 17))
    assert [hit(manager, request("b", length)) for length in (17, 13, 9, 5)] == [12, 8, 4, 0]


def test_what_the_draft_still_needs_is_cached_one_block_further() -> None:
    manager = ledger(usable=8, drafts=DraftRule(num_lookahead_tokens=3, hashes_ahead=False))
    admitted(manager, "a", 16)
    # The last two tokens may change, so 14 are settled: three full blocks.
    assert hit(manager, request("b", 17)) == 8


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"drafts": DraftRule(num_lookahead_tokens=5, hashes_ahead=False)},
            "num_lookahead_tokens=5: more than the 4 tokens",
        ),
        ({"retention_interval": 6}, "retention_interval=6: no multiple of 4"),
        ({"retention_interval": -4}, "retention_interval=-4"),
        ({"context_parallel_size": 0}, "context_parallel_size=0"),
    ],
)
def test_wrong_rules_are_named(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ledger(8, **options)


def test_context_parallel_ranks_share_out_a_block() -> None:
    manager = ledger(usable=8, context_parallel_size=2)
    admitted(manager, "a", 17)
    # A block of 4 tokens a rank holds 8 tokens.
    assert ids(manager, request("a", 1)) == [1, 2, 3]
    assert hit(manager, request("b", 17)) == 16


class Unserved(KVCacheSpec):
    pass


def test_a_spec_nobody_serves_is_refused_until_a_manager_is_registered() -> None:
    config = KVCacheConfig(9, (KVCacheGroupSpec(("layer.0",), Unserved(4)),))
    with pytest.raises(ConfigError, match="no manager serves this kind of KV cache; register one"):
        KVCacheManager(config, 4096)
    registry = ManagerRegistry()
    registry.register(Unserved, FullAttentionManager)
    manager = KVCacheManager(config, 4096, registry=registry)
    assert admit(manager, request("a", 9)) is not None
    assert hit(manager, request("b", 9)) == 8
    manager.check()


class Renamed(FullAttentionSpec):
    pass


def test_a_derived_spec_is_served_like_its_base() -> None:
    manager = KVCacheManager(KVCacheConfig(9, (KVCacheGroupSpec(("a",), Renamed(4, 1, 8)),)), 4096)
    admitted(manager, "a", 9)
    assert hit(manager, request("b", 9)) == 8


def test_a_registered_manager_replaces_the_librarys_own() -> None:
    class Forgetful(FullAttentionManager):
        def cache_blocks(self, held: object, request: object, num_computed_tokens: int) -> None:
            return

    registry = ManagerRegistry()
    registry.register(FullAttentionSpec, Forgetful)
    manager = KVCacheManager(kv_config(8), 4096, registry=registry)
    admitted(manager, "a", 9)
    assert hit(manager, request("b", 9)) == 0
