"""How layers are grouped where their pages differ, by what vLLM 0.32 does with the same specs."""

import pytest

from kvledger.core.groups.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from kvledger.errors import ConfigError
from kvledger.plan.groups import group_layers

LATENT = MLAAttentionSpec(16, head_size=576)
WINDOW = SlidingWindowSpec(16, num_kv_heads=1, head_size=512, sliding_window=512)


def named(*specs: KVCacheSpec) -> dict[str, KVCacheSpec]:
    return {f"layers.{index}": spec for index, spec in enumerate(specs)}


def test_latents_and_windows_without_a_common_page_are_stored_in_full() -> None:
    (group,) = group_layers(named(LATENT, WINDOW, LATENT, WINDOW)).groups
    assert [type(spec) for spec in group.layer_specs] == [MLAAttentionSpec, FullAttentionSpec] * 2
    assert sum(spec.page_size_bytes for spec in group.layer_specs) == 2 * (18_432 + 32_768)
    assert group.max_admission_blocks(32_768, 8_192) == 2_048


def test_latents_and_windows_with_a_common_page_keep_their_windows() -> None:
    groups = group_layers(named(MLAAttentionSpec(16, head_size=512), WINDOW)).groups
    assert [(type(group.spec), group.spec.block_size) for group in groups] == [
        (MLAAttentionSpec, 32),
        (SlidingWindowSpec, 16),
    ]


def test_latents_and_chunks_without_a_common_page_are_refused() -> None:
    chunk = ChunkedLocalAttentionSpec(16, num_kv_heads=1, head_size=512, attention_chunk_size=512)
    with pytest.raises(ConfigError, match=r"latents cannot be padded; use another --block-size"):
        group_layers(named(LATENT, chunk))
