"""The engine that traffic is replayed on, from what its user chooses. It is always a planned one.

    plan      planned before, by `kvledger plan --json`
    asked     planned here, as `kvledger plan` does with the same options; without a model the bundled DEFAULT_MODEL
    layout    the same, with groups written by hand in place of the model's own

A plan is read from its JSON in every case.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvledger.errors import ConfigError, wrong_value
from kvledger.files.whole import read_whole
from kvledger.plan.gpus import Gpu, find_gpu
from kvledger.replay.layout import MAX_BLOCK_BYTES, MAX_BLOCKS, InputError, KVLayout, num_blocks_in
from kvledger.replay.layout_file import ReplacedModel, read_layout
from kvledger.replay.planned_engine import PlannedEngine, read_plan
from kvledger.replay.step_time import StepWork

if TYPE_CHECKING:
    from kvledger.plan.ask import Asked
    from kvledger.plan.plan import Plan

# The engine without options: the bundled sample keeps four of these cards busy, and one cannot carry it.
# By its bundled name, so that no hub is asked.
DEFAULT_MODEL: Final = "Meta-Llama-3.1-8B"
DEFAULT_GPU: Final = "H100"
DEFAULT_TENSOR_PARALLEL_SIZE: Final = 4

# Options that change what a plan says; all others of an engine stand in the plan already.
_CHANGE_A_PLAN: Final = (
    "gpu",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
)
# Refusals of a plan that a replay can go on with when the blocks are given: it refuses the requests that do not fit.
_TOO_SMALL: Final = ("request_does_not_fit", "no_available_memory")


@dataclass(frozen=True)
class EngineChoice:
    """`asked`: the question to the planner, used where no plan is given. `plan`: its JSON, or the path of a
    file with it. `layout`: path of a file. `given`: options that plan, with their values, as far as the user gave them.
    `bandwidth` (GB/s) and `peak_tflops` of one GPU: None as in the table.
    """

    asked: "Asked"
    plan: str | bytes | None = None
    layout: str | None = None
    drafts: int = 0
    retention_interval: int | None = None
    bandwidth: float | None = None
    peak_tflops: float | None = None
    given: Mapping[str, object] = field(default_factory=dict)

    @property
    def num_gpu_blocks_override(self) -> int | None:
        return self.asked.options.num_gpu_blocks_override

    @property
    def kv_cache_memory_bytes(self) -> int | None:
        return self.asked.options.kv_cache_memory_bytes


@dataclass(frozen=True)
class ReplayEngine:
    """One engine.

    `name`: of its model; `num_gpus`: of one replica; `vllm_version`: the release whose decisions are made;
    `notes`: what its user should know.
    """

    name: str
    layout: KVLayout
    num_blocks: int
    max_model_len: int
    enable_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    work: StepWork
    gpu: Gpu
    num_gpus: int
    vllm_version: str
    notes: list[str] = field(default_factory=list)
    num_lookahead: int = 0


def replay_engine(options: EngineChoice) -> ReplayEngine:
    """The engine that was chosen. ConfigError for choices that do not go together."""
    engine = _from_model(options) if options.plan is None else _from_file(options, options.plan)
    layout = engine.layout
    if options.drafts:
        layout = layout.with_drafts(options.drafts)
        engine = replace(engine, num_lookahead=options.drafts)
    if options.retention_interval is not None:
        layout = replace(layout, retention_interval=options.retention_interval)
    _require_pool(options, engine, layout)
    return replace(engine, layout=layout)


def _require_pool(options: EngineChoice, engine: ReplayEngine, layout: KVLayout) -> None:
    """What a file says may be anything, and memory is cheap to ask for."""
    if not 2 <= engine.num_blocks <= MAX_BLOCKS:
        field = "num_gpu_blocks_override" if options.kv_cache_memory_bytes is None else "kv_cache_memory_bytes"
        problem = f"a pool of {engine.num_blocks:,} blocks cannot be replayed"
        raise wrong_value(field, getattr(options, field), problem, f"give one of 2 to {MAX_BLOCKS:,} blocks")
    if layout.bytes_per_block > MAX_BLOCK_BYTES:
        problem = f"a block of all layers takes {layout.bytes_per_block:,} bytes, and {MAX_BLOCK_BYTES:,} are the most"
        raise wrong_value("block_size", layout.groups[0].spec.block_size, problem, "give smaller blocks or layers")


def _gpu(options: EngineChoice, name: str) -> Gpu:
    """The card with the speeds that the options give. ConfigError where one is not known."""
    gpu = find_gpu(name)
    bandwidth = gpu.bandwidth_bytes_s if options.bandwidth is None else options.bandwidth * 1e9
    flops = gpu.peak_flops if options.peak_tflops is None else options.peak_tflops * 1e12
    for speed, value in (("bandwidth", bandwidth), ("peak_tflops", flops)):
        if value <= 0:
            raise ConfigError(f"gpu={gpu.name!r}: its {speed} is not in the table; give --{speed.replace('_', '-')}")
    return replace(gpu, bandwidth_bytes_s=bandwidth, peak_flops=flops)


# A plan that was made before


def _from_file(options: EngineChoice, plan: str | bytes) -> ReplayEngine:
    """The plan of a file; what the options say besides goes before."""
    for name, other in (("model", options.asked.model), ("layout", options.layout)):
        if other is not None:
            raise wrong_value(name, other, "plan is given too", "give one of the two")
    for name, value in options.given.items():
        if name not in _CHANGE_A_PLAN:
            raise wrong_value(name, value, "--plan says so itself", "leave it out")
    planned = read_plan(read_whole("plan", plan), plan) if isinstance(plan, str) else read_plan(plan, "plan")
    layout = planned.layout()
    wanted = options.asked.options
    length = wanted.max_model_len
    blocks, memory = options.num_gpu_blocks_override, options.kv_cache_memory_bytes
    if memory is not None and blocks is None:
        blocks = num_blocks_in(memory, layout.bytes_per_block, "kv_cache_memory_bytes")
    changed = replace(
        _engine(options, planned, layout, has_blocks=blocks is not None),
        max_model_len=length if length and length > 0 else planned.max_model_len,
        max_num_seqs=wanted.max_num_seqs or planned.max_num_seqs,
        max_num_batched_tokens=wanted.max_num_batched_tokens or planned.max_num_batched_tokens,
        enable_caching=planned.enable_prefix_caching and wanted.enable_prefix_caching is not False,
    )
    return changed if blocks is None else replace(changed, num_blocks=blocks)


# A model that is planned here


def _from_model(options: EngineChoice) -> ReplayEngine:
    """Plans the model, and reads the plan like one from a file."""
    from kvledger.plan.ask import answer, build_request
    from kvledger.plan.refusal import Refusal
    from kvledger.plan.view import PlanView, plan_object

    asked = _with_defaults(options.asked)
    model = str(asked.model)
    options = replace(options, asked=asked)
    _gpu(options, str(asked.gpu).split(",")[0])
    planned = answer(build_request(asked))
    if isinstance(planned, Refusal):
        raise _refused(model, planned.kind, planned.message, planned.ways_out)
    engine = read_plan(json.dumps(plan_object(PlanView(planned, None))).encode(), model)
    if options.layout is not None:
        return _with_layout(options, planned, engine)
    given = (options.num_gpu_blocks_override, options.kv_cache_memory_bytes)
    return _engine(options, engine, engine.layout(), has_blocks=given != (None, None))


def _with_defaults(asked: "Asked") -> "Asked":
    """The default engine, as far as nothing else is said. A named model runs on one card unless told."""
    given = asked.given | {"gpu"}
    if asked.model is not None:
        return replace(asked, gpu=asked.gpu or DEFAULT_GPU, given=given)
    options = asked.options
    if "tensor_parallel_size" not in asked.given:
        options = replace(options, tensor_parallel_size=DEFAULT_TENSOR_PARALLEL_SIZE)
        given |= {"tensor_parallel_size"}
    return replace(asked, model=DEFAULT_MODEL, gpu=asked.gpu or DEFAULT_GPU, options=options, given=given)


def _with_layout(options: EngineChoice, plan: "Plan", planned: PlannedEngine) -> ReplayEngine:
    """The planned engine with the groups of a layout file: its limits and memory, and blocks of another size."""
    assert options.layout is not None
    if planned.pipeline_parallel_size > 1:
        stages = planned.pipeline_parallel_size
        raise wrong_value("pipeline_parallel_size", stages, "a layout does not say which stage has a layer", "use 1")
    assert planned.work is not None
    text = read_whole("layout", options.layout)
    layout, work = read_layout(text, options.layout, ReplacedModel.of(plan), planned.work)
    layout = replace(layout, max_in_flight_tokens=planned.max_in_flight_tokens)
    blocks = options.num_gpu_blocks_override
    if blocks is None:
        memory = plan.budgets[0].available_bytes
        given = options.kv_cache_memory_bytes is not None
        blocks = num_blocks_in(memory, layout.bytes_per_block, "kv_cache_memory_bytes" if given else "gpu")
    # Whether a request of full length fits was planned for the layers that are replaced.
    engine = _engine(options, replace_error(planned), layout, has_blocks=True)
    return replace(engine, name=Path(options.layout).name, num_blocks=blocks, work=work)


def replace_error(planned: PlannedEngine) -> PlannedEngine:
    """The same without its refusal."""
    import msgspec

    return msgspec.structs.replace(planned, error=None)


# Both


def _engine(options: EngineChoice, planned: PlannedEngine, layout: KVLayout, *, has_blocks: bool) -> ReplayEngine:
    """The engine as planned. `has_blocks`: its pool is what the user asked for, not an estimate."""
    notes = list(planned.notes)
    draft = planned.draft
    if draft is not None and options.drafts:
        raise wrong_value("drafts", options.drafts, "speculative_config drafts too", "give one of the two")
    if draft is not None and draft.reads_hidden_states:
        layout = layout.with_drafts(draft.num_tokens)
    if planned.error is not None:
        if planned.error.kind not in _TOO_SMALL or not has_blocks:
            raise _refused(planned.model, planned.error.kind, planned.error.message, planned.error.ways_out)
        notes.append(f"a real engine would not start with this pool: {planned.error.message}")
    if planned.data_parallel_size > 1:
        notes.append(f"one of {planned.data_parallel_size} replicas is replayed, and gets the whole trace")
    if options.drafts:
        notes.append("a draft's own layers and weights are not in the plan")
    if not has_blocks and planned.block_range:
        blocks = f"{planned.num_blocks:,}"
        notes.append(f"{blocks} blocks are an estimate, {planned.block_range}; --num-blocks makes it exact")
    assert planned.work is not None
    return ReplayEngine(
        planned.model,
        layout,
        planned.num_blocks,
        planned.max_model_len,
        planned.enable_prefix_caching,
        planned.max_num_seqs,
        planned.max_num_batched_tokens,
        planned.work,
        _gpu(options, (options.asked.gpu or planned.gpu[0]).split(",")[0]),
        planned.num_gpus,
        planned.vllm_version,
        notes,
        draft.lookahead_slots if draft is not None else 0,
    )


def _refused(model: str, kind: str, message: str, ways_out: list[str] | tuple[str, ...]) -> InputError:
    """A plan's refusal, what would fit, and how to replay all the same."""
    ways = list(ways_out)
    if kind in _TOO_SMALL:
        ways.append("--num-blocks or --kv-cache-memory-bytes: replayed on that pool, whatever fits in it")
    return InputError(f"{model}: {message}" + "".join(f"\n  - {way}" for way in ways))
