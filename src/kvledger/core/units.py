"""Arithmetic that several layers share, and the sizes of KV cache element types."""

from operator import index
from typing import Final, SupportsIndex

from mypy_extensions import i64

from kvledger.errors import RequestError, wrong_value

# Counts of tokens and ids of blocks stand in int32 arrays: what is beyond cannot be meant.
MAX_COUNT: Final = 2**31 - 1
IS_COMPILED: Final = not __file__.endswith(".py")

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


def blocks_for(num_tokens: i64, block_size: i64) -> i64:
    """cdiv in native integers, for what every step counts. num_tokens >= 0."""
    return (num_tokens + block_size - 1) // block_size


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


# Types whose keys and values have their scales behind them in the page: elements in a byte, bytes of a head's scale.
SCALED_TYPES: Final[dict[str, tuple[int, int]]] = {
    "int8_per_token_head": (1, 4),
    "fp8_per_token_head": (1, 4),
    "int4_per_token_head": (2, 4),
}
# Two elements in a byte, and a scale of one byte for each 16.
NVFP4: Final = "nvfp4"
NVFP4_GROUP: Final = 16


def vector_bytes(dtype: str, size: int) -> int:
    """Bytes of one head's key or value of a token: `size` elements, with their scales where the type packs them."""
    if dtype == NVFP4:
        return size // 2 + size // NVFP4_GROUP
    scaled = SCALED_TYPES.get(dtype)
    if scaled is None:
        return size * dtype_bytes(dtype)
    return size // scaled[0] + scaled[1]


def require_positive(field: str, value: int, most: int | None = None) -> None:
    """ConfigError unless value is an integer from 1 on, up to `most`."""
    _require_integer(field, value)
    if value < 1:
        raise wrong_value(field, value, "must be at least 1", "give a positive number")
    if most is not None and value > most:
        raise wrong_value(field, value, f"must be at most {most}", "give a smaller number")


def require_not_negative(field: str, value: int, most: int | None = None) -> None:
    """ConfigError unless value is an integer from 0 on, up to `most`."""
    _require_integer(field, value)
    if value < 0:
        raise wrong_value(field, value, "must not be negative", "give 0 or more")
    if most is not None and value > most:
        raise wrong_value(field, value, f"must be at most {most}", "give a smaller number")


def whole_number(field: str, value: SupportsIndex, least: int = 0, most: int = MAX_COUNT) -> int:
    """The value as an int. RequestError unless it is an integer, be it numpy's, from `least` to `most`.

    For the doors that callers pass numbers through: whatever is behind them counts in 64 bits.
    """
    if isinstance(value, int):
        number = value
    else:
        try:
            number = index(value)
        except TypeError:
            raise RequestError(f"{field}={value!r}: not an integer; give one from {least} to {most}")
    if not least <= number <= most:
        raise RequestError(f"{field}={number}: out of range; give an integer from {least} to {most}")
    return number


def require_ints(field: str, values: object) -> None:
    """TypeError unless it is a list of ints: what a compiled function says of another argument."""
    if not isinstance(values, list):
        raise TypeError(f"{field}: list object expected; got {type(values).__name__}")
    for position, value in enumerate(values):
        if not isinstance(value, int):
            raise TypeError(f"{field}[{position}]={value!r}: int object expected; got {type(value).__name__}")


def _require_integer(field: str, value: object) -> None:
    """Compiled, the field's type has refused everything else already, with a TypeError."""
    if not isinstance(value, int):
        raise wrong_value(field, value, "not an integer", "give a whole number")
