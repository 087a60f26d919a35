"""Group layouts for both sides: the shapes of real models, and random ones."""

import random
from dataclasses import dataclass, field, replace
from math import gcd, lcm

import torch
from vllm.v1 import kv_cache_interface as theirs

import kvledger.core.groups.spec as ours
from kvledger import KVCacheConfig, KVCacheGroupSpec


@dataclass(frozen=True)
class Group:
    """One KV cache group, named by vLLM's kind, with only what decides about blocks."""

    kind: str
    block_size: int
    window: int = 0
    extra: int = 0
    num_speculative: int = 0
    checkpoint_alignment: int = 0
    heads: int = 1
    is_draft: bool = False

    def our_spec(self) -> ours.KVCacheSpec:
        size = self.block_size
        match self.kind:
            case "full":
                return ours.FullAttentionSpec(size, self.heads, 8, dtype="float16")
            case "mla":
                return ours.MLAAttentionSpec(size, 8, dtype="float16")
            case "sink":
                return ours.SinkFullAttentionSpec(size, self.heads, 8, dtype="float16", sink_len=size)
            case "window":
                return ours.SlidingWindowSpec(
                    size, self.heads, 8, dtype="float16", sliding_window=self.window, extra_retained_tokens=self.extra
                )
            case "window_mla":
                return ours.SlidingWindowMLASpec(size, 8, dtype="float16", sliding_window=self.window)
            case "chunked":
                return ours.ChunkedLocalAttentionSpec(
                    size, self.heads, 8, dtype="float16", attention_chunk_size=self.window
                )
            case "cross":
                return ours.CrossAttentionSpec(size, self.heads, 8, dtype="float16", max_encoder_tokens=64)
            case "ring":
                return ours.CircularBufferSpec(size, self.heads, 8, dtype="float16")
        return ours.MambaSpec(
            size,
            ((self.heads, 4),),
            ("float32",),
            mamba_cache_mode=self.kind.removeprefix("mamba_"),
            num_speculative_blocks=self.num_speculative,
            num_prefill_checkpoint_blocks=1 if self.checkpoint_alignment else 0,
            prefill_checkpoint_alignment=self.checkpoint_alignment,
        )

    def their_spec(self) -> theirs.KVCacheSpec:
        common = {"block_size": self.block_size, "num_kv_heads": self.heads, "head_size": 8, "dtype": torch.float16}
        match self.kind:
            case "full":
                return theirs.FullAttentionSpec(**common)
            case "mla":
                return theirs.MLAAttentionSpec(**{**common, "num_kv_heads": 1})
            case "sink":
                return theirs.SinkFullAttentionSpec(**common, sink_len=self.block_size)
            case "window":
                return theirs.SlidingWindowSpec(**common, sliding_window=self.window, extra_retained_tokens=self.extra)
            case "window_mla":
                return theirs.SlidingWindowMLASpec(**{**common, "num_kv_heads": 1}, sliding_window=self.window)
            case "chunked":
                return theirs.ChunkedLocalAttentionSpec(**common, attention_chunk_size=self.window)
            case "cross":
                return theirs.CrossAttentionSpec(**common)
            case "ring":
                return theirs.CircularBufferSpec(**common)
        return theirs.MambaSpec(
            block_size=self.block_size,
            shapes=((self.heads, 4),),
            dtypes=(torch.float32,),
            mamba_cache_mode=self.kind.removeprefix("mamba_"),
            num_speculative_blocks=self.num_speculative,
            num_prefill_checkpoint_blocks=1 if self.checkpoint_alignment else 0,
            prefill_checkpoint_alignment=self.checkpoint_alignment or None,
        )


