"""The options of `kvledger replay`: one field an option, with its default, its help and what typer checks."""

from dataclasses import dataclass
from math import inf
from typing import Annotated, Final, Literal

from typer import Argument, Option

from kvledger.cli.numbers import parse_bytes, parse_number, parse_whole
from kvledger.errors import wrong_value

# Option -> (least, most) of whole numbers. A pool of the most blocks takes several GB of this machine's memory.
_RANGES: Final = {
    "trace_block_size": (1, 1 << 20),
    "limit": (1, 1 << 40),
    "seed": (0, 1 << 62),
    "num_blocks": (2, 1 << 26),
    "bytes_per_token": (1, 1 << 40),
    "block_size": (1, 1 << 20),
    "max_model_len": (2, (1 << 31) - 1),
    "remember_evictions": (0, 1 << 30),
    "memory": (1, 1 << 60),
    "kv_cache_memory_bytes": (1, 1 << 60),
    "drafts": (0, 1 << 10),
    "retention_interval": (0, 1 << 40),
    "max_num_seqs": (1, 1 << 20),
    "max_num_batched_tokens": (1, 1 << 30),
    "num_gpus": (1, 1 << 20),
    "num_layers": (1, 1 << 20),
    "num_heads": (1, 1 << 20),
    "num_kv_heads": (1, 1 << 20),
    "head_size": (1, 1 << 20),
}
# Options that are numbers above 0, and 0 or more.
_ABOVE_ZERO: Final = ("speed_up", "peak_tflops", "bandwidth", "num_parameters")
_NOT_NEGATIVE: Final = ("session_gap", "step_overhead", "log_interval")

Dtype = Literal["bfloat16", "float16", "float32", "fp8", "int8"]


