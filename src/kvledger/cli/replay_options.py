"""The options of `kvledger replay`: one field an option, with its default, its help and what typer checks."""

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from typer import Option

from kvledger.cli.engine_options import LIMITS, PlannedEngineOptions
from kvledger.cli.numbers import parse_number
from kvledger.cli.trace_source import TRACE, TraceSource, whole
from kvledger.errors import wrong_value

if TYPE_CHECKING:
    from kvledger.replay.engine import EngineChoice
    from kvledger.replay.run import ReplayHow

HOW: Final = "How it is replayed"
TIME: Final = "The simulated time"
OUTPUT: Final = "Output"

# Option -> (least, most) of whole numbers. A pool of the most blocks takes several GB of this machine's memory.
_RANGES: Final = {
    "trace_block_size": (1, 1 << 20),
    "limit": (1, 1 << 40),
    "seed": (0, 1 << 62),
    "num_gpu_blocks_override": (2, 1 << 26),
    "remember_evictions": (0, 1 << 30),
    "drafts": (0, 1 << 10),
    "retention_interval": (0, 1 << 40),
}
# Options that are numbers above 0, and 0 or more.
_ABOVE_ZERO: Final = ("speed_up", "peak_tflops", "bandwidth")
_NOT_NEGATIVE: Final = ("session_gap", "step_overhead", "log_interval")
# Options that a replay in sequence has no use for.
_NEED_TIME: Final = (
    "speed_up",
    "peak_tflops",
    "bandwidth",
    "step_overhead",
    "step_time",
    "log_interval",
    "slo",
    "perfetto",
)
_NEED_OTHERS: Final = ("policy", "watermark")


def number(panel: str, help_text: str) -> Any:
    """An option with decimals."""
    return Option(parser=parse_number, metavar="N", help=help_text, rich_help_panel=panel)


