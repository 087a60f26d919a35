"""How a model's weights are stored: the checkpoint's own quantization, or what `--quantization` makes of it.

Sources: quantization_config in config.json, ModelOpt's hf_quant_config.json beside it, which counts only where
config.json has none, and the methods that vLLM 0.32 and 0.33 know. A method that they do not know is refused, because
its weights would not be loaded; nothing is counted in the model's own type in silence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvledger.errors import ConfigError, wrong_value
from kvledger.models.config import JSON, ModelConfig, integer
from kvledger.models.formats import (
    FP8_BLOCK_BYTES,
    FP8_BYTES,
    INT8_BYTES,
    MXFP4_BYTES,
    MXFP8_BYTES,
    NVFP4_BYTES,
    algorithm_bytes,
    compressed_bytes,
    integer_bytes,
    quark_bytes,
    torchao_bytes,
)
from kvledger.models.module_names import ModuleSet, enclosing, module_key

# The output head is quantized only where a checkpoint lists it.
OUTPUT_HEAD = "lm_head"
# Methods of vLLM that are one format under several names; the first is the one that a checkpoint states.
SAME_METHODS = (
    ("gptq", "gptq_marlin", "auto_gptq", "moe_wna16"),
    ("awq", "awq_marlin", "auto_awq", "moe_wna16"),
    ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"),
    ("mxfp4", "gpt_oss_mxfp4"),
    ("fp8", "deepseek_v4_fp8"),
    ("auto-round", "inc", "autoround"),
    ("compressed-tensors",),
    ("fbgemm_fp8",),
    ("quark",),
    ("torchao",),
    ("mxfp8",),
)  # fmt: skip
# Methods that quantize while they load: bytes of a weight in linear layers and in routed experts, None: not touched.
ONLINE: dict[str, tuple[float | None, float | None]] = {
    "fp8": (FP8_BYTES, FP8_BYTES),
    "fp8_per_tensor": (FP8_BYTES, FP8_BYTES),
    "fp8_per_channel": (FP8_BYTES, FP8_BYTES),
    "fp8_per_block": (FP8_BLOCK_BYTES, FP8_BLOCK_BYTES),
    "mxfp8": (MXFP8_BYTES, MXFP8_BYTES),
    "mxfp4": (MXFP4_BYTES, MXFP4_BYTES),
    "int8_per_channel_weight_only": (None, INT8_BYTES),
    "experts_int8": (None, INT8_BYTES),
    "nvfp4_per_token": (None, NVFP4_BYTES),
}
# What vLLM knows and a plan cannot count.
NOT_COUNTED = ("fp_quant", "humming", "online")


class UnknownQuantizationError(ConfigError):
    """vLLM would not load these weights, or what it makes of them is not known."""


@dataclass(frozen=True)
class KVScheme:
    """A KV cache type that the checkpoint asks for and the field that says so."""

    dtype: str
    field: str


@dataclass(frozen=True)
class WeightScheme:
    """How modules are stored.

    `linear`, `expert`: bytes of a weight of linear layers and of routed experts, None where they keep the model's type.
    `kept`: modules that keep it anyway; `listed`: modules with bytes of their own; `matched`: the same by pattern, the
    first that matches counts. `pads_experts`: experts are padded to what their kernels take.
    """

    method: str
    linear: float | None
    expert: float | None
    kept: ModuleSet = field(default_factory=lambda: ModuleSet(()))
    listed: Mapping[str, float] = field(default_factory=dict)
    matched: tuple[tuple[ModuleSet, float], ...] = ()
    pads_experts: bool = False

    def bytes_of(self, path: str, dtype_bytes: float, *, expert: bool = False) -> float:
        """Bytes of one weight of that module."""
        key = module_key(path)
        for name in enclosing(key) if self.listed else ():
            if name in self.listed:
                return self.listed[name]
        if path == OUTPUT_HEAD or self.kept.covers(key):
            return dtype_bytes
        for modules, size in self.matched:
            if modules.covers(key):
                return size
        size_of_kind = self.expert if expert else self.linear
        return dtype_bytes if size_of_kind is None else size_of_kind


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


def checkpoint_method(config: ModelConfig) -> str:
    """quant_method of the checkpoint, "" where its weights are in the model's own type."""
    section = quantization_section(config)
    method = str(section.get("quant_method") or "").lower().replace("compressed_tensors", "compressed-tensors")
    return "modelopt" if not method and section.get("quant_algo") else method


