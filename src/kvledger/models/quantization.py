"""The checkpoint's own quantization: bytes of a weight by module, and the KV cache type that it asks for.

Sources: quantization_config in config.json (fp8, compressed-tensors, modelopt, mxfp4, awq, gptq, bitsandbytes) and
ModelOpt's hf_quant_config.json beside it, which counts only where config.json has none, as in vLLM.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate

from kvledger.models.config import JSON, ModelConfig, integer

# Bytes of a weight, its scales included, where the format fixes them.
NVFP4_BYTES = 0.5 + 1 / 16
MXFP4_BYTES = 0.5 + 1 / 32
MXFP8_BYTES = 1 + 1 / 32
FP8_BLOCK_BYTES = 1 + 4 / (128 * 128)
FP8_BYTES = 1.0


@dataclass(frozen=True)
class KVScheme:
    """A KV cache type that the checkpoint asks for and the field that says so."""

    dtype: str
    field: str


# The output head is quantized only where a checkpoint lists it.
OUTPUT_HEAD = "lm_head"
# The same part of a layer under the names of different families and of fused layers.
SAME_PARTS = (
    (re.compile(r"\b(block_sparse_moe|feed_forward|ffn)\b"), "mlp"),
    (re.compile(r"\bshared_expert\b"), "shared_experts"),
    (re.compile(r"\b(gate_proj|up_proj)\b"), "gate_up_proj"),
    (re.compile(r"\bin_proj_[ab]\b"), "in_proj_ba"),
    (re.compile(r"\bexperts\.(\*|\d+)\b.*"), "experts"),
)


def module_key(path: str) -> str:
    """A module's path from its layer on, under one name for each part, so that ours and the checkpoint's compare."""
    key = path.rpartition("layers.")[2] if "layers." in path else path.removeprefix("model.")
    for pattern, name in SAME_PARTS:
        key = pattern.sub(name, key)
    return key


def enclosing(key: str) -> Iterator[str]:
    """The module and everything that it lies in."""
    yield key
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


class ModuleSet:
    """Modules that a checkpoint lists by path, by glob or by regular expression; a listed module covers its parts."""

    def __init__(self, listed: Sequence[str]) -> None:
        self.names: set[str] = set()
        self.single: set[str] = set()
        expressions = []
        for pattern in listed:
            if pattern.startswith("mtp"):
                # Draft layers count from 0 again; they are no part of the model here.
                continue
            if pattern.startswith("re:"):
                expressions.append(f"(?:.*\\.)?(?:{pattern[3:]})")
                continue
            plain = module_key(pattern).rstrip("*").rstrip(".")
            if "*" in plain:
                expressions.append(translate(plain + "*"))
            elif "." in pattern:
                self.names.add(plain)
            else:
                self.single.add(plain)
        self.expression = re.compile("|".join(expressions)) if expressions else None

    def covers(self, key: str) -> bool:
        """Whether the module of that key is listed."""
        if any(name in self.names for name in enclosing(key)) or not self.single.isdisjoint(key.split(".")):
            return True
        return self.expression is not None and self.expression.match(f"layers.{key}") is not None


@dataclass(frozen=True)
class WeightScheme:
    """How modules are stored. `kept`: those that stay in the model's type; `listed`: those with bytes of their own."""

    method: str
    bytes_per_weight: float | None
    kept: ModuleSet
    listed: Mapping[str, float]

    def bytes_of(self, path: str, dtype_bytes: float) -> float:
        """Bytes of one weight of that module."""
        key = module_key(path)
        for name in enclosing(key) if self.listed else ():
            if name in self.listed:
                return self.listed[name]
        if path == OUTPUT_HEAD or self.bytes_per_weight is None or self.kept.covers(key):
            return dtype_bytes
        return self.bytes_per_weight


def quantization_section(config: ModelConfig) -> JSON:
    """quantization_config, or ModelOpt's side file where there is none, or nothing."""
    for where in (config.root, config.text):
        for name in ("quantization_config", "compression_config"):
            section = where.get(name)
            if isinstance(section, Mapping):
                return section
    quant = config.hf_quant
    if quant is None:
        return {}
    producer, inner = quant.get("producer"), quant.get("quantization")
    if not (isinstance(producer, Mapping) and producer.get("name") == "modelopt" and isinstance(inner, Mapping)):
        config.note("hf_quant_config.json names no producer: ignored, as vLLM does")
        return {}
    return {"quant_method": "modelopt", **inner}