@dataclass(frozen=True)
class ReplayOptions(PlannedEngineOptions, TraceSource):
    """The fields carry the names of what they set, so that an error about a field names its option."""

    # Where the engine comes from
    model: Annotated[
        str | None,
        Option(
            metavar="MODEL",
            help="The model: config.json, directory, hub id or bundled name. Default: Llama-3.1-8B.",
            rich_help_panel=LIMITS,
        ),
    ] = None
    plan: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="An engine as `kvledger plan --json` gives it; - for standard input.",
            rich_help_panel=LIMITS,
        ),
    ] = None
    layout: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Groups of layers from a small JSON file in place of the model's (docs/replay.md).",
            rich_help_panel=LIMITS,
        ),
    ] = None
    drafts: Annotated[int, whole(LIMITS, "Tokens that a draft model looks ahead: slots and hits it costs.")] = 0
    retention_interval: Annotated[
        int | None,
        whole(LIMITS, "Windows and states stay cached once in so many tokens; 0: only at the ends of prompts."),
    ] = None
    watermark: Annotated[
        float, number(LIMITS, "Share of the pool kept free when a request is admitted while others run.")
    ] = 0.0
    policy: Annotated[Literal["fcfs", "priority"], Option(help="Who is served first.", rich_help_panel=LIMITS)] = "fcfs"

    # The trace
    limit: Annotated[int | None, whole(TRACE, "Replay the first LIMIT requests only.")] = None

    # How it is replayed
    sequential: Annotated[
        bool,
        Option(
            "--sequential",
            help="Requests one after another: look up, allocate the prompt, free.",
            rich_help_panel=HOW,
        ),
    ] = False
    closed_loop: Annotated[
        bool,
        Option(
            "--closed-loop",
            help="A session's next request comes its think time after the last one finished.",
            rich_help_panel=HOW,
        ),
    ] = False
    by_steps: Annotated[
        bool,
        Option(
            "--by-steps",
            help="Requests come at the recorded server's own steps (KVLEDGER_RECORD_STEPS=1).",
            rich_help_panel=HOW,
        ),
    ] = False
    session_gap: Annotated[float, number(HOW, "Mean seconds between the starts of two sessions.")] = 30.0
    speed_up: Annotated[float, number(HOW, "Divide all times between arrivals by this.")] = 1.0
    seed: Annotated[int, whole(HOW, "Seed of the gaps between sessions.")] = 0
    hash: Annotated[
        Literal["sha256", "siphash", "xxh3", "none"],
        Option(
            help="How blocks are named. none: from the trace's ids, without hashing, with the same hits.",
            rich_help_panel=HOW,
        ),
    ] = "sha256"
    check: Annotated[
        bool,
        Option("--check", help="Prove the invariants of every layer after each step (slow).", rich_help_panel=HOW),
    ] = False

    block_by_block: Annotated[
        bool,
        Option(
            "--block-by-block",
            help="Count every block and step where runs of them would give the same numbers, faster.",
            rich_help_panel=HOW,
        ),
    ] = False

    # The simulated time
    peak_tflops: Annotated[float | None, number(TIME, "Dense TFLOP/s of one GPU, instead of the table's.")] = None
    bandwidth: Annotated[float | None, number(TIME, "GB/s of one GPU's memory, instead of the table's.")] = None
    step_time: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Steps that were measured, as CSV (docs/replay.md): the clock is fitted to them.",
            rich_help_panel=TIME,
        ),
    ] = None
    step_overhead: Annotated[float, number(TIME, "Milliseconds that a step takes besides.")] = 2.0

    # The output
    events: Annotated[
        str | None,
        Option(
            metavar="FILE|SOCKET",
            help="KV events into a .jsonl or .msgpack file, or published at tcp://127.0.0.1:5557.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    requests: Annotated[
        str | None,
        Option(metavar="FILE", help="A row for every request into a .csv or .parquet file.", rich_help_panel=OUTPUT),
    ] = None
    perfetto: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Steps, requests and the pool into a .json or .json.gz file for ui.perfetto.dev.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    report: Annotated[
        str | None,
        Option(metavar="FILE", help="The report as one .html file with plots.", rich_help_panel=OUTPUT),
    ] = None
    slo: Annotated[
        str | None,
        Option(
            metavar="LIMITS",
            help="Count requests that keep these latencies (goodput): ttft=500ms,itl=50ms,e2e=30s.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    against: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="What a server did with this traffic: a scrape of its /metrics, two as BEFORE,AFTER, its log, or a "
            "recording.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    overwrite: Annotated[
        bool, Option("--overwrite", help="Files to write may be there already.", rich_help_panel=OUTPUT)
    ] = False
    remember_evictions: Annotated[
        int,
        whole(OUTPUT, "Evictions remembered to say why prompts missed, 9 to 110 bytes each. 0: do not say."),
    ] = 1 << 22
    log_interval: Annotated[
        float,
        Option(
            parser=parse_number,
            metavar="SECONDS",
            help="Print an engine's log line on stderr once in so many simulated seconds; 0: never.",
            rich_help_panel=OUTPUT,
        ),
    ] = 0.0
    json: Annotated[
        bool, Option("--json", help="One JSON object on stdout instead of tables and plots.", rich_help_panel=OUTPUT)
    ] = False

    def validate(self) -> None:
        """ConfigError for the first option whose value is out of its range."""
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise wrong_value(name, value, "out of range", f"give {least} to {most}")
        # Written so that what is not a number is refused, too.
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not 0.0 < value < inf:
                raise wrong_value(name, value, "must be above 0", "give a positive number")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not 0.0 <= value < inf:
                raise wrong_value(name, value, "not a number from 0 on", "give 0 or a positive number")
        if self.sequential:
            self._require_what_counts_in_sequence()

    def engine_choice(self) -> "EngineChoice":
        """The engine that the options describe. ConfigError for values that no engine takes."""
        from kvledger.replay.engine import EngineChoice

        return EngineChoice(
            self.asked(self.model),
            self.plan,
            self.layout,
            self.drafts,
            self.retention_interval,
            self.bandwidth,
            self.peak_tflops,
            {name: getattr(self, name) for name in self.given()},
        )

    def how(self) -> "ReplayHow":
        from dataclasses import fields

        from kvledger.replay.run import ReplayHow
        from kvledger.replay.slo import parse_slo

        same = {field.name: getattr(self, field.name) for field in fields(ReplayHow) if field.name != "slo"}
        return ReplayHow(**same, slo=None if self.slo is None else parse_slo(self.slo))

    def _require_what_counts_in_sequence(self) -> None:
        """ConfigError for an option that would change nothing."""
        for names, reason in (
            (_NEED_TIME, "no time passes with --sequential"),
            (_NEED_OTHERS, "nobody competes with --sequential"),
        ):
            for name in names:
                value = getattr(self, name)
                if value != getattr(ReplayOptions, name):
                    raise wrong_value(name, value, reason, "leave it out")
