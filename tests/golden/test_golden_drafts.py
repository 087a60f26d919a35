"""Drafts against vLLM: layers, groups and parameters that 0.33 built, and public logs of engines that draft."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvledger.models.config import read_config
from kvledger.models.facts import ModelFacts, model_facts
from kvledger.models.layers import AttentionCache, LatentCache
from kvledger.models.sources import find_in_catalogue
from kvledger.plan import speculative
from kvledger.plan.gpus import GIB, find_gpu
from kvledger.plan.options import EngineOptions
from kvledger.plan.plan import Plan, PlanRequest, make_plan
from kvledger.plan.speculative import SpeculativeConfig, draft_of, lookahead_slots
from kvledger.plan.versions import version_rules

DATA = Path(__file__).parent / "data" / "vllm-0.33-drafts.jsonl"
DRAFT = "the/draft"
# Parameters of one dimension, which are not counted: norms, biases of routers, maps of vocabularies.
SMALL = 0.0005
QWEN_27B = "Qwen/Qwen3.5-27B"


def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in DATA.read_text().splitlines()]


def unquantized(name: str) -> ModelFacts:
    row = find_in_catalogue(name)
    assert row is not None, name
    return model_facts(read_config(name, "test", {**row.config, "quantization_config": None}))


def planned(
    monkeypatch: pytest.MonkeyPatch, model: str, asked: SpeculativeConfig, draft: object = None, **options: Any
) -> Plan:
    if draft is not None:
        monkeypatch.setattr(speculative, "load_config", lambda name: read_config(name, "test", draft))  # type: ignore[arg-type]
    facts = unquantized(model)
    release, gpu = options.pop("release", "0.33"), options.pop("gpu", "H100")
    found = draft_of(facts, asked, stages=1, release=release)
    given = EngineOptions(speculative_config=asked, **{"max_model_len": 8192, **options})
    return make_plan(PlanRequest(facts, given, (find_gpu(gpu),), version_rules(release), draft=found))


def name_of(record: dict[str, Any]) -> str:
    return f"{record['model']} {record['speculative_config']}"


@pytest.mark.parametrize("record", records(), ids=name_of)
def test_layers_groups_and_parameters_are_those_of_vllm(
    record: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = record["speculative_config"]
    model = DRAFT if record["draft"] else None
    asked = SpeculativeConfig(fields["method"], fields["num_speculative_tokens"], model)
    plan = planned(monkeypatch, record["model"], asked, record["draft"], kv_cache_memory_bytes=40 * GIB)
    draft = plan.request.draft
    assert draft is not None
    assert [len(group.layer_names) for group in plan.layout.groups] == record["groups"]
    assert lookahead_slots(draft) == record["lookahead"]
    sizes = []
    for layer in draft.layers:
        cache = layer.cache
        assert isinstance(cache, AttentionCache | LatentCache)
        heads = cache.num_kv_heads if isinstance(cache, AttentionCache) else 1
        sizes.append([type(cache.spec(plan.settings.cache)).__name__, heads, cache.head_size, cache.window])
    assert sizes == record["layers"]
    params = sum(weight.params for weight in draft.weights)
    assert params == pytest.approx(record["params"], rel=SMALL)


def test_llama_with_one_eagle_layer_as_a_log_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """51.63 GiB, 410,128 tokens, 3.13 requests of 131,072: 33 layers (log L128)."""
    draft = next(record["draft"] for record in records() if record["speculative_config"]["method"] == "eagle")
    asked = SpeculativeConfig("eagle", 3, DRAFT)
    memory = int(51.63 * GIB)
    model = "meta-llama/Meta-Llama-3.1-8B"
    plan = planned(monkeypatch, model, asked, draft, kv_cache_memory_bytes=memory, max_model_len=131_072)
    assert plan.bytes_per_block == 33 * 16 * 8 * 128 * 2 * 2
    assert abs(plan.num_blocks * 16 - 410_128) <= 0.005 * GIB / plan.bytes_per_block * 16
    assert round(plan.max_concurrency, 2) == 3.13


def test_qwen_with_a_module_as_a_log_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """17.25 GiB, 255,975 tokens, 1.95 requests of 131,072 with one token drafted (log L125): 332 blocks, of which a
    request takes 164 and two for each group of states, so prefixes were not cached.
    """
    low, high = (
        planned(
            monkeypatch, QWEN_27B, SpeculativeConfig("mtp", 1), release="0.32",
            kv_cache_memory_bytes=int((17.25 + rounding) * GIB), max_model_len=131_072,
            enable_prefix_caching=False,
        ).kv_cache_tokens
        for rounding in (-0.005, 0.005)
    )  # fmt: skip
    assert low <= 255_975 <= high


# Public logs of one recipe on several machines (club-3090, #91, #295, #294, #642), vLLM 0.20 and later: Qwen3.6-27B,
# tp 2 on RTX 3090, KV in fp8_e5m2, three tokens drafted. The last prints 11.05 GiB, which rounds 426 blocks, and 2.38
# requests; the blocks of all are told by their tokens.
@pytest.mark.parametrize(("blocks", "tokens"), [(423, 619_479), (424, 620_944), (425, 622_408), (426, 623_873)])
def test_tokens_of_a_module_beside_states_as_logs_have_them(
    blocks: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(
        monkeypatch, QWEN_27B, SpeculativeConfig("mtp", 3), gpu="RTX 3090", tensor_parallel_size=2, dtype="float16",
        kv_cache_dtype="fp8_e5m2", max_model_len=262_144, max_num_seqs=2, max_num_batched_tokens=8192,
        enable_prefix_caching=True, num_gpu_blocks_override=blocks,
    )  # fmt: skip
    # Blocks of 1,600 tokens, 17 layers to a group: 164 blocks for the tokens, a state and four more in three groups.
    assert (plan.block_size, plan.blocks_per_request) == (1600, 164 + 3 * 5)
    assert plan.kv_cache_tokens == tokens
    assert abs(426 * plan.bytes_per_block / GIB - 11.05) <= 0.005


def test_a_module_makes_groups_of_17_and_three_padding_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a log says of 48 linear, 16 full and one draft layer (L116)."""
    plan = planned(monkeypatch, QWEN_27B, SpeculativeConfig("mtp", 1), kv_cache_memory_bytes=40 * GIB)
    assert (plan.layout.group_size, len(plan.layout.groups), plan.layout.padding_layers()) == (17, 4, 3)


def test_qwen_with_a_windowed_dflash_draft_as_a_log_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,018 blocks, 8.78 requests of 4,096: four groups of full layers, ten of states, one of windows (log L242)."""
    draft = next(record["draft"] for record in records() if record["model"] == QWEN_27B and record["draft"])
    windows = {**draft, "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "use_sliding_window": True}
    asked = SpeculativeConfig("dflash", 7, DRAFT)
    options = {"num_gpu_blocks_override": 1018, "max_model_len": 4096, "max_num_seqs": 4}
    plan = planned(monkeypatch, QWEN_27B, asked, windows, release="0.32", **options)
    assert len(plan.layout.groups) == 15
    assert plan.blocks_per_request == 4 * 5 + 6 + 10 * (2 + 7)
    assert round(plan.max_concurrency, 2) == 8.78
