"""replay(): the replay as a function, for programs and notebooks."""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import fields as fields_of
from difflib import get_close_matches
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Final

from kvledger.errors import ConfigError
from kvledger.replay.records import ReplayListener
from kvledger.traces.trace_request import TraceRequest

if TYPE_CHECKING:
    # What plans and replays is imported when a replay is asked for.
    from kvledger.replay.engine import EngineChoice
    from kvledger.replay.result import ReplayResult
    from kvledger.replay.run import ReplayHow
    from kvledger.replay.slo import Slo
    from kvledger.traces.reader import TraceReader

_SHORT: Final = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "num_blocks": "num_gpu_blocks_override",
}
# Of a choice of an engine, besides the options of the planner.
_CHOICES: Final = ("layout", "drafts", "retention_interval", "bandwidth", "peak_tflops")


def replay(
    trace: "str | PathLike[str] | TraceReader | Iterable[TraceRequest] | None" = None,
    *,
    model: str | None = None,
    gpu: str | None = None,
    plan: str | bytes | None = None,
    vllm_version: str | None = None,
    format: str | None = None,
    trace_block_size: int | None = None,
    fields: str | None = None,
    tokenizer: str | None = None,
    skip_bad: bool = False,
    slo: "str | Slo | None" = None,
    listeners: Sequence[ReplayListener] = (),
    **options: Any,
) -> "ReplayResult":
    """Replays a trace through the real scheduler and ledger, as `kvledger replay` does with options of the same names.

    `trace`: a file or a directory of recordings, a reader, or requests in the order of arrival; None: the sample.
    `plan`: a plan's JSON or the path of one. `options`: every other option of the engine (vLLM's names; tp, pp, dp and
    num_blocks for short), and of how it is replayed (ReplayHow). `slo`: limits like "ttft=500ms,itl=50ms". `listeners`
    are told of requests and steps; RequestTable collects requests.

    ConfigError for options that are wrong, TraceError for a trace that is, InputError for an engine that would not
    start.
    """
    from kvledger.replay.engine import replay_engine
    from kvledger.replay.run import arrivals_of_requests, replay_arrivals, replay_trace
    from kvledger.traces.reader import TraceReader

    for short, name in _SHORT.items():
        if short in options:
            options[name] = options.pop(short)
    how = _how(options, slo)
    engine = replay_engine(_engine_choice(options, model, gpu, plan, vllm_version))
    how_read = {
        "format": format, "trace_block_size": trace_block_size, "fields": fields, "tokenizer": tokenizer,
        "skip_bad": skip_bad,
    }  # fmt: skip
    if trace is None or isinstance(trace, str | PathLike | TraceReader):
        with closing(_opened(trace, **how_read)) as reader:
            result = replay_trace(reader, engine, how, listeners=listeners)
    else:
        _require_untold(how_read)
        result = replay_arrivals(arrivals_of_requests(iter(trace), how), engine, how, listeners=listeners)
        result.format = "requests"
    result.trace = _name(trace)
    return result


def _how(options: dict[str, Any], slo: "str | Slo | None") -> "ReplayHow":
    """Takes what says how out of the options."""
    from kvledger.replay.run import ReplayHow
    from kvledger.replay.slo import parse_slo

    given = {field.name: options.pop(field.name) for field in fields_of(ReplayHow) if field.name in options}
    return ReplayHow(**given, slo=parse_slo(slo) if isinstance(slo, str) else slo)


def _engine_choice(
    options: dict[str, Any], model: str | None, gpu: str | None, plan: str | bytes | None, version: str | None
) -> "EngineChoice":
    from kvledger.plan.ask import Asked
    from kvledger.plan.options import EngineOptions
    from kvledger.replay.engine import EngineChoice
    from kvledger.replay.run import ReplayHow

    choices = {name: options.pop(name) for name in _CHOICES if name in options}
    known = {field.name for field in fields_of(EngineOptions)}
    unknown = [name for name in options if name not in known]
    if unknown:
        names = [*known, *_SHORT, *_CHOICES, *[field.name for field in fields_of(ReplayHow)]]
        near = get_close_matches(unknown[0], names, 1)
        hint = f"did you mean {near[0]}" if near else "the names are those of `kvledger replay --help`"
        raise ConfigError(f"{unknown[0]}={options[unknown[0]]!r}: no such option; {hint}")
    given = options | {name: value for name, value in (("gpu", gpu), ("vllm_version", version)) if value is not None}
    asked = Asked(model, gpu, version, EngineOptions(**options), given=frozenset(given))
    return EngineChoice(asked, plan, **choices, given=given)


def _opened(trace: "str | PathLike[str] | TraceReader | None", **how_read: Any) -> "TraceReader":
    from kvledger.traces.formats import open_trace, sample_path

    if trace is None or isinstance(trace, str | PathLike):
        path = sample_path() if trace is None else fspath(trace)
        names = ("format", "trace_block_size", "skip_bad", "fields", "tokenizer")
        format_name, block_size, skip_bad, fields, tokenizer = (how_read[name] for name in names)
        return open_trace(path, format_name, block_size, skip_bad, fields=fields, tokenizer=tokenizer)
    _require_untold(how_read)
    return trace


def _require_untold(how_read: dict[str, Any]) -> None:
    for name, value in how_read.items():
        if value:
            raise ConfigError(f"{name}={value!r}: the trace is open already; leave it out")


def _name(trace: object) -> str:
    if trace is None:
        return "bundled sample"
    return fspath(trace) if isinstance(trace, str | PathLike) else type(trace).__name__
