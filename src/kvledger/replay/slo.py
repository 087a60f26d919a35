"""What latencies are promised, and how many requests kept them: goodput."""

import math
import re
from typing import Final

import msgspec

from kvledger.errors import wrong_value
from kvledger.replay.records import RequestRecord

# Of a second.
_UNITS: Final = {"s": 1.0, "ms": 1e3, "us": 1e6}
_FIX: Final = "give limits like ttft=500ms,itl=50ms,e2e=30s"
_LIMIT: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(s|ms|us)", re.ASCII)


class Slo(msgspec.Struct, frozen=True):
    """The most seconds to the first token, between tokens (the mean of a request), and from arrival to end. None: no
    limit."""

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    def missed(self, record: RequestRecord) -> list[str]:
        """The limits that a request did not keep."""
        broken: list[str] = []
        for name in self.__struct_fields__:
            limit, seconds = getattr(self, name), getattr(record, name)
            if limit is not None and seconds is not None and seconds > limit:
                broken.append(name)
        return broken


class Goodput(msgspec.Struct):
    """Requests that were served within all limits. `share`: of all requests, the refused among them. `missed`: requests
    that broke each limit."""

    limits: Slo
    num_good: int
    share: float
    requests_per_second: float
    missed: dict[str, int]


def parse_slo(text: str) -> Slo:
    """ConfigError for what is no list of limits."""
    limits: dict[str, float] = {}
    for pair in text.split(","):
        name, _, value = (part.strip() for part in pair.partition("="))
        match = _LIMIT.fullmatch(value)
        if name not in Slo.__struct_fields__:
            raise wrong_value("slo", text, f"{name!r} is none of ttft, itl, e2e", _FIX)
        if match is None or not 0.0 < float(match[1]) < math.inf:
            raise wrong_value("slo", text, f"{value!r} is no time with its unit (s, ms, us)", _FIX)
        if name in limits:
            raise wrong_value("slo", text, f"{name} is there twice", _FIX)
        limits[name] = float(match[1]) / _UNITS[match[2]]
    return Slo(**limits)
