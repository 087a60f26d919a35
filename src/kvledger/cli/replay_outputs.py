"""The files that `kvledger replay` writes besides events: single requests, a trace of steps, the report as a page."""

from contextlib import ExitStack, closing
from types import TracebackType
from typing import TYPE_CHECKING, Final

from kvledger.cli.outputs import require_free
from kvledger.cli.replay_options import ReplayOptions
from kvledger.errors import wrong_value

if TYPE_CHECKING:
    from kvledger.replay.html_report import LatencyCurves
    from kvledger.replay.records import ReplayListener
    from kvledger.replay.result import ReplayResult


class ReplayOutputs:
    """Opened before the replay and closed behind it; nothing is opened unless every file can be written."""

    def __init__(self, options: ReplayOptions) -> None:
        """ConfigError for a file that is there already, and for a name that says another kind."""
        for name in ("requests", "perfetto", "report"):
            path = getattr(options, name)
            if path is not None:
                require_free(name, path, overwrite=options.overwrite)
        if options.report is not None and not options.report.endswith((".html", ".htm")):
            raise wrong_value("report", options.report, "not a page", "end it in .html")
        self._options: Final = options
        self._open: Final = ExitStack()
        self._latencies: LatencyCurves | None = None
        self.listeners: list[ReplayListener] = []

    def __enter__(self) -> "ReplayOutputs":
        options = self._options
        with ExitStack() as opened:
            if options.requests is not None:
                from kvledger.replay.request_log import RequestLog

                self.listeners.append(opened.enter_context(closing(RequestLog(options.requests))))
            if options.perfetto is not None:
                from kvledger.replay.perfetto import PerfettoLog

                self.listeners.append(opened.enter_context(closing(PerfettoLog(options.perfetto))))
            if options.report is not None:
                from kvledger.replay.html_report import LatencyCurves

                self._latencies = LatencyCurves()
                self.listeners.append(self._latencies)
            self._open.push(opened.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def write_report(self, result: "ReplayResult") -> None:
        """What --report asks for."""
        if self._latencies is None or self._options.report is None:
            return
        from kvledger.replay.html_report import html_report

        with open(self._options.report, "w", encoding="utf-8") as file:
            file.write(html_report(result, self._latencies))
