"""Layers and parameters of 77 families, against what vLLM 0.32 builds for the defaults of each family's config class.

These configs are nobody's checkpoint: odd sizes, fields that published configs never leave out, lists of layers taken
away. They show whether fields decide, or names.
"""

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvledger.core.groups.spec import AttentionSpec, ChunkedLocalAttentionSpec, KVCacheSpec, MambaSpec
from kvledger.errors import ConfigError
from kvledger.models.config import read_config
from kvledger.models.facts import ModelFacts, model_facts
from kvledger.models.layers import CacheSettings
from kvledger.models.shards import Ranks
from kvledger.models.weights import rank_weight_bytes

DATA = Path(__file__).parent / "data" / "vllm-0.32-families.jsonl.gz"
Family = dict[str, Any]
# Parameters that are further off, with the reason.
OFF = {
    ("jetmoe", "class defaults"): "attention is a mixture of experts too, whose count is not modelled",
    ("laguna", "without layer lists"): "mlp_layer_types is missing; its class then makes the first layer dense",
}
REFUSED = {("granitemoehybrid", "without layer lists"): "no layer_types says which layers"}


@cache
def families() -> tuple[Family, ...]:
    return tuple(json.loads(line) for line in gzip.decompress(DATA.read_bytes()).splitlines())


def name(family: Family) -> tuple[str, str]:
    return family["family"], family["variant"]


def shape(spec: KVCacheSpec) -> dict[str, Any]:
    """A spec in the words of the golden file, without element types, which depend on the device."""
    if isinstance(spec, MambaSpec):
        return {"type": "MambaSpec", "shapes": [list(shape) for shape in spec.shapes]}
    found: dict[str, Any] = {"type": type(spec).__name__, "head_size": spec.head_size}
    if isinstance(spec, AttentionSpec):
        found |= {"num_kv_heads": spec.num_kv_heads, "head_size_v": spec.head_size_v or spec.head_size}
    if isinstance(spec, ChunkedLocalAttentionSpec):
        found["attention_chunk_size"] = spec.attention_chunk_size
    if getattr(spec, "sliding_window", 0):
        found["sliding_window"] = spec.sliding_window
    return found


def counted(made: ModelFacts) -> dict[str, int]:
    settings = CacheSettings(block_size=16)
    specs = (layer.cache.spec(settings) for layer in made.layers)
    return Counter(json.dumps(shape(spec), sort_keys=True) for spec in specs)


def expected(family: Family) -> dict[str, int]:
    found = {}
    for layer in family["layers"]:
        fields = {key: value for key, value in layer.items() if key != "count"}
        if "num_kv_heads" in fields:
            fields.setdefault("head_size_v", fields["head_size"])
        found[json.dumps(fields, sort_keys=True)] = layer["count"]
    return found


@pytest.mark.parametrize("family", families(), ids=lambda family: " ".join(name(family)))
def test_layers_length_and_parameters(family: Family) -> None:
    config = read_config(family["family"], "test", family["config"])
    if name(family) in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name(family)]):
            model_facts(config)
        return
    made = model_facts(config)
    assert counted(made) == expected(family)
    assert made.context.default == family["max_model_len"]
    weights = rank_weight_bytes(config, made.layers, 2, Ranks(), [range(made.num_layers)])[0]
    is_close = abs(weights.params - family["params"]) <= 0.005 * family["params"]
    assert is_close != (name(family) in OFF), f"{weights.params} parameters, vLLM has {family['params']}"
