"""The checkpoint's own quantization: bytes of a weight by module, and the KV cache type that it asks for.

Sources: quantization_config in config.json (fp8, compressed-tensors, modelopt, mxfp4, awq, gptq, bitsandbytes) and
ModelOpt's hf_quant_config.json beside it, which counts only where config.json has none, as in vLLM.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from kvledger.models.config import JSON, ModelConfig, integer

# Bytes of a weight, its scales included, where the format fixes them.
NVFP4_BYTES = 0.5 + 1 / 16
MXFP4_BYTES = 0.5 + 1 / 32
FP8_BLOCK_BYTES = 1 + 4 / (128 * 128)
FP8_BYTES = 1.0


@dataclass(frozen=True)
class KVScheme:
    """A KV cache type that the checkpoint asks for and the field that says so."""

    dtype: str
    field: str


@dataclass(frozen=True)
class WeightScheme:
    """How modules are stored. `kept`: patterns of modules that stay in the model's type; `mixed`: by module."""

    method: str
    bytes_per_weight: float
    kept: tuple[str, ...] = ()
    mixed: Mapping[str, float] | None = None

    def bytes_of(self, module: str, dtype_bytes: float) -> float:
        """Bytes of one weight of that module (a dotted path without a suffix)."""
        if self.mixed is not None:
            return next((size for name, size in self.mixed.items() if same_module(name, module)), dtype_bytes)
        if any(matches(pattern, module) for pattern in self.kept):
            return dtype_bytes
        return self.bytes_per_weight


def matches(pattern: str, module: str) -> bool:
    """Whether an exclusion pattern (a path, a glob or re:...) covers the module. A short path covers what is in it."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return fnmatchcase(module, pattern) or fnmatchcase(module, pattern.rstrip("*") + "*")
    return module == pattern or module.endswith("." + pattern) or module.startswith(pattern + ".")


def same_module(listed: str, module: str) -> bool:
    """Whether a module that is listed by its checkpoint name is ours, whatever stands before `layers`."""
    ours, theirs = module.split("layers.")[-1], listed.split("layers.")[-1]
    return ours == theirs or fnmatchcase(theirs, ours) or theirs.startswith(ours + ".")


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
    kept = excluded(section)
    if method in ("fp8", "deepseek_v4_fp8"):
        block = section.get("weight_block_size")
        size = FP8_BLOCK_BYTES if isinstance(block, Sequence) else FP8_BYTES
        mixed = section.get("moe_quant_algo")
        if mixed == "NVFP4":
            return WeightScheme(method, size, kept, mixed_layers(section))
        return WeightScheme(method, size, kept)
    if method == "fbgemm_fp8":
        return WeightScheme(method, FP8_BYTES, kept)
    if method.startswith("modelopt"):
        return modelopt_scheme(config, section, kept)
    if method in ("mxfp4", "gpt_oss_mxfp4"):
        return WeightScheme(method, MXFP4_BYTES, (*kept, "*norm*"))
    if method in ("compressed-tensors", "awq", "gptq", "gptq_marlin", "auto-round", "autoround", "bitsandbytes"):
        return WeightScheme(method, packed_bytes(section), kept)
    config.note(f"quant_method {method!r} is not known: weights are counted in the model's own type")
    return None


def modelopt_scheme(config: ModelConfig, section: JSON, kept: tuple[str, ...]) -> WeightScheme | None:
    algorithm = str(section.get("quant_algo") or "").upper()
    if algorithm == "MIXED_PRECISION":
        return WeightScheme("modelopt", FP8_BYTES, kept, mixed_layers(section))
    size = algorithm_bytes(algorithm)
    if size is None:
        config.note(f"quant_algo {algorithm!r} is not known: weights are counted in the model's own type")
        return None
    return WeightScheme("modelopt", size, kept)


def algorithm_bytes(algorithm: str) -> float | None:
    """Bytes of a weight under a ModelOpt algorithm."""
    if "NVFP4" in algorithm:
        return NVFP4_BYTES
    if "MXFP4" in algorithm:
        return MXFP4_BYTES
    return FP8_BYTES if "FP8" in algorithm else None


def mixed_layers(section: JSON) -> dict[str, float]:
    """Module -> bytes of a weight, for checkpoints that list their quantized modules."""
    listed = section.get("quantized_layers")
    if not isinstance(listed, Mapping):
        return {}
    sizes = {}
    for name, entry in listed.items():
        size = algorithm_bytes(str(entry.get("quant_algo")).upper()) if isinstance(entry, Mapping) else None
        if size is not None:
            sizes[str(name)] = size
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
    """Patterns of the modules that stay as they are. Output and input embeddings are never quantized in the kinds here."""
    patterns: list[str] = []
    for name in ("ignore", "modules_to_not_convert", "exclude_modules"):
        listed = section.get(name)
        if isinstance(listed, list):
            patterns.extend(str(item) for item in listed)
    return tuple(dict.fromkeys(patterns))
