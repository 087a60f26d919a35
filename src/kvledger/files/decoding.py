"""Decoding JSON: one kind of error, with the field that is wrong."""

import re
from typing import TypeVar

import msgspec

Decoded = TypeVar("Decoded")


def decode(decoder: "msgspec.json.Decoder[Decoded]", text: bytes) -> Decoded:
    """msgspec.DecodeError for whatever is wrong with the text; describe() makes words of it."""
    try:
        return decoder.decode(text)
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None


def describe(error: msgspec.DecodeError) -> tuple[str, str]:
    """A decoder's message as (field, problem), in the words of this tool."""
    message = str(error)
    path = re.search(r" - at `\$\.?(.*?)`$", message)
    field = path.group(1) if path else ""
    message = message[: path.start()] if path else message
    missing = re.fullmatch(r"Object missing required field `(.*)`", message)
    if missing:
        field = f"{field}.{missing.group(1)}" if field else missing.group(1)
        return field, "missing; expected a value"
    expected = re.fullmatch(r"Expected `(.*?)`( .*?)?(?:, got `(.*)`)?", message)
    if expected:
        got = f", got {expected.group(3)}" if expected.group(3) else ""
        return field, f"expected {expected.group(1)}{expected.group(2) or ''}{got}"
    return field, f"not a record: {message[:1].lower()}{message[1:]}"
