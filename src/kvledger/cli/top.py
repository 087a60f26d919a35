"""`kvledger top`: a running server at a glance, from its metrics and, where it publishes them, its KV events."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import typer
from typer import Argument, Option

from kvledger.cli.app import GroupedCommand, OptionsCommand, in_option_words
from kvledger.cli.numbers import parse_number
from kvledger.errors import ConfigError, wrong_value

if TYPE_CHECKING:
    from kvledger.events import EventSubscriber
    from kvledger.events.prefix_trees import PrefixTrees
    from kvledger.metrics.scrape import Page

# Where the ledger inside a server on this machine says why, unless told otherwise (integrations/vllm/why.py).
WHY_PORT: Final = 9478
_NUM_PREFIXES: Final = 8


@dataclass(frozen=True)
class TopOptions:
    address: Annotated[str, Argument(metavar="HOST:PORT", help="The server, as its clients know it.")]
    why: Annotated[
        str | None,
        Option(
            metavar="HOST:PORT",
            help=f"Where the ledger inside it says why (KVLEDGER_WHY). On this machine port {WHY_PORT} is tried.",
        ),
    ] = None
    events: Annotated[
        str | None, Option(metavar="SOCKET", help="Where it publishes KV events, such as tcp://127.0.0.1:5557.")
    ] = None
    events_replay: Annotated[
        str | None, Option(metavar="SOCKET", help="Where it answers with the events that it published before.")
    ] = None
    interval: Annotated[float, Option(parser=parse_number, metavar="SECONDS", help="Between two looks.")] = 2.0
    once: Annotated[bool, Option("--once", help="Two looks, an interval apart, and the end.")] = False
    json: Annotated[bool, Option("--json", help="A JSON object a look, one a line.")] = False

    def validate(self) -> None:
        """ConfigError for an interval that is none."""
        if self.events_replay is not None and self.events is None:
            raise wrong_value("events_replay", self.events_replay, "there are no events to begin with", "give --events")
        if not 0.05 <= self.interval <= 3600.0:
            raise wrong_value("interval", self.interval, "no time between two looks", "give 0.05 to 3600 seconds")


def register(app: typer.Typer) -> None:
    """Adds the subcommand."""
    app.command(
        "top",
        cls=GroupedCommand,
        help="Watch a running server: its pool, hit rate, who waits and why, and its largest cached prefixes.\n\n"
        "Any vLLM will do; with KVLEDGER_WHY it says more. docs/top.md explains each line.",
    )(OptionsCommand("top", TopOptions, run))


def run(options: TopOptions) -> None:
    """Looks until it is interrupted. ScrapeError when the server does not answer at the first look."""
    if find_spec("prometheus_client") is None:
        print("kvledger: top needs a package: pip install 'kvledger[metrics]'", file=sys.stderr)
        raise typer.Exit(1)
    try:
        options.validate()
        with ExitStack() as stack:
            watch = _Watch(options, stack)
            show = stack.enter_context(_lines() if options.json or options.once else _screen())
            _watch(options, watch, show)
    except ConfigError as error:
        raise typer.BadParameter(in_option_words(str(error))) from error


def _watch(options: TopOptions, watch: "_Watch", show: "_Show") -> None:
    # The first look is since the server's start, and has no rates.
    seen = watch.look()
    if not options.once:
        show(options, seen)
    while True:
        try:
            watch.wait(options.interval)
        except KeyboardInterrupt:
            return
        seen = watch.look()
        show(options, seen)
        if options.once:
            return


class _Watch:
    """The server's pages, and its events as far as they have come."""

    def __init__(self, options: TopOptions, stack: ExitStack) -> None:
        from kvledger.metrics.scrape import page_address, read_page
        from kvledger.metrics.server_view import ServerView

        address = page_address("address", options.address)
        self._why: Final = _why_address(options, address)
        self._is_told: Final = options.why is not None
        self._view: Final[ServerView] = ServerView(lambda: read_page(address), self._read_why)
        self._told: Final = None if options.events is None else _listen(options.events, options.events_replay, stack)

    def look(self) -> dict[str, Any]:
        """What is known now, as --json prints it."""
        import msgspec

        seen: dict[str, Any] = msgspec.to_builtins(self._view.look())
        seen["cached_blocks"] = seen["prefixes"] = None
        if self._told is not None:
            seen["cached_blocks"] = self._told[1].num_blocks
            seen["prefixes"] = msgspec.to_builtins(self._told[1].largest(_NUM_PREFIXES))
        seen["time"] = time.time()
        return seen

    def wait(self, seconds: float) -> None:
        """Until the next look, taking in events as they come."""
        if self._told is None:
            time.sleep(seconds)
            return
        events, trees = self._told
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for batch in events.receive(min(left, 1.0)):
                trees.apply(batch.events, batch.ts)

    def _read_why(self) -> "Page | None":
        from kvledger.metrics.scrape import ScrapeError, read_page

        if self._why is None:
            return None
        try:
            return read_page(self._why, timeout=1.0)
        except ScrapeError:
            if self._is_told:
                raise
            return None


def _listen(endpoint: str, replay: str | None, stack: ExitStack) -> "tuple[EventSubscriber, PrefixTrees]":
    from kvledger.events import EventSubscriber
    from kvledger.events.prefix_trees import PrefixTrees

    events, trees = stack.enter_context(EventSubscriber(endpoint, replay_endpoint=replay)), PrefixTrees()
    if replay is not None:
        for batch in events.catch_up():
            trees.apply(batch.events, batch.ts)
    return events, trees


def _why_address(options: TopOptions, address: str) -> str | None:
    from kvledger.metrics.scrape import page_address

    if options.why is not None:
        return page_address("why", options.why)
    host = urlsplit(address).hostname
    return f"http://127.0.0.1:{WHY_PORT}/metrics" if host in ("127.0.0.1", "localhost", "::1") else None


_Show = Callable[[TopOptions, dict[str, Any]], None]


@contextmanager
def _lines() -> Iterator[_Show]:
    import msgspec

    from kvledger.cli.top_screen import screen

    def show(options: TopOptions, seen: dict[str, Any]) -> None:
        if options.json:
            print(msgspec.json.encode(seen).decode(), flush=True)
        else:
            from rich.console import Console

            Console(highlight=False).print(screen(options.address, seen))

    yield show


@contextmanager
def _screen() -> Iterator[_Show]:
    from rich.live import Live

    from kvledger.cli.top_screen import screen

    with Live(auto_refresh=False, screen=sys.stdout.isatty()) as live:
        yield lambda options, seen: live.update(screen(options.address, seen), refresh=True)
