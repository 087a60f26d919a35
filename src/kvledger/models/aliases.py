"""Models that have the layers of a bundled one: fine-tunes, other lengths, quantized copies (data/aliases.tsv)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from kvledger.models.config import JSON

TABLE = "data/aliases.tsv"
# Words of the table -> the quantization that they stand for.
FORMATS: dict[str, JSON] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "gptq4": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
    "gptq8": {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "fp8-channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
        },
        "ignore": ["lm_head"],
    },
}


@dataclass(frozen=True)
class Alias:
    """`name` has the layers of `base`; `changes`: what its config has otherwise, in words of the table."""

    name: str
    base: str
    changes: tuple[str, ...]

    def config(self, base: JSON) -> JSON:
        """The base's config with the changes."""
        changed = dict(base)
        for change in self.changes:
            field, _, value = change.partition("=")
            if change in FORMATS:
                changed["quantization_config"] = FORMATS[change]
            elif change.isdigit():
                changed = with_field(changed, "max_position_embeddings", int(change))
            else:
                changed = with_field(changed, field, json.loads(value))
        return changed


def with_field(config: JSON, name: str, value: object) -> dict[str, object]:
    """The config with a field replaced where it stands, in the language model's part or outside."""
    for nest in ("text_config", "llm_config"):
        inner = config.get(nest)
        if isinstance(inner, Mapping) and name in inner:
            return {**config, nest: {**inner, name: value}}
    return {**config, name: value}


@cache
def aliases() -> dict[str, Alias]:
    """Lower-case name -> the alias."""
    found = {}
    for line in (files("kvledger.models") / TABLE).read_text().splitlines()[1:]:
        name, base, changes = line.split("\t")
        found[name.lower()] = Alias(name, base, tuple(changes.split()))
    return found


def find_alias(name: str) -> Alias | None:
    """The alias of that hub id, or of that name after the slash where all that have it are alike."""
    asked = name.lower()
    if asked in aliases():
        return aliases()[asked]
    found = [alias for key, alias in aliases().items() if key.split("/")[-1] == asked]
    return found[0] if len({(alias.base, alias.changes) for alias in found}) == 1 else None
