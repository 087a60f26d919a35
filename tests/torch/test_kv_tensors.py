"""Buffers, the layers that share them, copies and clearing."""

import pytest
import torch

from kvledger import BlockCopy, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from kvledger.core.groups.spec import HostResidentSpec, KVCacheSpec, SlidingWindowSpec
from kvledger.engine.kv_tensors import KVTensors
from kvledger.engine.transformers_model import kv_cache_layout
from kvledger.errors import ConfigError
from kvledger.plan.groups import GroupLayout
from tests.torch.models import tiny_config

BLOCKS = 5


def one_group(spec: KVCacheSpec, *names: str) -> KVCacheConfig:
    return KVCacheConfig(BLOCKS, (KVCacheGroupSpec(names or ("a", "b"), spec),))


def copy(source: int, target: int, group_id: int = 0) -> BlockCopy:
    return BlockCopy(group_id, source, target)


def test_layers_of_different_groups_share_buffers_as_the_plan_lays_them_out() -> None:
    layout = kv_cache_layout(tiny_config("gemma3"), block_size=4)
    names = [group.layer_names for group in layout.groups]
    assert names == [
        ("layers.0.self_attn", "layers.3.self_attn"),
        ("layers.2.self_attn",),
        ("layers.1.self_attn", "layers.4.self_attn"),
    ]
    tensors = KVTensors(KVCacheConfig(BLOCKS, layout.groups))
    tensors.check()
    # 4 tokens * 2 heads * (8 + 8) values * 4 bytes, twice in each block.
    assert [tuple(buffer.shape) for buffer in tensors.buffers] == [(BLOCKS, 512)] * 2
    assert tensors.num_bytes == BLOCKS * layout.bytes_per_block() == 5 * 1024
    starts = {name: tensors.layers[f"layers.{name}.self_attn"].pages.data_ptr() for name in range(5)}
    assert starts[0] == starts[2] == starts[1]
    assert starts[3] == starts[4] != starts[0]


def test_a_token_has_its_key_and_value_side_by_side() -> None:
    spec = FullAttentionSpec(2, 3, 4, head_size_v=1, dtype="float32")
    tensors = KVTensors(one_group(spec))
    layer = tensors.layers["b"]
    layer.keys[1, 0] = 1.0
    layer.values[1, 0] = 2.0
    page = tensors.buffers[1][1].view(torch.float32)
    # Two tokens of three heads of four key values and one value.
    assert page.tolist() == [1.0, 1.0, 1.0, 1.0, 2.0] * 3 + [0.0] * 15
    assert not tensors.buffers[0].any()


def test_padded_pages_leave_their_padding_alone() -> None:
    spec = FullAttentionSpec(2, 1, 4, dtype="float32", page_size_padded=100)
    tensors = KVTensors(one_group(spec))
    tensors.layers["a"].pages.fill_(1.0)
    assert tensors.buffers[0].shape == (BLOCKS, 100)
    assert int(tensors.buffers[0][:, 64:].count_nonzero()) == 0


def test_layers_of_one_group_may_have_pages_of_their_own_size() -> None:
    small = FullAttentionSpec(4, 1, 8, dtype="float32")
    large = FullAttentionSpec(4, 2, 8, dtype="float32")
    config = KVCacheConfig(BLOCKS, (KVCacheGroupSpec(("a", "b"), small, (small, large)),))
    tensors = KVTensors(config)
    assert [buffer.shape[1] for buffer in tensors.buffers] == [256, 512]
    assert tensors.num_bytes == BLOCKS * GroupLayout(config.groups).bytes_per_block()


def test_copies_are_made_in_their_order_and_for_their_group_only() -> None:
    full = FullAttentionSpec(2, 1, 4, dtype="float32")
    windowed = SlidingWindowSpec(2, 1, 4, dtype="float32", sliding_window=3)
    groups = (KVCacheGroupSpec(("a", "b"), full), KVCacheGroupSpec(("c",), windowed))
    tensors = KVTensors(KVCacheConfig(BLOCKS, groups))
    for block_id in range(BLOCKS):
        tensors.layers["a"].pages[block_id] = tensors.layers["b"].pages[block_id] = float(block_id)
    tensors.copy_blocks([copy(1, 2), copy(2, 3), copy(1, 4, group_id=1)])
    assert tensors.layers["a"].pages[:, 0, 0, 0].tolist() == [0, 1, 1, 1, 1]
    # Group 1 has no second layer, so the second buffer has nothing of it.
    assert tensors.layers["b"].pages[:, 0, 0, 0].tolist() == [0, 1, 1, 1, 4]


def test_blocks_are_filled_with_zeros_or_with_what_is_no_number() -> None:
    tensors = KVTensors(one_group(FullAttentionSpec(2, 1, 4, dtype="bfloat16")))
    layer = tensors.layers["a"]
    tensors.fill_blocks([1, 3], 0xFF)
    assert layer.pages.isnan().flatten(1).all(1).tolist() == [False, True, False, True, False]
    tensors.fill_blocks([3])
    tensors.fill_blocks([])
    assert layer.pages.isnan().flatten(1).any(1).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (FullAttentionSpec(2, 1, 4, dtype="fp8"), "kv_cache_dtype='fp8': layer a cannot keep it"),
        (MambaSpec(2, ((4,),), ("float32",)), "spec='MambaSpec': layer a keeps no keys and values"),
        (HostResidentSpec(2, 1, 4, num_host_blocks=8), "spec='HostResidentSpec': layer a keeps no keys and values"),
    ],
)
def test_what_has_no_tensor_is_refused(spec: KVCacheSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVTensors(one_group(spec))
