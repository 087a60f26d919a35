"""The installed vLLM is as the adapter knows it, and where it were not, that would be named."""

import pytest
import vllm

from kvledger.integrations.vllm import surface
from kvledger.integrations.vllm.coordinator import CoordinatorView
from kvledger.integrations.vllm.pool import PoolView


def test_the_installed_vllm_is_as_we_know_it() -> None:
    assert surface.drift(vllm.__version__) == []


def test_what_changed_is_named() -> None:
    # 0.33 gave a manager one more argument and get_computed_blocks another; 0.32 has neither.
    found = surface.drift("0.33.0") if vllm.__version__.startswith("0.32") else surface.drift("0.32.0")
    word = "gone" if vllm.__version__.startswith("0.32") else "new"
    assert found == [
        f"v1.core.kv_cache_manager:KVCacheManager.__init__: 'num_hash_lookahead_tokens' is {word}",
        f"v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks: 'max_cache_hit_length' is {word}",
        f"v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks_for_connector: 'max_cache_hit_length' is {word}",
        f"distributed.kv_events:BlockStored: 'lookahead_token_ids' is {word}",
    ]


def test_the_scheduler_of_vllm_is_really_read() -> None:
    from vllm.v1.core.sched import scheduler

    names = surface.touched(scheduler, "kv_cache_manager")
    assert {"allocate_slots", "free", "take_new_block_ids", "usage", "pop_blocks_for_free"} <= names


def test_its_connectors_are_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(PoolView, "get_cached_block")
    monkeypatch.delattr(CoordinatorView, "find_longest_cache_hit_per_group")
    found = surface.drift(vllm.__version__)
    assert "v1/simple_kv_offload/manager.py uses PoolView.get_cached_block" in found
    offloading = "distributed/kv_transfer/kv_connector/v1/offloading_connector.py"
    assert f"{offloading} uses CoordinatorView.find_longest_cache_hit_per_group" in found
