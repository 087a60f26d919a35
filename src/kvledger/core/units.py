"""Arithmetic that several layers share, and the sizes of KV cache element types."""

from typing import Final

from kvledger.errors import wrong_value

DTYPE_BYTES: Final[dict[str, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


def cdiv(value: int, divisor: int) -> int:
    """value / divisor, rounded up, for value >= 0."""
    return -(-value // divisor)


def round_down(value: int, step: int) -> int:
    """The largest multiple of step that is not above value."""
    return value // step * step


def round_up(value: int, step: int) -> int:
    """The smallest multiple of step that is not below value."""
    return cdiv(value, step) * step


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of that KV cache type."""
    size = DTYPE_BYTES.get(dtype)
    if size is None:
        raise wrong_value("dtype", dtype, "not a KV cache element type", "use one of " + ", ".join(DTYPE_BYTES))
    return size


def require_positive(field: str, value: int) -> None:
    """ConfigError unless value >= 1."""
    if value < 1:
        raise wrong_value(field, value, "must be at least 1", "give a positive number")


def require_not_negative(field: str, value: int) -> None:
    """ConfigError unless value >= 0."""
    if value < 0:
        raise wrong_value(field, value, "must not be negative", "give 0 or more")
