"""The typer application around the subcommands: --version, exit codes, errors as one line on stderr."""

import sys
from types import ModuleType

import typer

from kvledger import build_info
from kvledger.errors import KVLedgerError


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(build_info())
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and which build runs."
    ),
) -> None:
    """The KV cache ledger of a paged LLM engine: replay real traffic, plan memory, look inside."""


def run(argv: list[str], modules: list[ModuleType]) -> int:
    """Runs one command line against the subcommands of these modules; returns the exit code."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(_root)
    for module in modules:
        module.register(app)
    try:
        app(args=argv, prog_name="kvledger")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0
    except (KVLedgerError, OSError) as failed:
        print(f"kvledger: {failed}", file=sys.stderr)
        return 1
    return 0
