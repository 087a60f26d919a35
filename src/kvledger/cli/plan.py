"""`kvledger plan`: what fits, exactly, before launch."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from kvledger.cli.numbers import parse_bytes, parse_length, parse_number, parse_whole
from kvledger.errors import wrong_value

if TYPE_CHECKING:
    # What plans is imported when a plan is asked for, so that --help stays quick.
    from rich.console import Console

    from kvledger.plan.ask import Asked
    from kvledger.plan.logs import LogCheck
    from kvledger.plan.plan import Plan
    from kvledger.plan.refusal import Refusal

GIB = 1 << 30
PASTED = "kvledger.pasted"
# Columns of the output where it goes to a file or a pipe.
PIPE_WIDTH = 120

HELP = """What fits before launch: KV blocks, tokens, full-length requests, and why.

MODEL is a config.json, a directory with one, a Hugging Face id or the name of a bundled model. Options have
vLLM's names. A whole command line can be pasted:
kvledger plan --gpu H100 -- vllm serve MODEL --tensor-parallel-size 2"""


class PlanCommand(TyperCommand):
    """Turns what follows `--` into options of its own, when it is a pasted command line."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if "--" in args:
            from kvledger.plan.command_line import parse_pasted

            split = args.index("--")
            pasted = parse_pasted(args[split + 1 :])
            ctx.meta[PASTED] = pasted.remarks
            args = [*pasted.arguments, *args[:split]]
        return super().parse_args(ctx, args)


def register(app: typer.Typer) -> None:
    app.command("plan", cls=PlanCommand, help=HELP)(plan)


ENGINE = "Engine options (vLLM's names)"
CARD = "Card and memory"
OUTPUT = "Output"


