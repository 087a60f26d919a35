"""What a user asked -> plans: one, a sweep over an option, or one for each end of a log's rounding."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kvledger.errors import ConfigError, wrong_value
from kvledger.models.config import with_overrides
from kvledger.models.facts import ModelFacts, model_facts
from kvledger.models.sources import load_config
from kvledger.models.towers import without_towers
from kvledger.plan.counts import parse_count, parse_length, parse_number
from kvledger.plan.gpus import BY_SIZE, Gpu, custom_gpu, find_gpu
from kvledger.plan.memory import NOTHING_MEASURED, MeasuredMemory
from kvledger.plan.options import EngineOptions
from kvledger.plan.plan import Plan, PlanRequest, make_plan
from kvledger.plan.refusal import Refusal, RefusedError
from kvledger.plan.speculative import draft_of
from kvledger.plan.versions import NEWEST_VERSION, VersionRules, unknown_class_note, version_rules
from kvledger.plan.ways_out import ways_out

# The card that decides defaults where the memory is given and no card is.
DEFAULT_GPU = "H100"
# Where the kernels of compressed latents (DeepSeek-V4) run.
COMPRESSED_CAPABILITIES = (9, 10)


@dataclass(frozen=True)
class Asked:
    """A question: model, cards (comma-separated), release, options, measured memory.

    `unmodelled`: options that matter and are not counted. `given`: names of those that the user gave, whatever their
    value. `card`: the card where none is named. `stages`: measured memory of each pipeline stage, where they differ.
    """

    model: str | None
    gpu: str | None
    vllm_version: str | None
    options: EngineOptions
    measured: MeasuredMemory = NOTHING_MEASURED
    remarks: tuple[str, ...] = ()
    unmodelled: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()
    hf_overrides: Mapping[str, object] = field(default_factory=dict)
    card: Gpu | None = None
    stages: tuple[MeasuredMemory, ...] = ()

    def rules(self) -> VersionRules:
        """Of the release that is asked about. ConfigError for one that is not modelled."""
        return version_rules(self.vllm_version or NEWEST_VERSION)


def build_request(asked: Asked) -> PlanRequest:
    """The request. ConfigError when the model or the card is missing or not known."""
    if asked.model is None:
        raise ConfigError("MODEL is missing: give a config.json, a directory, a hub id or a bundled name")
    cards = asked_cards(asked)
    config = load_config(asked.model)
    if asked.hf_overrides:
        config = with_overrides(config, asked.hf_overrides)
    if asked.options.language_model_only:
        config = without_towers(config)
    facts = model_facts(config)
    for note in card_notes(asked, cards, facts):
        config.note(note)
    rules = asked.rules()
    note = unknown_class_note(rules, config.architecture)
    if note:
        config.note(note)
    draft = None
    if asked.options.speculative_config is not None:
        stages = asked.options.pipeline_parallel_size
        draft = draft_of(facts, asked.options.speculative_config, stages=stages, release=rules.name)
    return PlanRequest(facts, asked.options, cards, rules, asked.stages or (asked.measured,), draft=draft)


def asked_cards(asked: Asked) -> tuple[Gpu, ...]:
    """The card of each pipeline stage, or one for all. ConfigError where nothing says how much memory there is."""
    given = asked.measured.total_bytes
    if asked.gpu is None and asked.card is not None:
        return (asked.card,)
    if asked.gpu is None and given is not None:
        return (custom_gpu(given),)
    has_memory = asked.options.kv_cache_memory_bytes is not None or asked.measured.available_bytes is not None
    if asked.gpu is None and not has_memory:
        raise ConfigError(
            "--gpu is missing: give a card (like H100) or its size (like 24GB), --gpu-memory-gib, or "
            "--kv-cache-memory-bytes for the cache alone"
        )
    names = (asked.gpu or DEFAULT_GPU).split(",")
    stages = asked.options.pipeline_parallel_size
    if len(names) not in (1, stages):
        problem = f"{len(names)} cards for {stages} pipeline stages"
        raise wrong_value("--gpu", asked.gpu, problem, "give one card, or one for each stage")
    return tuple(map(find_gpu, names))


def card_notes(asked: Asked, cards: tuple[Gpu, ...], facts: ModelFacts) -> list[str]:
    """What is assumed of the cards, and where they may not do."""
    notes = []
    if asked.gpu is None and asked.card is None and asked.measured.total_bytes is None:
        notes.append(f"no --gpu: batch sizes and kernels are those of an {DEFAULT_GPU}")
    for card in dict.fromkeys(cards):
        capability = card.compute_capability
        if card.source == BY_SIZE:
            notes.append(f"{card.name}: kernels are those of compute capability {capability}; --gpu names one")
        elif card.is_processor:
            notes.append("a CPU server: its memory is the host's; batch sizes and blocks are those of vLLM on CPUs")
        elif not capability:
            notes.append(f"{card.name} is planned with the rules of CUDA cards: its own kernels may want other blocks")
        elif facts.is_compressed and int(capability) not in COMPRESSED_CAPABILITIES:
            kind = facts.config.model_type
            notes.append(f"{card.name}: the kernels of {kind} are for compute capability 9.0 and 10.x")
    return notes


def answer(request: PlanRequest) -> Plan | Refusal:
    """The plan, with the ways out where it does not fit; the refusal alone where the engine would not start."""
    try:
        plan = make_plan(request)
    except RefusedError as refused:
        return replace(refused.refusal, ways_out=ways_out(request, None, refused.refusal))
    if plan.error is None:
        return plan
    return replace(plan, error=replace(plan.error, ways_out=ways_out(request, plan, plan.error)))


@dataclass(frozen=True)
class Sweep:
    """One option and the values to try."""

    key: str
    values: tuple[str, ...]


# Option -> the values that a sweep tries when it is given none.
SWEEP_DEFAULTS = {
    "gpu": "L4,L40S,A100,H100,H200,B200",
    "max-model-len": "8192,32768,131072,262144",
    "tensor-parallel-size": "1,2,4,8",
    "pipeline-parallel-size": "1,2,4",
    "gpu-memory-utilization": "0.80,0.85,0.90,0.92,0.95",
    "kv-cache-dtype": "auto,fp8",
    "block-size": "16,32,64,128",
    "max-num-batched-tokens": "2048,4096,8192,16384",
    "max-num-seqs": "64,128,256,512,1024",
}
SHORT_KEYS = {
    "card": "gpu",
    "cards": "gpu",
    "gpus": "gpu",
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "length": "max-model-len",
    "lengths": "max-model-len",
}


def parse_sweep(text: str) -> Sweep:
    """A sweep given as KEY or KEY=VALUE,VALUE. ConfigError lists the keys."""
    key, _, values = text.partition("=")
    key = key.strip().removeprefix("--").replace("_", "-")
    key = SHORT_KEYS.get(key, key)
    if key not in SWEEP_DEFAULTS:
        raise wrong_value("--sweep", text, "not an option that can be swept", "use one of " + ", ".join(SWEEP_DEFAULTS))
    return Sweep(key, tuple(value.strip() for value in (values or SWEEP_DEFAULTS[key]).split(",") if value.strip()))


def swept(asked: Asked, key: str, value: str) -> Asked:
    """The question with one option changed."""
    options = asked.options
    changes: dict[str, Callable[[], EngineOptions]] = {
        "max-model-len": lambda: replace(options, max_model_len=parse_length("--max-model-len", value)),
        "tensor-parallel-size": lambda: replace(
            options, tensor_parallel_size=parse_count("--tensor-parallel-size", value)
        ),
        "pipeline-parallel-size": lambda: replace(
            options, pipeline_parallel_size=parse_count("--pipeline-parallel-size", value)
        ),
        "gpu-memory-utilization": lambda: replace(
            options, gpu_memory_utilization=parse_number("--gpu-memory-utilization", value)
        ),
        "kv-cache-dtype": lambda: replace(options, kv_cache_dtype=value),
        "block-size": lambda: replace(options, block_size=parse_count("--block-size", value)),
        "max-num-seqs": lambda: replace(options, max_num_seqs=parse_count("--max-num-seqs", value)),
        "max-num-batched-tokens": lambda: replace(
            options, max_num_batched_tokens=parse_count("--max-num-batched-tokens", value)
        ),
    }
    if key == "gpu":
        return replace(asked, gpu=value)
    return replace(asked, options=changes[key]())


def run_sweep(asked: Asked, sweep: Sweep) -> list[tuple[str, Plan | Refusal]]:
    """A plan or a refusal for each value, without ways out."""
    rows: list[tuple[str, Plan | Refusal]] = []
    for value in sweep.values:
        request = build_request(swept(asked, sweep.key, value))
        try:
            rows.append((value, make_plan(request)))
        except RefusedError as refused:
            rows.append((value, refused.refusal))
    return rows
