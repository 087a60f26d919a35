"""The report of a replay as one HTML file, which asks no network for anything."""

from importlib.resources import files
from typing import Final

import msgspec

from kvledger.metrics.samples import WeightedSamples
from kvledger.replay.records import ReplayListener, RequestRecord
from kvledger.replay.report import larger_pools, like_groups
from kvledger.replay.result import ReplayResult
from kvledger.replay.tally import REFUSAL_TEXTS
from kvledger.replay.why_missed import PART_WORDS

_PLACE: Final = "/*DATA*/"
_SHARES: Final = tuple(share / 100 for share in range(101))


class LatencyCurves(ReplayListener):
    """How latencies of requests are distributed, in percent of the requests."""

    def __init__(self) -> None:
        self._samples: Final = {name: WeightedSamples() for name in ("ttft", "itl", "e2e")}

    def ended(self, record: RequestRecord) -> None:
        for name, samples in self._samples.items():
            seconds = getattr(record, name)
            if seconds is not None:
                samples.add(seconds)

    def curves(self) -> dict[str, list[float]]:
        """Seconds at 0 %, 1 %, ... 100 %; without what nothing is known of."""
        return {
            name: [samples.percentile(share) for share in _SHARES]
            for name, samples in self._samples.items()
            if samples.total_weight > 0
        }


def html_report(result: ReplayResult, latencies: LatencyCurves) -> str:
    """The page."""
    page = (files("kvledger.replay") / "data" / "report.html").read_text("utf-8")
    why = result.why_missed
    data = {
        "result": result,
        "latencies": latencies.curves(),
        "words": {"missed": PART_WORDS, "refused": REFUSAL_TEXTS},
        "pools": [] if why is None or not why.more_blocks else larger_pools(why),
        "groups": [{"ids": ids, "count": len(run), "group": run[0]} for ids, run in like_groups(result.groups)],
    }
    # No end of a script may stand in a script.
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    return page.replace(_PLACE, text)