def weight_scheme(config: ModelConfig, asked: str = "") -> WeightScheme | None:
    """How the weights are stored; None for the model's own type. `asked`: `--quantization`.

    UnknownQuantizationError where vLLM would not load them so.
    """
    method = checkpoint_method(config)
    if not method:
        return online_scheme(config, asked) if asked else None
    if asked and not is_same_method(method, asked):
        raise UnknownQuantizationError(
            f"Quantization method specified in the model config ({method}) does not match the quantization method "
            f"specified in the `quantization` argument ({asked}); leave --quantization out"
        )
    if method in NOT_COUNTED or not any(method in names for names in SAME_METHODS):
        raise UnknownQuantizationError(not_loaded(config, method))
    if method == "fbgemm_fp8":
        config.note("vLLM calls fbgemm_fp8 deprecated and starts only with --allow-deprecated-quantization")
    return checkpoint_scheme(config, method, quantization_section(config))


def is_same_method(method: str, asked: str) -> bool:
    return asked == method or any(method in names and asked in names for names in SAME_METHODS)


def not_loaded(config: ModelConfig, method: str) -> str:
    known = sorted({name for names in SAME_METHODS for name in names} | ONLINE.keys())
    return (
        f"Unknown quantization method: {method}. The weights of {config.name} cannot be counted: vLLM has no such "
        f"method by itself, or it is not modelled; known are {', '.join(known)}. With a plugin that loads them, "
        "measure them and give --weights-gib"
    )


def online_scheme(config: ModelConfig, asked: str) -> WeightScheme:
    """Weights that are quantized while they load, from a checkpoint in the model's own type. ConfigError for others."""
    if asked not in ONLINE:
        is_format = any(asked in names for names in SAME_METHODS)
        problem = (
            f"a format of checkpoints, and {config.name} is not one" if is_format else "Unknown quantization method"
        )
        fix = f"give the quantized checkpoint, or one of those that quantize while loading: {', '.join(ONLINE)}"
        raise wrong_value("--quantization", asked, problem, fix)
    linear, expert = ONLINE[asked]
    return WeightScheme(f"{asked}, quantized while loading", linear, expert, pads_experts=asked == "mxfp4")


def checkpoint_scheme(config: ModelConfig, method: str, section: JSON) -> WeightScheme:
    """The scheme that the checkpoint's section describes."""
    kept = ModuleSet(excluded(section))
    if section.get("moe_quant_algo"):
        # What is listed has its own format; the exceptions from it are in the checkpoint's first one.
        size = fp8_bytes(section)
        return WeightScheme(method, size, size, listed=mixed_layers(config, section))
    if str(section.get("quant_algo")).upper() == "MIXED_PRECISION":
        return WeightScheme(method, None, None, listed=mixed_layers(config, section))
    if method == "compressed-tensors":
        return compressed_scheme(config, section, kept)
    if method == "quark":
        return quark_scheme(section, kept)
    if method == "torchao":
        return torchao_scheme(config, section, kept)
    size = method_bytes(config, method, section)
    if method in ("mxfp4", "gpt_oss_mxfp4"):
        # Only the experts are in that format, whatever the list of exceptions says.
        return WeightScheme(method, None, size, kept, pads_experts=True)
    return WeightScheme(method, size, size, kept, matched=overrides(section))


def method_bytes(config: ModelConfig, method: str, section: JSON) -> float:
    """Bytes of a weight under a quant_method whose modules are all alike."""
    if method in ("fp8", "deepseek_v4_fp8", "fbgemm_fp8"):
        return fp8_bytes(section)
    if method.startswith("modelopt"):
        algorithm = str(section.get("quant_algo") or "").upper()
        size = algorithm_bytes(algorithm)
        if size is None:
            raise UnknownQuantizationError(not_loaded(config, f"modelopt {algorithm}"))
        return size
    if method in ("mxfp4", "gpt_oss_mxfp4"):
        return MXFP4_BYTES
    return MXFP8_BYTES if method == "mxfp8" else integer_bytes(section, method)


def fp8_bytes(section: JSON) -> float:
    return FP8_BLOCK_BYTES if isinstance(section.get("weight_block_size"), Sequence) else FP8_BYTES


def mixed_layers(config: ModelConfig, section: JSON) -> dict[str, float]:
    """Module -> bytes of a weight, for checkpoints that list their quantized modules, in config.json or beside it."""
    listed = section.get("quantized_layers")
    if not isinstance(listed, Mapping):
        beside = (config.hf_quant or {}).get("quantization")
        listed = beside.get("quantized_layers") if isinstance(beside, Mapping) else None
    if not isinstance(listed, Mapping):
        raise UnknownQuantizationError(
            f"{config.name}: quant_algo is MIXED_PRECISION and nothing lists the quantized modules; give the directory "
            "with hf_quant_config.json, or --weights-gib"
        )
    sizes = {}
    for name, entry in listed.items():
        size = algorithm_bytes(str(entry.get("quant_algo")).upper()) if isinstance(entry, Mapping) else None
        if size is not None:
            sizes[module_key(str(name))] = size
    return sizes


