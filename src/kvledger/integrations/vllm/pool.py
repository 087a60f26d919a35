"""The block pool of the ledger as vLLM's scheduler and connectors use it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, make_block_hash_with_group_id

from kvledger.core.blocks.block import UNLINKED
from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.integrations.vllm.blocks import BlockView, BlockViews, Partial, QueueEnd
from kvledger.integrations.vllm.events import EventLog
from kvledger.integrations.vllm.residency import Residency


class PoolView(Partial):
    """vLLM's BlockPool: what its scheduler and its connectors call on it, and what can be shown of the rest."""

    def __init__(
        self, ledger: KVCacheManager, hash_block_size: int, residency: Residency | None, events: EventLog | None
    ) -> None:
        self._pool = ledger.block_pool
        self._outside = ledger.coordinator.outside
        self._residency = residency
        self._events = events
        self.blocks = BlockViews(self._pool.blocks)
        if residency is not None:
            residency.views = self.blocks
        self.null_block = self.blocks[0]
        self.num_gpu_blocks = self._pool.num_blocks
        self.enable_caching = ledger.enable_caching
        self.hash_block_size = hash_block_size
        self.free_block_queue = FreeQueueView(self)
        self.cached_block_hashes_by_block = FurtherHashes(self)
        self.cached_block_hash_to_block = CachedBlocks(self)

    def get_num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    def get_usage(self) -> float:
        return self._pool.get_usage()

    @property
    def kv_event_queue(self) -> list[Any]:
        """Events that nobody has taken yet."""
        return [] if self._events is None else self._events.pending

    def get_new_blocks(self, num_blocks: int) -> list[BlockView]:
        """Blocks for the caller, who gives them back through free_blocks. OutOfBlocksError when fewer are free."""
        taken = self._pool.get_new_blocks(num_blocks)
        self._outside.adopt(taken)
        return [self.blocks.of(block) for block in taken]

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[BlockView] | None:
        """The block of that hash in each of these groups; None when one of them lacks it."""
        found: list[BlockView] = []
        for group_id in kv_cache_group_ids:
            block = self._pool.get_cached_block(block_hash, group_id)
            if block is None:
                return None
            found.append(self.blocks.of(block))
        return found

    def touch(self, blocks: Sequence[BlockView]) -> None:
        """Adds a reference to each, so that nobody is given it while, say, a connector reads it."""
        self._outside.add([block.ours for block in blocks])

    def free_blocks(self, ordered_blocks: Iterable[BlockView]) -> None:
        """Drops a reference for each mention of a block; to be reused in this order.

        BlockError for references that nobody took through touch, get_new_blocks, a block copy or pop_blocks_for_free.
        """
        self._outside.release([block.ours for block in ordered_blocks])

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Takes these blocks' hashes. The null block, which has none, is passed over."""
        ids = [block_id for block_id in block_ids if block_id != 0]
        self._pool.evict_blocks(ids)
        if self._residency is not None:
            self._residency.named_for_eviction([self._pool.blocks[block_id] for block_id in ids])


class FreeQueueView(Partial):
    """vLLM's FreeKVCacheBlockQueue, to look at."""

    def __init__(self, pool: PoolView) -> None:
        self._views = pool.blocks
        self._queue = pool._pool.free_queue

    @property
    def num_free_blocks(self) -> int:
        return self._queue.num_free_blocks

    @property
    def fake_free_list_head(self) -> QueueEnd:
        return self._views.head

    @property
    def fake_free_list_tail(self) -> QueueEnd:
        return self._views.tail

    def get_all_free_blocks(self) -> list[BlockView]:
        return [self._views[block_id] for block_id in self._queue.block_ids()]

    def iter_blocks_after(self, cursor: BlockView | None) -> Iterator[BlockView]:
        """Free blocks in the order of their reuse, from the first or from behind `cursor`; none behind a held one."""
        block = (self._views[0] if cursor is None else cursor).ours
        while block.next_free_id not in (0, UNLINKED):
            view = self._views[block.next_free_id]
            yield view
            block = view.ours


class CachedBlocks(Partial):
    """vLLM's cached_block_hash_to_block, to look at: hashes packed with their group, each with its blocks."""

    def __init__(self, pool: PoolView) -> None:
        self._views = pool.blocks
        self._pool = pool._pool

    def __len__(self) -> int:
        """Hashes, of all groups."""
        return sum(len(index) for index in self._pool.indexes)

    def get_one_block(self, key: Any) -> BlockView | None:
        """The first block that carries that hash."""
        block = self._pool.get_cached_block(get_block_hash(key), get_group_id(key))
        return None if block is None else self._views.of(block)


class FurtherHashes(Partial):
    """vLLM's cached_block_hashes_by_block: {block id: its hashes beyond block_hash}, packed with the group."""

    def __init__(self, pool: PoolView) -> None:
        self._pool = pool._pool

    def get(self, block_id: int, default: Any = None) -> Any:
        block = self._pool.blocks[block_id]
        hashes = self._pool.further_hashes(block)
        return {make_block_hash_with_group_id(name, block.group_id) for name in hashes} if hashes else default
