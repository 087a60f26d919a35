"""OptionsCommand: a subcommand whose options are the fields of a frozen dataclass."""

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, Generic, TypeVar, get_type_hints

Options = TypeVar("Options")


class OptionsCommand(Generic[Options]):
    """The command as typer wants it: a callable whose signature lists the options, those without default required."""

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


def in_option_words(message: str) -> str:
    """A ConfigError with its field as the option that set it."""
    return re.sub(r"^(\w+)=", lambda match: f"--{match.group(1).replace('_', '-')} ", message)
