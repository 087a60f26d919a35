"""Chunked local attention: a token reads its own chunk only, from the last multiple of `attention_chunk_size` on."""

from mypy_extensions import i64, mypyc_attr

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.groups.base import GroupBlocks, GroupHit, ManagerContext, SingleTypeKVCacheManager, cached_in_all
from kvledger.core.groups.policy import GroupPolicy
from kvledger.core.groups.slot_ranges import SlotRanges
from kvledger.core.groups.spec import ChunkedLocalAttentionSpec
from kvledger.core.units import cdiv, round_down
from kvledger.errors import wrong_value


@mypyc_attr(allow_interpreted_subclasses=True)
class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    def __init__(
        self, spec: ChunkedLocalAttentionSpec, group_id: int, context: ManagerContext, policy: GroupPolicy
    ) -> None:
        super().__init__(spec, group_id, context, policy)
        self.chunk_size: int = spec.attention_chunk_size
        if policy.is_draft:
            problem = "a chunked-local group cannot be the draft's"
            raise wrong_value("drafts", policy.is_draft, problem, "mark another group with is_draft=True")
        if policy.hit_alignment != self.block_size:
            problem = f"a chunked-local group beside groups whose hits end at multiples of {policy.hit_alignment}"
            raise wrong_value("block_size", self.block_size, problem, "give all groups the same block size")

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return round_down(num_computed_tokens, self.chunk_size)

    def num_blocks_held(self, held: GroupBlocks) -> int:
        return self._num_blocks_behind_nulls(held)

    def num_blocks_at_peak(self, ranges: SlotRanges) -> int:
        """A chunk that begins inside a block has one block more than its tokens fill."""
        num_blocks = super().num_blocks_at_peak(ranges)
        if self.chunk_size % self.block_size == 0:
            return num_blocks
        return min(num_blocks + 1, cdiv(self.num_slots_wanted(ranges), self.block_size))

    def next_release(self, held: GroupBlocks) -> i64:
        return (held.num_released_blocks + 1) * self.block_size

    def find_longest_hit(
        self, block_hashes: list[bytes], max_tokens: int, group_ids: list[int], drops_last: bool
    ) -> GroupHit:
        """Null blocks up to the chunk of the next token, which nobody will read, then the cached run inside it.

        Where chunks do not end with blocks, a run may end before its chunk begins: then the chunk below counts.
        """
        indexes = [self.pool.indexes[group_id] for group_id in group_ids]
        found: list[KVCacheBlock] = []
        while True:
            num_blocks = min(max_tokens // self.block_size, len(block_hashes) // self.hashes_per_block)
            chunk_start = self.num_skipped_tokens(max_tokens)
            num_skipped = min(chunk_start // self.block_size, num_blocks)
            hit: list[list[KVCacheBlock]] = [[self.pool.null_block] * num_skipped for _ in group_ids]
            num_tokens = num_skipped * self.block_size
            for end in range(num_skipped + 1, num_blocks + 1):
                if not cached_in_all(indexes, block_hashes[end * self.hashes_per_block - 1], found):
                    break
                for position, block in enumerate(found):
                    hit[position].append(block)
                num_tokens = end * self.block_size
            if num_tokens >= chunk_start or num_tokens == 0:
                return GroupHit(hit, num_tokens)
            max_tokens = num_tokens
