"""python -m benchmarks.peers: this ledger against its peers, on this machine, in one run.

Data goes to stdout, messages to stderr. Exit codes: 0 done, 1 a contestant failed, 2 the command line is wrong.
"""

import sys
from dataclasses import dataclass
from typing import Annotated

import typer
from typer import Option

from benchmarks.peers.case import QUESTIONS
from benchmarks.peers.peers import find_interpreters, machine
from benchmarks.peers.process import ContestantError
from benchmarks.peers.report import as_json, markdown
from benchmarks.peers.run import BenchRun
from kvledger.cli.app import OptionsCommand, in_option_words
from kvledger.errors import ConfigError, wrong_value
from kvledger.plan.versions import NEWEST_VERSION, version_rules

PROGRAM = "python -m benchmarks.peers"
HELP = """This ledger against its peers on this machine: vLLM, SGLang, Dynamo.

Each contestant runs in an interpreter of its own, on the same workloads, in turns; times are CPU times of the thread,
medians. Peers are found where scripts/make_reference.sh and scripts/make_peers.sh put them; without any, ours is
measured alone."""


@dataclass(frozen=True)
class BenchOptions:
    """The fields carry the names of what they set, so that an error about a field names its option."""

    question: Annotated[
        list[str] | None, Option(help="What to measure, by name; repeat it for more. All if not given.")
    ] = None
    peer: Annotated[
        list[str] | None, Option(help="vllm, sglang or dynamo; repeat it. All that are found if not given.")
    ] = None
    peer_python: Annotated[list[str] | None, Option(help="Interpreter of a peer, NAME=PATH; repeat it.")] = None
    trace: Annotated[
        str | None,
        Option(metavar="FILE", help="A Mooncake trace, unpacked, for whole replays in place of the sample."),
    ] = None
    vllm_version: Annotated[
        str, Option(metavar="TEXT", help="The release of vLLM whose decisions ours makes, 0.33 or 0.32.")
    ] = NEWEST_VERSION
    quick: Annotated[bool, Option("--quick", help="Few repeats, nothing large: shows that it runs.")] = False
    json: Annotated[bool, Option("--json", help="Print an array of rows as JSON.")] = False
    markdown: Annotated[bool, Option("--markdown", help="Print a Markdown table (the default).")] = False
    list_questions: Annotated[bool, Option("--list", help="Print the questions and measure nothing.")] = False


def entry_point() -> None:
    sys.exit(main(sys.argv[1:]))


def main(argv: list[str]) -> int:
    """Runs one command line and returns its exit code."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command("peers", help=HELP)(OptionsCommand("peers", BenchOptions, run))
    try:
        app(args=argv, prog_name=PROGRAM)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0
    return 0


def run(options: BenchOptions) -> None:
    if options.list_questions:
        for each in QUESTIONS.values():
            print(f"{each.name:16}{each.asks}")
        return
    try:
        bench = _make_run(options)
    except ConfigError as error:
        raise typer.BadParameter(in_option_words(str(error))) from error
    try:
        rows = list(bench.run())
    except ContestantError as failed:
        print(f"{PROGRAM}: {failed}", file=sys.stderr)
        raise typer.Exit(1) from failed
    print((as_json if options.json else markdown)(machine(bench.decides_as), rows))
    for failure in bench.failures:
        print(f"{PROGRAM}: {failure}", file=sys.stderr)
    if bench.failures:
        raise typer.Exit(1)


def _make_run(options: BenchOptions) -> BenchRun:
    """ConfigError for options that are wrong."""
    if options.json and options.markdown:
        raise wrong_value("json", True, "--markdown is given too", "give one of the two")
    for name in options.question or ():
        if name not in QUESTIONS:
            raise wrong_value("question", name, "no such question", "use one of " + ", ".join(QUESTIONS))
    release = version_rules(options.vllm_version).name
    interpreters = find_interpreters(_named_paths(options.peer_python or []), tuple(options.peer or ()))
    if not interpreters:
        print("no peer found, measuring ours alone; scripts/make_peers.sh installs them", file=sys.stderr)
    questions = options.question or QUESTIONS
    return BenchRun(questions, interpreters, release, is_quick=options.quick, trace=options.trace)


def _named_paths(pairs: list[str]) -> dict[str, str]:
    """NAME=PATH pairs."""
    named: dict[str, str] = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not equals or not path:
            raise wrong_value(
                "peer_python", pair, "not a name and a path", "give NAME=PATH, as vllm=/opt/vllm/bin/python"
            )
        named[name] = path
    return named
