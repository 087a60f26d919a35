"""Which models the attention function serves, with which groups, and what it says to the others."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    PretrainedConfig,
)

from kvledger import FullAttentionSpec, KVCacheConfig, KVCacheManager, Request
from kvledger.core.groups.spec import KVCacheGroupSpec, SlidingWindowSpec
from kvledger.engine.transformers_model import TransformersModel, facts_of, kv_cache_layout
from kvledger.engine.worker import TorchWorker
from kvledger.errors import ConfigError
from kvledger.models.sources import load_config
from kvledger.plan.gpus import find_gpu
from kvledger.plan.options import EngineOptions
from kvledger.plan.plan import PlanRequest, make_plan
from kvledger.plan.versions import version_rules
from kvledger.scheduler import Scheduler, SchedulerConfig
from tests.torch.models import WINDOW, prompt, tiny_config, tiny_model
from tests.torch.rig import Rig


def small(model_type: str, **fields: Any) -> PretrainedConfig:
    """A config of any family."""
    return AutoConfig.for_model(
        model_type, vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0, **fields
    )


def run_one(
    config: PretrainedConfig, groups: tuple[KVCacheGroupSpec, ...], auto_class: Any = AutoModelForCausalLM
) -> list[int]:
    """Four tokens of a random model of that config."""
    torch.manual_seed(0)
    ledger = KVCacheConfig(32, groups)
    manager = KVCacheManager(ledger, 64)
    scheduler = Scheduler(manager, SchedulerConfig(max_num_seqs=1))
    model = TransformersModel(auto_class.from_config(config))
    worker = TorchWorker(model, ledger, max_num_reqs=1, max_model_len=64)
    request = Request("a", prompt(12), max_tokens=4)
    scheduler.add_request(request)
    while scheduler.has_unfinished_requests:
        output = scheduler.schedule()
        scheduler.update_from_output(output, worker.execute(output))
    return request.output_token_ids()


def test_groups_are_those_of_the_plan() -> None:
    """The same functions decide, so the ledger of an engine is the one that was planned for."""
    config = AutoConfig.for_model(**load_config("google/gemma-3-4b-it-text-only").root)
    request = PlanRequest(
        facts_of(config),
        EngineOptions(block_size=16, dtype="bfloat16"),
        (find_gpu("L4"),),
        version_rules("0.32"),
    )
    layout = kv_cache_layout(config, block_size=16, dtype="bfloat16")
    assert layout == make_plan(request).layout
    # Every sixth of 34 layers is full: 5 of them, and 29 windowed ones in groups of at most 5.
    assert [len(group.layer_names) for group in layout.groups] == [5, 5, 5, 5, 5, 4, 5]


def test_windows_and_sizes_come_from_the_loaded_config() -> None:
    [group] = kv_cache_layout(tiny_config("mistral"), block_size=8).groups
    assert group.layer_names == ("layers.0.self_attn", "layers.1.self_attn")
    assert group.spec == SlidingWindowSpec(8, 2, 8, dtype="float32", sliding_window=WINDOW)
    assert facts_of(tiny_config("mistral")).context.default == 256


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_may_be_stored_in_fewer_bits_than_the_model_computes_in(dtype: str) -> None:
    config = tiny_config("llama")
    groups = kv_cache_layout(config, block_size=4, dtype=dtype).groups
    assert len(run_one(config, groups)) == 4


def test_a_model_in_half_precision() -> None:
    config = tiny_config("gemma3")
    config.dtype = torch.bfloat16
    assert len(run_one(config, kv_cache_layout(config, block_size=4, dtype="bfloat16").groups)) == 4


def test_the_language_model_of_a_multimodal_one_reads_text() -> None:
    text = {**tiny_config("mistral").to_dict(), "model_type": "mistral"}
    vision = {"model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("mistral3", text_config=text, vision_config=vision, image_token_index=96)
    [group] = kv_cache_layout(config, block_size=4).groups
    assert group.spec == SlidingWindowSpec(4, 2, 8, dtype="float32", sliding_window=WINDOW)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    token_ids = prompt(12)
    expected = model.generate(torch.tensor([token_ids]), max_new_tokens=4, do_sample=False)[0, 12:].tolist()
    assert run_one(config, (group,), AutoModelForImageTextToText) == expected


def test_a_model_is_switched_for_good_and_says_so() -> None:
    model = tiny_model("llama")
    assert TransformersModel(model).device == torch.device("cpu")
    assert not model.training
    with pytest.raises(ConfigError, match=r"LlamaAttention was switched to 'kvledger' and got no block tables"):
        model(torch.tensor([prompt(3)]))


def test_a_class_with_attention_of_its_own_is_refused_at_once() -> None:
    config = small("bloom")
    with pytest.raises(ConfigError, match=r"BloomForCausalLM: does not look its attention function up by name"):
        run_one(config, kv_cache_layout(config).groups)


def test_a_class_that_keeps_arguments_from_its_layers_is_refused() -> None:
    config = small("stablelm", num_key_value_heads=2)
    # Older releases of transformers do not look its function up either.
    with pytest.raises(ConfigError, match=r"does not hand arguments on to its layers|does not look its attention"):
        run_one(config, kv_cache_layout(config).groups)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (small("llama4_text", num_local_experts=2), "layers.0.self_attn keeps AttentionCache, which this attention"),
        (small("deepseek_v3", kv_lora_rank=16), "layers.0.self_attn keeps LatentCache, which this attention function"),
    ],
)
def test_other_kinds_of_layers_are_refused_with_their_name(config: PretrainedConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_cache_layout(config)


def test_groups_that_keep_less_than_the_model_reads_are_refused() -> None:
    """Anything else would read blocks that others own by then."""
    spec = SlidingWindowSpec(4, 2, 8, dtype="float32", sliding_window=WINDOW - 1)
    names = ("layers.0.self_attn", "layers.1.self_attn")
    with pytest.raises(ConfigError, match=r"sliding_window=8: layer layers.0.self_attn reads 9 tokens, and its group"):
        run_one(tiny_config("mistral"), (KVCacheGroupSpec(names, spec),))
    with pytest.raises(ConfigError, match=r"sliding_window=8: layer layers.0.self_attn reads all tokens"):
        run_one(tiny_config("llama"), (KVCacheGroupSpec(names, spec),))


def test_groups_of_another_model_are_refused() -> None:
    spec = FullAttentionSpec(4, 4, 8, dtype="float32")
    names = ("layers.0.self_attn", "layers.1.self_attn")
    with pytest.raises(
        ConfigError, match=r"layer layers.0.self_attn has KV heads, key size and value size \(2, 8, 8\)"
    ):
        run_one(tiny_config("llama"), (KVCacheGroupSpec(names, spec),))
    with pytest.raises(ConfigError, match=r"layer='layers.1.self_attn': no KV cache group has it"):
        run_one(tiny_config("llama"), kv_cache_layout(LlamaConfig(**shallow())).groups)


def shallow() -> dict[str, Any]:
    return {**tiny_config("llama").to_dict(), "num_hidden_layers": 1}


def test_layers_that_the_model_lacks_are_noticed() -> None:
    """A layer that did not attend has its values elsewhere, or nowhere."""
    groups = kv_cache_layout(tiny_config("llama"), block_size=4).groups
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM, layers\.1\.self_attn: does not look its attention"):
        run_one(LlamaConfig(**shallow()), groups)


def test_masks_of_the_model_are_not_applied_so_they_are_refused() -> None:
    config = small("doge", num_key_value_heads=2)
    with pytest.raises(ConfigError, match=r"layer layers.0.self_attn attends with attention_mask: not supported"):
        run_one(config, kv_cache_layout(config).groups)


def test_a_run_beside_transformers_own() -> None:
    """Two models of one class in one process: the switch concerns one of them only."""
    rig = Rig("llama")
    rig.add("a", prompt(9, seed=8), 5)
    rig.step()
    plain = tiny_model("llama")
    assert plain(torch.tensor([prompt(4)])).logits.shape == (1, 4, 97)
    rig.run()
    rig.expect_reference()
