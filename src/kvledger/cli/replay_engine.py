"""From the options of `kvledger replay` to the engine that it replays on: groups, blocks, limits and speed.

Four sources: the built-in shape (one group of full attention), --layout FILE (groups written by hand), --model MODEL
(planned here, as `kvledger plan` does) and --plan FILE (planned before). A plan is read from its JSON in both cases.
"""

import json
import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvledger.cli.replay_options import ReplayOptions
from kvledger.core.units import cdiv
from kvledger.errors import ConfigError, wrong_value
from kvledger.replay.config import one_group
from kvledger.replay.layout import InputError, KVLayout, num_blocks_in
from kvledger.replay.layout_file import read_layout
from kvledger.replay.planned_engine import PlannedEngine, read_plan
from kvledger.replay.step_time import Gpu, ModelShape, StepWork, find_gpu, kv_memory_bytes

DEFAULT_GPU: Final = "h100"
DEFAULT_NUM_GPUS: Final = 4
DEFAULT_BLOCK_SIZE: Final = 16
DEFAULT_NUM_SEQS: Final = 256
DEFAULT_BATCHED_TOKENS: Final = 8192

_SHAPE: Final = ("num_parameters", "num_layers", "num_heads", "num_kv_heads", "head_size", "weight_dtype")
# Source -> options that it decides itself.
_DECIDED: Final[dict[str, tuple[str, ...]]] = {
    "layout": ("num_layers", "bytes_per_token"),
    "model": (*_SHAPE, "bytes_per_token"),
    "plan": (*_SHAPE, "kv_dtype", "bytes_per_token", "block_size", "num_gpus"),
}
# Refusals of a plan that a replay can go on with when the blocks are given: it refuses the requests that do not fit.
_TOO_SMALL: Final = ("request_does_not_fit", "no_available_memory")


@dataclass(frozen=True)
class ReplayEngine:
    """One engine. `name`: of its model, "" for the built-in shape; `notes`: what its user should know."""

    layout: KVLayout
    num_blocks: int
    max_model_len: int | None
    enable_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    work: StepWork
    gpu: Gpu
    num_gpus: int
    name: str = ""
    notes: list[str] = field(default_factory=list)


def make_engine(options: ReplayOptions) -> ReplayEngine:
    """The engine that the options describe. ConfigError for options that do not go together."""
    _require_one_source(options)
    if options.plan is not None:
        engine = _from_plan(options, read_plan(_read("plan", options.plan), options.plan))
    elif options.model is not None:
        engine = _from_model(options)
    else:
        engine = _from_shape(options)
    layout = engine.layout
    if options.drafts:
        layout = layout.with_drafts(options.drafts)
    if options.retention_interval is not None:
        layout = replace(layout, retention_interval=options.retention_interval)
    return replace(engine, layout=layout)


def _require_one_source(options: ReplayOptions) -> None:
    given = [name for name in ("model", "layout", "plan") if getattr(options, name) is not None]
    if len(given) > 1:
        raise wrong_value(given[1], getattr(options, given[1]), f"{given[0]} is given too", "give one of the two")
    for name in _DECIDED[given[0]] if given else ():
        if getattr(options, name) is not None:
            raise wrong_value(name, getattr(options, name), f"--{given[0]} says so itself", "leave it out")
    memory = [name for name in ("num_blocks", "memory", "kv_cache_memory_bytes") if getattr(options, name) is not None]
    if len(memory) > 1:
        value = getattr(options, memory[1])
        raise wrong_value(memory[1], value, f"{memory[0]} is given too", "give one of the two")


