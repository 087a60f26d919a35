"""SingleTypeKVCacheManager: the rules of one KV cache group, without state about requests.

What a request holds in a group is a GroupBlocks, kept by the coordinator and handed in. So a manager reads as
arithmetic on half-open token ranges (slot_ranges.py), and a new attention type is a subclass that answers a few
questions: which tokens are read no more, which cached blocks make a hit, how many blocks a range takes.
"""

from abc import ABC, abstractmethod
from typing import Final

from mypy_extensions import i64, mypyc_attr

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.block_pool import BlockPool
from kvledger.core.blocks.holds import BlockCopies
from kvledger.core.blocks.kv_cache_blocks import PrefixHit
from kvledger.core.blocks.observer import GroupSizes, LedgerObserver
from kvledger.core.blocks.prefix_index import PrefixIndex
from kvledger.core.groups.policy import GroupPolicy
from kvledger.core.groups.slot_ranges import SlotRanges
from kvledger.core.groups.spec import KVCacheSpec
from kvledger.core.groups.state_offers import StateOffer, StateOffers
from kvledger.core.requests.request import Request
from kvledger.core.units import blocks_for, cdiv, round_down

# "Not at any length that a request can have."
NEVER: Final = 1 << 60


@mypyc_attr(allow_interpreted_subclasses=True)
class GroupBlocks:
    """One request's blocks in one group: blocks[i] holds tokens [i * block_size, (i + 1) * block_size).

    The first num_cached_blocks of them need no more caching: they were hits, are indexed, or never shall be. The first
    num_released_blocks are null: their tokens are read no more. `shared_tail` is a hit block of which only the start
    is the request's; it is replaced by a copy before the request writes (index shared_tail_index).
    """

    def __init__(self) -> None:
        self.blocks: list[KVCacheBlock] = []
        self.num_cached_blocks: int = 0
        self.num_released_blocks: int = 0
        self.shared_tail: KVCacheBlock | None = None
        self.shared_tail_index: int = 0


class GroupHit:
    """A hit in groups that are looked up together: blocks[i] of the i-th of them, all for num_tokens tokens."""

    def __init__(self, blocks: list[list[KVCacheBlock]], num_tokens: int) -> None:
        self.blocks: Final = blocks
        self.num_tokens: Final = num_tokens


class ManagerContext:
    """What every manager of a ledger shares: the pool, the copies that workers owe, and who watches."""

    def __init__(self, pool: BlockPool, copies: BlockCopies, observer: LedgerObserver | None) -> None:
        self.pool: Final = pool
        self.copies: Final = copies
        self.observer: Final = observer


