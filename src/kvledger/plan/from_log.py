"""A start-up log -> the question that it answers, and the one that the user asks besides.

An option that the log states and the user gives differently is a "what if": the plan changes from the log's own terms.
One that the log does not state describes the start. A log with its line of arguments states every option.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import msgspec

from kvledger.errors import ConfigError
from kvledger.plan.ask import Asked
from kvledger.plan.calibration import Calibration, calibrate
from kvledger.plan.gpus import GIB, Gpu, cards_of_total, find_gpu, processor
from kvledger.plan.log_checks import bounding_plans
from kvledger.plan.logs import LogFacts
from kvledger.plan.memory import NOTHING_MEASURED, MeasuredMemory
from kvledger.plan.options import GRAPH_MODES, KV_CACHE_DTYPES, EngineOptions
from kvledger.plan.plan import Plan, make_plan
from kvledger.plan.serve_parser import option_effects
from kvledger.plan.speculative import SpeculativeConfig, speculative_config
from kvledger.plan.terms import ACTIVATIONS, GRAPHS, OTHER, WEIGHTS
from kvledger.plan.versions import NEWEST_VERSION, VERSIONS, graphs_are_taken_off

# Facts that are engine options, as they stand in the log.
STATED = (
    "max_model_len", "dtype", "kv_cache_dtype", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
    "decode_context_parallel_size", "gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs", "block_size",
    "enable_prefix_caching", "enforce_eager",
)  # fmt: skip
# Types that a log prints for both what was asked and what came of it.
TYPES = {"dtype": ("bfloat16", "float16", "float32"), "kv_cache_dtype": KV_CACHE_DTYPES[3:]}
# A card whose memory differs by more from the log's is another card.
SAME_CARD = 0.03
AMD_CARD = "MI300X"
USUAL_CARD = "H100"
OLDER_RULES = "0.32"


@dataclass(frozen=True)
class Change:
    """One option that is asked for beside a log."""

    option: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.option} {self.before} -> {self.after}"


@dataclass(frozen=True)
class LogQuestion:
    """`start`: the engine of the log; `changed`: what is asked besides, the same where nothing is."""

    start: Asked
    changed: Asked
    changes: tuple[Change, ...]


def asked_by_log(asked: Asked, facts: LogFacts) -> LogQuestion:
    """The questions of a log and a command line. ConfigError where the log does not say what a change needs."""
    stated = stated_options(facts)
    given = given_options(asked)
    differs = {
        name: value
        for name, value in given.items()
        if stated.get(name, default_of(name) if facts.args is not None else value) != value
    }
    described = {name: value for name, value in given.items() if name not in differs}
    options = engine_options({**stated, **described})
    version, remarks = logged_version(asked, facts)
    unmodelled = (*asked.unmodelled, *unmodelled_options(facts))
    start = replace(
        asked,
        model=asked.model or facts.model,
        vllm_version=version,
        options=options,
        measured=measured_by(asked.measured, facts),
        stages=stages_of(asked.measured, facts, options),
        remarks=remarks,
        unmodelled=unmodelled,
        hf_overrides=asked.hf_overrides or overrides_of(facts),
    )
    start, card_change = with_card(start, facts)
    changes = tuple(
        Change("--" + name.replace("_", "-"), getattr(options, name), value) for name, value in differs.items()
    )
    changed = replace(start, options=engine_options({**stated, **given}))
    if card_change is not None:
        changed = replace(changed, gpu=asked.gpu, card=None)
        changes = (card_change, *changes)
    return LogQuestion(start, changed, changes)


def engine_options(values: Mapping[str, object]) -> EngineOptions:
    """ConfigError where the log has an option that no plan takes."""
    try:
        options: EngineOptions = msgspec.convert(values, EngineOptions, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the log's engine cannot be planned: {error}") from None
    return options


def stated_options(facts: LogFacts) -> dict[str, object]:
    """Engine options that the log states, by its arguments and by what it prints of the engine."""
    known = {field.name for field in fields(EngineOptions)}
    stated = {name: value for name, value in (facts.args or {}).items() if name in known and value is not None}
    for name in STATED:
        value: object = getattr(facts, name)
        if value is not None and (name not in TYPES or value in TYPES[name]):
            stated.setdefault(name, value)
    if "gpu_memory_utilization" not in stated and facts.requested_gib and facts.total_gib:
        stated["gpu_memory_utilization"] = round(facts.requested_gib / facts.total_gib, 3)
    compilation: object = (facts.args or {}).get("compilation_config")
    if isinstance(compilation, Mapping):
        for name in ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size"):
            value = compilation.get(name)
            if value and name != "cudagraph_mode":
                stated[name] = value
            elif str(value).upper() in GRAPH_MODES:
                stated[name] = str(value)
    drafts = drafts_of(facts)
    stated.pop("speculative_config", None)
    if drafts is not None:
        stated["speculative_config"] = drafts
    if facts.args is not None:
        stated.setdefault("entry_point", "server" if facts.is_server else "llm")
    return stated


def drafts_of(facts: LogFacts) -> SpeculativeConfig | None:
    """What drafts, by the arguments, else by what the engine printed of it."""
    asked: object = (facts.args or {}).get("speculative_config")
    if isinstance(asked, Mapping):
        return speculative_config(asked)
    if facts.speculative_method is None:
        return None
    # MTP modules are printed with the path of the model itself.
    model = None if facts.speculative_method.endswith("mtp") else facts.speculative_model
    return SpeculativeConfig(facts.speculative_method, facts.speculative_tokens, model)


def given_options(asked: Asked) -> dict[str, object]:
    """Options of the command line: those that were given, and those that are not defaults."""
    return {
        field.name: getattr(asked.options, field.name)
        for field in fields(EngineOptions)
        if field.name in asked.given or getattr(asked.options, field.name) != field.default
    }


def default_of(name: str) -> object:
    return next(field.default for field in fields(EngineOptions) if field.name == name)


def overrides_of(facts: LogFacts) -> Mapping[str, object]:
    overrides: object = (facts.args or {}).get("hf_overrides")
    return overrides if isinstance(overrides, Mapping) else {}


def unmodelled_options(facts: LogFacts) -> tuple[str, ...]:
    """Options of the log's engine that matter and that no plan counts."""
    found = []
    for name, value in (facts.args or {}).items():
        effect = option_effects().get(name)
        if effect is not None and effect.kind == "matters" and value not in (None, False, {}, [], "", 0, "auto"):
            found.append(f"--{name.replace('_', '-')} is not modelled: {effect.words}")
    return tuple(found)


