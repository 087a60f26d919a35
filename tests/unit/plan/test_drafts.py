"""Drafts in a plan: layers, weights, states and steps that they add, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvledger.core.groups.spec import MambaSpec
from kvledger.errors import ConfigError
from kvledger.models.config import read_config
from kvledger.models.drafts import medusa_draft
from kvledger.models.shards import Ranks
from kvledger.plan.ask import Asked, build_request
from kvledger.plan.from_log import asked_by_log
from kvledger.plan.logs import read_log
from kvledger.plan.options import EngineOptions
from kvledger.plan.plan import Plan, make_plan
from kvledger.plan.speculative import SpeculativeConfig, lookahead_slots, speculative_config

GIB = 1 << 30
QWEN = "Qwen/Qwen3.5-27B"


def plan(model: str, method: str, tokens: int | None, draft: str | None = None, **options: Any) -> Plan:
    asked = SpeculativeConfig(method, tokens, draft)
    given = EngineOptions(speculative_config=asked, **{"max_model_len": 8192, **options})
    return make_plan(build_request(Asked(model, "H100", None, given)))


def without(model: str, **options: Any) -> Plan:
    return make_plan(build_request(Asked(model, "H100", None, EngineOptions(max_model_len=8192, **options))))


def weights(found: Plan) -> int:
    return found.budgets[-1].weight_bytes


def test_a_module_is_a_layer_more_and_its_weights() -> None:
    found, bare = plan("deepseek-ai/DeepSeek-V3", "mtp", 1, tensor_parallel_size=8), without(
        "deepseek-ai/DeepSeek-V3", tensor_parallel_size=8
    )  # fmt: skip
    assert found.bytes_per_block * 61 == bare.bytes_per_block * 62
    # 11.5 billion parameters of one byte over eight ranks, and on each a projection of 2 * 7,168 to 7,168 in bfloat16.
    assert weights(found) - weights(bare) == pytest.approx(11.507e9 / 8 + 4 * 7168 * 7168, rel=0.02)


def test_what_drafts_is_on_the_last_stage() -> None:
    found, bare = (
        plan("zai-org/GLM-4.5", "mtp", 1, tensor_parallel_size=8, pipeline_parallel_size=2),
        without("zai-org/GLM-4.5", tensor_parallel_size=8, pipeline_parallel_size=2),
    )
    assert [worker.num_layers for worker in found.workers] == [46, 47]
    assert found.budgets[0].weight_bytes == bare.budgets[0].weight_bytes
    # Embeddings stand on the first stage, so the draft has its own: 151,552 * 5,120 of them.
    assert weights(found) - weights(bare) > 151_552 * 5120 * 2 / 8


def test_recurrent_layers_keep_a_state_for_each_drafted_token() -> None:
    found = plan(QWEN, "ngram", 4)
    states = [group.spec for group in found.layout.groups if isinstance(group.spec, MambaSpec)]
    # 3 inputs of a convolution, and one for each drafted token.
    assert {spec.num_speculative_blocks for spec in states} == {4}
    assert {spec.shapes[0][0] for spec in states} == {3 + 4}
    assert found.request.draft is not None
    assert (found.request.draft.layers, found.request.draft.weights) == ((), ())


def test_graphs_are_counted_for_steps_of_one_token_and_the_drafts() -> None:
    details = [
        found.budgets[0].terms[2].detail for found in (plan("Qwen/Qwen3-8B", "ngram", 3), without("Qwen/Qwen3-8B"))
    ]
    assert details == ["51 + 49 graphs of 36 layers", "51 + 51 graphs of 36 layers"]


def test_a_draft_model_is_whole_beside_the_model() -> None:
    found, bare = plan("Qwen/Qwen3-8B", "draft_model", 4, "Qwen/Qwen3-0.6B"), without("Qwen/Qwen3-8B")
    assert [len(group.layer_names) for group in found.layout.groups] == [36 + 28]
    # 0.6 billion parameters of two bytes, embeddings included.
    assert weights(found) - weights(bare) == pytest.approx(596_049_920 * 2, rel=0.01)


def test_chunked_layers_are_stored_whole_under_a_draft_that_reads_hidden_states(tmp_path: Path) -> None:
    head = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 5120, "num_hidden_layers": 1,
            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 16384,
            "vocab_size": 202048, "max_position_embeddings": 131072}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(head))
    scout = "meta-llama/Llama-4-Scout-17B-16E-Instruct"
    assert len(without(scout, tensor_parallel_size=8).layout.groups) == 4
    assert len(plan(scout, "eagle", 3, str(tmp_path), tensor_parallel_size=8).layout.groups) == 1


def test_suffixes_are_looked_up_without_a_step_in_advance() -> None:
    assert plan("google/gemma-2-9b", "suffix", 4).settings.max_in_flight_tokens == 8192
    assert plan("google/gemma-2-9b", "ngram", 4).settings.max_in_flight_tokens == 2 * 8192


@pytest.mark.parametrize(
    ("model", "method", "tokens", "words"),
    [
        ("Qwen/Qwen3-8B", "mtp", 1, "has none in its config"),
        ("MiniMaxAI/MiniMax-M2.5", "mtp", 1, "has 3 in its config, and vLLM no class for them"),
        ("Qwen/Qwen3-8B", "medusa", 3, "vLLM 0.33 has it no more"),
        ("Qwen/Qwen3-8B", "eagle3", 3, "the method has a model of its own"),
        ("Qwen/Qwen3-8B", "ngram", None, "num_speculative_tokens is missing"),
        ("Qwen/Qwen3-8B", "guess", 3, "not one that is modelled"),
        ("Qwen/Qwen3-8B", "ngram", 0, "must be at least 1"),
    ],
)
def test_what_cannot_draft_is_refused(model: str, method: str, tokens: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(model, method, tokens)


def test_a_number_that_the_modules_cannot_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens:4 must be divisible by n_predict=3"):
        plan("stepfun-ai/Step-3.7-Flash", "mtp", 4, tensor_parallel_size=8)


@pytest.mark.parametrize(
    ("method", "model", "kind"),
    [
        ("", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("", "yuhuili/EAGLE-LLaMA3-Instruct-8B", "eagle"),
        ("draft_model", "z-lab/Qwen3-8B-DFlash-b16", "dflash"),
        ("", "[ngram]", "ngram"),
        ("", "Qwen/Qwen3-0.6B", "draft_model"),
        ("qwen3_5_mtp", None, "mtp"),
        ("eagle", "Qwen/Qwen3-0.6B", "eagle"),
    ],
)
def test_the_method_is_told_by_the_name_as_vllm_does(method: str, model: str | None, kind: str) -> None:
    assert SpeculativeConfig(method, 2, model).kind == kind


@pytest.mark.parametrize("fields", [{"method": 3}, {"num_speculative_tokens": "2"}, {"model": ["x"]}])
def test_fields_of_another_type_are_named(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"--speculative-config {next(iter(fields))}"):
        speculative_config(fields)


def test_what_drafted_is_read_from_a_log() -> None:
    text = (
        "INFO Initializing a V1 LLM engine (v0.33.0) with config: model='Qwen/Qwen3.5-27B', speculative_config="
        "SpeculativeConfig(method='mtp', model='/models/Qwen3.5-27B', num_spec_tokens=2), tensor_parallel_size=2\n"
        "INFO Available KV cache memory: 40.00 GiB\n"
    )
    start = asked_by_log(Asked(None, "H100", None, EngineOptions()), read_log(text)).start
    assert start.options.speculative_config == SpeculativeConfig("mtp", 2, None)
    found = make_plan(build_request(start))
    assert [len(group.layer_names) for group in found.layout.groups] == [16, 16, 16, 17]
    named = text.replace("mtp", "eagle3").replace("/models/Qwen3.5-27B", "some/head")
    start = asked_by_log(Asked(None, "H100", None, EngineOptions()), read_log(named)).start
    assert start.options.speculative_config == SpeculativeConfig("eagle3", 2, "some/head")


def test_bundled_drafts_need_no_network() -> None:
    head = plan("meta-llama/Llama-3.1-8B-Instruct", "eagle3", 3, "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")
    assert [len(group.layer_names) for group in head.layout.groups] == [33]
    block = plan("Qwen/Qwen3-8B", "", None, "z-lab/Qwen3-8B-DFlash-b16")
    assert block.request.draft is not None
    # A block of 16 is an anchor and 15 tokens.
    assert (block.request.draft.method, block.request.draft.num_tokens) == ("dflash", 15)


def test_a_draft_in_the_speculators_format_has_its_layers_nested(tmp_path: Path) -> None:
    layer = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 1, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
             "max_position_embeddings": 40960}  # fmt: skip
    nested = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 32000,
              "transformer_layer_config": layer}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(nested))
    by_file = plan("Qwen/Qwen3-8B", "eagle3", 3, str(tmp_path))
    bundled = plan("Qwen/Qwen3-8B", "eagle3", 3, "RedHatAI/Qwen3-8B-speculator.eagle3")
    assert by_file.layout == bundled.layout
    assert weights(by_file) == weights(bundled)


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"hidden_size": 4096, "vocab_size": 32000, "num_heads": 3, "num_hidden_layers": 1}, 443_547_648),
        ({"medusa_num_heads": 3, "hidden_size": 4096, "vocab_size": 32000}, 443_547_648),
        ({}, 740_556_800),
        (
            {"hidden_size": 64, "vocab_size": 128, "num_heads": 4, "num_hidden_layers": 2, "medusa_fc_bias": True},
            66_048,
        ),
        (
            {"hidden_size": 64, "vocab_size": 128, "num_heads": 4, "truncated_vocab_size": 64,
             "original_lm_head": True},
            20_480,
        ),
    ],
)  # fmt: skip
def test_medusa_has_the_parameters_that_vllm_builds(fields: dict[str, object], params: int) -> None:
    """Counted of vLLM 0.32's own class, without its weights."""
    draft = medusa_draft(read_config("heads", "test", {"model_type": "medusa", **fields}), 3)
    assert sum(weight.params for weight in draft.weights) == params
    assert draft.layers == ()


