"""Our blocks as vLLM's code sees them: KVCacheBlocks with fresh id lists, and single blocks for connectors.

Nearly every answer is "no new blocks", one shared object. The others keep ours and become vLLM's lists of block objects
only if somebody asks for those: the scheduler wants ids, which the compiled side lists.
"""

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks as VllmBlocks
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kvledger.core.blocks.block import UNLINKED, KVCacheBlock
from kvledger.core.blocks.kv_cache_blocks import KVCacheBlocks, PrefixHit


class Partial:
    """A stand-in for one of vLLM's classes, with the part of it that vLLM itself uses."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}: kvledger shows of vLLM's KV cache manager what vLLM 0.32 uses. "
            "Start without KVLEDGER_VLLM and scheduler_cls for code that uses more"
        )


class BlockView:
    """One of our blocks with the attributes of vLLM's. One view a block, so that identity means the block."""

    __slots__ = ("_views", "block_id", "is_null", "ours")

    def __init__(self, ours: KVCacheBlock, views: "BlockViews") -> None:
        self.ours = ours
        self._views = views
        self.block_id: int = ours.block_id
        self.is_null: bool = ours.is_null

    @property
    def ref_cnt(self) -> int:
        return self.ours.ref_cnt

    @property
    def block_hash(self) -> bytes | None:
        """Hash and group, packed as vLLM packs them."""
        block_hash = self.ours.block_hash
        return None if block_hash is None else make_block_hash_with_group_id(block_hash, self.ours.group_id)

    @property
    def block_hash_num_tokens(self) -> int | None:
        return None if self.ours.block_hash is None else self.ours.num_hash_tokens

    @property
    def next_free_block(self) -> "BlockView | QueueEnd | None":
        """Behind it in the free queue; None for a block that is held."""
        return self._views.linked(self.ours.next_free_id, self._views.tail)

    @property
    def prev_free_block(self) -> "BlockView | QueueEnd | None":
        return self._views.linked(self.ours.prev_free_id, self._views.head)

    def __repr__(self) -> str:
        return f"BlockView({self.ours!r})"


class QueueEnd:
    """vLLM's fake block in front of the free queue, or behind it. Ours is the null block, in a ring."""

    block_id = -1

    def __init__(self, views: "BlockViews") -> None:
        self._views = views

    @property
    def next_free_block(self) -> "BlockView | QueueEnd | None":
        return self._views.linked(self._views.first_free_id, self._views.tail) if self is self._views.head else None

    @property
    def prev_free_block(self) -> "BlockView | QueueEnd | None":
        return self._views.linked(self._views.last_free_id, self._views.head) if self is self._views.tail else None


class BlockViews:
    """The views of one pool, made when they are first asked for. `head`, `tail`: ends of the free queue."""

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        self._blocks = blocks
        self._views: dict[int, BlockView] = {}
        self.head = QueueEnd(self)
        self.tail = QueueEnd(self)

    @property
    def first_free_id(self) -> int:
        return self._blocks[0].next_free_id

    @property
    def last_free_id(self) -> int:
        return self._blocks[0].prev_free_id

    def linked(self, block_id: int, end: QueueEnd) -> "BlockView | QueueEnd | None":
        """What stands beside a free block, or at that end; None beside a block that is in no queue."""
        if block_id == UNLINKED:
            return None
        return end if block_id == 0 else self[block_id]

    def of(self, block: KVCacheBlock) -> BlockView:
        block_id: int = block.block_id
        view = self._views.get(block_id)
        if view is None:
            view = self._views[block_id] = BlockView(block, self)
        return view

    def __getitem__(self, block_id: int) -> BlockView:
        return self._views.get(block_id) or self.of(self._blocks[block_id])

    def __len__(self) -> int:
        return len(self._blocks)


class NoBlocks(VllmBlocks):  # type: ignore[misc]
    """No blocks in any group."""

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        if allow_none:
            return None
        return tuple([] for _ in (self.blocks if group_ids is None else group_ids))


class LedgerBlocks(VllmBlocks):  # type: ignore[misc]
    """Blocks of ours, at least one. `hit`: the lookup that found them, for allocate_slots."""

    def __init__(self, ours: KVCacheBlocks, views: BlockViews, hit: PrefixHit | None = None) -> None:
        self.ours = ours
        self.hit = hit
        self._views = views

    @property
    def blocks(self) -> tuple[Sequence[Any], ...]:
        of = self._views.of
        return tuple([of(block) for block in group] for group in self.ours.blocks)

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        block_ids = self.ours.get_block_ids()
        if group_ids is not None:
            block_ids = tuple(block_ids[group_id] for group_id in group_ids)
        if allow_none and not any(block_ids):
            return None
        return block_ids