def size(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def measured_by(given: MeasuredMemory, facts: LogFacts) -> MeasuredMemory:
    """What the log measured, where the user does not say otherwise."""
    other = facts.other_gib
    if other is None and facts.consumed_gib is not None and facts.weights_gib is not None:
        other = max(0.0, facts.consumed_gib - facts.weights_gib)
    activation = facts.activation_gib
    if activation is not None and facts.consumed_gib is not None:
        # That line counts the graphs that are set aside as activations.
        activation = max(0.0, activation - (facts.graphs_gib or 0.0))
    graphs = size(facts.graphs_gib) if graphs_are_taken_off(facts.version) else 0

    def pick(mine: int | None, logged: int | None) -> int | None:
        return logged if mine is None else mine

    return MeasuredMemory(
        pick(given.total_bytes, size(facts.total_gib)),
        size(facts.available_gib),
        pick(given.weight_bytes, size(facts.weights_gib)),
        pick(given.activation_bytes, size(activation)),
        pick(given.graph_bytes, graphs),
        pick(given.other_bytes, size(other)),
    )


def stages_of(given: MeasuredMemory, facts: LogFacts, options: EngineOptions) -> tuple[MeasuredMemory, ...]:
    """Measured memory of each pipeline stage, where the log has that of all."""
    if options.pipeline_parallel_size < 2 or len(facts.stage_gib) != options.pipeline_parallel_size:
        return ()
    whole = replace(measured_by(given, facts), weight_bytes=given.weight_bytes)
    return tuple(replace(whole, available_bytes=size(gib)) for gib in facts.stage_gib)


def with_card(start: Asked, facts: LogFacts) -> tuple[Asked, Change | None]:
    """The card of the log, and the change where the user names another."""
    total = size(facts.total_gib)
    if facts.platform is not None and facts.platform.lower() == "cpu":
        return replace(start, card=processor(total or 1)), None
    if start.gpu is None:
        card, remark = card_by(facts, total)
        return replace(start, card=card, remarks=(*start.remarks, remark)), None
    if total is None or "," in start.gpu:
        return start, None
    asked = find_gpu(start.gpu)
    if abs(asked.total_bytes - total) <= SAME_CARD * total:
        return start, None
    card, remark = card_by(facts, total)
    before = replace(start, gpu=None, card=card, remarks=(*start.remarks, remark))
    return before, Change("--gpu", card.name, asked.name)


def card_by(facts: LogFacts, total: int | None) -> tuple[Gpu, str]:
    """What the log's card is taken for, and a word about it: by its maker and memory, else a usual one."""
    amd = facts.platform is not None and facts.platform.lower() == "rocm"
    usual = find_gpu(AMD_CARD if amd else USUAL_CARD)
    alike = [gpu for gpu in cards_of_total(total) if gpu.name.startswith("AMD") == amd] if total is not None else []
    card = usual if usual in alike or not alike else alike[0]
    why = f"by its {total / GIB:.2f} GiB" if total is not None and alike else "batch sizes and kernels are its"
    return card, f"the log does not name its card, which is taken for {card.name} ({why}); --gpu names it"


def logged_version(asked: Asked, facts: LogFacts) -> tuple[str, tuple[str, ...]]:
    """The rules to plan with: the log's release where it is modelled, else the nearest, with a remark."""
    release = ".".join((facts.version or "").split(".")[:2])
    if release in VERSIONS or not facts.version:
        return release or asked.vllm_version or NEWEST_VERSION, asked.remarks
    remark = f"vLLM {facts.version} is not modelled release by release: planned with the rules of {OLDER_RULES}"
    return OLDER_RULES, (*asked.remarks, remark)


def calibrated(question: LogQuestion, facts: LogFacts, start: Plan) -> Asked:
    """What is asked besides, with the memory of the start that the log shows. ConfigError where it does not show it."""
    changed = question.changed
    if changed.options.kv_cache_memory_bytes is not None or changed.options.num_gpu_blocks_override is not None:
        return changed
    if facts.memory_is_given and not question.changes:
        return changed
    if facts.memory_is_given:
        return replace(changed, remarks=(*changed.remarks, "the log's engine was given its KV cache, so it stays"))
    check_card_is_known(question)
    stages = tuple(
        MeasuredMemory(total_of(question, stage), calibration=calibration_of(question, facts, start, place))
        for place, stage in enumerate(start.request.measured)
    )
    if len(stages) == changed.options.pipeline_parallel_size:
        return replace(changed, measured=stages[0], stages=stages)
    poorest = min(range(len(stages)), key=lambda place: stages[place].calibration.available_bytes)  # type: ignore[union-attr]
    return replace(changed, measured=stages[poorest], stages=())


def total_of(question: LogQuestion, measured: MeasuredMemory) -> int | None:
    """Memory of the card that is asked about, where it is not that of a table."""
    return None if any(change.option == "--gpu" for change in question.changes) else measured.total_bytes


def check_card_is_known(question: LogQuestion) -> None:
    asked, start = question.changed, question.start
    needs = asked.options.gpu_memory_utilization != start.options.gpu_memory_utilization
    if needs and start.gpu is None and start.measured.total_bytes is None:
        raise ConfigError(
            "--gpu-memory-utilization: the log does not say how much memory its card has; give --gpu (like H100) or "
            "--gpu-memory-gib"
        )


def calibration_of(question: LogQuestion, facts: LogFacts, start: Plan, stage: int) -> Calibration:
    """The start's terms by the estimates, by the log, and what it left for the cache."""
    measured = start.request.measured[stage]
    bare = replace(NOTHING_MEASURED, total_bytes=measured.total_bytes, available_bytes=measured.available_bytes)
    # The terms of one stage stand for all where the log does not tell them apart: those of the fullest.
    plan = make_plan(replace(start.request, measured=(bare,)))
    place = stage if len(start.request.measured) > 1 else fullest(plan)
    budget = plan.budgets[place]
    shown = {
        name: value
        for name, value in (
            (WEIGHTS, measured.weight_bytes),
            (ACTIVATIONS, measured.activation_bytes),
            (GRAPHS, measured.graph_bytes),
            (OTHER, measured.other_bytes),
        )
        if value is not None
    }
    if budget.gpu.is_processor:
        # One process and no graphs: what is not weights is other.
        shown |= {ACTIVATIONS: 0, GRAPHS: 0}
    bounds = bounding_plans(start.request, facts)
    low, high = (plan, plan) if bounds is None else bounds
    is_known = question.start.gpu is not None or measured.total_bytes is not None
    requested = budget.requested_bytes if is_known else None
    return calibrate(
        budget.terms, shown, requested, low.workers[place].available_bytes, high.workers[place].available_bytes
    )


def fullest(plan: Plan) -> int:
    """The stage with the most beside its cache."""
    sizes = [sum(term.bytes for term in budget.terms) for budget in plan.budgets]
    return sizes.index(max(sizes))