def compressed_scheme(config: ModelConfig, section: JSON, kept: ModuleSet) -> WeightScheme:
    """compressed-tensors: one or several groups of modules, each with its bits; Linear means all that are left."""
    layout = str(section.get("format") or "")
    groups = section.get("config_groups")
    default: float | None = None
    matched = []
    for entry in groups.values() if isinstance(groups, Mapping) else ():
        size = compressed_bytes(entry, layout) if isinstance(entry, Mapping) else None
        targets = entry.get("targets") if isinstance(entry, Mapping) else None
        if size is None:
            continue
        names = [str(target) for target in targets] if isinstance(targets, list) else ["Linear"]
        if "Linear" in names:
            default = size
        else:
            matched.append((ModuleSet(names), size))
    if default is None and not matched:
        raise UnknownQuantizationError(not_loaded(config, "compressed-tensors without config_groups"))
    return WeightScheme("compressed-tensors", default, default, kept, matched=tuple(matched))


def quark_scheme(section: JSON, kept: ModuleSet) -> WeightScheme:
    """Quark: a configuration for everything and others for modules by name."""
    own = section.get("layer_quant_config")
    matched = [
        (ModuleSet([str(name)]), size)
        for name, entry in (own.items() if isinstance(own, Mapping) else ())
        if (size := quark_bytes(entry)) is not None
    ]
    size = quark_bytes(section.get("global_quant_config"))
    return WeightScheme("quark", size, size, kept, matched=tuple(matched))


def torchao_scheme(config: ModelConfig, section: JSON, kept: ModuleSet) -> WeightScheme:
    """torchao: one configuration, or one for each module with a default."""
    kinds = section.get("quant_type")
    entry = kinds.get("default") if isinstance(kinds, Mapping) else None
    if entry is None and isinstance(kinds, str):
        entry = {"_type": kinds}
    data = entry.get("_data") if isinstance(entry, Mapping) else None
    modules = data.get("module_fqn_to_config") if isinstance(data, Mapping) else None
    if isinstance(modules, Mapping):
        skipped = [str(name) for name, given in modules.items() if given is None]
        matched = [
            (ModuleSet([str(name)]), size)
            for name, given in modules.items()
            if name != "_default" and (size := torchao_bytes(given)) is not None
        ]
        size = torchao_bytes(modules.get("_default"))
        return WeightScheme("torchao", size, size, ModuleSet([*excluded(section), *skipped]), matched=tuple(matched))
    size = torchao_bytes(entry)
    if size is None:
        raise UnknownQuantizationError(not_loaded(config, f"torchao {kinds}"))
    return WeightScheme("torchao", size, size, kept)


def overrides(section: JSON) -> tuple[tuple[ModuleSet, float], ...]:
    """Modules with bits of their own: GPTQ's dynamic ("+:pattern") and AutoRound's extra_config."""
    found: list[tuple[ModuleSet, float]] = []
    method = str(section.get("quant_method"))
    for name in ("dynamic", "extra_config"):
        entries = section.get(name)
        for pattern, entry in entries.items() if isinstance(entries, Mapping) else ():
            bits = integer(entry, "bits") if isinstance(entry, Mapping) else 0
            if bits in (2, 3, 4, 8) and not str(pattern).startswith("-:"):
                merged = {**section, **entry}
                prefix = "re:" if str(pattern).startswith("+:") else ""
                found.append((ModuleSet([prefix + str(pattern).removeprefix("+:")]), integer_bytes(merged, method)))
    return tuple(found)


def excluded(section: JSON) -> tuple[str, ...]:
    """Patterns of the modules that stay as they are."""
    patterns: list[str] = []
    for name in ("ignore", "modules_to_not_convert", "exclude_modules", "exclude"):
        listed = section.get(name)
        if isinstance(listed, list):
            patterns.extend(str(item) for item in listed)
    dynamic, extra = section.get("dynamic"), section.get("extra_config")
    if isinstance(dynamic, Mapping):
        patterns.extend(f"re:{str(name)[2:]}" for name in dynamic if str(name).startswith("-:"))
    if isinstance(extra, Mapping):
        patterns.extend(
            str(name) for name, entry in extra.items() if isinstance(entry, Mapping) and integer(entry, "bits") >= 16
        )
    return tuple(dict.fromkeys(patterns))
