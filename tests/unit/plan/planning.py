"""Short words for tests: a plan of a bundled model, or of a config made up on the spot."""

from dataclasses import replace
from typing import Any

from kvledger.models.config import read_config
from kvledger.models.facts import ModelFacts, model_facts
from kvledger.models.sources import find_in_catalogue, from_catalogue
from kvledger.plan.gpus import GIB, find_gpu
from kvledger.plan.memory import MeasuredMemory
from kvledger.plan.options import EngineOptions
from kvledger.plan.plan import Plan, PlanRequest, make_plan
from kvledger.plan.versions import version_rules

LLAMA_8B = "meta-llama/Llama-3.1-8B"
CACHE_40_GIB = 40 * GIB


def facts(name: str, *, quantized: bool = True) -> ModelFacts:
    """A bundled model; without its checkpoint's quantization where that is asked for."""
    row = find_in_catalogue(name)
    assert row is not None, name
    config = from_catalogue(row)
    if not quantized:
        config.hf_quant = None
        for where in (config.root, config.text):
            assert isinstance(where, dict)
            where.pop("quantization_config", None)
    return model_facts(config)


def made_up(**fields: Any) -> ModelFacts:
    """A small decoder with these fields on top."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
    return model_facts(read_config("made-up", "test", {**config, **fields}))


def request(
    model: ModelFacts,
    *,
    gpu: str = "H100",
    version: str = "0.33",
    stages: tuple[MeasuredMemory, ...] = (),
    **options: Any,
) -> PlanRequest:
    cards = tuple(map(find_gpu, gpu.split(",")))
    asked = PlanRequest(model, EngineOptions(**options), cards, version_rules(version))
    return replace(asked, measured=stages) if stages else asked


def plan(model: ModelFacts | str, **options: Any) -> Plan:
    return make_plan(request(facts(model) if isinstance(model, str) else model, **options))


def gib(size: float) -> int:
    return int(size * GIB)
