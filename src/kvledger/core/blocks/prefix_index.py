"""Which cached block carries which hash, for one KV cache group.

Several blocks may carry one hash: two requests computed the same content before either could hit the other. They are
not merged, since that would change block tables already sent to workers. The first one indexed answers lookups until it
is removed; then the next in the order of indexing does.
"""

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.errors import BlockError, require


class PrefixIndex:
    """hash -> blocks, first come first. Every operation is O(1)."""

    def __init__(self) -> None:
        self._first: dict[bytes, KVCacheBlock] = {}
        # Only hashes with two blocks or more: hash -> {block id: block} of all but the first, in order.
        self._later: dict[bytes, dict[int, KVCacheBlock]] = {}

    def __len__(self) -> int:
        """Number of different hashes."""
        return len(self._first)

    def get(self, block_hash: bytes) -> KVCacheBlock | None:
        """The block that answers for that hash, or None."""
        return self._first.get(block_hash)

    def has_several(self, block_hash: bytes) -> bool:
        """Whether two blocks or more carry that hash."""
        return len(self._later) > 0 and block_hash in self._later

    def num_blocks(self, block_hash: bytes) -> int:
        """Blocks that carry that hash."""
        if block_hash not in self._first:
            return 0
        return 1 + len(self._later.get(block_hash, {}))

    def insert(self, block_hash: bytes, block: KVCacheBlock) -> None:
        """Adds a block behind all others with its hash. REQUIRES that it is not in the index."""
        first = self._first.setdefault(block_hash, block)
        if first is not block:
            self._later.setdefault(block_hash, {})[block.block_id] = block

    def remove(self, block_hash: bytes, block: KVCacheBlock) -> None:
        """Removes that block. BlockError when the index lacks the hash, or the block among several of that hash.

        REQUIRES that the only block of its hash is this one.
        """
        later = self._later.get(block_hash) if self._later else None
        if later is None:
            # Without a look at what it deletes: in a large cache that is one more miss for each evicted block. The
            # pool removes what a block itself names, and its check() proves that it is indexed.
            try:
                del self._first[block_hash]
            except KeyError:
                raise BlockError(f"block {block.block_id} is not in the prefix index under its hash")
            return
        if self._first[block_hash] is block:
            heir_id = next(iter(later))
            self._first[block_hash] = later.pop(heir_id)
        elif later.pop(block.block_id, None) is None:
            raise BlockError(f"block {block.block_id} is not in the prefix index under its hash")
        if not later:
            del self._later[block_hash]

    def blocks(self) -> dict[bytes, list[KVCacheBlock]]:
        """Every hash with its blocks, first one first. A fresh copy: for tests and tools."""
        return {key: [first, *self._later.get(key, {}).values()] for key, first in self._first.items()}

    def clear(self) -> None:
        self._first.clear()
        self._later.clear()

    def check(self) -> None:
        """Proves that later blocks stand behind a first one. What the blocks say of themselves is the pool's check."""
        for block_hash, later in self._later.items():
            require(block_hash in self._first and len(later) > 0, "prefix index: later blocks without a first one")
