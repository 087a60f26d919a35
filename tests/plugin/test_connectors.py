"""Connectors that look into groups and states, with and without the ledger: the same steps, jobs and free blocks."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from kvledger.integrations.vllm.manager import VllmKVCacheManager
from tests.plugin.connected_run import ConnectedRun
from tests.side_by_side.layouts import MODEL_LAYOUTS, Layout

NAMES = (
    "gpt-oss",
    "gemma 3",
    "gemma 4, mixed block sizes",
    "qwen3-next",
    "qwen3-next, states in larger blocks",
    "qwen3-next, hash units inside blocks",
    "sparse states",
    "states kept once in 12",
    "several groups copy",
)
LAYOUTS = [layout for layout in MODEL_LAYOUTS if layout.name in NAMES]
NUM_STEPS = 120


ROOM = {"cpu_bytes_to_use": 1 << 16}
CONNECTORS: dict[str, dict[str, Any]] = {
    "offloading": {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": ROOM},
    "simple": {"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_extra_config": ROOM},
    "lazy": {"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_extra_config": {**ROOM, "lazy_offload": True}},
    "node": {"kv_connector": "PrefillNode", "kv_connector_module_path": "tests.plugin.connected_run"},
}
CONNECTORS["several"] = {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {
        "connectors": [{**CONNECTORS[name], "kv_role": "kv_both"} for name in ("offloading", "node")]
    },
}


def run_both(layout: Layout, name: str, seed: int, directory: Path) -> list[ConnectedRun]:
    runs: list[ConnectedRun] = []
    for with_ledger in (False, True):
        transfer = KVTransferConfig(kv_role="kv_both", **CONNECTORS[name])
        run = ConnectedRun(layout, transfer, directory, seed, with_ledger)
        assert isinstance(run.manager, VllmKVCacheManager) == with_ledger
        runs.append(run)
        run.live(NUM_STEPS)
    for index, (theirs, ours) in enumerate(zip(runs[0].steps, runs[1].steps, strict=False)):
        assert theirs == ours, f"seed {seed}, entry {index}"
    assert len(runs[0].steps) == len(runs[1].steps)
    runs[1].manager.ledger.check()
    return runs


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", CONNECTORS)
def test_a_connector(name: str, layout: Layout, tmp_path: Path) -> None:
    num_transfers = 0
    for seed in range(2):
        _, ours = run_both(layout, name, seed, tmp_path)
        num_transfers += ours.worker.num_loads + ours.worker.num_stores
    assert num_transfers > 0
