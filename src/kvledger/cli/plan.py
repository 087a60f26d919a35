"""`kvledger plan`: what fits, exactly, before launch."""

import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from kvledger.cli.app import GroupedCommand, OptionsCommand
from kvledger.cli.plan_options import PlanOptions
from kvledger.errors import KVLedgerError

if TYPE_CHECKING:
    # What plans is imported when a plan is asked for, so that --help stays quick.
    from rich.console import Console

    from kvledger.plan.ask import Asked
    from kvledger.plan.log_checks import LogCheck
    from kvledger.plan.plan import PlanRequest
    from kvledger.plan.view import WhatIf

# Exit code with --strict.
NOT_MODELLED = 3
# Columns of the output where it goes to a file or a pipe.
PIPE_WIDTH = 120

HELP = """What fits before launch: KV blocks, tokens, full-length requests, and why.

MODEL is a config.json, a directory with one, a Hugging Face id or the name of a bundled model. Options have
vLLM's names. A whole command line can be pasted:
kvledger plan --gpu H100 -- vllm serve MODEL --tensor-parallel-size 2"""


class PlanCommand(GroupedCommand):
    """Turns what follows `--` into options of its own, when it is a pasted command line."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if "--" in args:
            from kvledger.plan.command_line import parse_pasted

            split = args.index("--")
            pasted = parse_pasted(args[split + 1 :], release_of(args[:split]))
            remarks = [f"--remark={remark}" for remark in pasted.remarks]
            remarks += [f"--unmodelled={remark}" for remark in pasted.unmodelled]
            args = [*pasted.arguments, *remarks, *args[:split]]
        return super().parse_args(ctx, args)


def register(app: typer.Typer) -> None:
    app.command("plan", cls=PlanCommand, help=HELP)(OptionsCommand("plan", PlanOptions, run))


def release_of(args: list[str]) -> str:
    """The --vllm-version among the words before the pasted ones."""
    from kvledger.plan.versions import NEWEST_VERSION, version_rules

    for place, word in enumerate(args):
        if word == "--vllm-version" and args[place + 1 :]:
            return version_rules(args[place + 1]).name
        if word.startswith("--vllm-version="):
            return version_rules(word.partition("=")[2]).name
    return NEWEST_VERSION


def run(options: PlanOptions) -> None:
    """Answers one question. typer.Exit(1) when it does not fit or a log's number differs, typer.Exit(3) with --strict
    when options were pasted that matter and are not modelled.
    """
    try:
        code = answer_question(options)
    except KVLedgerError:
        for remark in (*(options.unmodelled or ()), *(options.remark or ())):
            print(f"note: {remark}", file=sys.stderr)
        raise
    if options.strict and options.unmodelled:
        code = NOT_MODELLED
    if code:
        raise typer.Exit(code)


def answer_question(options: PlanOptions) -> int:
    """Prints the answer; returns 0 when it fits and, for a log, agrees."""
    options.validate()
    asked = options.asked(options.model, tuple(options.remark or ()), tuple(options.unmodelled or ()))
    show = Show(options.prompt, options.output, options.layout == "best", options.explain, options.json)
    if options.need is not None:
        return print_need(asked, options.need, options.prices, as_json=options.json)
    if options.from_log is not None:
        return explain_log(asked, options.from_log, show)
    return print_plan(asked, show) if options.sweep is None else print_sweep(asked, options.sweep, show)


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
    from kvledger.plan.ask import build_request

    return print_answer(build_request(asked), asked, show, ())


def explain_log(asked: "Asked", path: str, show: Show) -> int:
    """Prints what a start-up log says and what a plan gives for it, changed by what is asked besides; returns 1 when a
    number differs.
    """
    from kvledger.files.whole import read_whole
    from kvledger.plan.ask import build_request
    from kvledger.plan.from_log import asked_by_log, calibrated
    from kvledger.plan.log_checks import check_log
    from kvledger.plan.logs import read_log
    from kvledger.plan.plan import make_plan
    from kvledger.plan.refusal import RefusedError
    from kvledger.plan.view import WhatIf

    facts = read_log(read_whole("--from-log", path).decode(errors="replace"))
    question = asked_by_log(asked, facts)
    request = build_request(question.start)
    checks = tuple(check_log(request, facts))
    agrees = all(check.agrees for check in checks)
    try:
        start = make_plan(request)
    except RefusedError:
        return print_answer(request, question.start, show, checks)
    changed = calibrated(question, facts, start)
    what_if = WhatIf(start, tuple(map(str, question.changes))) if question.changes else None
    return print_answer(build_request(changed), changed, show, checks, what_if) or int(not agrees)


def console() -> "Console":
    """The terminal, or plain lines of a fixed width where there is none."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else max(PIPE_WIDTH, terminal_width()))


def terminal_width() -> int:
    return int(os.environ.get("COLUMNS") or 0) if (os.environ.get("COLUMNS") or "0").isdigit() else 0


def print_answer(
    request: "PlanRequest",
    asked: "Asked",
    show: Show,
    checks: "tuple[LogCheck, ...]",
    what_if: "WhatIf | None" = None,
) -> int:
    from kvledger.plan.ask import answer
    from kvledger.plan.layout import compare_plan_layouts
    from kvledger.plan.refusal import Refusal
    from kvledger.plan.report import plan_report, refusal_text
    from kvledger.plan.view import PlanView, holding_of, plan_object, refusal_object

    result = answer(request)
    if isinstance(result, Refusal):
        notes = (*request.facts.config.notes, *asked.remarks)
        if show.as_json:
            print(json.dumps(refusal_object(asked.model, request.rules.name, result, notes, asked.unmodelled)))
        else:
            console().print(refusal_text(result, notes, asked.unmodelled, request.rules.name))
        return 1
    layouts = compare_plan_layouts(result) if show.layouts else None
    view = PlanView(
        result, holding_of(result, show.prompt, show.output), layouts, checks, asked.remarks, asked.unmodelled, what_if
    )
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
    release = asked.rules().name
    if show.as_json:
        print(json.dumps([sweep_object(sweep.key, value, release, result) for value, result in rows]))
    else:
        console().print(f"{asked.model}, vLLM {release}\n")
        console().print(sweep_table(sweep.key, rows))
    return int(not any(getattr(result, "error", result) is None for _, result in rows))


def print_need(asked: "Asked", need_text: str, prices_text: str | None, *, as_json: bool) -> int:
    """Prints a line for each card that serves the need, the best first."""
    from kvledger.plan.need import answers, answers_object, parse_need, parse_prices
    from kvledger.plan.report import need_table, note_lines

    need = parse_need(need_text)
    prices = {} if prices_text is None else parse_prices(prices_text)
    ranked = answers(asked, need, prices)
    notes = (*ranked[0].plan.facts.config.notes, *asked.remarks)
    if as_json:
        print(json.dumps(answers_object(ranked, notes, asked.unmodelled)))
        return 0
    console().print(need_table(ranked))
    if notes or asked.unmodelled:
        console().print(note_lines(notes, asked.unmodelled))
    return 0
