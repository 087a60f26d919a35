"""Groups whose blocks no other request can use: encoder states, scratch rings. Never looked up, never cached."""

from mypy_extensions import i64, mypyc_attr

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.groups.base import NEVER, GroupBlocks, GroupHit, SingleTypeKVCacheManager
from kvledger.core.groups.slot_ranges import SlotRanges
from kvledger.core.requests.request import Request
from kvledger.core.units import round_down


@mypyc_attr(allow_interpreted_subclasses=True)
class UnsharedManager(SingleTypeKVCacheManager):
    """Blocks for every token, for this request alone."""

    def find_longest_hit(
        self, block_hashes: list[bytes], max_tokens: int, group_ids: list[int], drops_last: bool
    ) -> GroupHit:
        return GroupHit([[] for _ in group_ids], 0)

    def attach_hit(self, held: GroupBlocks, hit: list[KVCacheBlock], ranges: SlotRanges) -> None:
        """Nothing of it can be a hit."""

    def cache_blocks(self, held: GroupBlocks, request: Request, num_computed_tokens: int) -> None:
        """Nothing of it can become one."""

    def holds_all_blocks(self) -> bool:
        return True

    def next_caching(self, held: GroupBlocks) -> i64:
        return NEVER


@mypyc_attr(allow_interpreted_subclasses=True)
class CrossAttentionManager(UnsharedManager):
    """The decoder's view of the encoder: slots for the encoder's tokens, taken once, however long the output gets."""

    def num_slots_wanted(self, ranges: SlotRanges) -> i64:
        return ranges.num_encoder_tokens

    def take_external_blocks(self, held: GroupBlocks, ranges: SlotRanges) -> None:
        """External tokens are the decoder's."""

    def num_resumable_tokens(self, held: GroupBlocks, num_valid_tokens: int, num_loaded_tokens: int) -> int:
        return num_valid_tokens

    def num_slots(self, held: GroupBlocks) -> i64:
        return NEVER

    def num_forkable_tokens(self, held: GroupBlocks) -> int:
        return NEVER

    def num_blocks_to_fork(self, held: GroupBlocks, num_tokens: int, num_forks: int) -> int:
        return 0

    def fork(self, held: GroupBlocks, twin: GroupBlocks, num_tokens: int) -> None:
        """The encoder's states are read only: both share all of them."""
        twin.blocks.extend(held.blocks)
        self.pool.touch(twin.blocks)


@mypyc_attr(allow_interpreted_subclasses=True)
class CircularBufferManager(UnsharedManager):
    """A ring of one block a request, however long it gets."""

    def num_slots_wanted(self, ranges: SlotRanges) -> i64:
        return self.block_size

    def take_external_blocks(self, held: GroupBlocks, ranges: SlotRanges) -> None:
        self._extend(held, self.block_size)

    def num_resumable_tokens(self, held: GroupBlocks, num_valid_tokens: int, num_loaded_tokens: int) -> int:
        """What the ring has is that of the load's end; where its blocks begin, nothing of it is read."""
        at_end = num_valid_tokens >= num_loaded_tokens - 1
        return num_valid_tokens if at_end else round_down(num_valid_tokens, self.block_size)

    def num_slots(self, held: GroupBlocks) -> i64:
        return NEVER if held.blocks else 0

    def num_forkable_tokens(self, held: GroupBlocks) -> int:
        return NEVER if held.blocks else 0

    def num_blocks_to_fork(self, held: GroupBlocks, num_tokens: int, num_forks: int) -> int:
        return num_forks

    def fork(self, held: GroupBlocks, twin: GroupBlocks, num_tokens: int) -> None:
        source = held.blocks[0]
        target = self.pool.get_new_blocks(1, self.group_id)[0]
        twin.blocks.append(target)
        self.pool.touch([source, target])
        self._copies.order(self.group_id, source, target)
