"""A plan for the terminal: rich tables and a bar. Knows no command line."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvledger.plan.explain import explain
from kvledger.plan.gpus import GIB, MIB
from kvledger.plan.granularity import reuse_step
from kvledger.plan.layout import WORTH_MORE_GROUPS, LayoutChoice, LayoutComparison
from kvledger.plan.log_checks import LogCheck
from kvledger.plan.memory import MemoryBudget
from kvledger.plan.need import Answer, command
from kvledger.plan.offloading import host_cache
from kvledger.plan.plan import Plan
from kvledger.plan.pool import blocks_of_group, capacity_lines
from kvledger.plan.refusal import DOES_NOT_FIT, NO_MEMORY, Refusal
from kvledger.plan.request import RequestHolding
from kvledger.plan.view import PlanView, WhatIf, block_range, group_words

BAR_WIDTH = 60
# One letter and one colour for each part of the bar, so it reads without colour too.
PARTS = {
    "weights": ("W", "cyan"),
    "activation peak": ("A", "yellow"),
    "CUDA graphs": ("G", "magenta"),
    "other": ("o", "blue"),
    "KV cache": ("K", "green"),
    "left alone": (".", "bright_black"),
}


def size_words(size: int) -> str:
    """Bytes as people read them."""
    if abs(size) >= GIB:
        return f"{size / GIB:,.2f} GiB"
    return f"{size / MIB:,.2f} MiB" if abs(size) >= MIB else f"{size / 1024:,.1f} KiB"


def plan_report(view: PlanView, *, with_steps: bool) -> Group:
    """Everything about one plan."""
    parts: list[RenderableType] = [heading(view.plan)]
    if view.plan.keeps_nothing:
        parts.append(Text("No layer keeps a KV cache: 1 block, the null block."))
    else:
        parts += [groups_table(view.plan), *memory_parts(view.plan), *capacity_part(view.plan)]
    kept = host_cache(view.plan.request.options, view.plan.workers)
    if kept is not None:
        parts.append(Text(f"The host keeps {kept.num_blocks:,} blocks more: {size_words(kept.bytes)} of all ranks"))
    if view.holding is not None:
        parts.append(holding_lines(view))
    if view.layouts is not None:
        parts.append(layout_table(view.layouts))
    if view.checks:
        parts.append(checks_table(view.checks))
    if view.what_if is not None:
        parts.append(what_if_table(view.what_if, view.plan))
    if with_steps:
        parts.append(steps_table(view.plan))
    if view.plan.error is not None:
        parts.append(refusal_text(view.plan.error))
    if view.notes or view.unmodelled:
        parts.append(note_lines(view.notes, view.unmodelled))
    return Group(*parts)


def heading(plan: Plan) -> Text:
    options = plan.request.options
    sizes = [
        f"{name} {size}"
        for name, size in (
            ("tp", options.tensor_parallel_size),
            ("pp", options.pipeline_parallel_size),
            ("pcp", options.prefill_context_parallel_size),
            ("dp", options.data_parallel_size),
            ("dcp", options.decode_context_parallel_size),
        )
        if size > 1
    ]
    cards = " + ".join(dict.fromkeys(gpu.name for gpu in plan.request.gpus))
    count = options.world_size * options.data_parallel_size
    text = Text(plan.facts.name, style="bold")
    text.append(
        f"  on {count} x {cards}{', ' + ' '.join(sizes) if sizes else ''}, vLLM {plan.request.rules.name}", style=""
    )
    draft = plan.request.draft
    if draft is not None:
        text.append(f", {draft.method} drafts {draft.num_tokens}")
    return text


def groups_table(plan: Plan) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, justify in (
        ("group", "right"),
        ("layers", "right"),
        ("keeps", "left"),
        ("tokens/block", "right"),
        ("page", "right"),
        ("block", "right"),
        ("blocks/request", "right"),
    ):
        table.add_column(title, justify="right" if justify == "right" else "left")
    for first, count in runs(plan):
        group = plan.layout.groups[first]
        pages = {spec.page_size_bytes for spec in group.layer_specs} or {group.spec.page_size_bytes}
        table.add_row(
            f"{first}" if count == 1 else f"{first}-{first + count - 1}",
            f"{len(group.layer_names)}" if count == 1 else f"{len(group.layer_names)} each",
            group_words(group),
            f"{group.spec.block_size:,}",
            " / ".join(size_words(page) for page in sorted(pages)),
            size_words(group.page_size_bytes),
            f"{blocks_of_group(group, plan.limits):,}" + ("" if count == 1 else " each"),
        )
    return Padding(table, (1, 0))


def runs(plan: Plan) -> Iterator[tuple[int, int]]:
    """Groups that look the same, as their first index and their number."""
    groups, first = plan.layout.groups, 0
    for index in range(1, len(groups) + 1):
        alike = index < len(groups) and same_group(plan, index, first)
        if not alike:
            yield first, index - first
            first = index


def same_group(plan: Plan, index: int, first: int) -> bool:
    one, other = plan.layout.groups[index], plan.layout.groups[first]
    return one.spec == other.spec and len(one.layer_names) == len(other.layer_names) and not one.layer_specs


def memory_parts(plan: Plan) -> Iterator[RenderableType]:
    shown = dict.fromkeys(range(len(plan.budgets))) if len({b.gpu for b in plan.budgets}) > 1 else dict.fromkeys((0,))
    limiting = min(range(len(plan.workers)), key=lambda stage: plan.workers[stage].num_blocks)
    shown[limiting] = None
    for stage in sorted(shown):
        title = f"stage {stage} of {len(plan.budgets)}" if len(plan.budgets) > 1 else "each GPU"
        if len(plan.budgets) > 1 and stage == limiting:
            title += " (has the fewest blocks)"
        yield memory_part(plan.budgets[stage], title)


def memory_part(budget: MemoryBudget, title: str) -> RenderableType:
    """The bar and the table of one GPU's memory; only the cache where it was given."""
    if not budget.decides:
        return Text(f"memory of {title}: {size_words(budget.available_bytes)} for the KV cache ({budget.cache.detail})")
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in range(5):
        table.add_column(justify="right" if column in (1, 2) else "left")
    for term in (*budget.terms, budget.cache):
        letter, colour = PARTS[term.name]
        spread = "" if term.is_exact else f"{term.low / GIB:,.2f} to {term.high / GIB:,.2f}"
        table.add_row(
            Text(f"{letter} {term.name}", style=colour),
            f"{term.bytes / GIB:,.2f} GiB",
            spread,
            term.origin,
            term.detail,
        )
    asked = f"{budget.requested_bytes / GIB:,.2f} of {budget.total_bytes / GIB:,.2f} GiB"
    return Group(Text(f"memory of {title}: {asked}"), memory_bar(budget), table)


