"""Bytes of one weight in each format that a checkpoint or `--quantization` names, its scales included.

A format is the packed value and, for each group of values, a scale: fp8 by blocks of 128 x 128, NVFP4 by 16, MXFP4 and
MXFP8 by 32, integers by the group size that the checkpoint states.
"""

import re
from collections.abc import Mapping

from kvledger.models.config import JSON, integer

NVFP4_BYTES = 0.5 + 1 / 16
MXFP4_BYTES = 0.5 + 1 / 32
MXFP8_BYTES = 1 + 1 / 32
FP8_BLOCK_BYTES = 1 + 4 / (128 * 128)
FP8_BYTES = 1.0
INT8_BYTES = 1.0
# A group where a format has groups and the checkpoint does not state their size.
USUAL_GROUP = 128


def algorithm_bytes(algorithm: str) -> float | None:
    """Bytes of a weight under a ModelOpt algorithm; None for one that is not known."""
    if "NVFP4" in algorithm:
        return NVFP4_BYTES
    if "MXFP4" in algorithm:
        return MXFP4_BYTES
    if "MXFP8" in algorithm:
        return MXFP8_BYTES
    if "W4A8" in algorithm or "INT4" in algorithm or "W4A16" in algorithm:
        return grouped_bytes(4, USUAL_GROUP)
    return FP8_BYTES if "FP8" in algorithm or "INT8" in algorithm else None


def grouped_bytes(bits: int, group: int, *, scale_bytes: float = 2, has_zeros: bool = False) -> float:
    """Bytes of a weight of some bits with a scale, and maybe a zero point of as many bits, for each group."""
    zeros = bits / 8 if has_zeros else 0.0
    return bits / 8 + ((scale_bytes + zeros) / group if group > 0 else 0.0)


def integer_bytes(section: JSON, method: str) -> float:
    """AWQ, GPTQ and AutoRound: bits and a group size; AWQ and asymmetric GPTQ keep zero points."""
    bits = integer(section, "bits") or integer(section, "w_bit") or 4
    group = integer(section, "group_size") or integer(section, "q_group_size") or USUAL_GROUP
    has_zeros = section.get("zero_point") is not False if "awq" in method else section.get("sym") is False
    return grouped_bytes(bits, group, has_zeros=has_zeros)


def compressed_bytes(entry: JSON, layout: str) -> float | None:
    """One group of a compressed-tensors checkpoint; None where it states no weights."""
    weights = entry.get("weights")
    if not isinstance(weights, Mapping):
        return None
    layout = str(entry.get("format") or layout)
    bits, group = integer(weights, "num_bits") or 8, integer(weights, "group_size")
    if weights.get("type") == "float" and bits == 4:
        return MXFP4_BYTES if "mxfp4" in layout else NVFP4_BYTES
    if "mxfp8" in layout:
        return MXFP8_BYTES
    if isinstance(weights.get("block_structure"), list):
        return FP8_BLOCK_BYTES
    return grouped_bytes(bits, group, has_zeros=weights.get("symmetric") is False)


def quark_bytes(entry: object) -> float | None:
    """One configuration of a Quark checkpoint: the type and the group of its weights; None where it keeps them."""
    weights = entry.get("weight") if isinstance(entry, Mapping) else None
    if isinstance(weights, list) and weights:
        weights = weights[0]
    if not isinstance(weights, Mapping):
        return None
    name, group = str(weights.get("dtype")), integer(weights, "group_size")
    bits = re.search(r"(\d+)", name)
    size = int(bits.group(1)) if bits else 8
    if name.startswith("fp4") or weights.get("scale_format") == "e8m0":
        return grouped_bytes(size, group or 32, scale_bytes=1)
    return grouped_bytes(size, group)


def torchao_bytes(entry: object) -> float | None:
    """One torchao configuration, by the name of its class; None where it is not known."""
    name = str(entry.get("_type")) if isinstance(entry, Mapping) else ""
    data = entry.get("_data") if isinstance(entry, Mapping) else None
    group = integer(data, "group_size") if isinstance(data, Mapping) else 0
    if "NVFP4" in name:
        return NVFP4_BYTES
    if "Int4" in name or "Int4Weight" in name:
        return grouped_bytes(4, group or USUAL_GROUP, scale_bytes=4)
    return FP8_BYTES if "Float8" in name or "Int8" in name else None
