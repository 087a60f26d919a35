"""`kvledger replay`: drive the real ledger and scheduler with recorded traffic, without a GPU.

Everything about typer is here and in replay_options.py. What is heavy to import comes in when the command runs, so that
--help is quick.
"""

import gc
import inspect
import math
import re
import sys
from contextlib import closing
from dataclasses import fields
from typing import TYPE_CHECKING, get_type_hints

import typer

from kvledger.cli.replay_options import ReplayOptions
from kvledger.errors import ConfigError, wrong_value

if TYPE_CHECKING:
    from kvledger.replay.arrivals import Arrivals
    from kvledger.replay.result import ReplayResult
    from kvledger.replay.scheduled import ScheduledReplay
    from kvledger.replay.sequential import SequentialReplay
    from kvledger.replay.step_time import Gpu, ModelShape
    from kvledger.replay.trace_reader import TraceReader


class _ReplayCommand:
    """The command as typer wants it: a callable whose signature lists the options."""

    __name__ = "replay"

    def __init__(self) -> None:
        hints = get_type_hints(ReplayOptions, include_extras=True)
        self.__annotations__ = hints
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    option.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=option.default,
                    annotation=hints[option.name],
                )
                for option in fields(ReplayOptions)
            ]
        )

    def __call__(self, **values: object) -> None:
        import msgspec

        run(msgspec.convert(values, ReplayOptions))


def register(app: typer.Typer) -> None:
    """Adds the subcommand."""
    app.command(
        "replay",
        help="Replay recorded traffic through the real scheduler and ledger, without a GPU.\n\n"
        "Prints hit rates, preemptions, pool usage and simulated latencies. Formats, options and the step-time model "
        "are explained in docs/replay.md.",
    )(_ReplayCommand())


def run(options: ReplayOptions) -> None:
    """Runs one replay and prints its result. typer.Exit(1) when nothing finished."""
    result = replay(options)
    _print(result, options.json)
    if result.num_finished == 0:
        print(f"kvledger: none of the {result.num_requests} requests finished", file=sys.stderr)
        raise typer.Exit(1)


def replay(options: ReplayOptions) -> "ReplayResult":
    """Runs one replay. typer.BadParameter for options that are wrong, TraceError for a trace that is."""
    from kvledger.replay.trace_formats import open_trace, sample_path

    try:
        options.validate()
        reader = open_trace(options.trace or sample_path(), options.format, options.trace_block_size, options.skip_bad)
        with closing(reader.lines):
            result = _run_with_progress(_make_replay(options, reader), reader)
    except ConfigError as error:
        raise typer.BadParameter(_in_option_words(str(error))) from error
    result.trace = options.trace or "bundled sample"
    result.format = reader.name
    result.hash = "off" if options.no_prefix_caching else options.hash
    result.num_bad_lines = reader.lines.num_bad
    return result


def _make_replay(options: ReplayOptions, reader: "TraceReader") -> "ScheduledReplay | SequentialReplay":
    from kvledger.replay.config import ReplayConfig
    from kvledger.replay.prompts import make_prompt_maker
    from kvledger.replay.scheduled import ScheduledReplay
    from kvledger.replay.sequential import SequentialReplay
    from kvledger.replay.step_time import StepTimeModel
    from kvledger.scheduler import SchedulerConfig, SchedulingPolicy

    shape = _shape(options)
    gpu = _gpu(options)
    bytes_per_token = options.bytes_per_token or shape.kv_bytes_per_token
    scheduler = SchedulerConfig(options.max_num_seqs, options.max_num_batched_tokens, SchedulingPolicy(options.policy))
    config = ReplayConfig(
        num_blocks=_num_blocks(options, shape, gpu, bytes_per_token),
        block_size=options.block_size,
        max_model_len=options.max_model_len,
        enable_caching=not options.no_prefix_caching,
        watermark=options.watermark,
        check=options.check,
        shape=shape,
        scheduler=scheduler,
    )
    maker = make_prompt_maker(options.hash, options.block_size)
    arrivals = _arrivals(options, reader)
    if options.sequential:
        return SequentialReplay(arrivals, maker, config)
    step_time = StepTimeModel(shape, gpu, options.num_gpus, bytes_per_token, options.step_overhead / 1000.0)
    return ScheduledReplay(arrivals, maker, config, step_time)