def memory_bar(budget: MemoryBudget) -> Text:
    parts = [(term.name, max(term.bytes, 0)) for term in (*budget.terms, budget.cache)]
    parts.append(("left alone", budget.total_bytes - budget.requested_bytes))
    total = max(sum(size for _, size in parts), 1)
    bar, drawn, passed = Text("["), 0, 0
    for name, size in parts:
        letter, colour = PARTS[name]
        passed += size
        width = round(BAR_WIDTH * passed / total) - drawn
        bar.append(letter * width, style=colour)
        drawn += width
    return bar.append("]")


def capacity_part(plan: Plan) -> Iterator[RenderableType]:
    """The two lines that vLLM prints at start, and the range behind them."""
    if not plan.num_blocks:
        return
    text = Text("\n")
    for line in capacity_lines(plan.kv_cache_tokens, plan.max_model_len, plan.max_concurrency):
        text.append(line + "\n", style="bold")
    low, high = block_range(plan)
    text.append(f"{plan.num_blocks:,} blocks of {size_words(plan.bytes_per_block)}")
    if low != high:
        text.append(f", {low:,} to {high:,} over the range of the estimates")
        needed = plan.blocks_per_request + 1
        if low < needed <= high:
            text.append("; whether one request fits depends on the estimates: measure them", style="yellow")
    if plan.request.options.data_parallel_size > 1:
        text.append(f", in each of {plan.request.options.data_parallel_size} replicas")
    step = reuse_step(plan)
    if step is not None:
        text.append(f"; prefixes are reused in steps of {step.tokens:,} tokens")
    yield text


def holding_lines(view: PlanView) -> Text:
    holding = view.holding
    assert isinstance(holding, RequestHolding)
    peak = f"; at most {holding.peak_blocks:,} while its prompt is read" if holding.peak_blocks > holding.blocks else ""
    fixed = f"{size_words(holding.fixed_bytes)} fixed, " if holding.fixed_bytes else ""
    return Text(
        f"A request of {holding.tokens:,} tokens holds {holding.blocks:,} blocks at its end: "
        f"{size_words(holding.bytes)}, {holding.share_of_pool:.2%} of the pool; {holding.at_a_time:,} fit at a time\n"
        f"  ({fixed}{size_words(int(holding.bytes_per_token))} for each token, in whole blocks{peak})"
    )


def layout_table(comparison: LayoutComparison) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.title = f"group sizes for {' + '.join(map(str, comparison.buckets))} layers"
    for title in ("layout", "layers/group", "groups", "padding layers", "reserved/request", "of it wasted"):
        table.add_column(title, justify="left" if title == "layout" else "right")
    rows: list[tuple[str, LayoutChoice]] = [("vLLM", comparison.vllm), ("best", comparison.best)]
    for name, choice in rows:
        table.add_row(
            name,
            f"{choice.group_size}",
            f"{choice.num_groups}",
            f"{choice.padding_layers}",
            size_words(choice.request_bytes),
            f"{choice.waste:.2%}",
        )
    verdict = (
        f"the best layout fits {comparison.extra_requests:.2%} more requests"
        if comparison.extra_requests > 0
        else f"vLLM's layout is within {WORTH_MORE_GROUPS:.0%} of the best"
    )
    return Group(Padding(table, (1, 0, 0, 0)), Text(verdict))


