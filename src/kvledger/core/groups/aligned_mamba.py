"""Recurrent states that others can start from (mode "align").

The state after a whole block of tokens is a hit for others, so running states are left behind at block boundaries. The
table is indexed by position like any other, null where no state is kept:

    | null | null | kept boundary state | null | running state | one a draft |
                    ^ last_state_index: where the step before this one left its state; read once more, then given back

The running state and the draft states are always the last 1 + num_speculative_blocks entries; when the sequence enters
a new block, the draft blocks move along.
"""

from mypy_extensions import i64, mypyc_attr

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.groups.base import GroupBlocks, ManagerContext, SingleTypeKVCacheManager
from kvledger.core.groups.mamba import MambaManager
from kvledger.core.groups.policy import GroupPolicy
from kvledger.core.groups.sliding_window import replay_ends
from kvledger.core.groups.slot_ranges import SlotRanges
from kvledger.core.groups.spec import MambaSpec
from kvledger.core.groups.state_offers import StateOffer, StateOffers
from kvledger.core.requests.request import Request
from kvledger.core.units import cdiv, round_down


def checkpoint_position(num_tokens: int, unit: int, policy: GroupPolicy) -> int:
    """The last multiple of `unit` whose state a request with the same num_tokens tokens can resume from.

    One token must be left to compute, and those that the hash covers behind it; where a draft drops a unit, that unit.
    """
    if policy.any_draft:
        return max(round_down(num_tokens, unit) - unit, 0)
    return max(round_down(num_tokens - max(1, policy.num_hash_lookahead), unit), 0)


class StateBlocks(GroupBlocks):
    """One request's states in one group."""

    def __init__(self) -> None:
        super().__init__()
        # A step has taken blocks: the table ends with the running state and the drafts' states.
        self.is_started: bool = False
        self.last_state_index: int = -1
        # A state that this step's prefill writes on its way: after how many tokens, into which table entry. 0: none.
        self.checkpoint: int = 0
        self.checkpoint_index: int = 0
        # Where the tokens of an external source ended, and the state that came with them; 0: there were none.
        self.external_end: int = 0
        # What shared_tail will be offered as once it is copied; None where it was a hit, or nobody asks.
        self.own_tail: StateOffer | None = None


