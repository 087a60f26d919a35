"""The switch, what is left to vLLM's own manager, and what the user is told."""

import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import async_scheduler, scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

import kvledger
from kvledger.integrations.vllm import AsyncScheduler, Scheduler
from kvledger.integrations.vllm.manager import VllmKVCacheManager
from kvledger.integrations.vllm.plugin import SWITCH, install, ledger_in_place, register
from kvledger.integrations.vllm.served import NotServedError, require_version
from tests.plugin.manager_pair import MAX_MODEL_LEN
from tests.side_by_side.layouts import Group, Layout
from tests.side_by_side.reference import manager_arguments

ROOT = Path(__file__).parents[2]
FULL = Layout("full", (Group("full", 4),))
SINK = Layout("sink", (Group("sink", 4),))
WINDOW = Layout("window", (Group("window", 4, window=8),))
UNCACHED = Layout("uncached states", (Group("full", 4), Group("mamba_none", 4)))
EXPORTED = Layout("exported states", (Group("full", 4), Group("mamba_align", 16, checkpoint_alignment=4)))
STATES = Layout("states", (Group("full", 4), Group("mamba_align", 4)))


def arguments(layout: Layout) -> dict[str, Any]:
    """What vLLM's scheduler gives its manager."""
    return manager_arguments(layout, 20, MAX_MODEL_LEN)


def test_the_entry_point_names_a_function_of_ours() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["kvledger"].partition(":")
    assert getattr(import_module(module), name) is register


def test_looking_up_the_entry_point_does_not_import_vllm() -> None:
    code = "import sys, kvledger.integrations.vllm.plugin; print('vllm' in sys.modules, 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False False\n"


@pytest.mark.parametrize("value", [None, "", "0", "false", "no", "off", "False", "OFF "])
def test_an_installed_kvledger_changes_nothing(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(SWITCH, value)
    before = scheduler.Scheduler.__init__
    register()
    assert scheduler.Scheduler.__init__ is before


@pytest.mark.parametrize("value", ["1", "true", "yes", "on", "force", "FORCE"])
def test_the_switch_is_on(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler.Scheduler, "__init__", scheduler.Scheduler.__init__)
    monkeypatch.setenv(SWITCH, value)
    before = scheduler.Scheduler.__init__
    register()
    assert scheduler.Scheduler.__init__ is not before


def test_registering_twice_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler.Scheduler, "__init__", scheduler.Scheduler.__init__)
    monkeypatch.setenv(SWITCH, "1")
    register()
    once = scheduler.Scheduler.__init__
    register()
    install()
    assert scheduler.Scheduler.__init__ is once


def test_the_ledger_is_in_place_only_while_a_scheduler_is_made(log: list[str]) -> None:
    with ledger_in_place():
        made = scheduler.KVCacheManager(**arguments(FULL))
    assert isinstance(made, VllmKVCacheManager)
    assert scheduler.KVCacheManager is KVCacheManager
    assert log == [
        f"{kvledger.build_info()} keeps the KV cache of vLLM 0.32.0: 20 blocks, 1 group (full_attention)",
    ]


def test_switch_and_scheduler_class_together_ask_once(log: list[str]) -> None:
    with ledger_in_place(), ledger_in_place():
        made = scheduler.KVCacheManager(**arguments(UNCACHED))
    assert type(made) is KVCacheManager
    assert len(log) == 1


def test_schedulers_for_scheduler_cls() -> None:
    assert issubclass(Scheduler, scheduler.Scheduler)
    assert issubclass(AsyncScheduler, async_scheduler.AsyncScheduler)


def test_what_is_not_served_is_left_to_vllm_with_one_line(log: list[str]) -> None:
    with ledger_in_place():
        made = scheduler.KVCacheManager(**arguments(UNCACHED))
    assert type(made) is KVCacheManager
    why = "recurrent states of the mode 'none' that are cached all the same"
    assert log == [f"vLLM's own KVCacheManager is used, because kvledger does not serve {why}"]


