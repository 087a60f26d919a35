"""Options that say which trace is read and how, the same in every command that reads one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from typer import Argument, Option

from kvledger.cli.numbers import parse_whole

if TYPE_CHECKING:
    from kvledger.traces.reader import TraceReader

TRACE: Final = "The trace"


def whole(panel: str, help_text: str) -> Any:
    """An option that is a count."""
    return Option(parser=parse_whole, metavar="N", help=help_text, rich_help_panel=panel)


@dataclass(frozen=True)
class TraceSource:
    """The fields carry the names of what they set, so that an error about a field names its option."""

    trace: Annotated[
        str | None,
        Argument(metavar="TRACE", help="Trace file, also packed, or a directory of recordings; - for standard input."),
    ] = None
    format: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Format of the trace (docs/traces.md). Default: recognised from its first record.",
            rich_help_panel=TRACE,
        ),
    ] = None
    trace_block_size: Annotated[
        int | None, whole(TRACE, "Tokens that one hash id stands for. Default: the format's; 512 for mooncake.")
    ] = None
    fields: Annotated[
        str | None,
        Option(
            metavar="MAP",
            help="Rows of any other kind: timestamp=ts:ms,input_length=n_in,output_length=n_out,...",
            rich_help_panel=TRACE,
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Option(metavar="FILE", help="A tokenizer.json, for traces that are texts.", rich_help_panel=TRACE),
    ] = None
    skip_bad: Annotated[bool, Option("--skip-bad", help="Count broken lines and go on.", rich_help_panel=TRACE)] = False

    @property
    def trace_name(self) -> str:
        return self.trace or "bundled sample"

    def open_trace(self) -> "TraceReader":
        """The reader. ConfigError for options that do not fit it, TraceError for a file that cannot be read."""
        from kvledger.traces.formats import open_trace, sample_path

        return open_trace(
            self.trace or sample_path(),
            self.format,
            self.trace_block_size,
            self.skip_bad,
            fields=self.fields,
            tokenizer=self.tokenizer,
        )
