"""The options of `kvledger trace`: one field an option, with its default, its help and what typer checks."""

from dataclasses import dataclass
from typing import Annotated, Final

from typer import Option

from kvledger.cli.numbers import parse_number
from kvledger.cli.trace_source import TraceSource, whole
from kvledger.errors import wrong_value

KEPT: Final = "What is kept of it"
OUTPUT: Final = "Output"

# Option -> (least, most).
_RANGES: Final = {
    "trace_block_size": (1, 1 << 20),
    "block_size": (1, 1 << 20),
    "limit": (1, 1 << 40),
    "sessions": (1, 1 << 40),
    "seed": (0, 1 << 62),
}


@dataclass(frozen=True)
class TraceOptions(TraceSource):
    """The fields carry the names of what they set, so that an error about a field names its option."""

    sample: Annotated[
        float,
        Option(
            parser=parse_number,
            metavar="SHARE",
            help="Draw this share of the sessions, each as a whole; requests without one for themselves.",
            rich_help_panel=KEPT,
        ),
    ] = 1.0
    seed: Annotated[int, whole(KEPT, "Seed of what is drawn.")] = 0
    sessions: Annotated[int | None, whole(KEPT, "The first SESSIONS sessions only.")] = None
    limit: Annotated[int | None, whole(KEPT, "The first LIMIT requests only.")] = None

    block_size: Annotated[int, whole(OUTPUT, "Tokens of a block of the cache whose hit rate is given.")] = 16
    to: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Write what is kept as a kvledger.trace file; packed if it ends in .gz; - for standard output.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    anonymize: Annotated[
        bool,
        Option(
            "--anonymize",
            help="With --to: number ids, scopes and sessions anew, and leave out where it is from.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    overwrite: Annotated[
        bool, Option("--overwrite", help="The file to write may be there already.", rich_help_panel=OUTPUT)
    ] = False
    json: Annotated[
        bool, Option("--json", help="One JSON object on stdout instead of tables and plots.", rich_help_panel=OUTPUT)
    ] = False

    def validate(self) -> None:
        """ConfigError for the first option whose value is out of its range."""
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise wrong_value(name, value, "out of range", f"give {least} to {most}")
        if not 0.0 < self.sample <= 1.0:
            raise wrong_value("sample", self.sample, "no share of a trace", "give a number above 0 and at most 1")
        if self.anonymize and self.to is None:
            raise wrong_value("anonymize", True, "nothing is written", "give --to as well")
        if self.to == "-" and self.json:
            raise wrong_value("json", True, "standard output is the trace's (--to -)", "leave it out")