@dataclass(frozen=True)
class Layout:
    """A ledger's groups and rules."""

    name: str
    groups: tuple[Group, ...]
    enable_caching: bool = True
    num_draft_lookahead: int = 0  # 0: no draft
    retention_interval: int | None = None
    pins_shared_prefix: bool = False
    context_parallel_size: int = 1
    hash_block_size: int = 0
    max_in_flight_tokens: int | None = None
    notes: str = field(default="", compare=False)

    def block_sizes(self) -> list[int]:
        """Effective block sizes: attention groups are sharded over context-parallel ranks."""
        sharded = ("full", "mla", "sink")
        ranks = self.context_parallel_size
        return [g.block_size * (ranks if g.kind in sharded else 1) for g in self.groups]

    @property
    def has_checkpoints(self) -> bool:
        """Whether a prefill step exports states on its way."""
        return any(group.checkpoint_alignment for group in self.groups)

    @property
    def base_block_size(self) -> int:
        return lcm(*self.block_sizes())

    @property
    def unit(self) -> int:
        cacheable = [
            size for g, size in zip(self.groups, self.block_sizes(), strict=True) if g.kind not in ("cross", "ring")
        ]
        if not self.enable_caching or not cacheable:
            return self.base_block_size
        return self.hash_block_size or gcd(*cacheable)

    def our_config(self, num_blocks: int) -> KVCacheConfig:
        return KVCacheConfig(
            num_blocks,
            tuple(
                KVCacheGroupSpec((f"layer.{i}",), group.our_spec(), is_draft=group.is_draft)
                for i, group in enumerate(self.groups)
            ),
        )

    def their_config(self, num_blocks: int) -> theirs.KVCacheConfig:
        return theirs.KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                theirs.KVCacheGroupSpec([f"layer.{i}"], group.their_spec(), is_eagle_group=group.is_draft)
                for i, group in enumerate(self.groups)
            ],
            prefix_cache_retention_interval=self.retention_interval,
        )


FULL4 = Group("full", 4)
WINDOW8 = Group("window", 4, window=8)

# Shapes of real models, scaled down to blocks of a few tokens.
MODEL_LAYOUTS = (
    Layout("full alone", (FULL4,)),
    Layout("mla alone", (Group("mla", 4),)),
    Layout("window alone", (Group("window", 4, window=10),)),
    Layout("sliding mla alone", (Group("window_mla", 4, window=9),)),
    Layout("chunked alone", (Group("chunked", 4, window=16),)),
    Layout("states alone, not cached", (Group("mamba_none", 256),), enable_caching=False),
    Layout("gpt-oss", (FULL4, WINDOW8)),
    Layout("gemma 3", (FULL4, WINDOW8, WINDOW8, WINDOW8, WINDOW8, WINDOW8)),
    Layout("llama 4", (FULL4, Group("chunked", 4, window=16), Group("chunked", 4, window=16))),
    Layout("qwen3-next", (FULL4, *[Group("mamba_align", 4)] * 3)),
    Layout("qwen3-next, states in larger blocks", (FULL4, *[Group("mamba_align", 8)] * 3)),
    Layout(
        "qwen3-next, hash units inside blocks", (*[Group("mamba_align", 8)] * 3, Group("full", 8)), hash_block_size=2
    ),
    Layout(
        "states of two sizes, hash units inside blocks",
        (Group("full", 8), Group("mamba_align", 8), Group("mamba_align", 16)),
        hash_block_size=4,
    ),
    Layout(
        "qwen3-next with a draft, hash units inside blocks",
        (Group("full", 8), *[Group("mamba_align", 8, num_speculative=2)] * 2),
        hash_block_size=2,
        num_draft_lookahead=1,
    ),
    Layout("checkpoints of several states", (FULL4, *[Group("mamba_align", 16, checkpoint_alignment=4)] * 2)),
    Layout("jamba, not cached", (FULL4, Group("mamba_none", 256), Group("mamba_none", 256)), enable_caching=False),
    Layout("states in small blocks, not cached", (FULL4, Group("mamba_none", 8)), enable_caching=False),
    Layout("whisper", (FULL4, Group("cross", 4)), enable_caching=False),
    Layout("gemma 4, mixed block sizes", (Group("full", 4), Group("window", 8, window=16))),
    Layout("mixed block sizes, window finer", (Group("full", 16), Group("window", 4, window=12))),
    Layout("indexer ring", (FULL4, Group("ring", 4), WINDOW8)),
    Layout("two windows", (Group("window", 4, window=8), Group("window", 4, window=16))),
    Layout("gpt-oss with a draft", (FULL4, WINDOW8), num_draft_lookahead=1),
    Layout(
        "gemma 3 with a marked draft", (FULL4, WINDOW8, Group("full", 4, heads=2, is_draft=True)), num_draft_lookahead=1
    ),
    Layout("full with a draft", (FULL4,), num_draft_lookahead=1),
    Layout("window with a draft", (Group("window", 4, window=10),), num_draft_lookahead=1),
    Layout("several draft modules", (FULL4, Group("window", 4, window=8, extra=2)), num_draft_lookahead=3),
    Layout("qwen3-next with a draft", (FULL4, Group("mamba_align", 4, num_speculative=2)), num_draft_lookahead=1),
    Layout(
        "states with drafts",
        (FULL4, Group("mamba_align", 8, num_speculative=2), Group("mamba_align", 8, num_speculative=2)),
    ),
    Layout("sparse windows", (FULL4, WINDOW8), retention_interval=0),
    Layout("windows kept once in 16", (FULL4, WINDOW8), retention_interval=16),
    Layout("windows kept once in 16, with a draft", (FULL4, WINDOW8), retention_interval=16, num_draft_lookahead=1),
    Layout("sparse states", (FULL4, Group("mamba_align", 4)), retention_interval=0),
    Layout("states kept once in 12", (FULL4, Group("mamba_align", 4)), retention_interval=12),
    Layout("sparse states inside blocks", (FULL4, Group("mamba_align", 16)), retention_interval=0),
    Layout("checkpoints", (FULL4, Group("mamba_align", 16, checkpoint_alignment=4))),
    Layout("sparse checkpoints", (FULL4, Group("mamba_align", 16, checkpoint_alignment=4)), retention_interval=0),
    Layout("several groups copy", (Group("full", 8), Group("mamba_align", 8), Group("mla", 8)), hash_block_size=4),
    Layout("context parallel", (Group("full", 4), Group("mamba_align", 8)), context_parallel_size=2),
    Layout("context parallel, full alone", (Group("full", 4),), context_parallel_size=2),
    Layout("steps in flight", (FULL4, WINDOW8), max_in_flight_tokens=16),
)