def _read(option: str, path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except OSError as failed:
        raise wrong_value(
            option, path, f"cannot be read ({failed.strerror or failed})", "give the path of a file"
        ) from None


# The built-in shape and layout files


def _from_shape(options: ReplayOptions) -> ReplayEngine:
    shape = _shape(options)
    block_size = options.block_size or DEFAULT_BLOCK_SIZE
    if options.layout is not None:
        layout, work = read_layout(_read("layout", options.layout), options.layout, block_size, shape)
    else:
        layout, work = one_group(shape, block_size), shape.work(options.bytes_per_token)
        if options.bytes_per_token is not None:
            size = block_size * options.bytes_per_token
            layout = replace(layout, bytes_per_block=size, group_bytes=(size,))
    gpu = _gpu(options, DEFAULT_GPU)
    num_gpus = options.num_gpus or DEFAULT_NUM_GPUS
    return ReplayEngine(
        layout,
        _num_blocks(options, shape, gpu, num_gpus, layout.bytes_per_block),
        options.max_model_len,
        not options.no_prefix_caching,
        options.max_num_seqs or DEFAULT_NUM_SEQS,
        options.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS,
        work,
        gpu,
        num_gpus,
        name="" if options.layout is None else Path(options.layout).name,
    )


def _shape(options: ReplayOptions) -> ModelShape:
    default = ModelShape()
    parameters = options.num_parameters
    return ModelShape(
        default.num_parameters if parameters is None else math.ceil(parameters),
        options.num_layers or default.num_layers,
        options.num_heads or default.num_heads,
        options.num_kv_heads or default.num_kv_heads,
        options.head_size or default.head_size,
        options.weight_dtype or default.weight_dtype,
        options.kv_dtype or default.kv_dtype,
    )


def _num_blocks(options: ReplayOptions, shape: ModelShape, gpu: Gpu, num_gpus: int, bytes_per_block: int) -> int:
    if options.num_blocks is not None:
        return options.num_blocks
    if options.memory is not None:
        return num_blocks_in(options.memory, bytes_per_block)
    if options.kv_cache_memory_bytes is not None:
        return num_blocks_in(options.kv_cache_memory_bytes, cdiv(bytes_per_block, num_gpus), "kv_cache_memory_bytes")
    left = kv_memory_bytes(shape, gpu, num_gpus)
    if left <= 0:
        raise wrong_value(
            "num_gpus",
            num_gpus,
            f"90% of {num_gpus} x {gpu.memory_bytes / 2**30:.1f} GiB does not hold the model's "
            f"{shape.weight_bytes / 2**30:.1f} GiB of weights",
            "give more or larger GPUs, or memory or num_blocks",
        )
    return num_blocks_in(left, bytes_per_block)


def _gpu(options: ReplayOptions, default: str) -> Gpu:
    gpu = find_gpu(options.gpu or default)
    bandwidth = gpu.bandwidth_bytes_s if options.bandwidth is None else options.bandwidth * 1e9
    flops = gpu.peak_flops if options.peak_tflops is None else options.peak_tflops * 1e12
    for name, value in (("bandwidth", bandwidth), ("peak_tflops", flops)):
        if value <= 0:
            raise ConfigError(f"gpu={gpu.name!r}: its {name} is not in the table; give --{name.replace('_', '-')}")
    return Gpu(gpu.name, gpu.memory_bytes, bandwidth, flops)


# Models and plans


def _from_model(options: ReplayOptions) -> ReplayEngine:
    """Plans the model, and reads the plan like one from a file."""
    from kvledger.plan.ask import Asked, answer, build_request
    from kvledger.plan.options import EngineOptions
    from kvledger.plan.refusal import Refusal
    from kvledger.plan.view import PlanView, plan_object

    num_gpus = options.num_gpus or 1
    _gpu(options, DEFAULT_GPU)
    memory = options.kv_cache_memory_bytes
    if options.memory is not None:
        memory = options.memory // num_gpus
    engine_options = EngineOptions(
        max_model_len=options.max_model_len,
        kv_cache_dtype=options.kv_dtype or "auto",
        block_size=options.block_size,
        kv_cache_memory_bytes=memory,
        num_gpu_blocks_override=options.num_blocks,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        tensor_parallel_size=num_gpus,
        enable_prefix_caching=False if options.no_prefix_caching else None,
    )
    asked = Asked(options.model, options.gpu or DEFAULT_GPU, "0.33", engine_options)
    planned = answer(build_request(asked))
    if isinstance(planned, Refusal):
        raise _refused(str(options.model), planned.kind, planned.message, planned.ways_out)
    text = json.dumps(plan_object(PlanView(planned, None))).encode()
    sized = replace(options, memory=None, kv_cache_memory_bytes=None, num_gpus=None, gpu=options.gpu or DEFAULT_GPU)
    return _from_plan(sized, read_plan(text, str(options.model)), is_given=memory is not None)


def _from_plan(options: ReplayOptions, planned: PlannedEngine, *, is_given: bool = False) -> ReplayEngine:
    """The engine of a plan; what the options say besides goes before. `is_given`: its memory is what the user asked."""
    layout = planned.layout()
    notes = list(planned.notes)
    if planned.error is not None:
        has_blocks = is_given or any((options.num_blocks, options.memory, options.kv_cache_memory_bytes))
        if planned.error.kind not in _TOO_SMALL or not has_blocks:
            raise _refused(planned.model, planned.error.kind, planned.error.message, planned.error.ways_out)
        notes.append(f"a real engine would not start with this pool: {planned.error.message}")
    if planned.data_parallel_size > 1:
        notes.append(f"one of {planned.data_parallel_size} replicas is replayed, and gets the whole trace")
    if options.drafts:
        notes.append("a draft's own layers and weights are not in the plan")
    num_blocks = planned.num_blocks
    if options.num_blocks is not None:
        num_blocks = options.num_blocks
    elif options.memory is not None:
        num_blocks = num_blocks_in(options.memory // planned.num_gpus, layout.bytes_per_block)
    elif options.kv_cache_memory_bytes is not None:
        num_blocks = num_blocks_in(options.kv_cache_memory_bytes, layout.bytes_per_block, "kv_cache_memory_bytes")
    elif planned.block_range:
        notes.append(f"{num_blocks:,} blocks are an estimate, {planned.block_range}; --num-blocks makes it exact")
    assert planned.work is not None
    return ReplayEngine(
        layout,
        num_blocks,
        options.max_model_len or planned.max_model_len,
        planned.enable_prefix_caching and not options.no_prefix_caching,
        options.max_num_seqs or planned.max_num_seqs,
        options.max_num_batched_tokens or planned.max_num_batched_tokens,
        planned.work,
        _gpu(options, planned.gpu[0]),
        planned.num_gpus,
        planned.model,
        notes,
    )


def _refused(model: str, kind: str, message: str, ways_out: list[str] | tuple[str, ...]) -> InputError:
    """A plan's refusal, what would fit, and how to replay all the same."""
    ways = list(ways_out)
    if kind in _TOO_SMALL:
        ways.append("--num-blocks or --memory: replayed on that pool, whatever fits in it")
    lines = "".join(f"\n  - {way}" for way in ways)
    elsewhere = (
        "For options that replay lacks: `kvledger plan ... --json > plan.json`, then `kvledger replay --plan plan.json`"
    )
    return InputError(f"{model}: {message}{lines}" + (f"\n{elsewhere}" if ways_out else ""))
