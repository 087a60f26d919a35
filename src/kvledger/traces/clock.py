"""Stamps of a clock on the wall, as seconds since the epoch."""

import re
from datetime import UTC, datetime
from typing import Final

# More decimals than datetime takes, which some traces have.
_ISO: Final = re.compile(r"(\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}:\d{2})(?:\.(\d{1,9}))?\s*(Z|[+-]\d{2}:?\d{2})?", re.ASCII)


def iso_seconds(text: str) -> float | None:
    """Seconds of 2023-11-16 18:17:03.9799600 or 2024-05-10T00:00:00.009930+00:00; without a zone it is UTC. None for
    what is no such time."""
    match = _ISO.fullmatch(text.strip())
    if match is None:
        return None
    whole, fraction, zone = match.groups()
    try:
        moment = datetime.fromisoformat(whole + ("+00:00" if zone in (None, "Z") else zone))
    except ValueError:
        return None
    return (moment - _EPOCH).total_seconds() + (float(f"0.{fraction}") if fraction else 0.0)


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