def random_layout(rng: random.Random) -> Layout:
    """Two to six groups of any kinds that can stand together."""
    enable_caching = rng.random() < 0.85
    size = rng.choice([2, 4, 8])
    mixed = rng.random() < 0.5
    kinds = ["full", "window", "mla", "window_mla", "ring"]
    kinds += ["mamba_align"] if enable_caching else ["cross", "mamba_none", "chunked"]
    num_draft_lookahead = rng.choice([0, 0, 1, 1, size]) if enable_caching else 0
    if not mixed and num_draft_lookahead == 0:
        kinds.append("chunked")
    groups = [Group("full", size * rng.choice([1, 2]) if mixed else size)] if rng.random() < 0.9 else []
    for _ in range(rng.randint(1 if groups else 2, 5)):
        kind = rng.choice(kinds)
        if kind == "chunked" and any(g.kind == "mamba_align" for g in groups):
            kind = "full"
        if kind == "mamba_align" and any(g.kind == "chunked" for g in groups):
            kind = "full"
        is_state = kind == "mamba_align"
        checkpoint_alignment = rng.choice([0, 0, size]) if is_state else 0
        groups.append(
            Group(
                kind,
                256 if kind == "mamba_none" else size * rng.choice([1, 2]) if mixed else size,
                window=rng.choice([size, 2 * size, 3 * size + 1, 5 * size])
                if kind.startswith("window")
                else rng.choice([2, 4]) * size
                if kind == "chunked"
                else 0,
                extra=rng.choice([0, 2]) if kind == "window" and num_draft_lookahead else 0,
                heads=rng.choice([1, 1, 2]),
                num_speculative=rng.choice([0, 0, 2]) if kind.startswith("mamba") else 0,
                checkpoint_alignment=checkpoint_alignment,
                is_draft=num_draft_lookahead > 0 and kind in ("full", "window") and rng.random() < 0.3,
            )
        )
    if all(g.kind in ("ring", "cross") for g in groups):
        groups.append(Group("full", size))
    # Sharding over ranks suits full attention and states only.
    can_shard = all(g.kind in ("full", "mla", "mamba_align") for g in groups)
    layout = Layout(
        "random",
        tuple(groups),
        enable_caching=enable_caching,
        num_draft_lookahead=num_draft_lookahead,
        pins_shared_prefix=rng.random() < 0.3,
        context_parallel_size=2 if can_shard and rng.random() < 0.2 else 1,
        max_in_flight_tokens=rng.choice([None, 16]),
    )
    if enable_caching and all(g.kind in ("full", "mla", "mamba_align", "ring") for g in groups):
        # Other kinds hit whole blocks only, of that size.
        layout = replace(layout, hash_block_size=rng.choice([0, layout.unit // 2]))
    if enable_caching and any(g.kind.startswith(("window", "mamba")) for g in groups):
        base = layout.base_block_size
        layout = replace(layout, retention_interval=rng.choice([None, None, 0, base, 3 * base]))
    return layout
