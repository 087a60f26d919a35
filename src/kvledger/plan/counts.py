"""Numbers as people write them on a vLLM command line: 32k, 32K, 25.6k, 16GiB."""

import re

from kvledger.errors import wrong_value

# Lower case counts in thousands, upper case in powers of two, as vLLM has it.
SUFFIXES = {
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
NUMBER = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([kmgtKMGT]?)(?:i?B)?")


def parse_count(option: str, text: str) -> int:
    """A whole number, with a suffix or without. ConfigError says what is allowed."""
    found = NUMBER.fullmatch(text.strip())
    if found is None:
        raise wrong_value(option, text, "not a number", "give one like 32768, 32k (32,000) or 32K (32,768)")
    value = float(found.group(1).replace(",", "").replace("_", "")) * SUFFIXES[found.group(2)]
    if value != int(value):
        raise wrong_value(option, text, "not a whole number", "give one like 32768, 32k (32,000) or 32K (32,768)")
    return int(value)


def parse_length(option: str, text: str) -> int:
    """A length, or -1 for the longest that fits (auto or -1)."""
    return -1 if text.strip() in ("auto", "-1") else parse_count(option, text)


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    return tuple(parse_count(option, part) for part in text.split(","))
