"""Layout files: the groups of a KV cache as a small JSON object, written by hand.

    {"groups": [{"kind": "full", "layers": 8},
                {"kind": "window", "layers": 8, "count": 3, "window": 1024}]}

A group is `layers` layers that share block tables; `count` (default 1) makes that many groups of it. Which fields a
kind has: FIELDS. What is left out comes from the command's options: block_size, num_kv_heads, head_size, dtype.
All groups take blocks from one pool, so a block is as large as the largest group needs.
"""

from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from kvledger.core.groups.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvledger.errors import ConfigError
from kvledger.replay.layout import InputError, KVLayout
from kvledger.replay.step_time import AttentionWork, ModelShape, StepWork
from kvledger.traces.reader import describe

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Attention: Final = ("num_kv_heads", "head_size", "dtype")

# Kind -> the fields that it takes besides kind, layers, count and block_size.
FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "full": _Attention,
    "window": ("window", *_Attention),
    "chunked": ("chunk", *_Attention),
    "mla": ("head_size", "dtype"),
    "mla_window": ("window", "head_size", "dtype"),
    "state": ("state_bytes", "cache_mode"),
}
_NEEDED: Final = {"window": "window", "chunked": "chunk", "mla_window": "window", "state": "state_bytes"}
# DeepSeek-V3's latent vector: 512 values and 64 rotary ones.
_LATENT_SIZE: Final = 576


class GroupEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of "groups"."""

    kind: str
    layers: _Positive = 1
    count: _Positive = 1
    block_size: _Positive | None = None
    window: _Positive | None = None
    chunk: _Positive | None = None
    num_kv_heads: _Positive | None = None
    head_size: _Positive | None = None
    dtype: str | None = None
    state_bytes: _Positive | None = None
    cache_mode: str | None = None

    def spec(self, block_size: int, shape: ModelShape) -> KVCacheSpec:
        """The spec of each of its layers."""
        return _MAKERS[self.kind](self, self.block_size or block_size, shape)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    groups: Annotated[list[GroupEntry], msgspec.Meta(min_length=1)]


def read_layout(text: bytes, where: str, block_size: int, shape: ModelShape) -> tuple[KVLayout, StepWork]:
    """The layout of a file, and what a step costs with the shape's weights and these layers' attention."""
    try:
        entries = msgspec.json.decode(text, type=_File).groups
    except msgspec.DecodeError as error:
        field, problem = describe(error)
        named = f", field {field}" if field else ""
        raise InputError(f'{where}{named}: {problem}; see "Layout files" in docs/replay.md') from None
    groups: list[KVCacheGroupSpec] = []
    attention: list[AttentionWork] = []
    state_bytes = 0
    for index, entry in enumerate(entries):
        _require_sound(f"{where}, field groups[{index}]", entry)
        try:
            spec = entry.spec(block_size, shape)
        except ConfigError as error:
            raise InputError(f"{where}, field groups[{index}]: {error}") from None
        for _ in range(entry.count):
            names = tuple(f"group.{len(groups)}.layer.{layer}" for layer in range(entry.layers))
            groups.append(KVCacheGroupSpec(names, spec))
        num_layers = entry.layers * entry.count
        if entry.kind == "state":
            state_bytes += num_layers * (entry.state_bytes or 0)
        else:
            attention.append(_attention_work(entry, spec, num_layers, shape))
    sizes = tuple(group.page_size_bytes for group in groups)
    parameters = shape.num_parameters
    work = StepWork(parameters, parameters, shape.weight_bytes, attention=tuple(attention), state_bytes=state_bytes)
    return KVLayout(tuple(groups), max(sizes), sizes), work


def _require_sound(where: str, entry: GroupEntry) -> None:
    allowed = FIELDS.get(entry.kind)
    if allowed is None:
        raise InputError(f"{where}.kind: {entry.kind!r} is not a kind of group; use one of {', '.join(FIELDS)}")
    for name in ("window", "chunk", "num_kv_heads", "head_size", "dtype", "state_bytes", "cache_mode"):
        if getattr(entry, name) is not None and name not in allowed:
            raise InputError(f"{where}.{name}: not a field of kind {entry.kind}, which takes {', '.join(allowed)}")
    needed = _NEEDED.get(entry.kind)
    if needed is not None and getattr(entry, needed) is None:
        raise InputError(f"{where}.{needed}: missing; kind {entry.kind} needs it")


def _attention_work(entry: GroupEntry, spec: KVCacheSpec, num_layers: int, shape: ModelShape) -> AttentionWork:
    flops = 4 * num_layers * shape.num_heads * (entry.head_size or shape.head_size)
    per_token = num_layers * spec.page_size_bytes / spec.block_size
    return AttentionWork(flops, per_token, window=entry.window or 0, chunk=entry.chunk or 0)


def _full(entry: GroupEntry, block_size: int, shape: ModelShape) -> KVCacheSpec:
    return FullAttentionSpec(block_size, *_heads(entry, shape), dtype=entry.dtype or shape.kv_dtype)


def _window(entry: GroupEntry, block_size: int, shape: ModelShape) -> KVCacheSpec:
    dtype = entry.dtype or shape.kv_dtype
    return SlidingWindowSpec(block_size, *_heads(entry, shape), dtype=dtype, sliding_window=entry.window or 0)


def _chunked(entry: GroupEntry, block_size: int, shape: ModelShape) -> KVCacheSpec:
    dtype = entry.dtype or shape.kv_dtype
    return ChunkedLocalAttentionSpec(
        block_size, *_heads(entry, shape), dtype=dtype, attention_chunk_size=entry.chunk or 0
    )


def _mla(entry: GroupEntry, block_size: int, shape: ModelShape) -> KVCacheSpec:
    return MLAAttentionSpec(block_size, entry.head_size or _LATENT_SIZE, entry.dtype or shape.kv_dtype)


def _mla_window(entry: GroupEntry, block_size: int, shape: ModelShape) -> KVCacheSpec:
    size, dtype = entry.head_size or _LATENT_SIZE, entry.dtype or shape.kv_dtype
    return SlidingWindowMLASpec(block_size, size, dtype, sliding_window=entry.window or 0)


def _state(entry: GroupEntry, block_size: int, shape: ModelShape) -> KVCacheSpec:
    # Only its bytes matter here, so the state is one row of them.
    shapes = ((entry.state_bytes or 0,),)
    return MambaSpec(block_size, shapes, ("uint8",), mamba_cache_mode=entry.cache_mode or "align")


def _heads(entry: GroupEntry, shape: ModelShape) -> tuple[int, int]:
    return entry.num_kv_heads or shape.num_kv_heads, entry.head_size or shape.head_size


_MAKERS: Final[dict[str, Callable[[GroupEntry, int, ModelShape], KVCacheSpec]]] = {
    "full": _full,
    "window": _window,
    "chunked": _chunked,
    "mla": _mla,
    "mla_window": _mla_window,
    "state": _state,
}