def plan(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument(help="config.json, directory, hub id or bundled name.")] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Card, or one for each pipeline stage: H100, or A100-40GB,A100.", rich_help_panel=CARD),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            parser=parse_length, metavar="N", help="Longest request: 32768, 32k, or auto.", rich_help_panel=ENGINE
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=ENGINE)] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto, bfloat16, float16, fp8, fp8_e4m3, ...", rich_help_panel=ENGINE)
    ] = "auto",
    block_size: Annotated[
        int | None, typer.Option(parser=parse_whole, metavar="N", help="Tokens per block.", rich_help_panel=ENGINE)
    ] = None,
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(
            parser=parse_number, metavar="N", help="Share of the card for this engine.", rich_help_panel=ENGINE
        ),
    ] = 0.92,
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(
            parser=parse_bytes,
            metavar="BYTES",
            help="KV cache of each GPU, instead of a share: 54.6GiB.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    num_gpu_blocks_override: Annotated[
        int | None,
        typer.Option(
            parser=parse_whole,
            metavar="N",
            help="Blocks to use instead of the computed number.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(parser=parse_whole, metavar="N", help="Tokens of one step.", rich_help_panel=ENGINE)
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(parser=parse_whole, metavar="N", help="Requests of one step.", rich_help_panel=ENGINE)
    ] = None,
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size",
            "--tp",
            "-tp",
            parser=parse_whole,
            metavar="N",
            help="Ranks that share each layer.",
            rich_help_panel=ENGINE,
        ),
    ] = 1,
    pipeline_parallel_size: Annotated[
        int,
        typer.Option(
            "--pipeline-parallel-size",
            "--pp",
            "-pp",
            parser=parse_whole,
            metavar="N",
            help="Stages of layers.",
            rich_help_panel=ENGINE,
        ),
    ] = 1,
    pp_layer_partition: Annotated[
        str | None, typer.Option(help="Layers of each stage: 16,32.", rich_help_panel=ENGINE)
    ] = None,
    data_parallel_size: Annotated[
        int,
        typer.Option(
            "--data-parallel-size",
            "--dp",
            "-dp",
            parser=parse_whole,
            metavar="N",
            help="Replicas.",
            rich_help_panel=ENGINE,
        ),
    ] = 1,
    decode_context_parallel_size: Annotated[
        int,
        typer.Option(
            "--decode-context-parallel-size",
            "--dcp",
            "-dcp",
            parser=parse_whole,
            metavar="N",
            help="Ranks that share a request's tokens.",
            rich_help_panel=ENGINE,
        ),
    ] = 1,
    enable_expert_parallel: Annotated[
        bool, typer.Option(help="Share experts over all ranks.", rich_help_panel=ENGINE)
    ] = False,
    enable_prefix_caching: Annotated[
        bool | None, typer.Option(help="Reuse cached prefixes; on for most models.", rich_help_panel=ENGINE)
    ] = None,
    disable_hybrid_kv_cache_manager: Annotated[
        bool, typer.Option(help="Store windowed layers like full ones.", rich_help_panel=ENGINE)
    ] = False,
    async_scheduling: Annotated[
        bool, typer.Option(help="Prepare a step during the last one.", rich_help_panel=ENGINE)
    ] = True,
    enforce_eager: Annotated[bool, typer.Option(help="No CUDA graphs.", rich_help_panel=ENGINE)] = False,
    mamba_ssm_cache_dtype: Annotated[
        str, typer.Option(help="Element type of recurrent states.", rich_help_panel=ENGINE)
    ] = "auto",
    entry_point: Annotated[
        str, typer.Option(help="server or llm: their defaults differ.", rich_help_panel=ENGINE)
    ] = "server",
    vllm_version: Annotated[str, typer.Option(help="0.33 or 0.32.", rich_help_panel=ENGINE)] = "0.33",
    gpu_memory_gib: Annotated[
        float | None,
        typer.Option(
            parser=parse_number, metavar="N", help="Measured: bytes that CUDA reports, in GiB.", rich_help_panel=CARD
        ),
    ] = None,
    weights_gib: Annotated[
        float | None,
        typer.Option(parser=parse_number, metavar="N", help="Measured: weights of a GPU.", rich_help_panel=CARD),
    ] = None,
    activation_gib: Annotated[
        float | None,
        typer.Option(parser=parse_number, metavar="N", help="Measured: activation peak.", rich_help_panel=CARD),
    ] = None,
    cuda_graphs_gib: Annotated[
        float | None,
        typer.Option(parser=parse_number, metavar="N", help="Measured: CUDA graphs.", rich_help_panel=CARD),
    ] = None,
    other_gib: Annotated[
        float | None,
        typer.Option(parser=parse_number, metavar="N", help="Measured: everything else.", rich_help_panel=CARD),
    ] = None,
    from_log: Annotated[
        str | None, typer.Option(help="A vLLM start-up log to explain; - for standard input.", rich_help_panel=CARD)
    ] = None,
    prompt: Annotated[
        int,
        typer.Option(
            parser=parse_whole, metavar="N", help="Prompt tokens of a typical request.", rich_help_panel=OUTPUT
        ),
    ] = 2000,
    output: Annotated[
        int,
        typer.Option(
            parser=parse_whole, metavar="N", help="Output tokens of a typical request.", rich_help_panel=OUTPUT
        ),
    ] = 500,
    sweep: Annotated[
        str | None,
        typer.Option(help="A table over one option: gpu, max-model-len=8k,32k, ...", rich_help_panel=OUTPUT),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="vllm, or best: the group size that wastes least.", rich_help_panel=OUTPUT)
    ] = "vllm",
    explain: Annotated[
        bool, typer.Option("--explain", help="Every step with its numbers.", rich_help_panel=OUTPUT)
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.", rich_help_panel=OUTPUT)] = False,
) -> None:
    from kvledger.plan.ask import Asked
    from kvledger.plan.counts import parse_counts
    from kvledger.plan.memory import MeasuredMemory
    from kvledger.plan.options import EngineOptions

    if layout not in ("vllm", "best"):
        raise wrong_value("--layout", layout, "not a layout", "use vllm or best")
    if prompt < 0 or output < 0 or prompt + output < 1:
        raise wrong_value("--prompt", prompt, f"with --output {output} it makes no request", "give at least one token")
    options = EngineOptions(
        max_model_len,
        dtype,
        kv_cache_dtype,
        block_size,
        gpu_memory_utilization,
        kv_cache_memory_bytes,
        num_gpu_blocks_override,
        max_num_batched_tokens,
        max_num_seqs,
        tensor_parallel_size,
        pipeline_parallel_size,
        data_parallel_size,
        decode_context_parallel_size,
        enable_expert_parallel,
        enable_prefix_caching,
        disable_hybrid_kv_cache_manager,
        async_scheduling,
        enforce_eager,
        mamba_ssm_cache_dtype,
        entry_point,
        () if pp_layer_partition is None else parse_counts("--pp-layer-partition", pp_layer_partition),
    )
    measured = MeasuredMemory(
        *(
            None if size is None else int(size * GIB)
            for size in (gpu_memory_gib, None, weights_gib, activation_gib, cuda_graphs_gib, other_gib)
        )
    )
    asked = Asked(model, gpu, vllm_version, options, measured, tuple(ctx.meta.get(PASTED, ())))
    show = Show(prompt, output, layout == "best", explain, as_json)
    if from_log is not None:
        code = explain_log(asked, from_log, show)
    elif sweep is not None:
        code = print_sweep(asked, sweep, show)
    else:
        code = print_plan(asked, show)
    if code:
        raise typer.Exit(code)