@dataclass(frozen=True)
class ReplayOptions:
    """The fields carry the names of what they set, so that an error about a field names its option."""

    trace: Annotated[
        str | None, Argument(metavar="TRACE", help="Trace file, plain or .gz or .xz. Without one: a bundled sample.")
    ] = None

    # The trace
    format: Annotated[
        Literal["mooncake", "agent", "azure"] | None,
        Option(help="Format of the trace. Default: recognised from its first record."),
    ] = None
    trace_block_size: Annotated[
        int | None,
        Option(
            parser=parse_whole,
            metavar="N",
            help="Tokens that one hash id of a mooncake trace stands for. Default: 512.",
        ),
    ] = None
    skip_bad: Annotated[bool, Option("--skip-bad", help="Count broken lines and go on.")] = False
    limit: Annotated[
        int | None, Option(parser=parse_whole, metavar="N", help="Replay the first LIMIT requests only.")
    ] = None

    # How it is replayed
    sequential: Annotated[
        bool, Option("--sequential", help="Requests one after another: look up, allocate the prompt, free.")
    ] = False
    closed_loop: Annotated[
        bool,
        Option("--closed-loop", help="A session's next request comes its think time after the last one finished."),
    ] = False
    session_gap: Annotated[
        float, Option(parser=parse_number, metavar="N", help="Mean seconds between the starts of two sessions.")
    ] = 30.0
    speed_up: Annotated[
        float, Option(parser=parse_number, metavar="N", help="Divide all times between arrivals by this.")
    ] = 1.0
    seed: Annotated[int, Option(parser=parse_whole, metavar="N", help="Seed of the gaps between sessions.")] = 0
    check: Annotated[bool, Option("--check", help="Prove the invariants of every layer after each step (slow).")] = (
        False
    )

    # The layers
    model: Annotated[
        str | None,
        Option(metavar="MODEL", help="The model's real layers: config.json, directory, hub id or bundled name."),
    ] = None
    layout: Annotated[
        str | None, Option(metavar="FILE", help="Groups of layers from a small JSON file (docs/replay.md).")
    ] = None
    plan: Annotated[
        str | None, Option(metavar="FILE", help="An engine as `kvledger plan --json` gives it; - for standard input.")
    ] = None
    drafts: Annotated[
        int,
        Option(parser=parse_whole, metavar="N", help="Tokens that a draft model looks ahead: slots and hits it costs."),
    ] = 0
    retention_interval: Annotated[
        int | None,
        Option(
            parser=parse_whole,
            metavar="N",
            help="Windows and states stay cached once in so many tokens; 0: only at the ends of prompts.",
        ),
    ] = None

    # The pool
    num_blocks: Annotated[
        int | None,
        Option(
            parser=parse_whole,
            metavar="N",
            help="Blocks of the pool, one of them the null block. Default: from the memory.",
        ),
    ] = None
    memory: Annotated[
        int | None,
        Option(
            parser=parse_bytes,
            metavar="BYTES",
            help="Memory for KV, all GPUs together, as 40GiB. Default: what is left.",
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None, Option(parser=parse_bytes, metavar="BYTES", help="The same for each GPU, as vLLM has it.")
    ] = None
    bytes_per_token: Annotated[
        int | None,
        Option(
            parser=parse_whole, metavar="N", help="KV bytes of a token over all layers. Default: from the model shape."
        ),
    ] = None
    block_size: Annotated[
        int | None, Option(parser=parse_whole, metavar="N", help="Tokens of a block. Default: 16, or the model's.")
    ] = None
    max_model_len: Annotated[
        int | None,
        Option(parser=parse_whole, metavar="N", help="Most tokens of a request. Default: none, or the model's."),
    ] = None
    watermark: Annotated[
        float,
        Option(
            parser=parse_number,
            metavar="N",
            help="Share of the pool kept free when a request is admitted while others run.",
        ),
    ] = 0.0
    no_prefix_caching: Annotated[bool, Option("--no-prefix-caching", help="Without the prefix cache.")] = False
    hash: Annotated[
        Literal["sha256", "siphash", "xxh3", "none"],
        Option(help="How blocks are named. none: from the trace's ids, without hashing, with the same hits."),
    ] = "sha256"

    # The scheduler
    max_num_seqs: Annotated[
        int | None,
        Option(parser=parse_whole, metavar="N", help="Requests that run at a time. Default: 256, or the plan's."),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, Option(parser=parse_whole, metavar="N", help="Tokens of one step. Default: 8192, or the plan's.")
    ] = None
    policy: Annotated[Literal["fcfs", "priority"], Option(help="Who is served first.")] = "fcfs"

    vllm_version: Annotated[Literal["0.32", "0.33"], Option(help="Decide as this release of vLLM does.")] = "0.33"

    # The step-time model
    gpu: Annotated[
        str | None, Option(help="GPU by name, for the simulated time and the default memory. Default: h100.")
    ] = None
    num_gpus: Annotated[
        int | None,
        Option(
            "--num-gpus",
            "--tensor-parallel-size",
            "--tp",
            parser=parse_whole,
            metavar="N",
            help="GPUs that share the model evenly. Default: 4, or 1 with --model.",
        ),
    ] = None
    peak_tflops: Annotated[
        float | None, Option(parser=parse_number, metavar="N", help="Dense TFLOP/s of one GPU, instead of the table's.")
    ] = None
    bandwidth: Annotated[
        float | None, Option(parser=parse_number, metavar="N", help="GB/s of one GPU's memory, instead of the table's.")
    ] = None
    step_overhead: Annotated[
        float, Option(parser=parse_number, metavar="N", help="Milliseconds that a step takes besides.")
    ] = 2.0

    # The model shape, where no model or plan says it. The defaults are Llama 3.1 8B's.
    num_parameters: Annotated[
        float | None, Option(parser=parse_number, metavar="N", help="Parameters of the model. Default: 8.03e9.")
    ] = None
    num_layers: Annotated[int | None, Option(parser=parse_whole, metavar="N", help="Layers. Default: 32.")] = None
    num_heads: Annotated[int | None, Option(parser=parse_whole, metavar="N", help="Query heads. Default: 32.")] = None
    num_kv_heads: Annotated[
        int | None, Option(parser=parse_whole, metavar="N", help="Key and value heads. Default: 8.")
    ] = None
    head_size: Annotated[
        int | None, Option(parser=parse_whole, metavar="N", help="Values of a head. Default: 128.")
    ] = None
    weight_dtype: Annotated[Dtype | None, Option(help="Type of a weight. Default: bfloat16.")] = None
    kv_dtype: Annotated[
        Dtype | None,
        Option(
            "--kv-dtype", "--kv-cache-dtype", help="Type of a value in the KV cache. Default: bfloat16, or the model's."
        ),
    ] = None

    # The output
    events: Annotated[
        str | None,
        Option(metavar="FILE|SOCKET", help="KV events into a .jsonl or .msgpack file, or published at tcp://*:5557."),
    ] = None
    remember_evictions: Annotated[
        int,
        Option(
            parser=parse_whole,
            metavar="N",
            help="Evictions remembered to say why prompts missed, about 100 bytes each. 0: do not say.",
        ),
    ] = 1 << 20
    log_interval: Annotated[
        float,
        Option(
            parser=parse_number,
            metavar="SECONDS",
            help="Print an engine's log line on stderr once in so many simulated seconds; 0: never.",
        ),
    ] = 0.0
    json: Annotated[bool, Option("--json", help="One JSON object on stdout instead of tables and plots.")] = False

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
        if self.sequential and self.log_interval > 0:
            raise wrong_value("log_interval", self.log_interval, "no time passes with --sequential", "leave it out")
