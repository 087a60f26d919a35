"""The options that describe an engine, for every command that plans one: one field an option, vLLM's names.

A field is None where the user says nothing, so that a log, a plan or a command's own default can say it; the defaults
themselves stand in kvledger.plan.options.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from typer import Option

from kvledger.cli.numbers import parse_bytes, parse_length, parse_number, parse_whole
from kvledger.errors import wrong_value

if TYPE_CHECKING:
    # What plans is imported when a plan is asked for, so that --help stays quick.
    from kvledger.plan.ask import Asked
    from kvledger.plan.memory import MeasuredMemory
    from kvledger.plan.options import EngineOptions

ENGINE: Final = "Model and types (vLLM's names)"
LIMITS: Final = "Limits and steps (vLLM's names)"
RANKS: Final = "Ranks (vLLM's names)"
DRAFTS: Final = "Drafts (vLLM's names)"
ADAPTERS: Final = "LoRA (vLLM's names)"
MEMORY: Final = "Memory (vLLM's names)"
PANELS: Final = (ENGINE, LIMITS, RANKS, DRAFTS, ADAPTERS, MEMORY)
CARD: Final = "Card and memory"
GIB: Final = 1 << 30


def whole(panel: str, help_text: str, *names: str) -> Any:
    """An option that is a count."""
    return Option(*names, parser=parse_whole, metavar="N", help=help_text, rich_help_panel=panel)


def words(panel: str, help_text: str) -> Any:
    """An option that is taken as it stands."""
    return Option(metavar="TEXT", help=help_text, rich_help_panel=panel)


def switch(panel: str, help_text: str, *names: str) -> Any:
    """An option that is on, off or not given."""
    return Option(*names, help=help_text, rich_help_panel=panel)


def size_of(panel: str, help_text: str) -> Any:
    """An option that is a size in GiB."""
    return Option(parser=parse_number, metavar="GIB", help=help_text, rich_help_panel=panel)


def measured(help_text: str) -> Any:
    """A size in GiB that the user knows."""
    return Option(parser=parse_number, metavar="N", help=help_text, rich_help_panel=CARD)


def json_object(option: str, text: str) -> Mapping[str, object]:
    """ConfigError where the text is no JSON object."""
    import json

    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise wrong_value(option, text, f"not JSON ({error})", 'give an object like {"field": 1}') from None
    if not isinstance(value, Mapping):
        raise wrong_value(option, text, "not a JSON object", 'give one like {"field": 1}')
    return value


@dataclass(frozen=True)
class PlannedEngineOptions:
    """Limits, parallel sizes and memory of one engine. The fields that EngineOptions has carry its names."""

    max_model_len: Annotated[
        int | None,
        Option(parser=parse_length, metavar="N", help="Longest request: 32768, 32k, or auto.", rich_help_panel=LIMITS),
    ] = None
    dtype: Annotated[str | None, words(ENGINE, "auto, bfloat16, float16 or float32. Default: auto.")] = None
    kv_cache_dtype: Annotated[
        str | None, words(ENGINE, "auto, bfloat16, float16, fp8, fp8_e4m3, ... Default: auto.")
    ] = None
    kv_cache_dtype_skip_layers: Annotated[
        str | None, words(ENGINE, "Layers that keep the model's type: 0,31 or sliding_window.")
    ] = None
    block_size: Annotated[int | None, whole(ENGINE, "Tokens per block. Default: what the model's kernels prefer.")] = (
        None
    )
    gpu_memory_utilization: Annotated[
        float | None,
        Option(
            parser=parse_number,
            metavar="N",
            help="Share of the card for this engine. Default: 0.92.",
            rich_help_panel=MEMORY,
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None,
        Option(
            parser=parse_bytes,
            metavar="BYTES",
            help="KV cache of each GPU, instead of a share: 54.6GiB.",
            rich_help_panel=MEMORY,
        ),
    ] = None
    num_gpu_blocks_override: Annotated[
        int | None,
        whole(
            MEMORY,
            "Blocks of the pool, the null block included, instead of the computed number.",
            "--num-gpu-blocks-override",
            "--num-blocks",
        ),
    ] = None
    max_num_batched_tokens: Annotated[int | None, whole(LIMITS, "Tokens of one step. Default: by the card.")] = None
    max_num_seqs: Annotated[int | None, whole(LIMITS, "Requests of one step. Default: by the card.")] = None
    tensor_parallel_size: Annotated[
        int | None, whole(RANKS, "Ranks that share each layer.", "--tensor-parallel-size", "--tp", "-tp")
    ] = None
    pipeline_parallel_size: Annotated[
        int | None, whole(RANKS, "Stages of layers.", "--pipeline-parallel-size", "--pp", "-pp")
    ] = None
    pp_layer_partition: Annotated[str | None, words(RANKS, "Layers of each stage: 16,32.")] = None
    prefill_context_parallel_size: Annotated[
        int | None,
        whole(RANKS, "Ranks that share a prompt's tokens.", "--prefill-context-parallel-size", "--pcp", "-pcp"),
    ] = None
    data_parallel_size: Annotated[int | None, whole(RANKS, "Replicas.", "--data-parallel-size", "--dp", "-dp")] = None
    decode_context_parallel_size: Annotated[
        int | None,
        whole(RANKS, "Ranks that share a request's tokens.", "--decode-context-parallel-size", "--dcp", "-dcp"),
    ] = None
    enable_expert_parallel: Annotated[bool | None, switch(RANKS, "Share experts over all ranks.")] = None
    enable_prefix_caching: Annotated[
        bool | None,
        switch(
            LIMITS,
            "Reuse cached prefixes; on for most models.",
            "--enable-prefix-caching/--no-enable-prefix-caching",
            "--prefix-caching/--no-prefix-caching",
        ),
    ] = None
    enable_chunked_prefill: Annotated[bool | None, switch(LIMITS, "Long prompts over several steps. Default: yes.")] = (
        None
    )
    performance_mode: Annotated[
        str | None, words(LIMITS, "balanced, interactivity or throughput, which doubles batches. Default: balanced.")
    ] = None
    disable_hybrid_kv_cache_manager: Annotated[bool | None, switch(LIMITS, "Store windowed layers like full ones.")] = (
        None
    )
    async_scheduling: Annotated[bool | None, switch(LIMITS, "Prepare a step during the last one. Default: yes.")] = None
    enforce_eager: Annotated[bool | None, switch(MEMORY, "No CUDA graphs.")] = None
    optimization_level: Annotated[
        int | None, whole(MEMORY, "0 to 3; 0 has no CUDA graphs.", "--optimization-level", "-O")
    ] = None
    compilation_config: Annotated[str | None, words(MEMORY, "JSON; its cudagraph fields are read.")] = None
    cudagraph_capture_sizes: Annotated[str | None, words(MEMORY, "Batches that are captured: 1,2,4,8.")] = None
    max_cudagraph_capture_size: Annotated[int | None, whole(MEMORY, "The largest batch that is captured.")] = None
    language_model_only: Annotated[bool | None, switch(ENGINE, "Without the towers of images and sounds.")] = None
    attention_backend: Annotated[
        str | None, words(ENGINE, "FLASH_ATTN, TRITON_ATTN, FLASHMLA, ... Default: by the card.")
    ] = None
    speculative_config: Annotated[
        str | None, words(DRAFTS, 'JSON of what drafts: {"method": "mtp", "num_speculative_tokens": 2}.')
    ] = None
    spec_method: Annotated[
        str | None, words(DRAFTS, "Of speculative_config: mtp, eagle3, dflash, draft_model, ngram, ...")
    ] = None
    spec_model: Annotated[
        str | None, words(DRAFTS, "Of speculative_config: the draft's config.json, hub id or name.")
    ] = None
    spec_tokens: Annotated[int | None, whole(DRAFTS, "Of speculative_config: tokens that are drafted in a step.")] = (
        None
    )
    enable_lora: Annotated[bool | None, switch(ADAPTERS, "Room for LoRA adapters.")] = None
    max_loras: Annotated[int | None, whole(ADAPTERS, "Adapters of a step. Default: 1.")] = None
    max_lora_rank: Annotated[int | None, whole(ADAPTERS, "Largest rank of an adapter. Default: 16.")] = None
    lora_dtype: Annotated[str | None, words(ADAPTERS, "auto, float16 or bfloat16. Default: auto.")] = None
    fully_sharded_loras: Annotated[bool | None, switch(ADAPTERS, "Divide both matrices of a layer.")] = None
    cpu_offload_gb: Annotated[float | None, size_of(MEMORY, "GiB of each GPU's weights that stay in the host.")] = None
    offload_group_size: Annotated[int | None, whole(MEMORY, "Layers of a group, the last of which stay there.")] = None
    offload_num_in_group: Annotated[int | None, whole(MEMORY, "Layers of a group that do. Default: 1.")] = None
    offload_prefetch_step: Annotated[int | None, whole(MEMORY, "Layers that are fetched ahead. Default: 1.")] = None
    kv_offloading_size: Annotated[float | None, size_of(MEMORY, "GiB of the host for KV blocks, of all ranks.")] = None
    hf_overrides: Annotated[str | None, words(ENGINE, "JSON: fields of config.json to replace.")] = None
    allow_long_max_model_len: Annotated[
        bool | None, switch(LIMITS, "VLLM_ALLOW_LONG_MAX_MODEL_LEN: max_model_len may be longer than the config's.")
    ] = None
    mamba_cache_dtype: Annotated[str | None, words(ENGINE, "Element type of convolution windows. Default: auto.")] = (
        None
    )
    mamba_block_size: Annotated[
        int | None, whole(ENGINE, "Tokens of a block of states, where nothing else is kept.")
    ] = None
    mamba_ssm_cache_dtype: Annotated[str | None, words(ENGINE, "Element type of recurrent states. Default: auto.")] = (
        None
    )
    quantization: Annotated[
        str | None,
        Option(
            "--quantization",
            "-q",
            metavar="TEXT",
            help="fp8, mxfp8, ...: quantized while loading.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    entry_point: Annotated[str | None, words(LIMITS, "server or llm: their defaults differ. Default: server.")] = None
    vllm_version: Annotated[str | None, words(ENGINE, "0.33 or 0.32. Default: 0.33.")] = None

    gpu: Annotated[
        str | None,
        Option(
            metavar="CARD",
            help="Card, or one for each pipeline stage: H100, or A100-40GB,A100.",
            rich_help_panel=CARD,
        ),
    ] = None
    gpu_memory_gib: Annotated[float | None, measured("Measured: bytes that CUDA reports, in GiB.")] = None
    weights_gib: Annotated[float | None, measured("Measured: weights of a GPU.")] = None
    activation_gib: Annotated[float | None, measured("Measured: activation peak.")] = None
    cuda_graphs_gib: Annotated[float | None, measured("Measured: CUDA graphs.")] = None
    other_gib: Annotated[float | None, measured("Measured: everything else.")] = None

    def given(self) -> tuple[str, ...]:
        """Names of the options here that the user gave."""
        return tuple(name for name in PLANNED_ENGINE_FIELDS if getattr(self, name) is not None)

    def engine_options(self) -> "EngineOptions":
        """ConfigError for values that no engine takes."""
        from dataclasses import fields

        from kvledger.plan.counts import parse_counts
        from kvledger.plan.options import EngineOptions
        from kvledger.plan.speculative import speculative_config

        known = {field.name for field in fields(EngineOptions)}
        values = {name: getattr(self, name) for name in self.given() if name in known}
        if self.pp_layer_partition is not None:
            values["pipeline_layers"] = parse_counts("--pp-layer-partition", self.pp_layer_partition)
        if self.kv_cache_dtype_skip_layers is not None:
            kept = self.kv_cache_dtype_skip_layers.replace(",", " ").split()
            values["kv_cache_dtype_skip_layers"] = tuple(kept)
        values.update(self.graph_options())
        values.pop("speculative_config", None)
        drafts = self.draft_options()
        if drafts:
            values["speculative_config"] = speculative_config(drafts)
        return EngineOptions(**values)

    def graph_options(self) -> dict[str, Any]:
        """What is captured, by compilation_config and by the options that go before its fields."""
        from kvledger.plan.counts import parse_counts

        fields: dict[str, Any] = {}
        if self.compilation_config is not None:
            given = json_object("--compilation-config", self.compilation_config)
            mode, sizes, largest = (
                given.get(name) for name in ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
            )
            fields["cudagraph_mode"] = "" if mode is None else str(mode)
            if isinstance(sizes, list):
                fields["cudagraph_capture_sizes"] = parse_counts("--compilation-config", ",".join(map(str, sizes)))
            if isinstance(largest, int):
                fields["max_cudagraph_capture_size"] = largest
        if self.cudagraph_capture_sizes is not None:
            sizes_text = self.cudagraph_capture_sizes
            fields["cudagraph_capture_sizes"] = parse_counts("--cudagraph-capture-sizes", sizes_text)
        if self.max_cudagraph_capture_size is not None:
            fields["max_cudagraph_capture_size"] = self.max_cudagraph_capture_size
        return fields

    def draft_options(self) -> dict[str, object]:
        """The fields of speculative_config, those of its own options before those of the JSON."""
        text = self.speculative_config
        fields = {} if text is None else dict(json_object("--speculative-config", text))
        for name, value in (
            ("method", self.spec_method), ("model", self.spec_model), ("num_speculative_tokens", self.spec_tokens)
        ):  # fmt: skip
            if value is not None:
                fields[name] = value
        return fields

    def measured_memory(self) -> "MeasuredMemory":
        from kvledger.plan.memory import MeasuredMemory

        def size(gib: float | None) -> int | None:
            return None if gib is None else int(gib * GIB)

        return MeasuredMemory(
            total_bytes=size(self.gpu_memory_gib),
            weight_bytes=size(self.weights_gib),
            activation_bytes=size(self.activation_gib),
            graph_bytes=size(self.cuda_graphs_gib),
            other_bytes=size(self.other_gib),
        )

    def asked(self, model: str | None, remarks: tuple[str, ...] = (), unmodelled: tuple[str, ...] = ()) -> "Asked":
        """The question to the planner."""
        from kvledger.plan.ask import Asked

        return Asked(
            model,
            self.gpu,
            self.vllm_version,
            self.engine_options(),
            self.measured_memory(),
            remarks,
            unmodelled,
            frozenset(self.given()),
            {} if self.hf_overrides is None else json_object("--hf-overrides", self.hf_overrides),
        )


PLANNED_ENGINE_FIELDS: Final = tuple(PlannedEngineOptions.__dataclass_fields__)