def checks_table(checks: tuple[LogCheck, ...]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("the log says", "printed", "the plan gives", "", "formula"):
        table.add_column(title, justify="right" if title == "printed" else "left")
    for check in checks:
        spread = f"{check.low:,.10g}" if check.low == check.high else f"{check.low:,.10g} to {check.high:,.10g}"
        table.add_row(
            check.name, f"{check.printed:,.10g}", spread, "agrees" if check.agrees else "differs", check.formula
        )
    return Padding(table, (1, 0))


def what_if_table(what_if: WhatIf, plan: Plan) -> RenderableType:
    """The log's engine beside the changed one."""
    changes = Text("from the log: " + ", ".join(what_if.changes), style="bold")
    return Padding(Group(changes, sweep_table("", [("the log", what_if.before), ("what if", plan)])), (0, 0, 1, 0))


def steps_table(plan: Plan) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("step", "from", "gives"):
        table.add_column(title, justify="right" if title == "gives" else "left", overflow="fold")
    seen: set[tuple[str, str]] = set()
    for step in explain(plan):
        # Groups that look the same are explained once.
        words = (
            step.title.split(" ", 2)[-1] if step.title.startswith("group ") else step.title,
            step.formula + step.value,
        )
        if words not in seen:
            table.add_row(step.title, step.formula, step.value)
        seen.add(words)
    return Padding(table, (1, 0, 0, 0))


def note_lines(notes: Sequence[str], unmodelled: Sequence[str]) -> Text:
    """What was assumed, and above it what is not counted and should be."""
    text = Text()
    for warning in unmodelled:
        text.append(f"\nwarning: {warning}", style="bold yellow")
    for note in notes:
        text.append(f"\nnote: {note}", style="bright_black")
    return text


def refusal_text(
    refusal: Refusal, notes: Sequence[str] = (), unmodelled: Sequence[str] = (), vllm_version: str = ""
) -> Text:
    """A refusal, and the ways out. `vllm_version`: where no plan says which release refuses."""
    text = note_lines(notes, unmodelled)
    text.append("\n\n" if text else "\n")
    too_little = refusal.kind in (NO_MEMORY, DOES_NOT_FIT)
    whose = f" (vLLM {vllm_version})" if vllm_version else ""
    text.append(f"does not fit{whose}: " if too_little else f"refused{whose}: ", style="bold red")
    text.append(refusal.message)
    for way in refusal.ways_out:
        text.append("\n  - " + way, style="green")
    return text


def sweep_table(key: str, rows: list[tuple[str, Plan | Refusal]]) -> Table:
    """One line for each value of a sweep."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(key)
    for title in ("KV cache", "tokens/block", "blocks", "KV cache tokens", "max_model_len", "concurrency"):
        table.add_column(title, justify="right")
    table.add_column("")
    for value, result in rows:
        if isinstance(result, Refusal):
            table.add_row(value, *[""] * 6, Text(result.message.split(";")[0], style="red"))
            continue
        refused = result.error
        longest = f"{result.max_model_len:,}"
        verdict = Text("fits", style="green")
        if refused is not None:
            verdict = Text(
                f"at most {result.estimated_max_len:,}" if result.estimated_max_len else "no memory", style="red"
            )
        table.add_row(
            value,
            size_words(min(worker.available_bytes for worker in result.workers)),
            f"{result.block_size:,}",
            f"{result.num_blocks:,}",
            f"{result.kv_cache_tokens:,}",
            longest,
            f"{result.max_concurrency:.2f}x",
            verdict,
        )
    return table


def need_table(answers: Sequence[Answer]) -> RenderableType:
    """One line for each card, and the command of the first."""
    need = answers[0].need
    has_prices = any(answer.price is not None for answer in answers)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("card")
    for title in ("cards", "tp x pp x dp", "blocks", "longest", "users", "at least", "margin"):
        table.add_column(title, justify="right", no_wrap=True)
    if has_prices:
        table.add_column("price", justify="right")
    for answer in answers:
        options = answer.plan.request.options
        sizes = (options.tensor_parallel_size, options.pipeline_parallel_size, answer.replicas)
        row: list[RenderableType] = [
            answer.card,
            f"{answer.num_cards}",
            " x ".join(map(str, sizes)),
            f"{answer.plan.num_blocks:,}",
            f"{answer.longest:,}",
            f"{answer.users:,}",
            Text(f"{answer.surely:,}", "green" if answer.surely >= need.users else "yellow"),
            f"{answer.margin:.0%}",
        ]
        if has_prices:
            row.append("" if answer.price is None else f"{answer.price:,.2f}")
        table.add_row(*row)
    name = answers[0].plan.facts.name
    release = answers[0].plan.request.rules.name
    words = f"{name}, vLLM {release}: {need.users:,} users at a time, {need.context:,} tokens each\n"
    asked = Text(words, style="bold")
    legend = (
        "blocks and longest: of a replica; users: that fit at a time; at least: at the low end of the memory estimate"
    )
    return Group(asked, table, Text(f"\n{legend}\n{command(answers[0])}", style="bright_black"))
