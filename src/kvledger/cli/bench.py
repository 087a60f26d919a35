"""`kvledger bench`: this ledger against its peers, on this machine, in one run."""

import sys
from typing import Annotated

import typer

from kvledger.errors import ConfigError, wrong_value

HELP = """This ledger against its peers on this machine: vLLM, SGLang, Dynamo.

Each contestant runs in an interpreter of its own, on the same workloads, in turns; times are CPU times of the thread,
medians. Peers are found where scripts/make_reference.sh and scripts/make_peers.sh put them; without any, ours is
measured alone."""


def register(app: typer.Typer) -> None:
    app.command("bench", help=HELP)(bench)


def bench(
    question: Annotated[
        list[str] | None, typer.Option(help="What to measure, by name; repeat it for more. All if not given.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="vllm, sglang or dynamo; repeat it. All that are found if not given.")
    ] = None,
    peer_python: Annotated[list[str] | None, typer.Option(help="Interpreter of a peer, NAME=PATH; repeat it.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few repeats, nothing large: shows that it runs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print an array of rows as JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table (the default).")] = False,
    list_questions: Annotated[bool, typer.Option("--list", help="Print the questions and measure nothing.")] = False,
) -> None:
    from kvledger.bench.case import QUESTIONS
    from kvledger.bench.peers import find_interpreters, machine
    from kvledger.bench.process import ContestantError
    from kvledger.bench.report import as_json as json_report
    from kvledger.bench.report import markdown
    from kvledger.bench.run import BenchRun

    if list_questions:
        for each in QUESTIONS.values():
            print(f"{each.name:16}{each.asks}")
        return
    if as_json and as_markdown:
        raise typer.BadParameter("--json and --markdown: give one")
    for name in question or ():
        if name not in QUESTIONS:
            raise typer.BadParameter(f"--question {name!r}: use one of {', '.join(QUESTIONS)}")
    try:
        interpreters = find_interpreters(_named_paths(peer_python or []), tuple(peer or ()))
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    if not interpreters:
        print("no peer found, measuring ours alone; scripts/make_peers.sh installs them", file=sys.stderr)
    run = BenchRun(question or QUESTIONS, interpreters, quick)
    try:
        rows = list(run.run())
    except ContestantError as failed:
        print(f"kvledger: {failed}", file=sys.stderr)
        raise typer.Exit(1) from failed
    print((json_report if as_json else markdown)(machine(), rows))
    for failure in run.failures:
        print(f"kvledger: {failure}", file=sys.stderr)
    if run.failures:
        raise typer.Exit(1)


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
