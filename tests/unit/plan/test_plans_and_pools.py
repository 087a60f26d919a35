"""A plan's numbers against the ledger itself: what a request really holds while it is read and decoded.

The plan bounds, the ledger holds; where nothing is freed or rounded both are the same.
"""

from collections import Counter

import pytest

from kvledger.core.groups.spec import KVCacheConfig
from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.core.requests.request import Request
from kvledger.plan.plan import Plan, make_plan
from kvledger.plan.request import request_holding
from tests.unit.plan.planning import CACHE_40_GIB, facts, request

BATCH = 2_048
PROMPT, OUTPUT = 9_000, 300
MODELS = (
    "meta-llama/Llama-3.1-8B",
    "openai/gpt-oss-120b",
    "google/gemma-3n-E4B",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "ibm-granite/granite-4.0-h-micro",
    "moonshotai/Kimi-K2.5",
    "deepseek-ai/DeepSeek-V3.2",
)


def small_plan(name: str, *, caching: bool) -> Plan:
    """A plan whose batches and length make windows and chunks count."""
    asked = request(
        facts(name),
        kv_cache_memory_bytes=CACHE_40_GIB,
        max_model_len=16_384,
        max_num_batched_tokens=BATCH,
        enable_prefix_caching=caching,
    )
    return make_plan(asked)


def held_over_time(plan: Plan) -> list[int]:
    """Blocks after each step of one request that is alone: chunks of the prompt, then one token at a time."""
    ledger = KVCacheManager(
        KVCacheConfig(plan.num_blocks, plan.layout.groups),
        plan.max_model_len,
        enable_caching=plan.settings.prefix_caching,
        max_in_flight_tokens=plan.settings.max_in_flight_tokens,
    )
    one = Request("r", list(range(PROMPT)))
    held = []
    while one.num_computed_tokens < PROMPT + OUTPUT:
        hit = None if held else ledger.get_computed_blocks(one)
        new = min(BATCH, one.num_tokens - one.num_computed_tokens)
        ledger.start_step()
        assert ledger.allocate_slots(one, new, hit) is not None
        held.append(ledger.num_usable_blocks - ledger.num_free_blocks)
        one.num_computed_tokens += new
        if one.num_computed_tokens >= one.num_tokens:
            one.append_token(1)
    ledger.check()
    return held


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
@pytest.mark.parametrize("name", MODELS)
def test_a_request_holds_at_most_what_the_plan_says(name: str, caching: bool) -> None:
    plan = small_plan(name, caching=caching)
    holding, held = request_holding(plan, PROMPT, OUTPUT), held_over_time(plan)
    assert max(held) <= holding.peak_blocks <= plan.blocks_per_request
    assert held[-1] <= holding.blocks
    kinds = Counter(type(group.spec).__name__ for group in plan.layout.groups)
    if set(kinds) <= {"FullAttentionSpec", "MLAAttentionSpec"}:
        assert held[-1] == holding.blocks
