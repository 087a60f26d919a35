"""Full attention and MLA: every token is read until the request ends, so blocks are only ever appended."""

from mypy_extensions import i64, mypyc_attr

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.prefix_index import PrefixIndex
from kvledger.core.groups.base import GroupBlocks, GroupHit, ManagerContext, SingleTypeKVCacheManager, cached_in_all
from kvledger.core.groups.policy import GroupPolicy
from kvledger.core.groups.slot_ranges import SlotRanges
from kvledger.core.groups.spec import KVCacheSpec
from kvledger.core.requests.request import Request
from kvledger.core.units import cdiv, round_down


@mypyc_attr(allow_interpreted_subclasses=True)
class FullAttentionManager(SingleTypeKVCacheManager):
    def __init__(self, spec: KVCacheSpec, group_id: int, context: ManagerContext, policy: GroupPolicy) -> None:
        super().__init__(spec, group_id, context, policy)
        # {id of a block that this step writes: where in its request it begins to}. A copy is made before it does, so
        # nobody may start behind that yet.
        self._written_from: dict[int, int] = {}

    def start_step(self) -> None:
        self._written_from.clear()

    def is_hit_in_writing(self, hit: list[KVCacheBlock], local_end: int) -> bool:
        if not self._written_from or not self.ends_inside_block(hit, local_end):
            return False
        return self._written_from.get(hit[-1].block_id, local_end) < local_end

    def num_blocks_to_take(self, held: GroupBlocks, hit: list[KVCacheBlock], ranges: SlotRanges) -> i64:
        if hit and self.is_hit_in_writing(hit, ranges.local_end):
            return self.pool.num_blocks + 1
        return super().num_blocks_to_take(held, hit, ranges)

    def cached(self, request: Request, blocks: list[KVCacheBlock]) -> None:
        super().cached(request, blocks)
        if self.policy.hits_inside_blocks:
            for block in blocks:
                self._written_from[block.block_id] = request.num_computed_tokens

    def num_blocks_held(self, held: GroupBlocks) -> int:
        return len(held.blocks)

    def holds_all_blocks(self) -> bool:
        return True

    def is_prefix_closed(self) -> bool:
        return True

    def find_longest_hit(
        self, block_hashes: list[bytes], max_tokens: int, group_ids: list[int], drops_last: bool
    ) -> GroupHit:
        """Full blocks from the start up to the first that is not cached: a later one cannot be without it.

        With hits inside blocks, the block behind them is tried at each hash unit, the longest first.
        """
        block_size = self.block_size
        per_block = self.hashes_per_block
        alignment = self.policy.hit_alignment
        indexes = [self.pool.indexes[group_id] for group_id in group_ids]
        hit: list[list[KVCacheBlock]] = [[] for _ in group_ids]
        found: list[KVCacheBlock] = []
        most = min(max_tokens // block_size, len(block_hashes) // per_block)
        num_full = _find_run(indexes, block_hashes, per_block, most, hit)
        num_tokens = num_full * block_size
        if alignment < block_size and block_size % alignment == 0:
            first = num_full * per_block
            last = min(min(first + per_block - 1, max_tokens // alignment), len(block_hashes))
            for unit in range(last, first, -1):
                if cached_in_all(indexes, block_hashes[unit - 1], found):
                    for position, block in enumerate(found):
                        hit[position].append(block)
                    num_tokens = unit * alignment
                    break
        if drops_last and num_tokens > 0:
            num_tokens -= min(alignment, block_size)
        num_tokens = round_down(num_tokens, alignment)
        for blocks in hit:
            del blocks[cdiv(num_tokens, block_size) :]
        return GroupHit(hit, num_tokens)

    def cache_blocks(self, held: GroupBlocks, request: Request, num_computed_tokens: int) -> None:
        SingleTypeKVCacheManager.cache_blocks(self, held, request, num_computed_tokens)
        if self.hashes_per_block > 1:
            self._cache_prompt_tail(held, request, self.cacheable_end(num_computed_tokens))

    def next_caching(self, held: GroupBlocks) -> i64:
        if self.hashes_per_block > 1:
            return 0
        return SingleTypeKVCacheManager.next_caching(self, held)

    def _cache_prompt_tail(self, held: GroupBlocks, request: Request, num_tokens: int) -> None:
        """Makes the block in which the prompt ends a hit up to the prompt's last whole hash unit."""
        unit = self.policy.hash_block_size
        # Sending the prompt again can use all but its last token; a draft looks at all of it before it drops a unit.
        limit = request.num_prompt_tokens if self.policy.is_draft else request.num_prompt_tokens - 1
        boundary = min(round_down(limit, unit), self._named_end(request))
        index = boundary // self.block_size
        if boundary == 0 or boundary > num_tokens or boundary % self.block_size == 0 or index >= len(held.blocks):
            return
        block = held.blocks[index]
        if block.block_id != 0:
            self.cache_partial(block, request, boundary)


def _find_run(
    indexes: list[PrefixIndex], block_hashes: list[bytes], per_block: int, most: int, hit: list[list[KVCacheBlock]]
) -> int:
    """Adds blocks from the start up to the first that some index lacks, at most `most`; returns how many."""
    num_found = 0
    if len(indexes) == 1:
        # By far the most frequent; without the lists of the general case a block takes 60 ns less of 180.
        index, blocks = indexes[0], hit[0]
        while num_found < most:
            block = index.get(block_hashes[(num_found + 1) * per_block - 1])
            if block is None:
                break
            blocks.append(block)
            num_found += 1
        return num_found
    found: list[KVCacheBlock] = []
    while num_found < most and cached_in_all(indexes, block_hashes[(num_found + 1) * per_block - 1], found):
        for position, block in enumerate(found):
            hit[position].append(block)
        num_found += 1
    return num_found