@mypyc_attr(allow_interpreted_subclasses=True)
class AlignedMambaManager(MambaManager):
    """Mode "align"."""

    def __init__(self, spec: MambaSpec, group_id: int, context: ManagerContext, policy: GroupPolicy) -> None:
        super().__init__(spec, group_id, context, policy)
        self.has_checkpoint_blocks: bool = spec.num_prefill_checkpoint_blocks > 0
        self.checkpoint_alignment: int = spec.prefill_checkpoint_alignment
        # Hashes of states that only this step writes: nobody can start from them yet.
        self._cached_this_step: set[bytes] = set()
        # {id of a block that this step's copies fill: where its state is until then}.
        self._moved_this_step: dict[int, KVCacheBlock] = {}
        # None until somebody asks for them.
        self.offers: StateOffers | None = None

    def make_held(self) -> GroupBlocks:
        return StateBlocks()

    def start_step(self) -> None:
        self._cached_this_step.clear()
        self._moved_this_step.clear()

    # Counting and taking

    def num_blocks_to_take(self, held: GroupBlocks, hit: list[KVCacheBlock], ranges: SlotRanges) -> i64:
        assert isinstance(held, StateBlocks)
        if self.is_hit_in_writing(hit, ranges.local_end):
            return self.pool.num_blocks + 1
        copies_tail = held.shared_tail is not None or self.ends_inside_block(hit, ranges.local_end)
        num_new = self._num_entries(ranges) - len(hit) - len(held.blocks)
        if copies_tail:
            num_new = max(num_new, 0) + 1
        if num_new > 0:
            most = 1 + (1 if copies_tail else 0) + (1 if self._needs_checkpoint(held, ranges) else 0)
            if ranges.num_external > 0 and ranges.computed_end <= (cdiv(ranges.new_end, self.block_size) - 1) * (
                self.block_size
            ):
                most += 1  # an external state has a block of its own, unless the step goes on in it
            num_new = min(num_new, most if held.is_started else most + self.num_speculative_blocks)
        for block in hit:
            if block.ref_cnt == 0 and block.block_id != 0:
                num_new += 1
        return num_new

    def is_hit_in_writing(self, hit: list[KVCacheBlock], local_end: int) -> bool:
        return len(hit) > 0 and hit[-1].block_hash is not None and hit[-1].block_hash in self._cached_this_step

    def num_blocks_at_peak(self, ranges: SlotRanges) -> int:
        """The running state, the drafts' and, once a block was left, the one that the step starts from; a checkpoint.

        A state that is a hit inside its block is copied before the next step writes it. That step stays within the
        block, so it needs the copy's block where others need the next one; it may need both where it writes a
        checkpoint on its way, or has to come to the prompt's end because several draft modules look ahead.
        """
        num_blocks = 1 + self.num_speculative_blocks
        copies_tail = self.policy.hits_inside_blocks and ranges.new_end > self.policy.hash_block_size
        if ranges.new_end <= self.block_size:
            return num_blocks + (1 if copies_tail else 0)
        if self.has_checkpoint_blocks:
            num_blocks += 1
        if copies_tail and (self.has_checkpoint_blocks or self.policy.num_draft_lookahead > 1):
            num_blocks += 1
        return num_blocks + 1

    def num_slots(self, held: GroupBlocks) -> i64:
        assert isinstance(held, StateBlocks)
        if not held.is_started or held.shared_tail is not None or self.has_checkpoint_blocks:
            return 0
        return (len(held.blocks) - self.num_speculative_blocks) * self.block_size

    def take_blocks(self, held: GroupBlocks, ranges: SlotRanges) -> None:
        assert isinstance(held, StateBlocks)
        needs_checkpoint = self._needs_checkpoint(held, ranges)
        held.checkpoint = self._checkpoint_position(ranges) if needs_checkpoint else 0
        held.checkpoint_index = cdiv(ranges.new_end, self.block_size) - 2
        if ranges.num_external > 0:
            held.external_end = ranges.computed_end
        if needs_checkpoint and ranges.computed_end % self.block_size != 0 and ranges.computed_end == held.external_end:
            # The step does not stop at the end of the block with the external state: none is left there.
            held.num_cached_blocks = max(held.num_cached_blocks, cdiv(ranges.computed_end, self.block_size))
        blocks = held.blocks
        num_entries = self._num_entries(ranges)
        num_before = len(blocks)
        copies_tail = held.shared_tail is not None
        if num_entries <= num_before and not copies_tail and not needs_checkpoint:
            held.is_started = True
            return
        if held.is_started:
            held.last_state_index = num_before - 1 - self.num_speculative_blocks
        elif num_before > 0:
            held.last_state_index = num_before - 1
        self._leave_behind(held, num_entries - self.num_speculative_blocks - 1 - (1 if needs_checkpoint else 0))
        num_taken = max(num_entries - len(blocks), 0) + (1 if copies_tail else 0)
        taken = self.pool.get_new_blocks(num_taken, self.group_id)
        if copies_tail:
            target = taken.pop(0)
            if held.is_started:
                self._keep_tail_for_others(held, target)
            else:
                self._replace_tail(held, target)
        blocks.extend(taken)
        held.is_started = True

    def _num_entries(self, ranges: SlotRanges) -> int:
        """Table entries for a state after new_end tokens. Lookahead slots count for nothing: a draft has no states."""
        return cdiv(ranges.new_end, self.block_size) + self.num_speculative_blocks

    def _leave_behind(self, held: StateBlocks, end: int) -> None:
        """Makes the table [0, end) history: null entries up to it, and the drafts' blocks moved behind it."""
        blocks = held.blocks
        null = self.pool.null_block
        num_before = len(blocks)
        if num_before < end:
            blocks.extend([null] * (end - num_before))
        if held.is_started:
            for index in range(num_before - self.num_speculative_blocks, min(num_before, end)):
                blocks.append(blocks[index])
                blocks[index] = null

    def _keep_tail_for_others(self, held: StateBlocks, target: KVCacheBlock) -> None:
        """The request goes on writing its own block; the copy takes over what the block was a hit for."""
        source = held.shared_tail
        assert source is not None
        held.shared_tail = None
        self.pool.move_hashes(source, target)
        self.pool.retain(source)
        self._copies.order(self.group_id, source, target)
        own = held.own_tail
        if own is not None:
            held.own_tail = None
            assert self.offers is not None
            self.offers.add(StateOffer(own.request_id, self.group_id, target, own.num_tokens))
        self._moved_this_step[target.block_id] = source
        if target.block_hash is not None and self.policy.delays_renamed_states:
            self._cached_this_step.add(target.block_hash)

    def _replace_tail(self, held: StateBlocks, target: KVCacheBlock) -> None:
        """The request goes on in the copy; the block that it hit stays as it is."""
        source = held.shared_tail
        assert source is not None
        held.shared_tail = None
        held.blocks[held.shared_tail_index] = target
        self.pool.retain(target)
        origin = self._moved_this_step.get(source.block_id)
        if origin is not None and self._copies.is_under_way(self.group_id, origin, source):
            # Nothing is in it before this step's copies are made.
            self.pool.retain(origin)
            self.pool.free_blocks([source])
            source = origin
        self._copies.order(self.group_id, source, target)

    def fork(self, held: GroupBlocks, twin: GroupBlocks, num_tokens: int) -> None:
        assert isinstance(twin, StateBlocks)
        super().fork(held, twin, num_tokens)
        twin.is_started = True

    def release_skipped(self, held: GroupBlocks, num_processed_tokens: int) -> None:
        assert isinstance(held, StateBlocks)
        super().release_skipped(held, num_processed_tokens)
        # The state that the step before the last one left was read by the last one; nobody reads it again.
        index = held.last_state_index
        if 0 <= index < cdiv(num_processed_tokens, self.block_size) - 1 and held.blocks[index].block_id != 0:
            block = held.blocks[index]
            held.blocks[index] = self.pool.null_block
            self.pool.free_blocks([block])

    def next_release(self, held: GroupBlocks) -> i64:
        return 0

    # Checkpoints within a prefill step

    def _checkpoint_position(self, ranges: SlotRanges) -> int:
        return checkpoint_position(ranges.new_end, self.policy.hit_alignment, self.policy)

    def _needs_checkpoint(self, held: StateBlocks, ranges: SlotRanges) -> bool:
        """Whether this step writes a reusable state on its way, and its table entry is free for it."""
        if not self.has_checkpoint_blocks:
            return False
        start, end = ranges.computed_end, ranges.new_end
        # A decode step with drafts passes positions whose tokens may be rejected (vLLM reserves and then fails there).
        if start >= ranges.prefill_end:
            return False
        # Nor is there a name for a state behind the known tokens: a lone token may be padded with unknown drafts.
        if self._checkpoint_position(ranges) > ranges.prefill_end:
            return False
        # With sparse retention only the chunk that reaches the prompt's end keeps one.
        if end < (ranges.prefill_end if self.policy.retention_interval == 0 else 0):
            return False
        index = cdiv(end, self.block_size) - 2
        if index < 0 or not self._can_export(start, end, self._checkpoint_position(ranges)):
            return False
        num_blocks = len(held.blocks)
        return (
            index >= num_blocks
            or held.blocks[index].block_id == 0
            or (held.is_started and index >= num_blocks - self.num_speculative_blocks)
        )

    def _can_export(self, start: int, end: int, position: int) -> bool:
        """Whether the kernel can write the state after `position` tokens while it computes tokens [start, end)."""
        unit = self.policy.hash_block_size
        return (
            self.checkpoint_alignment > 0
            and start % unit == 0
            and cdiv(end, self.block_size) - 2 > (start - 1) // self.block_size
            and start + unit <= position
            and start < position < end
            and (position - start) % self.checkpoint_alignment == 0
        )

    # Caching

    def cache_blocks(self, held: GroupBlocks, request: Request, num_computed_tokens: int) -> None:
        assert isinstance(held, StateBlocks)
        start = held.num_cached_blocks
        SingleTypeKVCacheManager.cache_blocks(self, held, request, num_computed_tokens)
        end = self.cacheable_end(num_computed_tokens)
        if held.checkpoint > 0:
            self._cache_checkpoint(held, request)
        elif end == num_computed_tokens or end % self.block_size == 0 or self.policy.delays_renamed_states:
            # Inside a block whose end may still change nothing is named: once it is settled, the state has gone on.
            # (vLLM names it all the same.)
            self._cache_tail(held, request, end)
        # With the names that they keep: an exported state takes another one than its block's end had.
        for index in range(start, held.num_cached_blocks):
            block = held.blocks[index]
            if block.block_hash is not None:
                self._note_cached(block.block_hash, request, block.num_hash_tokens)
                if self.offers is not None:
                    self.offers.add(StateOffer(request.request_id, self.group_id, block, block.num_hash_tokens))

    def offer_states(self, offers: StateOffers) -> None:
        self.offers = offers

    def last_state_offer(self, held: GroupBlocks, num_tokens: int) -> StateOffer | None:
        assert isinstance(held, StateBlocks)
        own = held.own_tail
        held.own_tail = None
        return own if own is not None and own.num_tokens == num_tokens else None

    def next_caching(self, held: GroupBlocks) -> i64:
        return 0

    def _cache_checkpoint(self, held: StateBlocks, request: Request) -> None:
        """Names the state that this step's prefill exports by the length that it stands for."""
        position = held.checkpoint
        block = held.blocks[held.checkpoint_index]
        at_prompt_end = position == checkpoint_position(
            request.num_prompt_tokens, self.policy.hit_alignment, self.policy
        )
        is_kept = position % self.block_size == 0 and self._is_segment_end(position // self.block_size - 1)
        if block.block_id == 0:
            return
        is_wanted = at_prompt_end or is_kept or position == request.shared_prefix_boundary
        if not is_wanted or position > self._named_end(request):
            # The exported state overwrites the block, whatever it was named before. (Behind a lone token that is padded
            # with drafts, a hash may cover a token that nobody knows yet.)
            self.pool.evict_blocks([block.block_id])
            return
        if block.num_hash_tokens == position:
            return
        self.pool.evict_blocks([block.block_id])
        self.cache_partial(block, request, position)

    def _cache_tail(self, held: StateBlocks, request: Request, num_tokens: int) -> None:
        """Makes the state at the prompt's last hash unit, or at a known shared prefix, a hit."""
        unit = self.policy.hash_block_size
        if num_tokens <= 0 or num_tokens % unit != 0:
            return
        at_prompt_end = num_tokens == checkpoint_position(request.num_prompt_tokens, unit, self.policy)
        at_shared_prefix = (
            self.policy.pins_shared_prefix
            and num_tokens == request.shared_prefix_boundary
            and request.num_computed_tokens < num_tokens <= request.num_prompt_tokens
        )
        index = cdiv(num_tokens, self.block_size) - 1
        if not (at_prompt_end or at_shared_prefix) or index >= len(held.blocks):
            return
        block = held.blocks[index]
        if block.block_id == 0 or (block.num_hash_tokens == num_tokens and not self.policy.recaches_hit_states):
            return
        self.cache_partial(block, request, num_tokens)
        if num_tokens % self.block_size != 0:
            # The next step writes into this block: the state must be copied away before.
            held.shared_tail = block
            held.shared_tail_index = index
            held.num_cached_blocks = index
            if self.offers is not None:
                held.own_tail = StateOffer(request.request_id, self.group_id, block, num_tokens)

    def cache_partial(self, block: KVCacheBlock, request: Request, num_tokens: int) -> None:
        super().cache_partial(block, request, num_tokens)
        self._note_cached(request.block_hashes[num_tokens // self.policy.hash_block_size - 1], request, num_tokens)

    def _note_cached(self, block_hash: bytes, request: Request, num_tokens: int) -> None:
        if num_tokens > request.num_computed_tokens or self.policy.delays_renamed_states:
            self._cached_this_step.add(block_hash)

    def _is_segment_end(self, index: int) -> bool:
        interval = self.policy.retention_interval
        if interval < 0:
            return True
        per_segment = interval // self.block_size
        return interval > 0 and (per_segment <= 1 or (index + 1) % per_segment == 0)

    def reachable(self, start: int, end: int, request: Request) -> list[bool] | None:
        """All states with dense retention; else the one at each segment's end and those at replay ends."""
        interval = self.policy.retention_interval
        if interval < 0 or 0 < interval <= self.block_size:
            return None
        keep = [self._is_segment_end(index) for index in range(start, end)]
        for boundary in replay_ends(request, self.policy, self.block_size):
            index = round_down(boundary, self.policy.hit_alignment) // self.block_size - 1
            if start <= index < end:
                keep[index - start] = True
        return keep

    # Chunks

    def clips_chunks(self) -> bool:
        return True

    def clip_chunk(self, request: Request, start: int, end: int, max_chunk: int) -> int:
        """Prefill chunks end where a state can be cached: at block boundaries, at the prompt's last checkpoint, and at
        the end of a prefix that others share. A block longer than a chunk is crossed in several.
        """
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if start >= prefill_end:
            return end
        policy = self.policy
        block_size = self.block_size
        hits_inside = policy.hits_inside_blocks and policy.hash_block_size < policy.base_block_size
        exports = (
            self.has_checkpoint_blocks
            and end >= prefill_end
            and self._can_export(start, end, checkpoint_position(prefill_end, policy.hit_alignment, policy))
        )
        last_boundary = 0 if exports else checkpoint_position(request.num_tokens, block_size, policy)
        if end < prefill_end:
            aligned = round_down(end, block_size)
            if aligned > start or block_size <= max_chunk:
                end = aligned
        stops = [last_boundary]
        if start % block_size != 0 and not exports:
            stops.append(round_down(start, block_size) + block_size)
        if hits_inside and not exports:
            tail = checkpoint_position(request.num_prompt_tokens, policy.hash_block_size, policy)
            if last_boundary < tail < request.num_prompt_tokens:
                stops.append(tail)
        junction = request.shared_prefix_boundary
        if start < junction < end:
            exact = hits_inside and policy.pins_shared_prefix and junction <= request.num_prompt_tokens
            stops.append(junction if exact else start + round_down(junction - start, block_size))
        for stop in stops:
            if start < stop < end:
                end = stop
        return max(end, start)
