"""BlockDemand: how many blocks requests need, now or ever, and whether the pools have them.

Refusals, endings, admissions and waiting all ask here, so that they agree: what is not refused fits once it is alone.
Nothing here takes or gives back a block.
"""

from typing import Final

from mypy_extensions import i64

from kvledger.core.blocks.block_pool import BlockPool
from kvledger.core.blocks.kv_cache_blocks import BlockShortage, PrefixHit
from kvledger.core.groups.base import SingleTypeKVCacheManager
from kvledger.core.groups.slot_ranges import SlotRanges, remaining_ranges, sequence_ranges, start_ranges
from kvledger.core.ledger.coordinator import KVCacheCoordinator, RequestBlocks
from kvledger.core.requests.request import Request
from kvledger.errors import wrong_value


class BlockDemand:
    """`max_in_flight_tokens`: None where the ledger was made for whatever its steps need."""

    def __init__(self, coordinator: KVCacheCoordinator, max_model_len: int, max_in_flight_tokens: int | None) -> None:
        self._coordinator: Final = coordinator
        self._managers: Final[list[SingleTypeKVCacheManager]] = coordinator.managers
        self._pool: Final[BlockPool] = coordinator.pool
        self._nothing: Final = [manager.make_held() for manager in coordinator.managers]
        self._max_model_len: Final = max_model_len
        self._max_in_flight_tokens: Final = max_in_flight_tokens
        self._has_host_pools: Final = any(manager.pool is not coordinator.pool for manager in coordinator.managers)
        # Of the last question that was answered with a shortage.
        self.shortage: BlockShortage | None = None

    def expect_steps(self, max_tokens: int, max_in_flight: int, num_lookahead_tokens: int) -> None:
        """Steps compute up to max_tokens tokens and write num_lookahead_tokens slots behind each request's, and
        max_in_flight of them are out at a time. A Scheduler says so when it is made.

        Then admission and refusals count what such steps need. ConfigError, changing nothing, when the ledger was made
        for fewer tokens in flight: what it admitted could not always be computed.
        """
        needed = self._most_blocks(max_tokens * max_in_flight)
        given = needed
        if self._max_in_flight_tokens is not None:
            given = self._most_blocks(self._max_in_flight_tokens)
        for group_id, num_blocks in enumerate(needed):
            if num_blocks > given[group_id]:
                raise wrong_value(
                    "max_in_flight_tokens",
                    self._max_in_flight_tokens,
                    f"less than {max_in_flight} steps of max_num_batched_tokens={max_tokens}, with which group "
                    f"{group_id} may hold {num_blocks} blocks of a request",
                    "leave it out, raise it, or lower max_num_batched_tokens",
                )
        step = self._most_blocks(max_tokens + num_lookahead_tokens)
        for group_id, manager in enumerate(self._managers):
            manager.policy = manager.policy.with_most_blocks(given[group_id], step[group_id])

    # Of one request

    def num_blocks_for(self, num_tokens: int, num_encoder_tokens: int, num_lookahead_tokens: int) -> int:
        """Most blocks over all groups that a request of num_tokens tokens holds at a time, when it shares none and has
        one step in flight at a time; more than there are when it never fits."""
        ranges = sequence_ranges(num_tokens, num_encoder_tokens, num_lookahead_tokens, self._max_model_len)
        return sum([manager.num_blocks_at_peak(ranges) for manager in self._managers])

    def num_blocks_missing(self, request: Request, num_more_tokens: int = 0) -> int:
        """Blocks that the request still needs to hold all its tokens so far and num_more_tokens drafts beyond."""
        coordinator = self._coordinator
        ranges = remaining_ranges(request, num_more_tokens, self._max_model_len)
        return self.num_blocks_to_take(coordinator.get(request.request_id), coordinator.no_hit, ranges)

    def num_draft_blocks(self, num_tokens: int) -> int:
        """Blocks, over all groups, for so many tokens of a step with drafts, whatever a request holds already."""
        return sum([manager.num_draft_blocks(num_tokens) for manager in self._managers])

    def num_blocks_to_take(self, held: RequestBlocks | None, hit: PrefixHit, ranges: SlotRanges) -> i64:
        """Free blocks that these ranges use up, over all groups."""
        num_blocks: i64 = 0
        groups = self._nothing if held is None else held.groups
        hit_blocks = hit.blocks.blocks
        managers = self._managers
        num_groups: i64 = len(managers)
        index: i64 = 0
        while index < num_groups:
            num_blocks += managers[index].num_blocks_to_take(groups[index], hit_blocks[index], ranges)
            index += 1
        return num_blocks

    # Against the pools

    def is_short(
        self,
        request: Request,
        held: RequestBlocks | None,
        hit: PrefixHit,
        ranges: SlotRanges,
        num_watermark: int = 0,
        num_reserved: int = 0,
    ) -> bool:
        """Whether too few blocks are free for these ranges; `shortage` has the numbers then."""
        num_blocks = self.num_blocks_to_take(held, hit, ranges)
        num_free = self._pool.num_free_blocks
        if num_blocks + num_watermark <= num_free - num_reserved:
            return False
        is_in_writing = hit.num_tokens > 0 and self._coordinator.is_hit_in_writing(hit)
        num_alone = 0
        if held is None and not is_in_writing:
            num_alone = self._num_blocks_alone(hit, ranges)
        elif held is not None and ranges.is_gate:
            num_alone = num_blocks + self._coordinator.num_blocks_held(held)
        num_usable = self._pool.num_usable_blocks
        self.shortage = BlockShortage(
            request.request_id,
            num_blocks,
            num_free,
            num_watermark,
            num_reserved,
            is_whole_sequence=ranges.is_gate,
            is_host_pool=num_blocks > num_usable and self._lacks_host_blocks(held, hit, ranges),
            is_in_writing=is_in_writing,
            never_fits=num_alone > num_usable,
        )
        return True

    def lacks_host_blocks_beside(
        self, request: Request, hit: PrefixHit, num_external_tokens: int, others: list[Request], num_more_tokens: int
    ) -> bool:
        """Whether pools in host memory have too few blocks for all tokens of a request that starts and what others
        still need, each with num_more_tokens of a step with drafts behind. In a pool that is all free, the request
        goes without its drafts."""
        if not self._has_host_pools:
            return False
        coordinator = self._coordinator
        hit = coordinator.usable_hit(hit, num_external_tokens)
        ranges = start_ranges(request, 0, hit.num_tokens, num_external_tokens, 0, self._max_model_len)
        whole = ranges.whole_sequence(request, self._max_model_len)
        for group_id, manager in enumerate(self._managers):
            pool = manager.pool
            if pool is self._pool:
                continue
            num_blocks = manager.num_host_blocks_to_take(self._nothing[group_id], hit.blocks.blocks[group_id], whole)
            if pool.num_free_blocks < pool.num_usable_blocks:
                num_blocks += manager.num_draft_blocks(num_more_tokens)
            for other in others:
                group = coordinator.require_held(other.request_id).groups[group_id]
                rest = remaining_ranges(other, num_more_tokens, self._max_model_len)
                num_blocks += manager.num_host_blocks_to_take(group, [], rest)
            if num_blocks > pool.num_free_blocks:
                return True
        return False

    def _most_blocks(self, max_in_flight_tokens: int) -> list[int]:
        """Most blocks of one request in each group, with so many tokens scheduled and not settled at a time."""
        groups = self._coordinator.groups
        return [group.max_admission_blocks(self._max_model_len, max_in_flight_tokens) for group in groups]

    def _num_blocks_alone(self, hit: PrefixHit, ranges: SlotRanges) -> int:
        """Blocks that a start with these ranges uses up of pools that it has for itself, over all groups, its hit's
        among them; more than there are when it never fits. REQUIRES a hit that this step does not write."""
        num_blocks = 0
        for group_id, manager in enumerate(self._managers):
            num_blocks += manager.num_blocks_alone(hit.blocks.blocks[group_id], ranges)
        return num_blocks

    def _lacks_host_blocks(self, held: RequestBlocks | None, hit: PrefixHit, ranges: SlotRanges) -> bool:
        """Whether a group with a pool of its own has too few blocks there. Such a group takes none of this pool."""
        groups = self._nothing if held is None else held.groups
        for group_id, manager in enumerate(self._managers):
            hit_blocks = hit.blocks.blocks[group_id]
            if manager.pool is not self._pool and manager.num_blocks_to_take(groups[group_id], hit_blocks, ranges) > 0:
                return True
        return False
