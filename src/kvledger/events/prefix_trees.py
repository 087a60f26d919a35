"""PrefixTrees: which prefixes a cache holds, from its events: how large each is, what hangs on it, how old it is."""

from collections.abc import Iterable
from typing import Final

import msgspec

from kvledger.events.event_types import AllBlocksCleared, AnyEvent, BlockRemoved, BlockStored, WireHash

_Key = tuple[int, WireHash]


class PrefixTree(msgspec.Struct):
    """All cached blocks behind one first block. `num_shared_tokens`: from its start up to where its prompts part.
    `num_leaves`: how many ways they go on. `first_stored`, `last_stored`: of its blocks, by the publisher's clock."""

    num_blocks: int
    num_shared_tokens: int
    num_leaves: int
    first_stored: float
    last_stored: float


class _Block(msgspec.Struct, gc=False):
    parent: _Key | None
    num_tokens: int
    stored: float


class PrefixTrees:
    """Follows one stream of events. Memory: a record a cached block."""

    def __init__(self) -> None:
        self._blocks: Final[dict[_Key, _Block]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks that the stream has told of and that are cached, over all groups."""
        return len(self._blocks)

    def apply(self, events: Iterable[AnyEvent], ts: float) -> None:
        """Takes in a batch of that time."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event, ts)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    self._blocks.pop((event.group_idx or 0, name), None)
            elif isinstance(event, AllBlocksCleared):
                self._blocks.clear()

    def largest(self, number: int) -> list[PrefixTree]:
        """Those with the most cached blocks, the largest first. O(blocks)."""
        # Made anew: a parent may come back after what hangs on it.
        children: dict[_Key | None, list[_Key]] = {}
        for key, block in self._blocks.items():
            children.setdefault(block.parent if block.parent in self._blocks else None, []).append(key)
        trees = [self._tree(root, children) for root in children.get(None, [])]
        return sorted(trees, key=lambda tree: (-tree.num_blocks, -tree.last_stored))[:number]

    def _store(self, event: BlockStored, ts: float) -> None:
        group = event.group_idx or 0
        parent = None if event.parent_block_hash is None else (group, event.parent_block_hash)
        for name in event.block_hashes:
            key = (group, name)
            if key not in self._blocks:
                self._blocks[key] = _Block(parent, event.block_size, ts)
            parent = key

    def _tree(self, root: _Key, children: dict[_Key | None, list[_Key]]) -> PrefixTree:
        blocks = self._blocks
        tree = PrefixTree(0, 0, 0, blocks[root].stored, blocks[root].stored)
        key = root
        while True:
            tree.num_shared_tokens += blocks[key].num_tokens
            if len(children.get(key, ())) != 1:
                break
            key = children[key][0]
        behind = [root]
        while behind:
            key = behind.pop()
            block = blocks[key]
            tree.num_blocks += 1
            tree.first_stored = min(tree.first_stored, block.stored)
            tree.last_stored = max(tree.last_stored, block.stored)
            tree.num_leaves += key not in children
            behind += children.get(key, ())
        return tree