@pytest.mark.parametrize(
    ("layout", "changes", "reason"),
    [
        (SINK, {}, "SinkFullAttentionSpec, a kind of KV cache that it does not know"),
        (FULL, {"shiny": 1}, "shiny, which is new in vLLM 0.32.0"),
        (FULL, {"scheduler_block_size": 8}, "hits that end at multiples of 8 tokens"),
        (FULL, {"num_prefill_lookahead": 1}, "a draft model whose hits keep their last block"),
        (FULL, {"pcp_world_size": 2}, "prefill context parallelism"),
        (FULL, {"hash_block_size": 3}, "this configuration (hash_block_size=3: does not fit a group with blocks of 4"),
        (EXPORTED, {"metrics_collector": object()}, "block residency metrics over states that a prefill exports"),
        (UNCACHED, {}, "recurrent states of the mode 'none' that are cached all the same"),
        (WINDOW, {"dcp_world_size": 2}, "SlidingWindowSpec over decode-context-parallel ranks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reasons_not_to_serve(layout: Layout, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotServedError) as error:
        VllmKVCacheManager.for_engine({**arguments(layout), **changes})
    assert str(error.value).startswith(reason)


def test_an_engine_without_kv_cache_is_not_served() -> None:
    empty = {**arguments(FULL), "kv_cache_config": KVCacheConfig(1, [], [])}
    with pytest.raises(NotServedError, match="no layer keeps a KV cache"):
        VllmKVCacheManager.for_engine(empty)


def test_a_spec_of_somebody_else_is_not_served() -> None:
    class MySpec(FullAttentionSpec):
        pass

    config = FULL.their_config(20)
    config.kv_cache_groups[0].kv_cache_spec = MySpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float16)
    with pytest.raises(NotServedError, match="MySpec"):
        VllmKVCacheManager.for_engine({**arguments(FULL), "kv_cache_config": config})


def test_a_spec_with_a_field_that_is_not_what_it_should_be_is_not_served(log: list[str]) -> None:
    config = STATES.their_config(20)
    states = config.kv_cache_groups[1]
    states.kv_cache_spec = replace(states.kv_cache_spec, shapes=(1, 4), dtypes=(torch.float32, torch.float32))
    with ledger_in_place():
        made = scheduler.KVCacheManager(**{**arguments(STATES), "kv_cache_config": config})
    assert type(made) is KVCacheManager
    assert "does not serve this MambaSpec ('int' object is not iterable)" in log[0]


def test_a_retention_interval_that_no_group_heeds_is_refused_by_vllm() -> None:
    config = replace(FULL.their_config(20), prefix_cache_retention_interval=4)
    with ledger_in_place(), pytest.raises(ValueError, match="no sliding-window or Mamba KV cache group"):
        scheduler.KVCacheManager(**{**arguments(FULL), "kv_cache_config": config})
    for layout, interval in ((FULL, 0), (WINDOW, 8), (STATES, 4)):
        config = replace(layout.their_config(20), prefix_cache_retention_interval=interval)
        with ledger_in_place():
            made = scheduler.KVCacheManager(**{**arguments(layout), "kv_cache_config": config})
        assert isinstance(made, VllmKVCacheManager)


def test_groups_that_only_vllm_tells_apart_are_not_served() -> None:
    config = Layout("two", (Group("full", 4), Group("full", 4))).their_config(20)
    spec = config.kv_cache_groups[1].kv_cache_spec
    config.kv_cache_groups[1].kv_cache_spec = replace(spec, non_causal=True)
    with pytest.raises(NotServedError, match="groups 0 and 1 differ only in what it does not look at"):
        VllmKVCacheManager.for_engine({**arguments(FULL), "kv_cache_config": config})


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.34.0rc1.dev12+g0123", "1.0.0", "dev"])
def test_an_unknown_vllm_is_refused_unless_forced(version: str) -> None:
    with pytest.raises(NotServedError, match=r"known are 0\.32 to 0\.33; .* set KVLEDGER_VLLM=force"):
        require_version(version)
    require_version(version, force=True)


def test_known_versions() -> None:
    for version in ("0.32.0", "0.32.1+cpu", "0.33.0", "0.33.1.dev3+gabc"):
        require_version(version)
