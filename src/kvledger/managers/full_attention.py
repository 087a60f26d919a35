"""Full attention and MLA: every token is read until the request ends, so blocks are only ever appended."""

from mypy_extensions import mypyc_attr

from kvledger.block import KVCacheBlock
from kvledger.managers.base import SingleTypeKVCacheManager


@mypyc_attr(allow_interpreted_subclasses=True)
class FullAttentionManager(SingleTypeKVCacheManager):
    def find_longest_hit(self, block_hashes: list[bytes], max_tokens: int) -> list[KVCacheBlock]:
        """Full blocks from the start up to the first that is not cached: a later one cannot be without it."""
        hit: list[KVCacheBlock] = []
        index = self.pool.indexes[self.group_id]
        per_block = self.hashes_per_block
        num_blocks = min(max_tokens // self.block_size, len(block_hashes) // per_block)
        for end in range(1, num_blocks + 1):
            block = index.get(block_hashes[end * per_block - 1])
            if block is None:
                break
            hit.append(block)
        return hit
