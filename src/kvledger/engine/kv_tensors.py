"""KVTensors: the memory behind the block ids of one worker.

Layer i of every group lives in buffer i, so a hybrid model with two groups of ten layers needs ten buffers, not twenty:
a block id belongs to one group at a time, and only that group's layers touch its page.

    buffer i   [num_blocks, page bytes]                      one page for each block, whatever group holds it
    layer      [num_blocks, block_size, heads, key + value]  the same bytes as a layer of some group sees them

A token's key and value lie side by side, so one gather fetches both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvledger.core.blocks.holds import BlockCopy
from kvledger.core.groups.spec import AttentionSpec, HostResidentSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from kvledger.errors import require, wrong_value

# Element type of a spec -> how torch names it. Quantized caches need scales that no spec carries.
TORCH_DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LayerTensors:
    """One layer's keys and values: [num_blocks, block_size, heads, key size + value size], a view of its buffer."""

    group_id: int
    spec: AttentionSpec
    pages: torch.Tensor

    @property
    def keys(self) -> torch.Tensor:
        return self.pages[..., : self.spec.head_size]

    @property
    def values(self) -> torch.Tensor:
        return self.pages[..., self.spec.head_size :]


class KVTensors:
    """Buffers for all layers of a KVCacheConfig. New memory is zero. One owner thread."""

    def __init__(self, config: KVCacheConfig, device: torch.device | str = "cpu") -> None:
        self.num_blocks: Final = config.num_blocks
        self.device: Final = torch.device(device)
        page_bytes: list[int] = []
        for group in config.groups:
            for index, spec in enumerate(layer_specs(group)):
                if index == len(page_bytes):
                    page_bytes.append(0)
                page_bytes[index] = max(page_bytes[index], spec.page_size_bytes)
        self.buffers: Final = [
            torch.zeros(config.num_blocks, num_bytes, dtype=torch.uint8, device=self.device) for num_bytes in page_bytes
        ]
        self._num_layers: Final = [len(group.layer_names) for group in config.groups]
        self.layers: Final[dict[str, LayerTensors]] = {}
        for group_id, group in enumerate(config.groups):
            for buffer, name, spec in zip(self.buffers, group.layer_names, layer_specs(group), strict=False):
                self.layers[name] = layer_tensors(name, group_id, spec, buffer)

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(buffer.numel() for buffer in self.buffers)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Makes the copies in their order: a target may be the source of a later one."""
        for copy in copies:
            for buffer in self.buffers[: self._num_layers[copy.group_id]]:
                buffer[copy.target_block_id] = buffer[copy.source_block_id]

    def fill_blocks(self, block_ids: Sequence[int], byte: int = 0) -> None:
        """Sets every byte of these blocks: 0 before their first use, 0xFF (not a number in every float type) to prove
        that nobody reads them."""
        if block_ids:
            index = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
            for buffer in self.buffers:
                buffer.index_fill_(0, index, byte)

    def check(self) -> None:
        """Proves that layers of one group never share memory, and that no page is larger than its buffer's."""
        for group_id, num_layers in enumerate(self._num_layers):
            starts = {layer.pages.data_ptr() for layer in self.layers.values() if layer.group_id == group_id}
            require(len(starts) == num_layers, f"two layers of group {group_id} share a buffer")
        for name, layer in self.layers.items():
            require(layer.pages.shape[0] == self.num_blocks, f"{name} has no page for each of {self.num_blocks} blocks")


def layer_specs(group: KVCacheGroupSpec) -> tuple[KVCacheSpec, ...]:
    """One spec for each layer of the group."""
    return group.layer_specs or (group.spec,) * len(group.layer_names)


def layer_tensors(name: str, group_id: int, spec: KVCacheSpec, buffer: torch.Tensor) -> LayerTensors:
    """The view of a buffer that one layer has. ConfigError when the layer keeps something that is no key and value."""
    if not isinstance(spec, AttentionSpec) or isinstance(spec, HostResidentSpec):
        problem = f"layer {name} keeps no keys and values in the device's pool"
        raise wrong_value("spec", type(spec).__name__, problem, "use a model whose layers are attention layers")
    dtype = TORCH_DTYPES.get(spec.dtype)
    if dtype is None:
        problem = f"layer {name} cannot keep it: quantized values need scales"
        raise wrong_value("kv_cache_dtype", spec.dtype, problem, "use one of " + ", ".join(TORCH_DTYPES))
    head_size = spec.head_size + (spec.head_size_v or spec.head_size)
    content = buffer[:, : spec.content_bytes].view(dtype)
    return LayerTensors(group_id, spec, content.view(-1, spec.block_size, spec.num_kv_heads, head_size))
