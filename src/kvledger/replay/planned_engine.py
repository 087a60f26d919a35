"""PlannedEngine: what `kvledger plan --json` says of an engine, read back as a layout and its limits."""

from dataclasses import fields
from typing import Annotated, Final, get_type_hints

import msgspec

from kvledger.core.groups import spec as specs
from kvledger.core.groups.spec import CrossAttentionSpec, KVCacheGroupSpec, KVCacheSpec
from kvledger.errors import ConfigError
from kvledger.files.decoding import decode, describe
from kvledger.replay.layout import MAX_BLOCK_BYTES, MAX_GROUPS, MAX_LAYERS, NO_LIMIT, InputError, KVLayout
from kvledger.replay.step_time import StepWork

_Positive = Annotated[int, msgspec.Meta(ge=1, le=NO_LIMIT)]
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
_Drafts = Annotated[int, msgspec.Meta(ge=0, le=1 << 10)]

# Every kind of group that a plan can have.
_SPECS: Final[dict[str, type[KVCacheSpec]]] = {
    kind.__name__: kind
    for kind in vars(specs).values()
    if isinstance(kind, type) and issubclass(kind, KVCacheSpec) and kind is not KVCacheSpec
}


class PlannedGroup(msgspec.Struct):
    layer_names: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_LAYERS)]
    bytes_per_block: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_BYTES)]
    spec: dict[str, object]


class PlannedError(msgspec.Struct):
    kind: str
    message: str
    ways_out: list[str] = []


class PlannedDraft(msgspec.Struct):
    """What drafts beside the model. `lookahead_slots`: that every request has reserved behind its tokens."""

    method: str
    num_tokens: _Drafts
    lookahead_slots: _Drafts
    reads_hidden_states: bool


class PlannedEngine(msgspec.Struct):
    """The fields of a plan that matter here; the others are passed over."""

    model: str
    num_blocks: int
    max_model_len: _Positive
    bytes_per_block: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_BYTES)]
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    max_num_batched_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    max_in_flight_tokens: _Positive
    enable_prefix_caching: bool
    groups: Annotated[list[PlannedGroup], msgspec.Meta(max_length=MAX_GROUPS)]
    gpu: Annotated[list[str], msgspec.Meta(min_length=1)]
    vllm_version: str
    work: StepWork | None = None
    tensor_parallel_size: _Ranks = 1
    pipeline_parallel_size: _Ranks = 1
    data_parallel_size: _Ranks = 1
    prefill_context_parallel_size: _Ranks = 1
    decode_context_parallel_size: _Ranks = 1
    num_blocks_low: int | None = None
    num_blocks_high: int | None = None
    notes: list[str] = []
    error: PlannedError | None = None
    draft: PlannedDraft | None = None

    @property
    def block_range(self) -> str:
        """The range of num_blocks where the memory is an estimate, else nothing."""
        low, high = self.num_blocks_low, self.num_blocks_high
        return "" if low is None or high is None or low == high else f"{low:,} to {high:,}"

    @property
    def num_gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size

    def layout(self) -> KVLayout:
        """InputError for a model that a trace of prompts cannot serve."""
        groups = tuple(_group(index, group) for index, group in enumerate(self.groups))
        if not groups:
            raise InputError(f"{self.model}: keeps no KV cache between steps (an encoder), so nothing can be replayed")
        if any(isinstance(group.spec, CrossAttentionSpec) for group in groups):
            raise InputError(
                f"{self.model}: its cross attention keeps what an encoder made of audio, images or a source text, and "
                "a trace says nothing of that; replay a decoder, or describe the decoder's layers in a --layout file"
            )
        return KVLayout(
            groups,
            self.bytes_per_block,
            tuple(group.bytes_per_block for group in self.groups),
            self.max_in_flight_tokens,
            self.decode_context_parallel_size,
        )


_DECODER: Final = msgspec.json.Decoder(PlannedEngine)


def read_plan(text: bytes, where: str) -> PlannedEngine:
    """The engine of a plan's JSON. InputError names the field that is missing or wrong."""
    try:
        planned = decode(_DECODER, text)
        if planned.groups and planned.work is None:
            raise InputError(f"{where}, field work: missing; make the plan again with this version")
        return planned
    except msgspec.DecodeError as error:
        refusal = _refusal(text)
        if refusal is not None:
            raise InputError(f"{where}: this plan is a refusal: {refusal}") from None
        field, problem = describe(error)
        named = f", field {field}" if field else ""
        raise InputError(
            f"{where}{named}: {problem}; give the output of `kvledger plan MODEL --gpu CARD --json`"
        ) from None


def _refusal(text: bytes) -> str | None:
    """The message of a plan without numbers."""

    class Refused(msgspec.Struct):
        error: PlannedError

    try:
        return decode(msgspec.json.Decoder(Refused), text).error.message
    except msgspec.DecodeError:
        return None


def _group(index: int, group: PlannedGroup) -> KVCacheGroupSpec:
    kind = group.spec.get("type")
    spec_class = _SPECS.get(kind) if isinstance(kind, str) else None
    if spec_class is None:
        known = ", ".join(_SPECS)
        raise InputError(f"groups[{index}].spec.type={kind!r}: not a kind of group; use one of {known}")
    known_fields = {field.name for field in fields(spec_class)}
    unknown = sorted(group.spec.keys() - known_fields - {"type"})
    if unknown:
        raise InputError(f"groups[{index}].spec.{unknown[0]}: {kind} has no such field")
    values = {
        name: _value(f"groups[{index}].spec.{name}", spec_class, name, value)
        for name, value in group.spec.items()
        if name != "type"
    }
    try:
        spec = spec_class(**values)  # type: ignore[arg-type]
    except (TypeError, ConfigError) as error:
        raise InputError(f"groups[{index}].spec: {error}") from None
    return KVCacheGroupSpec(tuple(group.layer_names), spec)


def _value(where: str, spec_class: type[KVCacheSpec], name: str, value: object) -> object:
    """A field of a spec, of its type and within what a pool can have."""
    try:
        converted: object = msgspec.convert(_tuples(value), get_type_hints(spec_class)[name])
    except msgspec.ValidationError as error:
        field, problem = describe(error)
        raise InputError(f"{where}{field}: {problem}") from None
    if not all(abs(number) <= MAX_BLOCK_BYTES for number in _numbers(converted)):
        raise InputError(f"{where}: expected numbers up to {MAX_BLOCK_BYTES:,}")
    return converted


def _numbers(value: object) -> list[float]:
    if isinstance(value, tuple):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, int | float) else []


def _tuples(value: object) -> object:
    """JSON lists as the tuples that specs are made of."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
