"""KVCacheManager: the door of the ledger. A scheduler calls this and nothing below it.

    hit = manager.get_computed_blocks(request)                 # what the prefix cache has
    new = manager.allocate_slots(request, n, hit, admission=AdmissionRule())   # None: does not fit now
    new = manager.allocate_slots(request, 1)                   # later, a decode step
    manager.free(request)                                      # finished or preempted

Every call either does all of its work or changes nothing. One owner thread.
"""

from typing import Final

from kvledger.block_copies import BlockCopy
from kvledger.block_hash import BlockHasher, Sha256BlockHasher
from kvledger.block_pool import PoolOccupancy
from kvledger.coordinator import KVCacheCoordinator, RequestBlocks
from kvledger.errors import RequestError, wrong_value
from kvledger.hybrid_coordinator import make_coordinator
from kvledger.kv_cache_blocks import AdmissionRule, GroupOccupancy, KVCacheBlocks, PrefixHit
from kvledger.ledger_rules import LedgerRules
from kvledger.managers.policy import DraftRule
from kvledger.managers.registry import ManagerRegistry
from kvledger.observer import LedgerObserver
from kvledger.prefix_cache_stats import PrefixCacheStats
from kvledger.request import Request
from kvledger.slot_ranges import SlotRanges
from kvledger.spec import KVCacheConfig
from kvledger.units import require_positive


