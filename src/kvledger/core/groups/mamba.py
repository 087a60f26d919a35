"""Recurrent states that no request shares (Mamba, gated delta nets; mode "none").

One block is one state, whatever the number of tokens behind it: a request holds its running state, and one a draft.
"""

from mypy_extensions import i64, mypyc_attr

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.kv_cache_blocks import PrefixHit
from kvledger.core.groups.base import (
    NEVER,
    GroupBlocks,
    GroupHit,
    ManagerContext,
    SingleTypeKVCacheManager,
    cached_in_all,
)
from kvledger.core.groups.policy import GroupPolicy
from kvledger.core.groups.slot_ranges import SlotRanges
from kvledger.core.groups.spec import MambaSpec
from kvledger.core.requests.request import Request
from kvledger.core.units import cdiv


@mypyc_attr(allow_interpreted_subclasses=True)
class MambaManager(SingleTypeKVCacheManager):
    """Mode "none"; AlignedMambaManager is mode "align"."""

    def __init__(self, spec: MambaSpec, group_id: int, context: ManagerContext, policy: GroupPolicy) -> None:
        super().__init__(spec, group_id, context, policy)
        self.num_speculative_blocks: int = spec.num_speculative_blocks

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Only the state of the last token is read."""
        return num_computed_tokens - 1

    def num_draft_blocks(self, num_tokens: int) -> int:
        """Drafts' states have blocks from the start."""
        return 0

    def can_step_back(self) -> bool:
        return False

    def hit_may_lag(self) -> bool:
        return True

    def num_resumable_tokens(self, held: GroupBlocks, num_valid_tokens: int, num_loaded_tokens: int) -> int:
        """There is one state, that after all tokens."""
        return num_valid_tokens if num_valid_tokens == num_loaded_tokens else 0

    def _num_skipped_blocks(self, ranges: SlotRanges) -> int:
        return max(0, self.num_skipped_tokens(ranges.computed_end)) // self.block_size

    def next_release(self, held: GroupBlocks) -> i64:
        return (held.num_released_blocks + 1) * self.block_size + 1

    def num_slots_wanted(self, ranges: SlotRanges) -> i64:
        return ranges.slots_end + self.block_size * self.num_speculative_blocks

    def num_blocks_at_peak(self, ranges: SlotRanges) -> int:
        """One state and one a draft; where sequences outgrow a block, one step may enter all blocks of a prompt."""
        return cdiv(self.num_slots_wanted(ranges), self.block_size)

    def num_slots(self, held: GroupBlocks) -> i64:
        return (len(held.blocks) - self.num_speculative_blocks) * self.block_size

    def draft_margin(self) -> int:
        """A draft has no recurrent layers, so nothing of a state hit is dropped."""
        return 0

    def find_longest_hit(
        self, block_hashes: list[bytes], max_tokens: int, group_ids: list[int], drops_last: bool
    ) -> GroupHit:
        """The rightmost cached state at an aligned length; nothing before it is needed."""
        alignment = self.policy.hit_alignment
        block_size = self.block_size
        fine = alignment < block_size and block_size % alignment == 0
        unit = alignment if fine else block_size
        units_per_hash = 1 if fine else self.hashes_per_block
        indexes = [self.pool.indexes[group_id] for group_id in group_ids]
        found: list[KVCacheBlock] = []
        for end in range(min(max_tokens // unit, len(block_hashes) // units_per_hash), 0, -1):
            if end * unit % alignment != 0:
                continue
            if cached_in_all(indexes, block_hashes[end * units_per_hash - 1], found):
                num_before = (end * unit - 1) // block_size
                null = self.pool.null_block
                hit: list[list[KVCacheBlock]] = []
                for block in found:
                    table = [null] * num_before
                    table.append(block)
                    hit.append(table)
                return GroupHit(hit, end * unit)
        return GroupHit([[] for _ in group_ids], 0)

    def still_has(self, block: KVCacheBlock, index: int, hit: PrefixHit, hashes: list[bytes]) -> bool:
        """A state is one after exactly so many tokens."""
        unit = self.policy.hash_block_size
        num_tokens = min((index + 1) * self.block_size, hit.num_tokens)
        num_units = num_tokens // unit
        return (
            num_tokens % unit == 0
            and 0 < num_units <= len(hashes)
            and self.pool.answers_for(block, hashes[num_units - 1], self.group_id)
        )

    def num_forkable_tokens(self, held: GroupBlocks) -> int:
        return (len(held.blocks) - self.num_speculative_blocks) * self.block_size

    def cache_blocks(self, held: GroupBlocks, request: Request, num_computed_tokens: int) -> None:
        """A block may have been written over by later tokens, so it stands for no prefix."""

    def next_caching(self, held: GroupBlocks) -> i64:
        return NEVER

    def num_blocks_to_fork(self, held: GroupBlocks, num_tokens: int, num_forks: int) -> int:
        return num_forks * (1 + self.num_speculative_blocks)

    def fork(self, held: GroupBlocks, twin: GroupBlocks, num_tokens: int) -> None:
        """Every state is copied: both sequences go on from it. After accepted drafts it lies in a draft's block."""
        running = len(held.blocks) - self.num_speculative_blocks - 1
        twin.blocks.extend([self.pool.null_block] * running)
        twin.num_cached_blocks = running
        twin.num_released_blocks = running
        targets = self.pool.get_new_blocks(1 + self.num_speculative_blocks, self.group_id)
        twin.blocks.extend(targets)
        for index, target in enumerate(targets):
            source = held.blocks[running + index]
            self.pool.touch([source, target])
            self._copies.order(self.group_id, source, target)
