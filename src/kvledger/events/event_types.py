"""The KV events on the wire, as vLLM 0.33 publishes them: field names, their order, tags, and what is left out.

A batch is an array [ts, events, data_parallel_rank]; an event is a map with its class's name under "type". Optional
fields at their defaults are left out. So a subscriber written for vLLM decodes ours, and these types decode vLLM's.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

# A block hash on the wire: the low 64 bits of the digest (vLLM's default), or the whole digest.
WireHash = int | bytes

MEDIUM_GPU: Final = "GPU"
MEDIUM_CPU: Final = "CPU"


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """One of the classes below."""


class BlockStored(KVCacheEvent):
    """Blocks became hits: block_hashes[i] names tokens [i * block_size, (i + 1) * block_size) of token_ids with all
    that is before them; parent_block_hash names what is before the first, None at the start of a sequence.

    `extra_keys`: of each block, what its hash covers beside tokens (None: nothing), in this order: the adapter's name,
    (content hash, offset) of each multimodal item, and in a sequence's first block the cache salt.
    `lookahead_token_ids`: of each block, the tokens behind it that its hash covers as well; None without a draft that
    needs them.
    """

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(KVCacheEvent):
    """These hashes are hits no more."""

    block_hashes: list[WireHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """Nothing is a hit any more, in any group."""


AnyEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one step, in the order in which they happened. `ts`: seconds."""

    ts: float
    events: Sequence[AnyEvent]
    data_parallel_rank: int | None = None


def decode_batch(payload: bytes) -> KVEventBatch:
    """The batch in a message's last frame. msgspec.DecodeError when it is none."""
    return _DECODER.decode(payload)


_DECODER: Final = msgspec.msgpack.Decoder(KVEventBatch)