class KVCacheManager:
    """The ledger of one engine.

    `hasher` names blocks for the prefix cache; sha256 is used if none is given. `watermark`: share of the pool that
    stays free when a request that is not running asks for blocks while others run. `max_in_flight_tokens`: most tokens
    that are scheduled and not settled at a time, over all steps in flight; bounds what windowed groups hold (default:
    max_model_len). `drafts`: the rule of a draft model, if one keeps KV values. `retention_interval`: sparse groups
    (windows, states) keep a reusable tail once in so many tokens, 0: only where a replay of the prompt can use it,
    None: at every boundary. `pins_shared_prefix`: also cache a state exactly where a shared prefix ends.
    `context_parallel_size`: ranks that share out each block's tokens. `registry`: managers for your own specs.
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
        registry: ManagerRegistry | None = None,
        observer: LedgerObserver | None = None,
    ) -> None:
        require_positive("max_model_len", max_model_len)
        if not 0.0 <= watermark < 1.0:
            raise wrong_value("watermark", watermark, "not a share of the pool", "give 0.0 up to below 1.0")
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
            observer=observer,
        )
        if hasher is None:
            hasher = Sha256BlockHasher(rules.resolved_hash_block_size(config))
        self.config: Final = config
        self.max_model_len: Final = max_model_len
        self.enable_caching: Final = enable_caching
        self._hasher: Final = hasher
        self._hash_block_size: Final = hasher.block_size
        self._coordinator: Final[KVCacheCoordinator] = make_coordinator(config, rules)
        self._pool: Final = self._coordinator.pool
        self._no_blocks: Final = self._coordinator.no_blocks
        self._no_hit: Final = self._coordinator.no_hit
        # Whether clip_chunk has anything to say; for schedulers that ask once per request and step.
        self.clips_chunks: Final = self._coordinator.clips_chunks
        self._watermark_blocks: Final = int(watermark * config.num_blocks)
        self._stats: PrefixCacheStats = PrefixCacheStats(len(config.groups))

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

    def num_blocks_for(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        """Most blocks that a request of num_tokens tokens holds at a time when it shares none, over all groups."""
        return self._coordinator.num_blocks_to_take(
            None, self._no_hit, self._gate_ranges(num_tokens, num_encoder_tokens)
        )

    def num_blocks_missing(self, request: Request, num_more_tokens: int = 0) -> int:
        """Blocks that the request still needs to hold all its tokens so far and num_more_tokens beyond."""
        held = self._coordinator.get(request.request_id)
        ranges = self._gate_ranges(request.num_tokens + num_more_tokens, request.num_encoder_tokens)
        return self._coordinator.num_blocks_to_take(held, self._no_hit, ranges)

    def group_occupancies(self) -> list[GroupOccupancy]:
        """What requests hold and what is cached, for each group. O(blocks held): for reports, not for every step."""
        return self._coordinator.group_occupancies()

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

        None when they do not fit: nothing has changed, but for blocks that no later token reads, which are given back
        first. `hit`: this request's get_computed_blocks, for one that holds no blocks yet. `delay_cache_blocks`: the
        values arrive later; call cache_blocks then. `admission`: for a request that is not running. RequestError for a
        step without tokens, a hit for a request that holds blocks, or computed tokens without blocks.
        """
        held = self._coordinator.get(request.request_id)
        starts = hit is not None or admission is not None or num_external_computed_tokens != 0 or delay_cache_blocks
        if held is not None and not starts and num_new_tokens > 0 and num_lookahead_tokens >= 0:
            return self._grow(request, held, num_new_tokens, num_lookahead_tokens)
        if hit is None:
            hit = self._no_hit
        local_end = request.num_computed_tokens + hit.num_tokens
        computed_end = local_end + num_external_computed_tokens
        new_end = min(computed_end, self.max_model_len) + num_new_tokens
        ranges = SlotRanges(
            local_end,
            computed_end,
            new_end,
            min(new_end + num_lookahead_tokens, self.max_model_len),
            request.num_encoder_tokens,
            _prefill_end(request),
        )
        self._require_sound_start(request, hit, ranges)
        return self._start(request, hit, ranges, delay_cache_blocks, admission)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Makes blocks full at num_computed_tokens tokens hits for others, after delay_cache_blocks.

        RequestError when the request has fewer tokens or holds no blocks for them.
        """
        held = self._coordinator.require_held(request.request_id)
        num_covered = self._coordinator.num_covered_tokens(held)
        if num_computed_tokens > min(request.num_tokens, num_covered):
            raise RequestError(
                f"num_computed_tokens={num_computed_tokens}: request {request.request_id!r} has {request.num_tokens} "
                f"tokens and blocks for {num_covered}"
            )
        if self.enable_caching and num_computed_tokens >= held.next_caching:
            self._hash(request, num_computed_tokens)
            self._coordinator.cache_blocks(held, request, num_computed_tokens)

    def uncache_beyond(self, request: Request, num_tokens: int) -> None:
        """Takes back what cache_blocks did beyond num_tokens tokens: their step does not run after all."""
        self._coordinator.uncache_beyond(self._coordinator.require_held(request.request_id), num_tokens)

    def free(self, request: Request) -> None:
        """Gives back a request's blocks, the last first. UnknownRequestError when it holds none."""
        self._coordinator.free(request.request_id)

    def fork(self, parent: Request, child: Request) -> KVCacheBlocks | None:
        """Gives the child the parent's computed prefix: full blocks shared, the partial tail as a copy order.

        Returns the child's blocks; None when the copy does not fit, nothing changed. The prefix covers what workers
        have finished, parent.num_processed_tokens, which becomes the child's computed count by the caller's hand.
        RequestError when the child holds blocks or has no such prefix.
        """
        num_tokens = parent.num_processed_tokens
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

    def take_block_copies(self) -> list[BlockCopy]:
        """Copy orders since the last call, for the step about to be sent to the workers."""
        return self._coordinator.copies.take()

    def release_block_copies(self, copies: list[BlockCopy]) -> None:
        """To be called once the step that carried these copies is done."""
        self._coordinator.copies.release(copies)

    # The prefix cache as a whole

    def evict_blocks(self, block_ids: list[int]) -> None:
        """Takes the hashes of these blocks, held or free. BlockError on a wrong id, evicting none."""
        self._pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content. False, with a warning to the observer, while requests hold blocks."""
        done = self._coordinator.reset_prefix_cache()
        if done:
            self._stats.reset = True
        return done

    def start_epoch(self) -> None:
        """Separates all later lookups from everything cached so far: the weights changed under running requests.

        Unlike reset_prefix_cache it always works. Running requests finish on their old values; whatever they still
        cache stays in their epoch, where no later request looks.
        """
        self._hasher.start_epoch()

    def record_prefix_lookup(self, request: Request, num_hit_tokens: int, hit: PrefixHit | None = None) -> None:
        """Counts one lookup, at admission, so that lookups of requests that stay waiting are not counted twice.

        `hit`: what was found, to count which group limited it.
        """
        if self.enable_caching and not request.skip_prefix_lookup:
            preempted = request.num_preemptions > 0
            self._stats.record(request.num_tokens, num_hit_tokens, preempted)
            if hit is not None and hit.limiting_group >= 0 and not preempted:
                self._stats.record_limit(hit.limiting_group, max(0, hit.shared_prefix_boundary - hit.num_tokens))

    def take_prefix_cache_stats(self) -> PrefixCacheStats:
        """The counts since the last call."""
        stats = self._stats
        self._stats = PrefixCacheStats(len(self.config.groups))
        return stats

    def check(self) -> None:
        """Proves the invariants of every layer. O(blocks): for tests, replay --check and hunting bugs."""
        self._coordinator.check()

    def _grow(
        self, request: Request, held: RequestBlocks, num_new_tokens: int, num_lookahead_tokens: int
    ) -> KVCacheBlocks | None:
        """allocate_slots for a running request. Most steps stay within its blocks, fill none and leave none: three
        comparisons."""
        num_computed = request.num_computed_tokens
        new_end = num_computed + num_new_tokens
        if new_end > self.max_model_len:
            raise self._too_long(request, new_end)
        slots_end = min(new_end + num_lookahead_tokens, self.max_model_len)
        # Drafts may be rejected and must never be hits, so caching stops at the tokens known for certain.
        cache_end = min(new_end, request.num_tokens) if self.enable_caching else 0
        caches = cache_end > 0 and cache_end >= held.next_caching
        if caches:
            self._hash(request, cache_end)
        num_processed = num_computed - request.num_in_flight_tokens
        if num_processed >= held.next_release:
            self._coordinator.release_skipped(held, max(0, num_processed))
        new_blocks = self._no_blocks
        if slots_end > held.num_slots:
            ranges = SlotRanges(
                num_computed, num_computed, new_end, slots_end, request.num_encoder_tokens, _prefill_end(request)
            )
            if self._coordinator.num_blocks_to_take(held, self._no_hit, ranges) > self._pool.num_free_blocks:
                return None
            new_blocks = self._coordinator.take_blocks(held, ranges)
        if caches:
            self._coordinator.cache_blocks(held, request, cache_end)
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
            end = min(request.num_tokens, self.max_model_len)
            computed_end = min(ranges.computed_end, self.max_model_len)
            gate = SlotRanges(
                ranges.local_end, computed_end, end, end, ranges.num_encoder_tokens, ranges.prefill_end, is_gate=True
            )
            if coordinator.num_blocks_to_take(held, hit, gate) + watermark > self._pool.num_free_blocks:
                return None
        if held is not None:
            num_computed = min(ranges.computed_end, self.max_model_len)
            coordinator.release_skipped(held, max(0, num_computed - request.num_in_flight_tokens))
        num_blocks = coordinator.num_blocks_to_take(held, hit, ranges)
        if num_blocks + watermark > self._pool.num_free_blocks - rule.reserved_blocks:
            return None
        if self.enable_caching and held is None:
            self._hasher.refresh(request)
        elif self.enable_caching:
            self._hash(request, min(ranges.new_end, request.num_tokens))
        if held is None:
            held = coordinator.add(request.request_id)
            coordinator.attach(held, hit, ranges)
        new_blocks = coordinator.take_blocks(held, ranges)
        if self.enable_caching and not delay_cache_blocks:
            coordinator.cache_blocks(held, request, min(ranges.new_end, request.num_tokens))
        return self._no_blocks if new_blocks.is_empty() else new_blocks

    def _gate_ranges(self, num_tokens: int, num_encoder_tokens: int) -> SlotRanges:
        end = min(num_tokens, self.max_model_len)
        return SlotRanges(0, 0, end, end, num_encoder_tokens, end, is_gate=True)

    def _hash(self, request: Request, num_tokens: int) -> None:
        """Hashes what is full at num_tokens tokens. Comes before blocks are taken: wrong tokens raise here."""
        if num_tokens // self._hash_block_size > len(request.block_hashes):
            self._hasher.extend(request)

    def _too_long(self, request: Request, num_tokens: int) -> RequestError:
        return RequestError(
            f"request {request.request_id!r}: {num_tokens} tokens are more than max_model_len={self.max_model_len}; "
            "nothing was changed"
        )

    def _require_sound_start(self, request: Request, hit: PrefixHit, ranges: SlotRanges) -> None:
        request_id = request.request_id
        num_new = ranges.new_end - min(ranges.computed_end, self.max_model_len)
        num_external = ranges.num_external
        if ranges.new_end > self.max_model_len:
            raise self._too_long(request, ranges.new_end)
        if ranges.slots_end < ranges.new_end:
            raise RequestError(f"request {request_id!r}: num_lookahead_tokens is negative; give 0 or more")
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


def _prefill_end(request: Request) -> int:
    """Where the known tokens end that are computed before the next new one: a resumed request's output counts too."""
    return max(request.num_prompt_tokens, request.num_tokens - 1)


# Of a request that just takes what is free.
_NO_RULE: Final = AdmissionRule(full_sequence_must_fit=False, has_scheduled_requests=False)