def _shape(options: ReplayOptions) -> "ModelShape":
    from kvledger.replay.step_time import ModelShape

    return ModelShape(
        num_parameters=math.ceil(options.num_parameters),
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        num_kv_heads=options.num_kv_heads,
        head_size=options.head_size,
        weight_dtype=options.weight_dtype,
        kv_dtype=options.kv_dtype,
    )


def _gpu(options: ReplayOptions) -> "Gpu":
    from kvledger.replay.step_time import Gpu, find_gpu

    gpu = find_gpu(options.gpu)
    return Gpu(
        gpu.name,
        gpu.memory_bytes,
        gpu.bandwidth_bytes_s if options.bandwidth is None else options.bandwidth * 1e9,
        gpu.peak_flops if options.peak_tflops is None else options.peak_tflops * 1e12,
    )


def _num_blocks(options: ReplayOptions, shape: "ModelShape", gpu: "Gpu", bytes_per_token: int) -> int:
    from kvledger.replay.config import num_blocks_in
    from kvledger.replay.step_time import kv_memory_bytes

    if options.num_blocks is not None:
        if options.memory is not None:
            raise wrong_value("memory", options.memory, "num_blocks is given too", "give one of the two")
        return options.num_blocks
    if options.memory is not None:
        return num_blocks_in(options.memory, options.block_size, bytes_per_token)
    left = kv_memory_bytes(shape, gpu, options.num_gpus)
    if left <= 0:
        raise wrong_value(
            "num_gpus",
            options.num_gpus,
            f"90% of {options.num_gpus} x {gpu.memory_bytes / 2**30:.1f} GiB does not hold the model's "
            f"{shape.weight_bytes / 2**30:.1f} GiB of weights",
            "give more or larger GPUs, or memory or num_blocks",
        )
    return num_blocks_in(left, options.block_size, bytes_per_token)


def _arrivals(options: ReplayOptions, reader: "TraceReader") -> "Arrivals":
    from kvledger.replay.arrivals import ClosedLoopArrivals, LimitedArrivals, RecordedArrivals, SessionArrivals

    sessions = reader.sessions()
    arrivals: Arrivals
    if sessions is None:
        if options.closed_loop:
            raise wrong_value("closed_loop", True, f"the {reader.name} format has no sessions", "leave it out")
        arrivals = RecordedArrivals(reader.requests(), options.speed_up)
    else:
        arrivals_class = ClosedLoopArrivals if options.closed_loop else SessionArrivals
        arrivals = arrivals_class(sessions, options.session_gap, options.seed, options.speed_up)
    return arrivals if options.limit is None else LimitedArrivals(arrivals, options.limit)


def _run_with_progress(replay: "ScheduledReplay | SequentialReplay", reader: "TraceReader") -> "ReplayResult":
    # The pool is up to millions of objects that live to the end: no collection needs to walk over them.
    gc.freeze()
    try:
        if not sys.stderr.isatty():
            return replay.run(lambda num_done, num_arrived: None)
        from rich.console import Console
        from rich.progress import Progress

        lines = reader.lines
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("replay", total=1.0)

            def show(num_done: int, num_arrived: int) -> None:
                read = lines.num_bytes_read / max(1, lines.num_bytes)
                bar.update(task, completed=read * num_done / max(1, num_arrived), description=f"{num_done:,} requests")

            return replay.run(show)
    finally:
        gc.unfreeze()


def _print(result: "ReplayResult", as_json: bool) -> None:
    if as_json:
        import msgspec

        print(msgspec.json.encode(result).decode())
        return
    from rich.console import Console

    from kvledger.replay.report import print_report

    print_report(result, Console())


def _in_option_words(message: str) -> str:
    """A ConfigError with its field as the option that set it."""
    return re.sub(r"^(\w+)=", lambda match: f"--{match.group(1).replace('_', '-')} ", message)
