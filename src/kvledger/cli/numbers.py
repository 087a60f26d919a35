"""Numbers as options take them: one way to write them in every command (kvledger.plan.counts), errors as typer's."""

from collections.abc import Callable
from typing import TypeVar

from typer import BadParameter

from kvledger.errors import ConfigError

Value = TypeVar("Value")


def _parsed(parse: Callable[[str, str], Value], text: str) -> Value:
    try:
        # typer passes defaults through here too, as the numbers that they are.
        return parse("", str(text))
    except ConfigError as error:
        # typer names the option itself.
        raise BadParameter(str(error).removeprefix("=")) from None


def parse_whole(text: str) -> int:
    """A count, such as 32768 or 32k."""
    from kvledger.plan.counts import parse_count as parse

    return _parsed(parse, text)


def parse_bytes(text: str) -> int:
    """A number of bytes, such as 40GiB."""
    from kvledger.plan.counts import parse_bytes as parse

    return _parsed(parse, text)


def parse_length(text: str) -> int:
    """A length, or auto."""
    from kvledger.plan.counts import parse_length as parse

    return _parsed(parse, text)


def parse_number(text: str) -> float:
    """A number with or without decimals."""
    from kvledger.plan.counts import parse_number as parse

    return _parsed(parse, text)