@dataclass(frozen=True)
class Show:
    """What to print of a plan."""

    prompt: int
    output: int
    layouts: bool
    steps: bool
    as_json: bool


def print_plan(asked: "Asked", show: Show) -> int:
    """Prints one plan; returns 0 when it fits and 1 when it does not."""
    from kvledger.plan.ask import answer, build_request

    return print_answer(answer(build_request(asked)), asked, show, ())


def explain_log(asked: "Asked", path: str, show: Show) -> int:
    """Prints what a start-up log says and what a plan gives for it; returns 1 when a number differs."""
    from kvledger.plan.ask import answer, asked_by_log, build_request
    from kvledger.plan.logs import check_log, read_log

    facts = read_log(sys.stdin.read() if path == "-" else Path(path).read_text(errors="replace"))
    asked = asked_by_log(asked, facts)
    request = build_request(asked)
    checks = tuple(check_log(request, facts))
    code = print_answer(answer(request), asked, show, checks)
    return code or int(not all(check.agrees for check in checks))


def console() -> "Console":
    """The terminal, or plain lines of a fixed width where there is none."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else max(PIPE_WIDTH, terminal_width()))


def terminal_width() -> int:
    return int(os.environ.get("COLUMNS") or 0) if (os.environ.get("COLUMNS") or "0").isdigit() else 0


def print_answer(result: "Plan | Refusal", asked: "Asked", show: Show, checks: "tuple[LogCheck, ...]") -> int:
    from kvledger.plan.layout import compare_plan_layouts
    from kvledger.plan.refusal import Refusal
    from kvledger.plan.report import plan_report, refusal_text
    from kvledger.plan.view import PlanView, error_object, holding_of, plan_object

    if isinstance(result, Refusal):
        if show.as_json:
            print(json.dumps({"model": asked.model, "fits": False, "error": error_object(result)}))
        else:
            console().print(refusal_text(result))
        return 1
    layouts = compare_plan_layouts(result) if show.layouts else None
    view = PlanView(result, holding_of(result, show.prompt, show.output), layouts, checks, asked.remarks)
    if show.as_json:
        print(json.dumps(plan_object(view)))
    else:
        console().print(plan_report(view, with_steps=show.steps))
    return int(result.error is not None)


def print_sweep(asked: "Asked", text: str, show: Show) -> int:
    """Prints a line for each value; returns 0 when one fits."""
    from kvledger.plan.ask import parse_sweep, run_sweep
    from kvledger.plan.report import sweep_table
    from kvledger.plan.view import sweep_object

    sweep = parse_sweep(text)
    rows = run_sweep(asked, sweep)
    if show.as_json:
        print(json.dumps([sweep_object(sweep.key, value, result) for value, result in rows]))
    else:
        console().print(sweep_table(sweep.key, rows))
    return int(not any(getattr(result, "error", result) is None for _, result in rows))