@mypyc_attr(allow_interpreted_subclasses=True)
class SingleTypeKVCacheManager(ABC):
    """Rules of one group. The defaults are those of attention that reads every token."""

    def __init__(self, spec: KVCacheSpec, group_id: int, context: ManagerContext, policy: GroupPolicy) -> None:
        self.spec: Final = spec
        self.group_id: Final = group_id
        self.pool: BlockPool = context.pool
        # Replaced once, by an engine that says how large its steps are.
        self.policy: GroupPolicy = policy
        # A block of a spec that is sharded over context-parallel ranks spans block_size tokens on each of them.
        ranks = policy.context_parallel_size if spec.shards_over_context else 1
        self.block_size: Final = spec.block_size * ranks
        # A block's hash is the hash of its last unit.
        self.hashes_per_block: Final = self.block_size // policy.hash_block_size
        self._sizes: Final = GroupSizes(self.block_size, policy.hash_block_size, policy.num_hash_lookahead)
        self._copies: Final = context.copies
        self._observer: LedgerObserver | None = context.observer

    def observe(self, observer: LedgerObserver) -> None:
        """From now on this one is told, in the place of any other."""
        self._observer = observer

    # Hits

    def is_prefix_closed(self) -> bool:
        """True if every shorter aligned prefix of a hit is a hit with the first of its blocks."""
        return False

    def keeps_longer_hit(self) -> bool:
        """True if a hit longer than the other groups' is handed out whole, because a connector may fill in the rest."""
        return False

    def draft_margin(self) -> int:
        """Tokens that a draft group looks up beyond a candidate length, to drop them again."""
        if self.spec.hits_inside_blocks and self.policy.hit_alignment < self.block_size:
            return self.policy.hit_alignment
        return self.block_size

    @abstractmethod
    def find_longest_hit(
        self, block_hashes: list[bytes], max_tokens: int, group_ids: list[int], drops_last: bool
    ) -> GroupHit:
        """Cached blocks of the longest usable prefix of at most max_tokens tokens. Changes nothing.

        `group_ids`: groups with this manager's spec, this one among them, looked up together: a block counts if all of
        them have it. `drops_last`: a draft needs the last block computed again.
        """

    def still_has(self, block: KVCacheBlock, index: int, hit: PrefixHit, hashes: list[bytes]) -> bool:
        """Whether a block that stands at `index` of a hit's table still answers for it in a sequence with these hashes.

        Where the hit ends inside it, any hash of the block that covers the hit's tokens will do.
        """
        unit = self.policy.hash_block_size
        end = (index + 1) * self.block_size
        first = hit.num_tokens if index * self.block_size < hit.num_tokens < end else end
        for num_units in range(cdiv(first, unit), min(end // unit, len(hashes)) + 1):
            if self.pool.answers_for(block, hashes[num_units - 1], self.group_id):
                return True
        return False

    # Counting

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens from the start that no later token reads, once num_computed_tokens are computed."""
        return 0

    def num_slots_wanted(self, ranges: SlotRanges) -> i64:
        """Tokens that need a slot in this group."""
        return ranges.slots_end

    def num_blocks_to_take(self, held: GroupBlocks, hit: list[KVCacheBlock], ranges: SlotRanges) -> i64:
        """Free blocks that these ranges will use up; more than any pool has for a hit that this step writes.

        Hit blocks that nobody holds count as well: attaching them takes them out of the free queue.
        """
        num_wanted: i64 = blocks_for(self.num_slots_wanted(ranges), self.block_size)
        if ranges.is_gate and 0 < self.policy.max_admission_blocks < num_wanted:
            num_wanted = self.policy.max_admission_blocks
        num_held: i64 = len(held.blocks)
        if num_held > 0:
            if num_wanted > num_held:
                return num_wanted - num_held
            return 0
        num_skipped = self._num_skipped_blocks(ranges)
        num_blocks = max(num_wanted - max(num_skipped, len(hit)), 0)
        for index in range(num_skipped, len(hit)):
            block = hit[index]
            if block.ref_cnt == 0 and block.block_id != 0:
                num_blocks += 1
        if self.ends_inside_block(hit, ranges.local_end):
            num_blocks += 1
        return num_blocks

    def num_host_blocks_to_take(self, held: GroupBlocks, hit: list[KVCacheBlock], ranges: SlotRanges) -> i64:
        """Blocks that these ranges use up of a pool of the group's own."""
        return 0

    def num_blocks_alone(self, hit: list[KVCacheBlock], ranges: SlotRanges) -> int:
        """Blocks that a request which starts with these ranges uses up of a pool that nobody else uses, its hit's among
        them. REQUIRES a hit that this step does not write.
        """
        num_blocks = self.num_blocks_to_take(self.make_held(), hit, ranges)
        num_skipped = max(0, self.num_skipped_tokens(ranges.computed_end)) // self.block_size
        for index in range(num_skipped, len(hit)):
            if hit[index].ref_cnt > 0:
                num_blocks += 1
        return num_blocks

    def num_blocks_at_peak(self, ranges: SlotRanges) -> int:
        """Most blocks that a request holds at a time from its first step to the end of these ranges, when it shares
        none and has one step in flight at a time, however large. A request fits a pool of so many."""
        return min(cdiv(self.num_slots_wanted(ranges), self.block_size), self.policy.max_step_blocks)

    def is_hit_in_writing(self, hit: list[KVCacheBlock], local_end: int) -> bool:
        """Whether this very step writes what a hit of local_end tokens would have to be copied or read from."""
        return False

    def num_draft_blocks(self, num_tokens: int) -> int:
        """Blocks for that many tokens of a step with drafts, wherever in a block they begin, less the one begun."""
        return cdiv(num_tokens, self.block_size)

    def ends_inside_block(self, hit: list[KVCacheBlock], local_end: int) -> bool:
        """Whether a hit of local_end tokens ends inside its last block, which must then be copied."""
        return len(hit) > 0 and local_end % self.block_size != 0

    # Taking and giving back

    def make_held(self) -> GroupBlocks:
        """The record of a request that holds nothing yet."""
        return GroupBlocks()

    def attach_hit(self, held: GroupBlocks, hit: list[KVCacheBlock], ranges: SlotRanges) -> None:
        """Makes the request a holder of its prefix hit; null blocks stand for what it will not read.

        REQUIRES a request that holds nothing yet.
        """
        num_skipped = self._num_skipped_blocks(ranges)
        blocks = held.blocks
        if num_skipped > 0:
            hit = hit[num_skipped:]
            blocks.extend([self.pool.null_block] * num_skipped)
        self.pool.touch(hit)
        blocks.extend(hit)
        held.num_cached_blocks = len(blocks)
        if self.ends_inside_block(hit, ranges.local_end):
            held.shared_tail = hit[-1]
            held.shared_tail_index = ranges.local_end // self.block_size
            held.num_cached_blocks = held.shared_tail_index

    def take_external_blocks(self, held: GroupBlocks, ranges: SlotRanges) -> None:
        """Takes the blocks that external tokens will be written to: those that will be read."""
        if ranges.computed_end > max(ranges.local_end, self.num_skipped_tokens(ranges.computed_end)):
            self._extend(held, ranges.computed_end)

    def can_step_back(self) -> bool:
        """True if a request whose external tokens all arrived can go on a token before their end."""
        return True

    def hit_may_lag(self) -> bool:
        """True if external tokens behind a hit bring what this group reads, whatever the hit has of it."""
        return False

    def num_resumable_tokens(self, held: GroupBlocks, num_valid_tokens: int, num_loaded_tokens: int) -> int:
        """Where a request can go on, at num_valid_tokens tokens or below, with the blocks that it took for a load of
        num_loaded_tokens tokens, of which the first num_valid_tokens have values. 0: only from its start.

        What was to be read from the load's end on has blocks; from further back more is read, and written.
        """
        first = max(0, self.num_skipped_tokens(num_valid_tokens)) // self.block_size
        for index in range(first, len(held.blocks)):
            if held.blocks[index].block_id == 0:
                return 0  # and the further back it goes, the earlier is what it reads
        return num_valid_tokens

    def take_blocks(self, held: GroupBlocks, ranges: SlotRanges) -> None:
        """Adds the missing blocks to the table, behind those that are there, and makes a shared tail the request's own.
        REQUIRES that they were counted as free.
        """
        if held.shared_tail is not None:
            self._privatize_tail(held)
        self._extend(held, self.num_slots_wanted(ranges))

    def release_skipped(self, held: GroupBlocks, num_processed_tokens: int) -> None:
        """Gives back blocks that are read no more; null blocks take their places.

        `num_processed_tokens`: computed and settled. Steps in flight still read behind it, and rejected drafts can move
        the end of what is computed back to it.
        """
        end = min(max(0, self.num_skipped_tokens(num_processed_tokens)) // self.block_size, len(held.blocks))
        start = held.num_released_blocks
        if end <= start:
            return
        held.num_released_blocks = end
        blocks = held.blocks
        null = self.pool.null_block
        freed: list[KVCacheBlock] = []
        for index in range(end - 1, start - 1, -1):
            if blocks[index].block_id != 0:
                freed.append(blocks[index])
                blocks[index] = null
        self.pool.free_blocks(freed)

    def next_release(self, held: GroupBlocks) -> i64:
        """Processed tokens at which release_skipped has something to do."""
        return NEVER

    def num_slots(self, held: GroupBlocks) -> i64:
        """Tokens that the request has slots for. Below it, take_blocks has nothing to do."""
        return len(held.blocks) * self.block_size

    def num_blocks_held(self, held: GroupBlocks) -> int:
        """Blocks that the request holds, without null ones. O(blocks that are not released)."""
        blocks = held.blocks
        num_blocks = 0
        for index in range(held.num_released_blocks, len(blocks)):
            if blocks[index].block_id != 0:
                num_blocks += 1
        return num_blocks

    def _num_blocks_behind_nulls(self, held: GroupBlocks) -> int:
        """num_blocks_held where null blocks only stand first. O(1) once the first blocks were released."""
        blocks = held.blocks
        start = held.num_released_blocks
        while start < len(blocks) and blocks[start].block_id == 0:
            start += 1
        return len(blocks) - start

    def holds_all_blocks(self) -> bool:
        """True if a request gives nothing back before it is freed, so that it holds most at its end."""
        return False

    def fork(self, held: GroupBlocks, twin: GroupBlocks, num_tokens: int) -> None:
        """Makes `twin`, which is empty, a second holder of what the first num_tokens tokens need.

        Full blocks are shared; one that they fill in part is ordered to be copied. REQUIRES num_blocks_to_fork free.
        """
        num_full = num_tokens // self.block_size
        twin.blocks.extend(held.blocks[:num_full])
        twin.num_cached_blocks = min(held.num_cached_blocks, num_full)
        twin.num_released_blocks = min(held.num_released_blocks, num_full)
        self.pool.touch(twin.blocks)
        if num_tokens % self.block_size != 0:
            source = held.blocks[num_full]
            target = self.pool.get_new_blocks(1, self.group_id)[0]
            twin.blocks.append(target)
            self.pool.touch([source, target])
            self._copies.order(self.group_id, source, target)

    def num_forkable_tokens(self, held: GroupBlocks) -> int:
        """Tokens that the request has blocks for, so that a fork can share them."""
        return len(held.blocks) * self.block_size

    def num_blocks_to_fork(self, held: GroupBlocks, num_tokens: int, num_forks: int) -> int:
        """Blocks that num_forks forks at num_tokens tokens take."""
        return num_forks if num_tokens % self.block_size != 0 else 0

    def free(self, held: GroupBlocks) -> None:
        """Gives all blocks back, the last first, so that a cached prefix loses its tail before its head."""
        held.blocks.reverse()
        self.pool.free_blocks(held.blocks)

    # Caching

    def cacheable_end(self, num_computed_tokens: int) -> int:
        """The part of what is computed that a hit can ever use: hits are aligned, and drafts look one block further."""
        # Inside blocks nothing is rounded: a tail that was copied away would be cached again in its old block.
        alignment = 1 if self.policy.hits_inside_blocks else self.policy.hit_alignment
        end = round_down(num_computed_tokens, alignment)
        if end == 0:
            return 0
        settled = max(0, num_computed_tokens - self.policy.num_unsettled)
        if not self.policy.is_draft:
            return round_down(settled, alignment)
        return min(settled, round_down(settled, alignment) + self.block_size)

    def cache_blocks(self, held: GroupBlocks, request: Request, num_computed_tokens: int) -> None:
        """Makes blocks that are full at num_computed_tokens tokens, and have their hash, hits for others."""
        num_full = self.cacheable_end(num_computed_tokens) // self.block_size
        if self.policy.num_hash_lookahead > 0:
            num_full = min(num_full, self._named_end(request) // self.block_size)
        start = held.num_cached_blocks
        if num_full <= start:
            return
        keep = self.reachable(start, num_full, request)
        blocks = held.blocks
        # Listed only for somebody: mostly it is one block, and a list costs as much as naming it.
        lists = self._observer is not None or self.policy.hits_inside_blocks
        cached: list[KVCacheBlock] = []
        for index in range(start, num_full):
            block = blocks[index]
            if (keep is None or keep[index - start]) and self._cache_block(block, request, index + 1) and lists:
                cached.append(block)
        held.num_cached_blocks = num_full
        if cached:
            self.cached(request, cached)
        if self._observer is not None:
            size = self.block_size
            self._observer.blocks_filled(request, self.group_id, cached, start * size, num_full * size, self._sizes)

    def _named_end(self, request: Request) -> int:
        """Where the last hash unit ends whose hash can be known: it is whole, and the tokens behind it are there."""
        unit = self.policy.hash_block_size
        return round_down(max(0, request.num_tokens - self.policy.num_hash_lookahead), unit)

    def cache_partial(self, block: KVCacheBlock, request: Request, num_tokens: int) -> None:
        """Makes a block a hit for the request's first num_tokens tokens, which end inside it at a hash unit."""
        block_hash = request.block_hashes[num_tokens // self.policy.hash_block_size - 1]
        if not self.pool.cache_partial_block(block, block_hash, self.group_id, num_tokens):
            return
        if block.block_hash == block_hash:
            self.cached(request, [block])
        if self._observer is not None:
            self._observer.prefix_cached(request, self.group_id, block, num_tokens, self._sizes)

    def cached(self, request: Request, blocks: list[KVCacheBlock]) -> None:
        """Called with blocks that were just made hits, where hits can end inside blocks. Mostly nothing to do."""

    def reachable(self, start: int, end: int, request: Request) -> list[bool] | None:
        """Which of blocks [start, end) can ever be part of a hit; None: all of them."""
        return None

    def next_caching(self, held: GroupBlocks) -> i64:
        """Computed tokens below which cache_blocks has nothing to do."""
        return (held.num_cached_blocks + 1) * self.block_size

    def offer_states(self, offers: StateOffers) -> None:
        """From now on states that become hits are offered there. Nothing to do for kinds without states."""

    def last_state_offer(self, held: GroupBlocks, num_tokens: int) -> StateOffer | None:
        """The state inside a block, at the prompt's end, of a request that stops after num_tokens tokens, all of them
        computed; None where there is none or a later token was written over it. It is offered once.
        """
        return None

    # Steps

    def start_step(self) -> None:
        """A new step begins."""

    def clips_chunks(self) -> bool:
        """Whether clip_chunk has anything to say."""
        return False

    def clip_chunk(self, request: Request, start: int, end: int, max_chunk: int) -> int:
        """Where a prefill chunk over tokens [start, end) should end so that this group can cache it; start: not now."""
        return end

    # For subclasses

    def _num_skipped_blocks(self, ranges: SlotRanges) -> int:
        """Blocks from the start that a request which starts with these ranges will not read."""
        return max(0, self.num_skipped_tokens(ranges.resume_end)) // self.block_size

    def _cache_block(self, block: KVCacheBlock, request: Request, end: int) -> bool:
        """Makes the last of a request's first `end` blocks a hit. False where there is nothing to do."""
        num_tokens = end * self.block_size
        if block.block_id == 0 or (block.block_hash is not None and block.num_hash_tokens >= num_tokens):
            return False  # null, or shared by a fork from when it was full but not cached; the other holder was first
        block_hash = request.block_hashes[end * self.hashes_per_block - 1]
        self.pool.cache_block(block, block_hash, self.group_id, num_tokens)
        return True

    def _extend(self, held: GroupBlocks, num_slots: i64) -> None:
        num_missing = blocks_for(num_slots, self.block_size) - len(held.blocks)
        if num_missing > 0:
            self.pool.take(num_missing, self.group_id, held.blocks)

    def _privatize_tail(self, held: GroupBlocks) -> None:
        """Replaces the shared tail by a block of the request's own and orders the copy.

        The reference to the shared block passes from the request to the copy.
        """
        source = held.shared_tail
        assert source is not None
        target = self.pool.get_new_blocks(1, self.group_id)[0]
        held.blocks[held.shared_tail_index] = target
        held.shared_tail = None
        self.pool.retain(target)
        self._copies.order(self.group_id, source, target)


def cached_in_all(indexes: list[PrefixIndex], block_hash: bytes, found: list[KVCacheBlock]) -> bool:
    """Whether every index knows that hash. `found` then holds its block in each of them; its old content is dropped."""
    found.clear()
    for index in indexes:
        block = index.get(block_hash)
        if block is None:
            return False
        found.append(block)
    return True
