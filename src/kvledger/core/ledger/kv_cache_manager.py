"""KVCacheManager: the door of the ledger. A scheduler calls this and nothing below it.

    hit = manager.get_computed_blocks(request)                 # what the prefix cache has
    new = manager.allocate_slots(request, n, hit, admission=AdmissionRule())   # None: does not fit now
    new = manager.allocate_slots(request, 1)                   # later, a decode step
    new = manager.allocate_running(requests, [1, 1, ...])      # the same for many requests, in one call
    manager.free(request)                                      # finished or preempted

Every call either does all of its work or changes nothing; what observers raise surfaces when it is done. Only where
MemoryError or an interrupt comes in the midst of a change is the ledger half changed: check() names the change then,
and every further call is refused (core/change.py). One owner thread.
"""

from typing import Final, SupportsIndex

from mypy_extensions import i32, i64

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.block_pool import BlockPool, PoolOccupancy
from kvledger.core.blocks.holds import BlockCopy
from kvledger.core.blocks.kv_cache_blocks import AdmissionRule, BlockShortage, GroupOccupancy, KVCacheBlocks, PrefixHit
from kvledger.core.blocks.new_blocks import NewBlocks, RunningSlots
from kvledger.core.blocks.observer import EvictionCause, LedgerObserver
from kvledger.core.blocks.observer_relay import ObserverRelay
from kvledger.core.change import (
    ADMITTING,
    AT_REST,
    CACHING,
    COPYING,
    EVICTING,
    FORKING,
    FREEING,
    RESETTING,
    Change,
)
from kvledger.core.groups.allocation_checks import (
    require_sound_fork,
    require_sound_growth,
    require_sound_position,
    require_sound_start,
    too_long,
)
from kvledger.core.groups.decisions import LATEST_RELEASE, Decisions
from kvledger.core.groups.policy import DraftRule
from kvledger.core.groups.registry import ManagerRegistry
from kvledger.core.groups.slot_ranges import SlotRanges, start_ranges
from kvledger.core.groups.spec import KVCacheConfig
from kvledger.core.ledger.block_demand import BlockDemand
from kvledger.core.ledger.coordinator import KVCacheCoordinator, RequestBlocks
from kvledger.core.ledger.hash_door import HashDoor
from kvledger.core.ledger.hit_check import require_current
from kvledger.core.ledger.hit_search import make_coordinator
from kvledger.core.ledger.ledger_rules import LedgerRules
from kvledger.core.ledger.lookups import LookupCounter, PrefixCacheStats
from kvledger.core.ledger.spoiled_blocks import SpoiledBlocks
from kvledger.core.requests.block_hash import BlockHasher, Sha256BlockHasher
from kvledger.core.requests.request import Request
from kvledger.core.units import IS_COMPILED, MAX_COUNT, require_ints, require_positive, whole_number
from kvledger.errors import RequestError, wrong_value


