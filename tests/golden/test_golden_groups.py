"""Random sets of layers, grouped and sized like vLLM 0.32 does: kinds and sizes that no known model combines."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvledger.core.groups.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from kvledger.errors import ConfigError
from kvledger.plan.groups import group_layers
from kvledger.plan.pool import RequestLimits, blocks_per_request, worker_pool
from kvledger.plan.refusal import RefusedError

DATA = Path(__file__).parent / "data" / "vllm-0.32-groups.jsonl.gz"
Case = dict[str, Any]
BLOCK_SIZE = 16
PARTS = 8


def cases() -> list[Case]:
    return [json.loads(line) for line in gzip.decompress(DATA.read_bytes()).splitlines()]


def spec(kind: dict[str, Any]) -> KVCacheSpec:
    heads, size = kind["h"], kind["d"]
    match kind["t"]:
        case "full":
            return FullAttentionSpec(BLOCK_SIZE, heads, size, kind.get("dv", 0))
        case "swa":
            return SlidingWindowSpec(BLOCK_SIZE, heads, size, kind.get("dv", 0), sliding_window=kind["w"])
        case "chunk":
            return ChunkedLocalAttentionSpec(BLOCK_SIZE, heads, size, kind.get("dv", 0), attention_chunk_size=kind["w"])
        case "mla":
            return MLAAttentionSpec(BLOCK_SIZE, size)
    return MambaSpec(kind["bs"], ((3, size), (heads, 64, 64)), ("bfloat16", "float32"), page_size_padded=kind["pad"])


def page_bytes(group: KVCacheGroupSpec) -> int:
    """Of all layers of the group."""
    pages = [layer.page_size_bytes for layer in group.layer_specs]
    return sum(pages) if pages else group.spec.page_size_bytes * len(group.layer_names)


def sized(case: Case) -> dict[str, Any]:
    layers = {f"layers.{index}": spec(case["kinds"][int(kind)]) for index, kind in enumerate(case["layers"])}
    try:
        layout = group_layers(layers, hybrid_manager=case["hybrid_manager"])
    except (ConfigError, RefusedError):
        return {"refused": True}
    blocks = worker_pool(layout, 0, layers, case["available"], None).num_blocks
    groups = [[group.spec.block_size, page_bytes(group), len(group.layer_names)] for group in layout.groups]
    concurrency = blocks / blocks_per_request(layout.groups, RequestLimits(32_768, 8_192))
    return {"groups": groups, "num_blocks": blocks, "concurrency": round(concurrency, 9)}


@pytest.mark.parametrize("part", range(PARTS))
def test_groups_blocks_and_concurrency(part: int) -> None:
    for case in cases()[part::PARTS]:
        expected = {name: value for name, value in case.items() if name in ("groups", "num_blocks", "concurrency")}
        assert sized(case) == (expected or {"refused": True}), case
