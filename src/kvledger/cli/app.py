"""The typer application around the subcommands: options as classes, grouped help, --version, exit codes, errors as one
line on stderr.
"""

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from types import ModuleType
from typing import Any, Generic, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from kvledger import build_info
from kvledger.errors import KVLedgerError

Options = TypeVar("Options")
ARGUMENTS, OTHER_OPTIONS = "Arguments", "Other options"


class OptionsCommand(Generic[Options]):
    """A subcommand whose options are the fields of a frozen dataclass.

    As typer wants it: a callable whose signature lists the options, those without default required.
    """

    def __init__(self, name: str, options_class: type[Options], run: Callable[[Options], None]) -> None:
        hints = get_type_hints(options_class, include_extras=True)
        # typer asks every callback for its name.
        self.__name__ = name
        self.__annotations__ = hints
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    option.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if option.default is MISSING else option.default,
                    annotation=hints[option.name],
                )
                for option in fields(options_class)  # type: ignore[arg-type]
            ]
        )
        self._options_class = options_class
        self._run = run

    def __call__(self, **values: Any) -> None:
        import msgspec

        self._run(msgspec.convert(values, self._options_class))


class GroupedCommand(TyperCommand):
    """Its --help lists the options under the panels that they name, in the order in which the panels come up."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {ARGUMENTS: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                named = ARGUMENTS if parameter.param_type_name == "argument" else OTHER_OPTIONS
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or named, []).append(record)
        rest = panels.pop(OTHER_OPTIONS, [])
        for panel, records in (*panels.items(), (OTHER_OPTIONS, rest)):
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)


def in_option_words(message: str) -> str:
    """A ConfigError with its field as the option that set it."""
    return re.sub(r"^(\w+)=", lambda match: f"--{match.group(1).replace('_', '-')} ", message)


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
