"""The options of `kvledger plan`: one field an option, with its default and its help."""

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from typer import Argument, Option

from kvledger.cli.engine_options import CARD, PlannedEngineOptions
from kvledger.cli.numbers import parse_whole
from kvledger.errors import wrong_value

OUTPUT: Final = "Output"


@dataclass(frozen=True)
class PlanOptions(PlannedEngineOptions):
    """What to plan, and what to print of it."""

    model: Annotated[str | None, Argument(metavar="MODEL", help="config.json, directory, hub id or bundled name.")] = (
        None
    )
    from_log: Annotated[
        str | None,
        Option(metavar="FILE", help="A vLLM start-up log to explain; - for standard input.", rich_help_panel=CARD),
    ] = None
    prompt: Annotated[
        int,
        Option(parser=parse_whole, metavar="N", help="Prompt tokens of a typical request.", rich_help_panel=OUTPUT),
    ] = 2000
    output: Annotated[
        int,
        Option(parser=parse_whole, metavar="N", help="Output tokens of a typical request.", rich_help_panel=OUTPUT),
    ] = 500
    sweep: Annotated[
        str | None,
        Option(metavar="KEY", help="A table over one option: gpu, max-model-len=8k,32k, ...", rich_help_panel=OUTPUT),
    ] = None
    need: Annotated[
        str | None,
        Option(
            metavar="USERS,CONTEXT",
            help="Which cards, and how many: users=200,context=32k. --gpu lists the cards to look at.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    prices: Annotated[
        str | None,
        Option(metavar="CARD=PRICE,...", help="With --need: ranks by price.", rich_help_panel=OUTPUT),
    ] = None
    layout: Annotated[
        Literal["vllm", "best"],
        Option(help="vllm, or best: the group size that wastes least.", rich_help_panel=OUTPUT),
    ] = "vllm"
    explain: Annotated[bool, Option("--explain", help="Every step with its numbers.", rich_help_panel=OUTPUT)] = False
    json: Annotated[bool, Option("--json", help="One JSON object.", rich_help_panel=OUTPUT)] = False
    strict: Annotated[
        bool,
        Option(
            "--strict", help="Exit code 3 when a pasted option matters and is not modelled.", rich_help_panel=OUTPUT
        ),
    ] = False
    # What reading a pasted command line found out.
    remark: Annotated[list[str] | None, Option(hidden=True)] = None
    unmodelled: Annotated[list[str] | None, Option(hidden=True)] = None

    def validate(self) -> None:
        """ConfigError for the first option that is wrong."""
        if self.prompt + self.output < 1:
            problem = f"with --output {self.output} it makes no request"
            raise wrong_value("--prompt", self.prompt, problem, "give at least one token")
        for name in ("from_log", "sweep", "need"):
            if self.need is not None and name != "need" and getattr(self, name) is not None:
                option = "--" + name.replace("_", "-")
                raise wrong_value(option, getattr(self, name), "--need is given too", "give one of the two")
        if self.prices is not None and self.need is None:
            raise wrong_value("--prices", self.prices, "nothing is ranked without --need", "add --need")