# Millions of parameters and of bytes, as a public table gives them of their cards (of the large two the bytes alone).
ASSISTANTS = {"E2B": (78, 156), "E4B": (79, 158), "26B-A4B": (420, 840), "31B": (470, 940)}


@pytest.mark.parametrize(("size", "card"), ASSISTANTS.items())
def test_an_assistant_reads_what_the_model_keeps(size: str, card: tuple[int, int]) -> None:
    model = f"google/gemma-4-{size}-it"
    found = plan(model, "", 4, f"{model}-assistant")
    draft = found.request.draft
    assert draft is not None
    assert (draft.method, draft.num_tokens, draft.layers) == ("mtp", 4, ())
    assert found.layout == without(model).layout
    assert sum(weight.params for weight in draft.weights) / 1e6 == pytest.approx(card[0], rel=0.01)
    assert draft.rank_bytes(2, Ranks())[1] / 1e6 == pytest.approx(card[1], rel=0.01)


def test_an_assistant_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reads hidden states of 1,536, and google/gemma-4-31B-it has 5,376"):
        plan("google/gemma-4-31B-it", "", 4, "google/gemma-4-E2B-it-assistant")


QWEN_DSPARK = {
    "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "block_size": 7, "markov_rank": 256,
    "target_layer_ids": [1, 9, 17, 25, 33], "layer_types": ["full_attention"] * 5,
}  # fmt: skip