def checkpoint_kv_scheme(config: ModelConfig) -> KVScheme | None:
    """The KV cache type that the checkpoint asks for, or None."""
    section = quantization_section(config)
    scheme = section.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and integer(scheme, "num_bits") == 8 and scheme.get("type") == "float":
        dtype = "fp8_e4m3" if section.get("quant_method") == "modelopt" else "fp8"
        return KVScheme(dtype, "quantization_config.kv_cache_scheme")
    if str(section.get("kv_cache_quant_algo")).upper() == "FP8":
        return KVScheme("fp8_e4m3", "kv_cache_quant_algo")
    return None


def weight_scheme(config: ModelConfig) -> WeightScheme | None:
    """How the checkpoint stores its weights; None for the model's own type. Unknown methods are noted."""
    section = quantization_section(config)
    method = str(section.get("quant_method") or "").lower()
    if not method:
        return None
    kept, size = excluded(section), method_bytes(method, section)
    if section.get("moe_quant_algo"):
        # What is listed has its own format; the exceptions from it are in the checkpoint's first one.
        return WeightScheme(method, size, ModuleSet(()), mixed_layers(config, section))
    if str(section.get("quant_algo")).upper() == "MIXED_PRECISION":
        return WeightScheme(method, None, ModuleSet(()), mixed_layers(config, section))
    if size is None:
        config.note(f"quantization {method} is not known: weights are counted in the model's own type")
        return None
    return WeightScheme(method, size, ModuleSet(kept), {})


def method_bytes(method: str, section: JSON) -> float | None:
    """Bytes of a weight under a quant_method, None where it is not known."""
    if method in ("fp8", "deepseek_v4_fp8", "fbgemm_fp8"):
        return FP8_BLOCK_BYTES if isinstance(section.get("weight_block_size"), Sequence) else FP8_BYTES
    if method.startswith("modelopt"):
        return algorithm_bytes(str(section.get("quant_algo") or "").upper())
    if method in ("mxfp4", "gpt_oss_mxfp4"):
        return MXFP4_BYTES
    if method in ("compressed-tensors", "awq", "gptq", "gptq_marlin", "auto-round", "autoround", "bitsandbytes"):
        return packed_bytes(section)
    return None


def algorithm_bytes(algorithm: str) -> float | None:
    """Bytes of a weight under a ModelOpt algorithm."""
    if "NVFP4" in algorithm:
        return NVFP4_BYTES
    if "MXFP4" in algorithm:
        return MXFP4_BYTES
    if "MXFP8" in algorithm:
        return MXFP8_BYTES
    return FP8_BYTES if "FP8" in algorithm else None


def mixed_layers(config: ModelConfig, section: JSON) -> dict[str, float]:
    """Module -> bytes of a weight, for checkpoints that list their quantized modules, in config.json or beside it."""
    listed = section.get("quantized_layers")
    if not isinstance(listed, Mapping):
        beside = (config.hf_quant or {}).get("quantization")
        listed = beside.get("quantized_layers") if isinstance(beside, Mapping) else None
    if not isinstance(listed, Mapping):
        config.note("the quantized modules are not listed: weights are counted in the model's own type")
        return {}
    sizes = {}
    for name, entry in listed.items():
        size = algorithm_bytes(str(entry.get("quant_algo")).upper()) if isinstance(entry, Mapping) else None
        if size is not None:
            sizes[module_key(str(name))] = size
    return sizes


def packed_bytes(section: JSON) -> float:
    """Bytes of a weight of bits and a group size: the packed value and a 16-bit scale for each group."""
    bits, group = integer(section, "bits") or integer(section, "w_bit"), integer(section, "group_size")
    groups = section.get("config_groups")
    if isinstance(groups, Mapping):
        for entry in groups.values():
            weights = entry.get("weights") if isinstance(entry, Mapping) else None
            if isinstance(weights, Mapping):
                bits, group = integer(weights, "num_bits"), integer(weights, "group_size")
    if section.get("load_in_4bit"):
        bits, group = 4, 64
    scale_bytes = 1 if "mxfp4" in str(section.get("format")) else 2
    return (bits or 8) / 8 + (scale_bytes / group if group > 0 else 0.0)


def excluded(section: JSON) -> tuple[str, ...]:
    """Patterns of the modules that stay as they are."""
    patterns: list[str] = []
    for name in ("ignore", "modules_to_not_convert", "exclude_modules"):
        listed = section.get(name)
        if isinstance(listed, list):
            patterns.extend(str(item) for item in listed)
    return tuple(dict.fromkeys(patterns))
