"""Layout files: the groups of a KV cache as a small JSON object, written by hand.

    {"groups": [{"kind": "full", "layers": 8},
                {"kind": "window", "layers": 8, "count": 3, "window": 1024}]}

A group is `layers` layers that share block tables; `count` (default 1) makes that many groups of it. Which fields a
kind has: FIELDS. What is left out is the model's: block_size, num_kv_heads, head_size, dtype. Numbers are those of the
whole model; ranks share heads and states as they share the model's. All groups take blocks from one pool, so a block
is as large as the largest group needs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Final

import msgspec

from kvledger.core.groups.spec import KVCacheGroupSpec, KVCacheSpec, MambaSpec
from kvledger.core.units import cdiv
from kvledger.errors import ConfigError
from kvledger.files.decoding import decode, describe
from kvledger.models.layers import AttentionCache, CacheSettings, LatentCache, LayerCache
from kvledger.plan.plan import Plan
from kvledger.replay.layout import MAX_BLOCK_BYTES, MAX_GROUPS, MAX_LAYERS, NO_LIMIT, InputError, KVLayout
from kvledger.replay.step_time import AttentionWork, StepWork

_Tokens = Annotated[int, msgspec.Meta(ge=1, le=NO_LIMIT)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
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


@dataclass(frozen=True)
class ReplacedModel:
    """The planned model whose layers a file replaces. `num_heads`: query heads; 0 heads where it has no plain
    attention, so that a file must give them.
    """

    cache: CacheSettings
    num_heads: int
    num_kv_heads: int = 0
    head_size: int = 0

    @classmethod
    def of(cls, plan: Plan) -> "ReplacedModel":
        attention = [layer.cache for layer in plan.facts.layers if isinstance(layer.cache, AttentionCache)]
        heads = (attention[0].num_kv_heads, attention[0].head_size) if attention else (0, 0)
        return cls(plan.settings.cache, plan.facts.num_attention_heads, *heads)


class GroupEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of "groups"."""

    kind: str
    layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)] = 1
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_GROUPS)] = 1
    block_size: _Size | None = None
    window: _Tokens | None = None
    chunk: _Tokens | None = None
    num_kv_heads: _Size | None = None
    head_size: _Size | None = None
    dtype: str | None = None
    state_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_BYTES)] | None = None
    cache_mode: str | None = None

    def spec(self, model: ReplacedModel) -> KVCacheSpec:
        """The spec of each of its layers on one rank."""
        cache = replace(
            model.cache,
            block_size=self.block_size or model.cache.block_size,
            cache_dtype=self.dtype or model.cache.cache_dtype,
        )
        if self.kind == "state":
            return self._state(cache)
        return _CACHES[self.kind](self, model).spec(cache)

    def _state(self, cache: CacheSettings) -> MambaSpec:
        # Only its bytes matter here, so the state is one row of them.
        shapes = ((cdiv(self.state_bytes or 0, cache.tensor_parallel_size),),)
        return MambaSpec(cache.block_size, shapes, ("uint8",), mamba_cache_mode=self.cache_mode or "align")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    groups: Annotated[list[GroupEntry], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]


_DECODER: Final = msgspec.json.Decoder(_File)


def read_layout(text: bytes, where: str, model: ReplacedModel, work: StepWork) -> tuple[KVLayout, StepWork]:
    """The layout of a file, and what a step costs with the model's weights and these layers' attention."""
    try:
        entries = decode(_DECODER, text).groups
    except msgspec.DecodeError as error:
        field, problem = describe(error)
        named = f", field {field}" if field else ""
        raise InputError(f'{where}{named}: {problem}; see "Layout files" in docs/replay.md') from None
    _require_few(where, entries)
    groups: list[KVCacheGroupSpec] = []
    attention: list[AttentionWork] = []
    state_bytes = 0
    for index, entry in enumerate(entries):
        _require_sound(f"{where}, field groups[{index}]", entry, model)
        try:
            spec = entry.spec(model)
        except ConfigError as error:
            raise InputError(f"{where}, field groups[{index}]: {error}") from None
        for _ in range(entry.count):
            names = tuple(f"group.{len(groups)}.layer.{layer}" for layer in range(entry.layers))
            groups.append(KVCacheGroupSpec(names, spec))
        num_layers = entry.layers * entry.count
        if entry.kind == "state":
            state_bytes += num_layers * (entry.state_bytes or 0)
        else:
            attention.append(_attention_work(entry, spec, num_layers, model))
    sizes = tuple(group.page_size_bytes for group in groups)
    replaced = msgspec.structs.replace(work, attention=tuple(attention), state_bytes=state_bytes)
    return KVLayout(tuple(groups), max(sizes), sizes), replaced


def _require_few(where: str, entries: list[GroupEntry]) -> None:
    num_groups = sum(entry.count for entry in entries)
    num_layers = sum(entry.count * entry.layers for entry in entries)
    for field, number, most in (("count", num_groups, MAX_GROUPS), ("layers", num_layers, MAX_LAYERS)):
        if number > most:
            raise InputError(f"{where}, field {field}: {number:,} in all groups, and {most:,} are the most")


def _require_sound(where: str, entry: GroupEntry, model: ReplacedModel) -> None:
    allowed = FIELDS.get(entry.kind)
    if allowed is None:
        raise InputError(f"{where}.kind: {entry.kind!r} is not a kind of group; use one of {', '.join(FIELDS)}")
    for name in ("window", "chunk", "num_kv_heads", "head_size", "dtype", "state_bytes", "cache_mode"):
        if getattr(entry, name) is not None and name not in allowed:
            raise InputError(f"{where}.{name}: not a field of kind {entry.kind}, which takes {', '.join(allowed)}")
    needed = _NEEDED.get(entry.kind)
    if needed is not None and getattr(entry, needed) is None:
        raise InputError(f"{where}.{needed}: missing; kind {entry.kind} needs it")
    if "num_kv_heads" in allowed:
        for name in ("num_kv_heads", "head_size"):
            if not (getattr(entry, name) or getattr(model, name)):
                raise InputError(f"{where}.{name}: missing, and the model has no plain attention to take it from")


def _attention_work(entry: GroupEntry, spec: KVCacheSpec, num_layers: int, model: ReplacedModel) -> AttentionWork:
    """Over all ranks: what every rank keeps whole is read on each."""
    size = entry.head_size or (_LATENT_SIZE if entry.kind.startswith("mla") else model.head_size)
    flops = 4 * num_layers * model.num_heads * size
    per_token = num_layers * spec.page_size_bytes * model.cache.tensor_parallel_size / spec.block_size
    return AttentionWork(flops, per_token, window=entry.window or 0, chunk=entry.chunk or 0)


def _attention(entry: GroupEntry, model: ReplacedModel) -> LayerCache:
    return AttentionCache(
        entry.num_kv_heads or model.num_kv_heads,
        entry.head_size or model.head_size,
        window=entry.window or 0,
        chunk=entry.chunk or 0,
    )


def _latent(entry: GroupEntry, model: ReplacedModel) -> LayerCache:
    return LatentCache(entry.head_size or _LATENT_SIZE, window=entry.window or 0)


_CACHES: Final[dict[str, Callable[[GroupEntry, ReplacedModel], LayerCache]]] = {
    "full": _attention,
    "window": _attention,
    "chunked": _attention,
    "mla": _latent,
    "mla_window": _latent,
}