class KVCacheManager:
    """The ledger of one engine.

    `hasher` names blocks for the prefix cache; sha256 is used if none is given. `watermark`: share of the pool that
    stays free when a request that is not running asks for blocks while others run. `max_in_flight_tokens`: most tokens
    that are scheduled and not settled at a time, over all steps in flight; bounds what windowed groups hold (default:
    what a Scheduler's limits make it; max_model_len without one). `drafts`: the rule of a draft model, if one keeps KV
    values. `retention_interval`: sparse groups (windows, states) keep a reusable tail once in so many tokens, 0: only
    where a replay of the prompt can use it, None: at every boundary. `pins_shared_prefix`: also cache a state exactly
    where a shared prefix ends. `decisions`: the release of vLLM whose decisions are made, "0.33" or "0.32", or rules of
    your own.
    `context_parallel_size`: ranks that share out each block's tokens. `registry`: managers for your own specs.
    `observer`: is told what happens from the start; observe() adds others.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        max_model_len: int,
        *,
        enable_caching: bool = True,
        hasher: BlockHasher | None = None,
        watermark: float = 0.0,
        max_in_flight_tokens: int | None = None,
        drafts: DraftRule | None = None,
        retention_interval: int | None = None,
        pins_shared_prefix: bool = False,
        context_parallel_size: int = 1,
        decisions: str | Decisions = LATEST_RELEASE,
        registry: ManagerRegistry | None = None,
        observer: LedgerObserver | None = None,
    ) -> None:
        require_positive("max_model_len", max_model_len, MAX_COUNT)
        if not 0.0 <= watermark < 1.0:
            raise wrong_value("watermark", watermark, "not a share of the pool", "give 0.0 up to below 1.0")
        self._change: Final = Change("ledger")
        # None until somebody listens.
        self._relay: ObserverRelay | None = None if observer is None else ObserverRelay([observer])
        rules = LedgerRules(
            registry=ManagerRegistry() if registry is None else registry,
            max_model_len=max_model_len,
            max_in_flight_tokens=max_model_len if max_in_flight_tokens is None else max_in_flight_tokens,
            enable_caching=enable_caching,
            hash_block_size=0 if hasher is None else hasher.block_size,
            drafts=drafts,
            retention_interval=retention_interval,
            context_parallel_size=context_parallel_size,
            pins_shared_prefix=pins_shared_prefix,
            decisions=decisions,
            observer=self._relay,
        )
        if hasher is None:
            hasher = Sha256BlockHasher(rules.resolved_hash_block_size(config))
        hasher.serve(rules.num_hash_lookahead)
        self.config: Final = config
        # The rules of the release that decides; a scheduler follows them too.
        self.decisions: Final[Decisions] = rules.release
        self.max_model_len: Final = max_model_len
        self._max_end: Final[i64] = max_model_len
        self.enable_caching: Final = enable_caching
        self._hashes: Final = HashDoor(hasher)
        self._hash_block_size: Final = hasher.block_size
        self._coordinator: Final[KVCacheCoordinator] = make_coordinator(config, rules)
        self._pool: Final = self._coordinator.pool
        self._no_blocks: Final = self._coordinator.no_blocks
        # Of the call that is going on, for running requests.
        self._growth: Final = SlotRanges()
        self._no_hit: Final = self._coordinator.no_hit
        # Whether clip_chunk has anything to say; for schedulers that ask once per request and step.
        self.clips_chunks: Final = self._coordinator.clips_chunks
        # Whether a request whose external tokens all arrived can compute the last of them again.
        self.can_step_back: Final = self._coordinator.can_step_back
        # Whether requests hold most blocks at their end, because no group gives any back before.
        self.holds_all_blocks: Final = self._coordinator.holds_all_blocks
        self._watermark_blocks: Final = int(watermark * config.num_blocks)
        self._lookups: Final = LookupCounter(len(config.groups))
        # What requests need; schedulers ask it for more than this class passes on.
        self.demand: Final = BlockDemand(self._coordinator, max_model_len, max_in_flight_tokens)

    # For code that shows the ledger to an engine written for another one; schedulers need neither.

    @property
    def block_pool(self) -> BlockPool:
        return self._pool

    @property
    def coordinator(self) -> KVCacheCoordinator:
        return self._coordinator

    def observe(self, observer: LedgerObserver) -> None:
        """Adds an observer, who is told what happens from now on, after those that are there."""
        self._change.require_at_rest()
        if self._relay is None:
            self._relay = ObserverRelay([])
            self._coordinator.observe(self._relay)
        self._relay.add(observer)

    # Counting

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0.0 to 1.0. Cached free blocks count as free."""
        return self._pool.get_usage()

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can hold tokens: all but the null block."""
        return self._pool.num_usable_blocks

    def occupancy(self) -> PoolOccupancy:
        """Live, cached and unused blocks."""
        return self._pool.occupancy()

    def eviction_counts(self) -> dict[EvictionCause, int]:
        """Blocks that lost their hashes so far, by cause."""
        return self._pool.eviction_counts()

    @property
    def shortage(self) -> BlockShortage | None:
        """What the last allocate_slots that returned None lacked."""
        return self.demand.shortage

    def num_blocks_for(self, num_tokens: int, num_encoder_tokens: int = 0, num_lookahead_tokens: int = 0) -> int:
        """Most blocks over all groups that a request of num_tokens tokens holds at a time, when it shares none and has
        one step in flight at a time.

        With so many blocks in the pool it can be computed, whoever else waits; with fewer perhaps not.
        """
        return self.demand.num_blocks_for(num_tokens, num_encoder_tokens, num_lookahead_tokens)

    def num_blocks_held(self, request: Request) -> int:
        """Blocks that the request holds now, shared ones included, over all groups. O(groups) for full attention."""
        held = self._coordinator.get(request.request_id)
        return 0 if held is None else self._coordinator.num_blocks_held(held)

    def group_occupancies(self) -> list[GroupOccupancy]:
        """What requests hold and what is cached, for each group. O(blocks held): for reports, not for every step."""
        return self._coordinator.group_occupancies()

    # The life of a request

    def get_computed_blocks(self, request: Request, max_tokens: int = -1) -> PrefixHit:
        """The longest cached prefix of at most num_tokens - 1 tokens, and of max_tokens if that is not negative.

        The last token is always computed, because its logits are needed. Changes nothing; the hit belongs to the
        request only once allocate_slots takes it. RequestError for a request that holds blocks.
        """
        self._change.require_at_rest()
        if self._coordinator.get(request.request_id) is not None:
            raise RequestError(f"request {request.request_id!r} holds blocks already; look up before allocate_slots")
        if not self.enable_caching or request.skip_prefix_lookup:
            return self._no_hit
        self._hashes.refresh(request)
        most = request.num_tokens - 1
        return self._coordinator.find_longest_hit(
            request.block_hashes, most if max_tokens < 0 else min(most, max_tokens)
        )

    def whole_blocks_of(self, hit: PrefixHit) -> PrefixHit:
        """The part of a hit that ends with blocks of every group. With tokens of an external source behind it, it
        stands for the hit: a source cannot write behind the start of a block that others share.
        """
        return self._coordinator.whole_blocks_of(hit)

    def num_resumable_tokens(self, request: Request, num_valid_tokens: int) -> int:
        """Where a request whose external tokens arrived, counted in num_computed_tokens, can go on when only its first
        num_valid_tokens tokens have values: every group must hold what is read from there on. 0: it must start over.
        """
        held = self._coordinator.require_held(request.request_id)
        most = min(num_valid_tokens, request.num_computed_tokens, request.num_tokens - 1)
        return self._coordinator.num_resumable_tokens(held, most, request.num_computed_tokens)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: SupportsIndex,
        hit: PrefixHit | None = None,
        *,
        num_lookahead_tokens: SupportsIndex = 0,
        num_external_computed_tokens: SupportsIndex = 0,
        delay_cache_blocks: bool = False,
        admission: AdmissionRule | None = None,
    ) -> KVCacheBlocks | None:
        """Gives a request slots for this step (ranges: slot_ranges.py) and returns only the blocks that are new.

        None when they do not fit: nothing has changed, but for blocks that no later token reads, which are given back
        first. `hit`: this request's get_computed_blocks, for one that holds no blocks yet. `delay_cache_blocks`: the
        values arrive later; call cache_blocks then. `admission`: for a request that is not running. RequestError for a
        number out of range, a step without tokens, a hit for a request that holds blocks or whose blocks cache
        something else by now, and computed tokens without blocks.
        """
        self._change.require_at_rest()
        num_new = whole_number("num_new_tokens", num_new_tokens)
        num_lookahead = whole_number("num_lookahead_tokens", num_lookahead_tokens)
        num_external = whole_number("num_external_computed_tokens", num_external_computed_tokens)
        require_sound_position(request)
        starts = hit is not None or admission is not None or num_external != 0 or delay_cache_blocks
        if not starts and num_new > 0:
            if request.num_computed_tokens + num_new + num_lookahead <= request.quiet_end:
                return self._no_blocks
            held = self._coordinator.get(request.request_id)
            if held is not None:
                new_blocks = self._grow(request, held, num_new, num_lookahead)
                self._done()
                return new_blocks
        if hit is None:
            hit = self._no_hit
        ranges = start_ranges(request, num_new, hit.num_tokens, num_external, num_lookahead, self.max_model_len)
        require_sound_start(request, hit, ranges, self.holds_blocks(request), self.max_model_len)
        new_blocks = self._start(request, hit, ranges, delay_cache_blocks, admission)
        self._done()
        return new_blocks

    def allocate_running(
        self, requests: list[Request], num_new_tokens: list[int], *, num_lookahead_tokens: SupportsIndex = 0
    ) -> RunningSlots:
        """allocate_slots(requests[i], num_new_tokens[i]) for running requests in order, up to the first that gets None.

        For engines that call from interpreted Python: one call a step. The requests behind the one that does not fit
        are as they were; once room is made, call again with them. RequestError or UnknownRequestError, before anything
        is taken, for requests that hold no blocks, steps without tokens, or sequences beyond max_model_len.
        """
        self._change.require_at_rest()
        if len(num_new_tokens) != len(requests):
            raise RequestError(
                f"num_new_tokens: {len(num_new_tokens)} numbers for {len(requests)} requests; give one number a request"
            )
        num_lookahead = whole_number("num_lookahead_tokens", num_lookahead_tokens)
        if not IS_COMPILED:
            # Compiled, reading them finds out.
            require_ints("num_new_tokens", num_new_tokens)
        # Most requests stay within their blocks, fill none and leave none: nothing to do for them.
        rows: list[int] = []
        for row, request in enumerate(requests):
            num_new = num_new_tokens[row]
            num_computed = request.num_computed_tokens
            # As a difference: a sum may be more than 64 bits hold.
            if not 0 < num_new <= MAX_COUNT or not 0 <= num_computed <= request.quiet_end - num_new - num_lookahead:
                self._require_can_grow(request, num_new)
                rows.append(row)
        new_blocks = NewBlocks()
        num_allocated = len(requests)
        for row in rows:
            request = requests[row]
            held = self._coordinator.require_held(request.request_id)
            if self._grow(request, held, num_new_tokens[row], num_lookahead, i32(row), new_blocks) is None:
                num_allocated = row
                break
        slots = RunningSlots(num_allocated, new_blocks)
        self._done()
        return slots

    def allocate_row(
        self, held: RequestBlocks, num_new_tokens: i64, num_lookahead_tokens: i64, row: i32, new_blocks: NewBlocks
    ) -> bool:
        """allocate_slots for a running request, of which held_by tells, whose new blocks join new_blocks as those of
        that row. False: None."""
        self._change.require_at_rest()
        if not held.is_held:
            held = self._coordinator.require_held(held.request.request_id)
        slots = self._grow(held.request, held, num_new_tokens, num_lookahead_tokens, row, new_blocks)
        self._done()
        return slots is not None

    def held_by(self, request: Request) -> RequestBlocks:
        """What a request holds, for allocate_row. UnknownRequestError when that is nothing."""
        return self._coordinator.require_held(request.request_id)

    def cache_blocks(self, request: Request, num_computed_tokens: SupportsIndex) -> None:
        """Makes blocks full at num_computed_tokens tokens hits for others, after delay_cache_blocks.

        RequestError when the request has fewer tokens or holds no blocks for them.
        """
        self._change.require_at_rest()
        num_computed = whole_number("num_computed_tokens", num_computed_tokens)
        held = self._coordinator.require_held(request.request_id)
        num_covered = self._coordinator.num_covered_tokens(held)
        if num_computed > min(request.num_tokens, num_covered):
            raise RequestError(
                f"num_computed_tokens={num_computed}: request {request.request_id!r} has {request.num_tokens} "
                f"tokens and blocks for {num_covered}"
            )
        if self.enable_caching and num_computed >= held.next_caching:
            self._hashes.require(request, num_computed)
            self._change.begin(CACHING)
            self._coordinator.cache_blocks(held, request, num_computed)
            self._coordinator.measure(held)
            self._done()

    def uncache_beyond(self, request: Request, num_tokens: int) -> None:
        """Takes back what cache_blocks did beyond num_tokens tokens: their step does not run after all."""
        held = self._coordinator.require_held(request.request_id)
        self._change.begin(EVICTING)
        self._coordinator.uncache_beyond(held, num_tokens)
        self._done()

    def free(self, request: Request) -> None:
        """Gives back a request's blocks, the last first. UnknownRequestError when it holds none."""
        held = self._coordinator.require_held(request.request_id)
        self._change.begin(FREEING)
        self._coordinator.free(held)
        self._change.under_way = AT_REST

    def release_skipped(self, request: Request) -> None:
        """Gives back what no later token of the request reads, as every step does before it takes blocks."""
        held = self._coordinator.require_held(request.request_id)
        self._change.begin(FREEING)
        self._coordinator.release_skipped(held, max(0, request.num_computed_tokens - request.num_in_flight_tokens))
        self._coordinator.measure(held)
        self._change.under_way = AT_REST

    def detach(self, request: Request) -> list[KVCacheBlock]:
        """Forgets a request and returns its blocks, which are not reused before release_detached gives them back."""
        held = self._coordinator.require_held(request.request_id)
        self._change.begin(FREEING)
        blocks = self._coordinator.detach(held)
        self._change.under_way = AT_REST
        return blocks

    def release_detached(self, blocks: list[KVCacheBlock]) -> None:
        """Gives back the blocks of a detached request, the last first."""
        outside = self._coordinator.outside
        self._change.require_at_rest()
        outside.require_held(blocks)
        self._change.begin(FREEING)
        outside.release(blocks[::-1])
        self._change.under_way = AT_REST

    def spoiled_blocks(self) -> SpoiledBlocks:
        """An empty collection of blocks whose values are missing or wrong."""
        return SpoiledBlocks(self._coordinator)

    def fork(self, parent: Request, child: Request) -> KVCacheBlocks | None:
        """Gives the child the parent's computed prefix: full blocks shared, the partial tail as a copy order.

        Returns the child's blocks; None when the copy does not fit, nothing changed. The prefix covers what workers
        have finished, parent.num_processed_tokens, which becomes the child's computed count by the caller's hand.
        RequestError when the child holds blocks or has no such prefix.
        """
        self._change.require_at_rest()
        coordinator = self._coordinator
        num_tokens = parent.num_processed_tokens
        held = coordinator.require_held(parent.request_id)
        require_sound_fork(parent, child, self.holds_blocks(child), coordinator.num_forkable_tokens(held))
        if coordinator.num_blocks_to_fork(held, num_tokens, 1) > self._pool.num_free_blocks:
            return None
        self._change.begin(FORKING)
        blocks = coordinator.fork(held, child, num_tokens)
        self._done()
        return blocks

    def num_blocks_to_fork(self, parent: Request, num_forks: int = 1) -> int:
        """Free blocks that so many forks of that request take; more than there are when another pool has not enough."""
        held = self._coordinator.require_held(parent.request_id)
        return self._coordinator.num_blocks_to_fork(held, parent.num_processed_tokens, num_forks)

    def holds_blocks(self, request: Request) -> bool:
        return self._coordinator.get(request.request_id) is not None

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All blocks of a request. UnknownRequestError when it holds none."""
        return self._coordinator.blocks_of(self._coordinator.require_held(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """All block ids of a request per group, in fresh lists."""
        return self.get_blocks(request_id).get_block_ids()

    # Steps

    def start_step(self) -> None:
        """A new step begins: from now on requests can start from states that the step before has written."""
        self._coordinator.start_step()

    def clip_chunk(self, request: Request, start: int, num_new_tokens: int, max_chunk: int) -> int:
        """How many of num_new_tokens tokens from `start` on to compute in one step, so that groups which cache states
        only where a step ends can do so. 0: wait for more budget. `max_chunk`: most tokens that a step can have.
        """
        return self._coordinator.clip_chunk(request, start, start + num_new_tokens, max_chunk) - start

    def waits_for_rest(self, request: Request, start: int, num_new_tokens: int, max_chunk: int) -> bool:
        """Whether clip_chunk gives 0 only because the chunk would end too near to the prompt's end for a draft."""
        return self._coordinator.waits_for_rest(request, start, start + num_new_tokens, max_chunk)

    def take_block_copies(self) -> list[BlockCopy]:
        """Copy orders since the last call, for the step about to be sent to the workers."""
        self._change.require_at_rest()
        return self._coordinator.copies.take()

    def release_block_copies(self, copies: list[BlockCopy]) -> None:
        """To be called once the step that carried these copies is done."""
        self._change.require_at_rest()
        self._coordinator.copies.require_held(copies)
        self._change.begin(COPYING)
        self._coordinator.copies.release(copies)
        self._change.under_way = AT_REST

    # The prefix cache as a whole

    def evict_blocks(self, block_ids: list[int]) -> None:
        """Takes the hashes of these blocks, held or free. BlockError on a wrong id, evicting none."""
        self._change.require_at_rest()
        self._pool.require_ids(block_ids)
        self._change.begin(EVICTING)
        self._pool.evict_blocks(block_ids)
        self._done()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content. False, with a warning to the observer, while requests hold blocks."""
        self._change.begin(RESETTING)
        is_reset = self._coordinator.reset_prefix_cache()
        if is_reset:
            self._lookups.record_reset()
        self._done()
        return is_reset

    def start_epoch(self) -> None:
        """Separates all later lookups from everything cached so far: the weights changed under running requests.

        Unlike reset_prefix_cache it always works. Running requests finish on their old values; whatever they still
        cache stays in their epoch, where no later request looks.
        """
        self._hashes.hasher.start_epoch()

    def record_prefix_lookup(self, request: Request, num_hit_tokens: int, hit: PrefixHit | None = None) -> None:
        """Counts one lookup, at admission, so that lookups of requests that stay waiting are not counted twice.

        `hit`: what was found, to count which group limited it.
        """
        if self.enable_caching and not request.skip_prefix_lookup:
            self._lookups.record(request, num_hit_tokens, hit)

    def record_external_lookup(self, request: Request, num_local_tokens: int, num_hit_tokens: int) -> None:
        """Counts one lookup in an external source, at admission. Those of preempted requests do not count."""
        self._lookups.record_external(request, num_local_tokens, num_hit_tokens)

    def take_prefix_cache_stats(self) -> PrefixCacheStats:
        """The counts since the last call."""
        return self._lookups.take()

    def prefix_cache_totals(self) -> PrefixCacheStats:
        """The counts since the beginning, whoever has taken some of them, in a fresh object."""
        return self._lookups.totals()

    def check(self) -> None:
        """Proves the invariants of every layer and every observer. O(blocks): for tests, replay --check and bugs."""
        self._change.check()
        self._coordinator.check()
        if self._relay is not None:
            self._relay.check()

    # For schedulers: what observers raise within a step surfaces when the step is complete.

    def hold_errors(self) -> None:
        """Keeps what observers raise until surface_errors()."""
        if self._relay is not None:
            self._relay.is_held = True

    def surface_errors(self) -> None:
        """Raises what observers raised since hold_errors()."""
        if self._relay is not None:
            self._relay.is_held = False
            self._relay.surface()

    def _done(self) -> None:
        """A change that observers may have been told of is complete."""
        self._change.under_way = AT_REST
        if self._relay is not None:
            self._relay.surface()

    def _grow(
        self,
        request: Request,
        held: RequestBlocks,
        num_new_tokens: i64,
        num_lookahead_tokens: i64,
        row: i32 = 0,
        flat: NewBlocks | None = None,
    ) -> KVCacheBlocks | None:
        """allocate_slots for a running request. `flat`: takes what is new as that row's; what is returned then has no
        blocks.
        """
        coordinator = self._coordinator
        num_computed = request.num_computed_tokens
        if not 0 <= num_computed <= self._max_end - num_new_tokens:
            require_sound_position(request)
            raise too_long(request, num_computed + num_new_tokens, self.max_model_len)
        new_end = num_computed + num_new_tokens
        slots_end: i64 = min(new_end + num_lookahead_tokens, self._max_end)
        # Drafts may be rejected and must never be hits, so caching stops at the tokens known for certain.
        cache_end = min(new_end, request.num_tokens)
        caches = self.enable_caching and cache_end > 0 and cache_end >= held.next_caching
        if caches:
            self._hashes.require(request, cache_end)
        num_processed = num_computed - request.num_in_flight_tokens
        releases = num_processed >= held.next_release
        # Until the caller says that it is done.
        self._change.under_way = ADMITTING
        if releases:
            coordinator.release_skipped(held, max(0, num_processed))
        takes = slots_end > held.num_slots
        new_blocks = self._no_blocks
        if takes:
            ranges = self._growth
            ranges.be_growth(request, new_end, slots_end)
            if self.demand.is_short(request, held, self._no_hit, ranges):
                return None
            if flat is None:
                new_blocks = coordinator.take_blocks(held, ranges)
            else:
                coordinator.take_row(held, ranges, row, flat)
        if caches:
            coordinator.cache_blocks(held, request, cache_end)
        # A table that grows may move all of them, a tail that is named the slots as well.
        coordinator.measure(held, slots=takes or caches, caching=takes or caches, release=takes or releases)
        return new_blocks

    def _start(
        self,
        request: Request,
        hit: PrefixHit,
        ranges: SlotRanges,
        delay_cache_blocks: bool,
        admission: AdmissionRule | None,
    ) -> KVCacheBlocks | None:
        """allocate_slots for a request that does not simply grow: new, resumed, or back from a load."""
        coordinator = self._coordinator
        hit = coordinator.usable_hit(hit, ranges.num_external)
        held = coordinator.get(request.request_id)
        rule = _NO_RULE if admission is None else admission
        watermark = self._watermark_blocks if rule.has_scheduled_requests else 0
        if rule.full_sequence_must_fit:
            gate = ranges.whole_sequence(request, self.max_model_len)
            if self.demand.is_short(request, held, hit, gate, watermark):
                return None
        if self.enable_caching and held is None:
            self._hashes.refresh(request)
        elif self.enable_caching:
            self._hashes.require(request, min(ranges.new_end, request.num_tokens))
        if held is None:
            require_current(coordinator, request, hit, ranges.num_external)
        # Until the caller says that it is done.
        self._change.under_way = ADMITTING
        if held is not None:
            num_computed = min(ranges.computed_end, self.max_model_len)
            coordinator.release_skipped(held, max(0, num_computed - request.num_in_flight_tokens))
        if self.demand.is_short(request, held, hit, ranges, watermark, rule.reserved_blocks):
            return None
        if held is None:
            if self._relay is not None:
                self._relay.request_admitted(request, hit, ranges.num_external)
            held = coordinator.add(request)
            coordinator.attach(held, hit, ranges)
        new_blocks = coordinator.take_blocks(held, ranges)
        if self.enable_caching and not delay_cache_blocks:
            coordinator.cache_blocks(held, request, min(ranges.new_end, request.num_tokens))
        coordinator.measure(held)
        return self._no_blocks if new_blocks.is_empty() else new_blocks

    def _require_can_grow(self, request: Request, num_new_tokens: int) -> None:
        """Raises now what _grow would raise, so that a call for many requests raises before it takes anything."""
        self._coordinator.require_held(request.request_id)
        require_sound_growth(request, num_new_tokens, self.max_model_len)
        if self.enable_caching:
            self._hashes.require(request, min(request.num_computed_tokens + num_new_tokens, request.num_tokens))


# Of a request that just takes what is free.
_NO_RULE: Final = AdmissionRule(full_sequence_must_fit=False, has_scheduled_requests=False)
