"""Specs, groups and the configuration: page sizes and refusals."""

import pytest

from kvledger import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from kvledger.core.units import cdiv, dtype_bytes, round_down
from kvledger.errors import ConfigError, KVLedgerError


def test_a_page_holds_keys_and_values_of_every_head_and_token() -> None:
    assert FullAttentionSpec(16, num_kv_heads=8, head_size=128).page_size_bytes == 8 * 16 * (128 + 128) * 2
    assert FullAttentionSpec(16, num_kv_heads=2, head_size=192, head_size_v=128).page_size_bytes == 2 * 16 * 320 * 2
    assert FullAttentionSpec(32, num_kv_heads=1, head_size=64, dtype="fp8").page_size_bytes == 32 * 128


def test_mla_keeps_one_latent_vector_a_token() -> None:
    # DeepSeek-V3: 512 latent + 64 rope dimensions, bfloat16.
    assert MLAAttentionSpec(64, head_size=576).page_size_bytes == 64 * 576 * 2


def test_a_request_holds_its_length_in_blocks() -> None:
    spec = FullAttentionSpec(16, 1, 8)
    assert [spec.max_blocks_per_request(length) for length in (1, 16, 17, 131_072)] == [1, 1, 2, 8192]


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("block_size", lambda: FullAttentionSpec(0, 8, 128)),
        ("num_kv_heads", lambda: FullAttentionSpec(16, 0, 128)),
        ("head_size", lambda: FullAttentionSpec(16, 8, 0)),
        ("head_size_v", lambda: FullAttentionSpec(16, 8, 128, head_size_v=-1)),
        ("dtype", lambda: FullAttentionSpec(16, 8, 128, dtype="int3")),
        ("block_size", lambda: MLAAttentionSpec(-16, 576)),
        ("head_size", lambda: MLAAttentionSpec(16, 0)),
        ("dtype", lambda: MLAAttentionSpec(16, 576, dtype="float128")),
        ("block_size", lambda: KVCacheSpec(0)),
        ("layer_names", lambda: KVCacheGroupSpec((), FullAttentionSpec(16, 8, 128))),
        ("num_blocks", lambda: KVCacheConfig(1, (KVCacheGroupSpec(("a",), FullAttentionSpec(16, 8, 128)),))),
        ("groups", lambda: KVCacheConfig(10)),
    ],
)
def test_a_wrong_value_is_named_with_a_fix(field: str, make: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}=.*: .*; ") as caught:
        make()  # type: ignore[operator]
    assert isinstance(caught.value, KVLedgerError)
    assert isinstance(caught.value, ValueError)


def test_a_padded_page_is_at_least_its_content() -> None:
    assert FullAttentionSpec(16, 1, 8, page_size_padded=1024).page_size_bytes == 1024
    with pytest.raises(ConfigError, match="page_size_padded=100: smaller than the 512 bytes that a block holds"):
        FullAttentionSpec(16, 1, 8, page_size_padded=100)
    assert MLAAttentionSpec(64, 576, alignment=1000).page_size_bytes == 74_000
    assert MLAAttentionSpec(64, 576, state_bytes=656).page_size_bytes == 64 * 656
    assert MLAAttentionSpec(64, 576, tokens_per_state=4).page_size_bytes == 16 * 576 * 2
    with pytest.raises(ConfigError, match="tokens_per_state=3: does not divide block_size=64"):
        MLAAttentionSpec(64, 576, tokens_per_state=3)


def test_layers_of_one_group_may_differ_in_their_pages() -> None:
    latent, index = MLAAttentionSpec(64, 576), MLAAttentionSpec(64, 128, dtype="fp8")
    group = KVCacheGroupSpec(("latent", "index"), latent, (latent, index))
    assert group.page_size_bytes == 64 * 576 * 2 + 64 * 128
    assert group.max_admission_blocks(1000, 100) == 16
    with pytest.raises(ConfigError, match="1 specs for 2 layers"):
        KVCacheGroupSpec(("latent", "index"), latent, (latent,))


def test_the_base_spec_has_no_page() -> None:
    with pytest.raises(NotImplementedError):
        _ = KVCacheSpec(16).page_size_bytes


def test_specs_are_values() -> None:
    assert FullAttentionSpec(16, 8, 128) == FullAttentionSpec(16, 8, 128)
    assert FullAttentionSpec(16, 8, 128) != FullAttentionSpec(16, 8, 64)
    with pytest.raises(AttributeError):
        FullAttentionSpec(16, 8, 128).block_size = 8  # type: ignore[misc]


def test_arithmetic() -> None:
    assert [cdiv(value, 4) for value in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [round_down(value, 4) for value in (0, 3, 4, 7)] == [0, 0, 4, 4]
    assert [dtype_bytes(name) for name in ("float32", "bfloat16", "fp8_e5m2", "uint8")] == [4, 2, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "token_bytes"),
    [
        ("int8_per_token_head", 64 + 4 + 32 + 4),
        ("fp8_per_token_head", 64 + 4 + 32 + 4),
        ("int4_per_token_head", 32 + 4 + 16 + 4),
        ("nvfp4", 32 + 4 + 16 + 2),
    ],
)
def test_scales_that_stand_in_the_page_are_part_of_it(dtype: str, token_bytes: int) -> None:
    # Two heads, keys of 64 and values of 32, 16 tokens.
    assert FullAttentionSpec(16, 2, 64, 32, dtype).page_size_bytes == 2 * 16 * token_bytes
    assert SlidingWindowSpec(16, 2, 64, 32, dtype, sliding_window=64).page_size_bytes == 2 * 16 * token_bytes
    with pytest.raises(ConfigError, match="not a KV cache element type"):
        MLAAttentionSpec(16, 576, dtype)
