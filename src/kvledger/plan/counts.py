"""Counts and bytes as people write them on a command line, for every command alike.

    32768  1e6  1,000,000     as they stand
    32k  2m  40g  1t          thousands: 32,000                   (vLLM's)
    32K  2M  40G  1T          powers of two: 32,768               (vLLM's)
    40KiB MiB GiB TiB         powers of two, bytes only
    40KB  MB  GB  TB          thousands, bytes only: 40 GB is 40,000,000,000 bytes

A letter alone counts as vLLM counts it, which tells k from K; with a B behind it, small and capital letters are the
same. Everything is exact: no number goes through a float.
"""

import re
from fractions import Fraction
from typing import Final

from kvledger.errors import wrong_value

# A letter behind a number, as vLLM counts it.
SUFFIXES: Final = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
}
_BYTE_UNITS: Final = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40,
}  # fmt: skip
_NUMBER: Final = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?)\s*([A-Za-z]*)")
# No number of this world is longer, and converting long ones takes time.
_MAX_LENGTH: Final = 64
MAX_NUMBER: Final = 1 << 60

_COUNTS: Final = "give one like 32768, 32k (32,000) or 32K (32,768)"
_BYTES: Final = "give one like 40GiB, 40G (the same), 40GB (40,000,000,000) or 1000000"


def parse_count(option: str, text: str) -> int:
    """A whole number, with a suffix or without. ConfigError says what is allowed."""
    value = _parse(option, text, {}, "not a whole number", _COUNTS)
    if value.denominator != 1:
        raise wrong_value(option, text, "not a whole number", _COUNTS)
    return int(value)


def parse_bytes(option: str, text: str) -> int:
    """A number of bytes; of a part of a byte nothing is left. ConfigError says what is allowed."""
    return int(_parse(option, text, _BYTE_UNITS, "not a number of bytes", _BYTES))


def parse_length(option: str, text: str) -> int:
    """A length, or -1 for the longest that fits (auto or -1)."""
    return -1 if text.strip().lower() in ("auto", "-1") else parse_count(option, text)


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    return tuple(parse_count(option, part) for part in text.split(","))


def parse_number(option: str, text: str) -> float:
    """A number with or without decimals; no infinity, nothing that is no number."""
    try:
        value = float(text)
    except ValueError:
        raise wrong_value(option, text, "not a number", "give one like 0.9 or 8.03e9") from None
    if not abs(value) < float("inf"):
        raise wrong_value(option, text, "not a finite number", "give one like 0.9 or 8.03e9")
    return value


def _parse(option: str, text: str, units: dict[str, int], problem: str, fix: str) -> Fraction:
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= _MAX_LENGTH else None
    unit = match.group(2) if match else ""
    factor = SUFFIXES.get(unit, units.get(unit.lower()))
    if match is None or factor is None:
        problem = "less than nothing" if re.match(r"\s*-[0-9]", text) else problem
        raise wrong_value(option, text[:_MAX_LENGTH], problem, fix)
    value = Fraction(match.group(1).replace(",", "").replace("_", "")) * factor
    if value > MAX_NUMBER:
        raise wrong_value(option, text, f"more than {MAX_NUMBER:,}, the largest that counts", fix)
    return value
