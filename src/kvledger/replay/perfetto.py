"""PerfettoLog: steps, requests and the pool over simulated time, for ui.perfetto.dev or chrome://tracing.

The file is in the trace event format: JSON with one event a line. Steps are slices of the process "engine"; requests
are slices of the process "requests", each in a lane that is free for all of its time, with its phases inside.
"""

import gzip
import json
from bisect import bisect_right, insort
from typing import Any, Final, TextIO

from kvledger.errors import wrong_value
from kvledger.replay.records import ReplayListener, RequestRecord, StepRecord

_ENGINE: Final = 1
_REQUESTS: Final = 2


class PerfettoLog(ReplayListener):
    """Close it."""

    hears_steps = True

    def __init__(self, path: str) -> None:
        """ConfigError for a name that ends in neither .json nor .json.gz, and for a file that cannot be written."""
        if not path.endswith((".json", ".json.gz")):
            raise wrong_value("perfetto", path, "not a known kind of file", "end it in .json or .json.gz")
        try:
            self._file: Final = _create(path)
        except OSError as failed:
            raise wrong_value("perfetto", path, f"cannot be written ({failed.strerror})", "name another file") from None
        # (end of the last request in it, lane), by end.
        self._lanes: Final[list[tuple[float, int]]] = []
        self._counted: Final[dict[str, dict[str, int]]] = {}
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[')
        self._separator: str = "\n"
        for process, name in ((_ENGINE, "engine"), (_REQUESTS, "requests")):
            self._event({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
            self._event({"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}})
        self._event({"ph": "M", "pid": _ENGINE, "tid": 1, "name": "thread_name", "args": {"name": "steps"}})

    def stepped(self, record: StepRecord) -> None:
        num_decode = record.num_tokens - record.num_prefill_tokens
        kind = "prefill" if num_decode == 0 else "decode" if record.num_prefill_tokens == 0 else "mixed"
        args = {
            "step": record.number,
            "requests": record.num_requests,
            "prefill tokens": record.num_prefill_tokens,
            "decode tokens": num_decode,
            "preempted": record.num_preempted,
        }
        self._slice(_ENGINE, 1, record.start, record.start + record.seconds, kind, args)
        self._count(record.start, "requests", {"running": record.num_running, "waiting": record.num_waiting})
        self._count(
            record.start + record.seconds,
            "blocks",
            {"live": record.num_live_blocks, "cached": record.num_cached_blocks},
        )

    def ended(self, record: RequestRecord) -> None:
        lane = self._lane(record.arrival, record.end)
        args: dict[str, object] = {
            "prompt tokens": record.num_prompt_tokens,
            "hit tokens": record.num_hit_tokens,
            "output tokens": record.num_output_tokens,
            "preemptions": len(record.away),
            "outcome": record.outcome,
        }
        if record.session:
            args["session"] = record.session
        self._slice(_REQUESTS, lane, record.arrival, record.end, f"request {record.number}", args)
        for start, end, phase in phases(record):
            self._slice(_REQUESTS, lane, start, end, phase, {})

    def close(self) -> None:
        if not self._file.closed:
            self._file.write("\n]}\n")
            self._file.close()

    def _lane(self, start: float, end: float) -> int:
        """The lane that became free last before the start. Requests come in the order of their ends, so what is in a
        lane ended before the last one in it."""
        place = bisect_right(self._lanes, (start, 1 << 60)) - 1
        lane = self._lanes.pop(place)[1] if place >= 0 else len(self._lanes) + 1
        insort(self._lanes, (end, lane))
        return lane

    def _slice(self, process: int, lane: int, start: float, end: float, name: str, args: dict[str, Any]) -> None:
        event: dict[str, Any] = {"ph": "X", "pid": process, "tid": lane, "ts": _micros(start)}
        # The end is rounded, not the length, so that what ends together does.
        event["dur"] = round(_micros(end) - event["ts"], 3)
        event["name"] = name
        if args:
            event["args"] = args
        self._event(event)

    def _count(self, time: float, name: str, values: dict[str, int]) -> None:
        if self._counted.get(name) != values:
            self._counted[name] = values
            self._event({"ph": "C", "pid": _ENGINE, "ts": _micros(time), "name": name, "args": values})

    def _event(self, event: dict[str, Any]) -> None:
        self._file.write(self._separator + json.dumps(event, separators=(",", ":")))
        self._separator = ",\n"


def phases(record: RequestRecord) -> list[tuple[float, float, str]]:
    """(start, end, phase) of all that a request went through: waiting, prefill, decode, preempted."""
    if record.admitted is None:
        return [(record.arrival, record.end, "waiting")] if record.end > record.arrival else []
    found: list[tuple[float, float, str]] = []
    if record.admitted > record.arrival:
        found.append((record.arrival, record.admitted, "waiting"))
    start = record.admitted
    for left, back in [*record.away, (record.end, record.end)]:
        first = record.first_token
        if first is None or first >= left:
            found.append((start, left, "prefill"))
        elif first <= start:
            found.append((start, left, "decode"))
        else:
            found += [(start, first, "prefill"), (first, left, "decode")]
        if back > left:
            found.append((left, back, "preempted"))
        start = back
    return [phase for phase in found if phase[1] > phase[0]]


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _create(path: str) -> TextIO:
    if path.endswith(".gz"):
        return gzip.open(path, "wt", encoding="ascii")
    return open(path, "w", encoding="ascii")
