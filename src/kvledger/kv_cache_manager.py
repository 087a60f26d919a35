"""KVCacheManager: the door of the ledger. A scheduler calls this and nothing below it.

    hit = manager.get_computed_blocks(request)                 # what the prefix cache has
    new = manager.allocate_slots(request, n, hit, admission=AdmissionRule())   # None: does not fit now
    new = manager.allocate_slots(request, 1)                   # later, a decode step
    manager.free(request)                                      # finished or preempted

Every call either does all of its work or changes nothing. One owner thread.
"""

from typing import Final

from kvledger.block_hash import BlockHasher, Sha256BlockHasher
from kvledger.block_pool import PoolOccupancy
from kvledger.coordinator import KVCacheCoordinator, RequestBlocks, make_coordinator
from kvledger.errors import RequestError, wrong_value
from kvledger.kv_cache_blocks import AdmissionRule, BlockCopy, KVCacheBlocks, PrefixHit
from kvledger.observer import LedgerObserver
from kvledger.prefix_cache_stats import PrefixCacheStats
from kvledger.request import Request
from kvledger.slot_ranges import SlotRanges
from kvledger.spec import KVCacheConfig
from kvledger.units import require_positive


class KVCacheManager:
    """The ledger of one engine.

    `hasher` names blocks for the prefix cache; sha256 over the block size if none is given. `watermark`: share of the
    pool that stays free when a request that is not running asks for blocks while others run.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        max_model_len: int,
        *,
        enable_caching: bool = True,
        hasher: BlockHasher | None = None,
        watermark: float = 0.0,
        observer: LedgerObserver | None = None,
    ) -> None:
        require_positive("max_model_len", max_model_len)
        if not 0.0 <= watermark < 1.0:
            raise wrong_value("watermark", watermark, "not a share of the pool", "give 0.0 up to below 1.0")
        if hasher is None:
            hasher = Sha256BlockHasher(min(group.spec.block_size for group in config.groups))
        self.config: Final = config
        self.max_model_len: Final = max_model_len
        self.enable_caching: Final = enable_caching
        self._hasher: Final = hasher
        self._hash_block_size: Final = hasher.block_size
        self._coordinator: Final[KVCacheCoordinator] = make_coordinator(
            config, enable_caching, hasher.block_size, observer
        )
        self._pool: Final = self._coordinator.pool
        self._no_blocks: Final = self._coordinator.no_blocks
        self._no_hit: Final = self._coordinator.no_hit
        self._watermark_blocks: Final = int(watermark * config.num_blocks)
        self._stats: PrefixCacheStats = PrefixCacheStats()

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

    def num_blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a request of num_tokens tokens holds when it shares none, over all groups."""
        return self._coordinator.num_blocks_to_take(None, self._no_hit, min(num_tokens, self.max_model_len))

    def num_blocks_missing(self, request: Request) -> int:
        """Blocks that the request still needs to hold all its tokens so far."""
        held = self._coordinator.get(request.request_id)
        return self._coordinator.num_blocks_to_take(held, self._no_hit, min(request.num_tokens, self.max_model_len))

    # The life of a request

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """The longest cached prefix, in whole blocks, of at most num_tokens - 1 tokens.

        The last token is always computed, because its logits are needed. Changes nothing; the hit belongs to the
        request only once allocate_slots takes it. RequestError for a request that holds blocks.
        """
        if self._coordinator.get(request.request_id) is not None:
            raise RequestError(f"request {request.request_id!r} holds blocks already; look up before allocate_slots")
        if not self.enable_caching or request.skip_prefix_lookup:
            return self._no_hit
        self._hasher.refresh(request)
        return self._coordinator.find_longest_hit(request.block_hashes, request.num_tokens - 1)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hit: PrefixHit | None = None,
        *,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        admission: AdmissionRule | None = None,
    ) -> KVCacheBlocks | None:
        """Gives a request slots for this step (ranges: slot_ranges.py) and returns only the blocks that are new.

        None when they do not fit: nothing has changed. `hit`: this request's get_computed_blocks, for one that holds
        no blocks yet. `delay_cache_blocks`: the values arrive later; call cache_blocks then. `admission`: for a request
        that is not running. RequestError for a step without tokens, a hit for a request that holds blocks, or computed
        tokens without blocks.
        """
        held = self._coordinator.get(request.request_id)
        starts = hit is not None or admission is not None or num_external_computed_tokens != 0 or delay_cache_blocks
        if held is None or starts or num_new_tokens <= 0:
            ranges = SlotRanges(
                request.num_computed_tokens + (0 if hit is None else hit.num_tokens),
                num_external_computed_tokens,
                num_new_tokens,
                num_lookahead_tokens,
                self.max_model_len,
            )
            return self._start(request, hit or self._no_hit, ranges, delay_cache_blocks, admission)
        # A running request grows. Most steps stay within the blocks it has and fill none: two comparisons.
        new_end = request.num_computed_tokens + num_new_tokens
        slots_end = min(new_end + num_lookahead_tokens, self.max_model_len)
        new_blocks = self._no_blocks
        if slots_end > held.num_slots:
            if self._coordinator.num_blocks_to_take(held, self._no_hit, slots_end) > self._pool.num_free_blocks:
                return None
            new_blocks = self._coordinator.take_blocks(held, slots_end)
        if self.enable_caching:
            self._cache_blocks(held, request, min(new_end, request.num_tokens))
        return new_blocks

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Makes blocks full at num_computed_tokens tokens hits for others, after delay_cache_blocks.

        RequestError when the request has fewer tokens or holds no blocks for them.
        """
        held = self._coordinator.require_held(request.request_id)
        if num_computed_tokens > request.num_tokens:
            raise RequestError(
                f"num_computed_tokens={num_computed_tokens}: request {request.request_id!r} has {request.num_tokens}"
            )
        if self.enable_caching:
            self._cache_blocks(held, request, num_computed_tokens)

    def free(self, request: Request) -> None:
        """Gives back a request's blocks, the last first. UnknownRequestError when it holds none."""
        self._coordinator.free(request.request_id)

    def fork(self, parent: Request, child: Request) -> KVCacheBlocks | None:
        """Gives the child the parent's computed prefix: full blocks shared, the partial tail as a copy order.

        Returns the child's blocks; None when the copy does not fit, nothing changed. The prefix covers what workers
        have finished: parent.num_computed_tokens - num_in_flight_tokens, which becomes the child's computed count by
        the caller's hand. RequestError when the child holds blocks or has no such prefix.
        """
        num_tokens = parent.num_computed_tokens - parent.num_in_flight_tokens
        if self._coordinator.get(child.request_id) is not None:
            raise RequestError(f"request {child.request_id!r} holds blocks already; a fork starts without any")
        if not 0 < num_tokens <= child.num_tokens or child.tokens.pack(0, num_tokens) != parent.tokens.pack(
            0, num_tokens
        ):
            raise RequestError(
                f"request {child.request_id!r} is no fork of {parent.request_id!r}: their first {num_tokens} computed "
                "tokens differ, or there are none"
            )
        return self._coordinator.fork(parent.request_id, child.request_id, num_tokens)

    def holds_blocks(self, request: Request) -> bool:
        return self._coordinator.get(request.request_id) is not None

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All blocks of a request. UnknownRequestError when it holds none."""
        return self._coordinator.blocks_of(self._coordinator.require_held(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """All block ids of a request per group, in fresh lists."""
        return self.get_blocks(request_id).get_block_ids()

    # Copies that workers must make

    def take_block_copies(self) -> list[BlockCopy]:
        """Copy orders since the last call, for the step about to be sent to the workers."""
        return self._coordinator.take_block_copies()

    def release_block_copies(self, copies: list[BlockCopy]) -> None:
        """To be called once the step that carried these copies is done."""
        self._coordinator.release_block_copies(copies)

    # The prefix cache as a whole

    def evict_blocks(self, block_ids: list[int]) -> None:
        """Takes the hashes of these blocks, held or free. BlockError on a wrong id, evicting none."""
        self._pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content. False, with a warning to the observer, while requests hold blocks."""
        done = self._pool.reset_prefix_cache()
        if done:
            self._stats.reset = True
        return done

    def start_epoch(self) -> None:
        """Separates all later lookups from everything cached so far: the weights changed under running requests.

        Unlike reset_prefix_cache it always works. Running requests finish on their old values; whatever they still
        cache stays in their epoch, where no later request looks.
        """
        self._hasher.start_epoch()

    def record_prefix_lookup(self, request: Request, num_hit_tokens: int) -> None:
        """Counts one lookup, at admission, so that lookups of requests that stay waiting are not counted twice."""
        if self.enable_caching and not request.skip_prefix_lookup:
            self._stats.record(request.num_tokens, num_hit_tokens, request.num_preemptions > 0)

    def take_prefix_cache_stats(self) -> PrefixCacheStats:
        """The counts since the last call."""
        stats = self._stats
        self._stats = PrefixCacheStats()
        return stats

    def check(self) -> None:
        """Proves the invariants of every layer. O(blocks): for tests, replay --check and hunting bugs."""
        self._coordinator.check()

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
        self._require_sound_start(request, hit, ranges)
        held = coordinator.get(request.request_id)
        num_blocks = coordinator.num_blocks_to_take(held, hit, ranges.slots_end)
        rule = _NO_RULE if admission is None else admission
        num_free = self._pool.num_free_blocks
        watermark = self._watermark_blocks if rule.has_scheduled_requests else 0
        if rule.full_sequence_must_fit:
            num_slots = min(request.num_tokens, self.max_model_len)
            if coordinator.num_blocks_to_take(held, hit, num_slots) + watermark > num_free:
                return None
        if num_blocks + watermark > num_free - rule.reserved_blocks:
            return None
        if held is None:
            if self.enable_caching:
                self._hasher.refresh(request)
            held = coordinator.add(request.request_id)
            coordinator.attach(held, hit, ranges, self.max_model_len)
        new_blocks = coordinator.take_blocks(held, ranges.slots_end)
        if self.enable_caching and not delay_cache_blocks:
            self._cache_blocks(held, request, min(ranges.new_end, request.num_tokens))
        return self._no_blocks if new_blocks.is_empty() else new_blocks

    def _cache_blocks(self, held: RequestBlocks, request: Request, num_tokens: int) -> None:
        """Caches what is full at num_tokens tokens. REQUIRES num_tokens <= request.num_tokens: drafts may be rejected
        and must never be hits."""
        if num_tokens < held.next_full:
            return
        if num_tokens // self._hash_block_size > len(request.block_hashes):
            self._hasher.extend(request)
        self._coordinator.cache_blocks(held, request, num_tokens)

    def _require_sound_start(self, request: Request, hit: PrefixHit, ranges: SlotRanges) -> None:
        request_id = request.request_id
        num_new, num_external = ranges.num_new, ranges.num_external
        if num_new < 0 or num_external < 0 or (num_new == 0 and num_external == 0 and hit.num_tokens == 0):
            raise RequestError(
                f"num_new_tokens={num_new}: a step of request {request_id!r} needs a token to compute, unless it "
                "adopts computed ones (a prefix hit or external tokens)"
            )
        if self._coordinator.get(request_id) is not None:
            if hit.num_tokens > 0 or num_external > 0:
                raise RequestError(
                    f"request {request_id!r} holds blocks already: a prefix hit or external tokens can only start one"
                )
        elif request.num_computed_tokens > 0:
            raise RequestError(
                f"request {request_id!r} counts {request.num_computed_tokens} computed tokens but holds no blocks: "
                "set num_computed_tokens to 0 when you free it"
            )


# Of a request that just takes what is free.
_NO_RULE: Final = AdmissionRule(full_sequence_must_fit=False, has_scheduled_requests=False)