def test_dspark_is_dflash_and_a_table_of_what_follows_what(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_DSPARK))
    spark, flash = (plan("Qwen/Qwen3-8B", method, 7, str(tmp_path)) for method in ("dspark", "dflash"))
    assert spark.layout == flash.layout
    assert [len(group.layer_names) for group in spark.layout.groups] == [36 + 5]
    # Two tables of 151,936 tokens (a multiple of 64) by 256, two bytes an element, whole on every rank.
    assert weights(spark) - weights(flash) == 2 * 151936 * 256 * 2
    draft = plan("Qwen/Qwen3-8B", "dspark", None, str(tmp_path)).request.draft
    # A block of seven is seven tokens, whose first stands where the anchor is: no slot more.
    assert draft is not None
    assert (draft.num_tokens, lookahead_slots(draft)) == (7, 7)


def test_a_part_of_the_vocabulary_has_a_head_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_DSPARK, "draft_vocab_size": 32000}))
    pruned = plan("Qwen/Qwen3-8B", "dspark", 7, str(tmp_path))
    flash = plan("Qwen/Qwen3-8B", "dflash", 7, str(tmp_path))
    assert weights(pruned) - weights(flash) == ((151936 + 32000) * 256 + 32000 * 4096) * 2


def test_dspark_of_other_kinds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_DSPARK, "architectures": ["Gemma4DSparkModel"]}))
    with pytest.raises(ConfigError, match="class Gemma4DSparkModel, which is not modelled"):
        plan("Qwen/Qwen3-8B", "dspark", 7, str(tmp_path))
    with pytest.raises(ConfigError, match="ship in the model's own checkpoint"):
        plan("Qwen/Qwen3-8B", "dspark", 7)
