"""Page: what a server shows at /metrics, read once. Needs the extra `metrics` (prometheus-client)."""

import math
from collections.abc import Mapping
from http.client import HTTPException
from typing import Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from kvledger.errors import KVLedgerError, wrong_value

# A page of a large server with many models has a megabyte.
MAX_PAGE_BYTES: Final = 64 << 20


class ScrapeError(KVLedgerError):
    """A page cannot be had, or is none of metrics."""


class Page:
    """Samples by name; their labels as they are."""

    def __init__(self, text: str) -> None:
        self._samples: Final[dict[str, list[tuple[Mapping[str, str], float]]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if math.isfinite(sample.value):
                        self._samples.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
        except (ValueError, KeyError, IndexError) as broken:
            raise ScrapeError(f"no page of Prometheus metrics ({broken})") from None

    def has(self, name: str) -> bool:
        return name in self._samples

    def names(self) -> list[str]:
        return list(self._samples)

    def total(self, name: str) -> float | None:
        """Of all engines and models; None where the page has no such series."""
        found = self._samples.get(name)
        return None if found is None else sum(value for _, value in found)

    def by(self, name: str, label: str) -> dict[str, float] | None:
        """The same for each value of that label."""
        found = self._samples.get(name)
        if found is None:
            return None
        totals: dict[str, float] = {}
        for labels, value in found:
            key = labels.get(label, "")
            totals[key] = totals.get(key, 0.0) + value
        return totals

    def labels(self, name: str) -> list[Mapping[str, str]]:
        """Those of each sample."""
        return [labels for labels, _ in self._samples.get(name, [])]


def page_address(field: str, text: str) -> str:
    """127.0.0.1:8000 or http://127.0.0.1:8000 as the address of its /metrics. ConfigError for what is none."""
    address = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(address)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port or 80) > 0:
            return address if parts.path not in ("", "/") else f"{parts.scheme}://{parts.netloc}/metrics"
    except ValueError:
        pass
    raise wrong_value(field, text, "no address of a server", "give HOST:PORT, such as 127.0.0.1:8000")


def read_page(address: str, timeout: float = 5.0) -> Page:
    """ScrapeError, naming the address, when there is no page of metrics within that many seconds."""
    try:
        with urlopen(address, timeout=timeout) as answer:
            text = answer.read(MAX_PAGE_BYTES).decode("utf-8", "replace")
    except HTTPError as error:
        raise ScrapeError(f"{address}: answers {error.code} {error.reason}") from None
    except URLError as error:
        raise ScrapeError(f"{address}: no answer ({getattr(error.reason, 'strerror', None) or error.reason})") from None
    except (OSError, HTTPException, ValueError) as error:
        raise ScrapeError(f"{address}: no answer ({error})") from None
    try:
        return Page(text)
    except ScrapeError as error:
        raise ScrapeError(f"{address}: {error}") from None
