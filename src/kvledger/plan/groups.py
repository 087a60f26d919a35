"""Layers -> groups that share a block table, all with the same bytes for a block, as vLLM forms them.

1. All alike: one group. 2. Alike in the tokens that they need, different in bytes: one group with a spec each.
3. Otherwise pages are made equal (bigger blocks, or padding), like layers are put into buckets, and buckets are cut
   into groups of one size: the smallest bucket, or the largest where that is under 1.5 times the smallest. Layers are
   dealt out in turn, so every pipeline stage gets its part of each group. What is missing to a full group is padding.
4. Models whose pages are packed side by side inside a block (DeepSeek-V4) skip the equal pages.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvledger.core.groups.spec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvledger.core.units import cdiv
from kvledger.errors import ConfigError
from kvledger.plan.refusal import NO_PROMOTION, RefusedError

Specs = Mapping[str, KVCacheSpec]
# Largest bucket under this many times the smallest: pad the smallest instead of cutting the largest.
PAD_INSTEAD_OF_CUT = 1.5


@dataclass(frozen=True)
class GroupLayout:
    """The groups of a model. `packed`: pages of different size lie side by side in a block."""

    groups: tuple[KVCacheGroupSpec, ...]
    packed: bool = False

    @property
    def group_size(self) -> int:
        return max(len(group.layer_names) for group in self.groups) if self.groups else 0

    def bytes_per_block(self, stage: Specs | None = None) -> int:
        """Bytes of one block: what the largest group needs on the worker with the layers of `stage` (None: all)."""
        return max((group_bytes(group, stage) for group in self.groups), default=0)

    def padding_layers(self) -> int:
        """Layers that are allocated and do not exist, over all groups."""
        if self.packed or len(self.groups) < 2:
            return 0
        return sum(self.group_size - len(group.layer_names) for group in self.groups)


def group_bytes(group: KVCacheGroupSpec, stage: Specs | None) -> int:
    """Bytes of one block of the group's layers that are on that worker."""
    specs = group.layer_specs or (group.spec,) * len(group.layer_names)
    return sum(
        spec.page_size_bytes
        for name, spec in zip(group.layer_names, specs, strict=True)
        if stage is None or name in stage
    )


def group_layers(
    specs: Specs, *, hybrid_manager: bool = True, packed: bool = False, group_size: int = 0
) -> GroupLayout:
    """Groups of these layers. `group_size` 0: vLLM's rule.

    RefusedError when the hybrid manager is off and the layers cannot be stored alike.
    """
    if not specs:
        return GroupLayout(())
    if not hybrid_manager:
        specs = promote_local(specs)
    if len({bucket_key(spec) for spec in specs.values()}) == 1:
        return GroupLayout((KVCacheGroupSpec(tuple(specs), merged(list(specs.values()))),))
    if need_same_blocks(list(specs.values())):
        return GroupLayout((uniform_group(specs),))
    if packed:
        return packed_layout(specs)
    try:
        specs = equal_pages(specs)
    except ConfigError:
        full = full_allocation(specs)
        if full is None:
            raise
        return GroupLayout((uniform_group(full),))
    return GroupLayout(equal_groups(specs, group_size))


def full_allocation(specs: Specs) -> dict[str, KVCacheSpec] | None:
    """Windows stored like full layers, which vLLM falls back to where latents have no page in common with them.

    None where that is no way out: chunked or latent windows, states, or other block sizes.
    """
    kinds = {type(spec) for spec in specs.values()}
    if not kinds >= {MLAAttentionSpec, SlidingWindowSpec} or ChunkedLocalAttentionSpec in kinds:
        return None
    promoted = {name: promoted_spec(spec) for name, spec in specs.items()}
    return promoted if need_same_blocks(list(promoted.values())) else None


def uniform_group(specs: Specs) -> KVCacheGroupSpec:
    members = tuple(specs.values())
    same = len({spec.page_size_bytes for spec in members}) == 1 and len(set(members)) == 1
    return KVCacheGroupSpec(tuple(specs), members[0], () if same else members)


