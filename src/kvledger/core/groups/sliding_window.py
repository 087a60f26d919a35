"""Sliding-window attention: a token reads the last `sliding_window` tokens, itself included.

    computed tokens 0 .. n - 1, the next one is n:   | skipped ........... | extra | window - 1 tokens | n
                                                     0                     ^ num_skipped_tokens(n)

Blocks that lie in the skipped part whole are given back and null blocks take their places. A hit needs only the blocks
of the window before its end, so of a long prefix only short tails are ever useful.
"""

from mypy_extensions import i64, mypyc_attr

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.groups.base import (
    GroupBlocks,
    GroupHit,
    ManagerContext,
    SingleTypeKVCacheManager,
    cached_in_all,
)
from kvledger.core.groups.policy import GroupPolicy
from kvledger.core.groups.spec import KVCacheSpec
from kvledger.core.requests.request import Request
from kvledger.core.units import cdiv, round_down
from kvledger.errors import wrong_value


@mypyc_attr(allow_interpreted_subclasses=True)
class SlidingWindowManager(SingleTypeKVCacheManager):
    """`sliding_window` and `extra_retained_tokens` as in the spec (sliding attention or sliding MLA)."""

    def __init__(
        self,
        spec: KVCacheSpec,
        group_id: int,
        context: ManagerContext,
        policy: GroupPolicy,
        sliding_window: int,
        extra_retained_tokens: int = 0,
    ) -> None:
        super().__init__(spec, group_id, context, policy)
        if sliding_window < 1:
            raise wrong_value("sliding_window", sliding_window, "not a window", "give at least 1 token")
        self.sliding_window: int = sliding_window
        self.num_behind: int = sliding_window - 1 + extra_retained_tokens

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.num_behind)

    def num_blocks_held(self, held: GroupBlocks) -> int:
        return self._num_blocks_behind_nulls(held)

    def next_release(self, held: GroupBlocks) -> i64:
        return (held.num_released_blocks + 1) * self.block_size + self.num_behind

    def num_blocks_for_hit(self, is_draft: bool) -> int:
        """Blocks in a row that a hit needs at its end; a draft needs one more, which it drops."""
        return cdiv(self.sliding_window - 1, self.block_size) + (1 if is_draft else 0)

    def find_longest_hit(
        self, block_hashes: list[bytes], max_tokens: int, group_ids: list[int], drops_last: bool
    ) -> GroupHit:
        """The rightmost run of enough cached blocks; else the run at the start, which needs no more than it has."""
        block_size = self.block_size
        per_block = self.hashes_per_block
        num_needed = self.num_blocks_for_hit(drops_last)
        if num_needed == 0:
            # A window of one token reads nothing that is cached (vLLM caches nothing then, and asks for a block).
            kept = self._align(max_tokens // block_size)
            return GroupHit([self._table([], kept, kept) for _ in group_ids], kept * block_size)
        indexes = [self.pool.indexes[group_id] for group_id in group_ids]
        # Blocks of the run under way, last one first, for each group.
        run: list[list[KVCacheBlock]] = [[] for _ in group_ids]
        found: list[KVCacheBlock] = []
        end = 0
        num_in_run = 0
        for index in range(min(max_tokens // block_size, len(block_hashes) // per_block) - 1, -1, -1):
            if not cached_in_all(indexes, block_hashes[(index + 1) * per_block - 1], found):
                num_in_run = 0
                continue
            if num_in_run == 0:
                kept = index if drops_last else index + 1
                if kept * block_size % self.policy.hit_alignment != 0:
                    continue
                end = index + 1
                for blocks in run:
                    blocks.clear()
            for position, block in enumerate(found):
                run[position].append(block)
            num_in_run += 1
            if num_in_run >= num_needed:
                break
        if num_in_run == 0:
            end = 0
        kept = end
        if num_in_run < num_needed:
            kept = self._align(kept)
        if drops_last and kept > 0:
            kept = self._align(kept - 1)
        return GroupHit([self._table(blocks[:num_in_run], end, kept) for blocks in run], kept * block_size)

    def _align(self, num_blocks: int) -> int:
        """The most blocks, up to num_blocks, that end at an aligned length."""
        while num_blocks * self.block_size % self.policy.hit_alignment != 0:
            num_blocks -= 1
        return num_blocks

    def _table(self, run: list[KVCacheBlock], end: int, kept: int) -> list[KVCacheBlock]:
        """Null blocks, then the run (given last block first) up to block `end`; cut to `kept` blocks."""
        table = [self.pool.null_block] * (end - len(run))
        table.extend(reversed(run))
        del table[kept:]
        return table

    def reachable(self, start: int, end: int, request: Request) -> list[bool] | None:
        """Of each segment only the tail that a hit at its end needs; with sparse retention, tails at replay ends."""
        alignment = self.policy.hit_alignment
        block_size = self.block_size
        if alignment % block_size != 0:
            return None
        interval = self.policy.retention_interval
        num_needed = self.num_blocks_for_hit(self.policy.is_draft)
        # A draft looks one block past the boundary, so its tail ends one block later.
        shift = 1 if self.policy.is_draft else 0
        per_segment = (alignment if interval < 0 else interval) // block_size
        if interval != 0 and num_needed >= per_segment:
            return None
        keep = [False] * (end - start)
        if interval != 0:
            for index in range(max(start, shift), end):
                keep[index - start] = (index - shift) % per_segment >= per_segment - num_needed
        if interval >= 0:
            for boundary in replay_ends(request, self.policy, self.block_size):
                tail_end = round_down(boundary, alignment) // block_size + shift
                for index in range(max(start, tail_end - num_needed), min(end, tail_end)):
                    keep[index - start] = True
        return keep


def replay_ends(request: Request, policy: GroupPolicy, block_size: int) -> list[int]:
    """Positions at which a later request with the same prompt can resume: the same prompt again, a longer one, and a
    prefix that others are known to share.

    The same prompt again stops before its last token. With drafts, hits are looked up one block further and dropped
    back, so both stops are one block lower.
    """
    num_prompt = request.num_prompt_tokens
    if policy.any_draft:
        block = policy.base_block_size
        ends = [max(round_down(num_prompt - 1, block) - block, 0), max(round_down(num_prompt, block) - block, 0)]
    else:
        ends = [num_prompt - 1]
    if request.shared_prefix_boundary > 0:
        ends.append(request.shared_prefix_boundary)
        if policy.is_draft and policy.keeps_block_below_junction:
            # Who leaves the shared prefix right behind it has no block there to drop.
            ends.append(request.shared_prefix_boundary - block_size)
    return ends
