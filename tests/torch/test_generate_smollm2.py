"""A real model through the engine: greedy tokens equal to transformers' own generate, in float32, one by one.

The same five texts each time; what differs is what the ledger does with their blocks.
"""

import time
from typing import Any

import pytest

from kvledger.engine import Engine, SamplingParams
from kvledger.engine.load_options import LoadOptions
from kvledger.engine.loading import make_engine
from tests.torch.smollm2 import NUM_TOKENS, SYSTEM, SmolLM2, load_smollm2

GREEDY = SamplingParams(max_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def smollm2() -> SmolLM2:
    return load_smollm2()


def engine_of(smollm2: SmolLM2, **options: Any) -> Engine:
    options = {"num_blocks": 400, "max_model_len": 256, **options}
    return make_engine(smollm2.loaded, LoadOptions("smollm2", **options))


def generated(
    smollm2: SmolLM2, engine: Engine, names: list[str], params: SamplingParams = GREEDY
) -> dict[str, list[int]]:
    for name in names:
        engine.add_request(name, smollm2.prompts[name], params)
    tokens = engine.run()
    engine.check()
    return tokens


@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_a_batch_of_different_lengths(smollm2: SmolLM2, block_size: int) -> None:
    engine = engine_of(smollm2, block_size=block_size)
    assert generated(smollm2, engine, list(smollm2.prompts)) == smollm2.expected
    assert sorted(len(prompt) for prompt in smollm2.prompts.values()) == [1, 5, 41, 49, 49]
    assert engine.stats.num_steps == NUM_TOKENS
    # One of the texts came to its end, and that is its last token.
    assert smollm2.expected["whales"][-1] in smollm2.loaded.eos_token_ids
    assert len(smollm2.expected["whales"]) < NUM_TOKENS


@pytest.mark.parametrize(("chunk", "names"), [(1, ["word", "capital"]), (7, ["counting", "whales"]), (16, None)])
def test_prompts_in_chunks(smollm2: SmolLM2, chunk: int, names: list[str] | None) -> None:
    engine = engine_of(smollm2, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 5), enable_prefix_caching=False)
    names = names or list(smollm2.prompts)
    assert generated(smollm2, engine, names) == {name: smollm2.expected[name] for name in names}
    assert engine.stats.num_prompt_tokens_computed == sum(len(smollm2.prompts[name]) for name in names)


def test_a_shared_prefix_is_computed_once(smollm2: SmolLM2) -> None:
    whales, children = smollm2.prompts["whales"], smollm2.prompts["children"]
    num_shared = len(smollm2.loaded.tokenizer(SYSTEM + "A customer asks:").input_ids)
    assert whales[:num_shared] == children[:num_shared]
    engine = engine_of(smollm2, block_size=16)
    spent = []
    for name in ("whales", "children"):
        engine.add_request(name, smollm2.prompts[name], GREEDY)
        started = time.process_time()
        [first] = engine.step()
        spent.append(time.process_time() - started)
        assert [*first.token_ids, *engine.run()[name]] == smollm2.expected[name]
    num_hits = num_shared // 16 * 16
    assert num_hits >= 32
    stats = engine.stats
    assert stats.num_hit_tokens == num_hits
    assert stats.num_prompt_tokens_computed == len(whales) + len(children) - num_hits
    print(f"\n{len(whales)} tokens computed: {spent[0]:.3f} s; {len(children) - num_hits} of as many: {spent[1]:.3f} s")


def test_a_pool_so_small_that_requests_are_preempted(smollm2: SmolLM2) -> None:
    names = ["word", "capital", "counting"]
    longest = len(smollm2.prompts["counting"]) + NUM_TOKENS
    # In blocks of 4: room for the longest text, not for all three.
    engine = engine_of(smollm2, block_size=4, num_blocks=1 + -(-longest // 4) + 4)
    assert generated(smollm2, engine, names) == {name: smollm2.expected[name] for name in names}
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_recomputed_tokens > 0


def test_drafts_accepted_and_rejected(smollm2: SmolLM2) -> None:
    engine = engine_of(smollm2, num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)
    assert generated(smollm2, engine, list(smollm2.prompts)) == smollm2.expected
    stats = engine.stats
    assert 0 < stats.num_accepted_drafts < stats.num_drafts
    assert stats.num_steps <= NUM_TOKENS


def test_drafts_under_preemption_in_chunks(smollm2: SmolLM2) -> None:
    names = ["word", "capital", "counting"]
    longest = len(smollm2.prompts["counting"]) + NUM_TOKENS
    engine = engine_of(
        smollm2,
        block_size=4,
        num_blocks=1 + -(-longest // 4) + 4,
        max_num_batched_tokens=16,
        num_speculative_tokens=3,
        prompt_lookup_min=1,
    )
    assert generated(smollm2, engine, names) == {name: smollm2.expected[name] for name in names}
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_accepted_drafts > 0


def test_forks_go_on_like_their_parent(smollm2: SmolLM2) -> None:
    engine = engine_of(smollm2, block_size=16)
    engine.add_request("parent", smollm2.prompts["whales"], GREEDY)
    first = engine.run(max_steps=2)["parent"]
    assert engine.fork("parent", ["left", "right"])
    rest = engine.run()
    expected = smollm2.expected["whales"]
    assert first + rest["parent"] == expected
    assert rest["left"] == rest["right"] == expected[2:]


def test_a_fully_cached_prompt(smollm2: SmolLM2) -> None:
    """Case B57: of a cached prompt of k whole blocks, the last block is computed again, and nothing else."""
    prompt = smollm2.prompts["whales"]
    for num_tokens, num_hits in ((32, 16), (33, 32), (31, 16)):
        engine = engine_of(smollm2, block_size=16)
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        engine.add_request("first", prompt[:num_tokens], params)
        first = engine.run()["first"]
        engine.add_request("again", prompt[:num_tokens], params)
        assert engine.run()["again"] == first
        assert engine.stats.num_hit_tokens == num_hits


def test_sampled_texts_depend_on_their_seed_alone(smollm2: SmolLM2) -> None:
    """Alone, in a batch, in chunks, with drafts, after a preemption: the same tokens, drawn from the same chances."""
    names = ["word", "capital", "counting"]
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=12, ignore_eos=True)
    alone = {name: generated(smollm2, engine_of(smollm2), [name], params)[name] for name in names}
    longest = len(smollm2.prompts["counting"]) + 12
    small = {"block_size": 4, "num_blocks": 1 + -(-longest // 4) + 2}
    together = engine_of(smollm2, num_speculative_tokens=3, prompt_lookup_min=1, max_num_batched_tokens=16, **small)
    assert generated(smollm2, together, names, params) == alone
    assert together.stats.num_preemptions > 0
    assert together.stats.num_drafts > 0
    assert alone["word"] != smollm2.expected["word"][:12]