def bucket_key(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec without what two layers of one bucket may differ in: the window that a full layer does not use."""
    if isinstance(spec, FullAttentionSpec):
        return replace(spec, sliding_window=0, attention_chunk_size=0)
    return spec


def merged(specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
    """One spec for a bucket: the window or chunk that some of its layers have is kept, so nobody forgets it."""
    first = specs[0]
    if not isinstance(first, FullAttentionSpec):
        return first
    full = [spec for spec in specs if isinstance(spec, FullAttentionSpec)]
    windows = max(spec.sliding_window for spec in full)
    return replace(first, sliding_window=windows, attention_chunk_size=max(spec.attention_chunk_size for spec in full))


def need_same_blocks(specs: Sequence[KVCacheSpec]) -> bool:
    """Whether one block table serves all: same block size and the same rule for which tokens stay."""
    return len({(spec.block_size, retention(spec)) for spec in specs}) == 1


def retention(spec: KVCacheSpec) -> tuple[object, ...]:
    """What decides how many blocks a layer needs, apart from its block size."""
    match spec:
        case SlidingWindowMLASpec():
            return ("window", spec.sliding_window, "latent")
        case SlidingWindowSpec():
            return ("window", spec.sliding_window)
        case ChunkedLocalAttentionSpec():
            return ("chunk", spec.attention_chunk_size)
        case CrossAttentionSpec():
            return ("encoder", spec.max_encoder_tokens)
        case MambaSpec():
            return ("state", spec.page_size_bytes, spec.num_speculative_blocks, spec.num_prefill_checkpoint_blocks)
        case FullAttentionSpec() | MLAAttentionSpec():
            return ("full",)
    return (type(spec),)


def promote_local(specs: Specs) -> dict[str, KVCacheSpec]:
    """Stores windowed and chunked layers like full ones, because the hybrid manager is off. The window stays known."""
    if len({bucket_key(spec) for spec in specs.values()}) == 1 or need_same_blocks(list(specs.values())):
        return dict(specs)
    has_full = any(isinstance(spec, FullAttentionSpec | MLAAttentionSpec) for spec in specs.values())
    promoted = {name: promoted_spec(spec) if has_full else spec for name, spec in specs.items()}
    if not need_same_blocks(list(promoted.values())):
        kinds = ", ".join(sorted({type(spec).__name__ for spec in promoted.values()}))
        raise RefusedError(
            NO_PROMOTION,
            f"Failed to promote local KV cache specs to one unified type. The hybrid KV cache manager is off and the "
            f"model has {kinds}; leave --disable-hybrid-kv-cache-manager (or the KV connector that implies it) out",
        )
    return promoted


def promoted_spec(spec: KVCacheSpec) -> KVCacheSpec:
    if isinstance(spec, SlidingWindowSpec):
        return FullAttentionSpec(
            spec.block_size, spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.dtype, spec.page_size_padded,
            sliding_window=spec.sliding_window,
        )  # fmt: skip
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return FullAttentionSpec(
            spec.block_size, spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.dtype, spec.page_size_padded,
            attention_chunk_size=spec.attention_chunk_size,
        )  # fmt: skip
    return spec


def equal_pages(specs: Specs) -> dict[str, KVCacheSpec]:
    """The same layers with pages of equal bytes: blocks grow where that works out, else pages are padded."""
    largest = max(spec.page_size_bytes for spec in specs.values())
    return {name: with_page(name, spec, largest) for name, spec in specs.items()}


def with_page(name: str, spec: KVCacheSpec, page_bytes: int) -> KVCacheSpec:
    if spec.page_size_bytes == page_bytes:
        return spec
    if isinstance(spec, MambaSpec):
        return replace(spec, page_size_padded=page_bytes)
    if page_bytes % spec.page_size_bytes == 0:
        return replace(spec, block_size=spec.block_size * (page_bytes // spec.page_size_bytes))
    if isinstance(spec, AttentionSpec):
        return replace(spec, page_size_padded=page_bytes)
    raise ConfigError(
        f"{name}: a page of {spec.page_size_bytes:,} bytes does not divide the largest of {page_bytes:,}, and latents "
        "cannot be padded; use another --block-size or --kv-cache-dtype"
    )


def buckets_of(specs: Specs) -> list[list[str]]:
    """Names of like layers, buckets in the order of their first layer."""
    buckets: dict[KVCacheSpec, list[str]] = defaultdict(list)
    for name, spec in specs.items():
        buckets[bucket_key(spec)].append(name)
    return list(buckets.values())


def vllm_group_size(sizes: Sequence[int]) -> int:
    """Layers of a group by vLLM's rule, from the sizes of the buckets."""
    return max(sizes) if max(sizes) < min(sizes) * PAD_INSTEAD_OF_CUT else min(sizes)


def equal_groups(specs: Specs, group_size: int = 0) -> tuple[KVCacheGroupSpec, ...]:
    buckets = buckets_of(specs)
    size = group_size or vllm_group_size([len(bucket) for bucket in buckets])
    groups = []
    for bucket in buckets:
        count = cdiv(len(bucket), size)
        for start in range(count):
            names = bucket[start::count]
            groups.append(KVCacheGroupSpec(tuple(names), merged([specs[name] for name in names])))
    return tuple(groups)


def packed_layout(specs: Specs) -> GroupLayout:
    """Groups whose pages of different size are packed into one block, as few repeats apart as possible.

    A bucket holds the layers that need the same blocks. Where it has as many layers of each page size, those form a
    pattern that may be cut after any repeat; other buckets stay whole.
    """
    buckets: dict[tuple[object, ...], dict[str, KVCacheSpec]] = defaultdict(dict)
    for name, spec in specs.items():
        buckets[(spec.block_size, *retention(spec))][name] = spec
    repeats = packed_repeats(list(buckets.values()))
    groups: list[KVCacheGroupSpec] = []
    for bucket in buckets.values():
        by_page = layers_by_page(bucket)
        count = cdiv(len(by_page[0]), repeats) if repeats and is_balanced(by_page) else 1
        if count == 1:
            groups.append(uniform_group(bucket))
            continue
        pattern = list(zip(*by_page, strict=True))
        for start in range(count):
            names = [name for repeat in pattern[start::count] for name in repeat]
            groups.append(uniform_group({name: bucket[name] for name in names}))
    return GroupLayout(tuple(groups), packed=True)


def layers_by_page(bucket: Specs) -> list[list[str]]:
    by_page: dict[int, list[str]] = defaultdict(list)
    for name, spec in bucket.items():
        by_page[spec.page_size_bytes].append(name)
    return list(by_page.values())


def is_balanced(by_page: Sequence[Sequence[str]]) -> bool:
    return len(set(map(len, by_page))) == 1


def packed_repeats(buckets: Sequence[Specs]) -> int:
    """Repeats of a pattern in one group: what pads least, not under the largest pattern that stays whole."""
    balanced = [by_page for bucket in buckets if is_balanced(by_page := layers_by_page(bucket))]
    floor = max((len(by_page[0]) for by_page in balanced if len(by_page) > 1), default=0)
    if not floor:
        return 0
    lengths = [len(by_page[0]) for by_page in balanced]
    candidates = range(floor, max(lengths) + 1)
    return min(candidates, key=lambda size: (sum(-length % size for length in lengths), -size))
