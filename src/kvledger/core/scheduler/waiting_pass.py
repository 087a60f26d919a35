"""WaitingPass: admits waiting requests, in order, while budget, seats and blocks last."""

from typing import Final

from kvledger.core.blocks.kv_cache_blocks import AdmissionRule, BlockShortage, PrefixHit
from kvledger.core.requests.request import Request, RequestStatus
from kvledger.core.scheduler.config import SchedulingPolicy
from kvledger.core.scheduler.external import ExternalHit, ExternalKVSource
from kvledger.core.scheduler.state import SchedulerState
from kvledger.core.scheduler.step import StepBuilder
from kvledger.core.scheduler.wait_reason import WaitReason
from kvledger.errors import RequestError


class Candidate:
    """A waiting request with what is known of it already: `| local hit | external hit |`, and how that arrives."""

    def __init__(self, request: Request, hit: PrefixHit | None, num_external: int, asynchronous: bool) -> None:
        self.request: Final = request
        # None for a request that holds its computed blocks already, after a load.
        self.hit: Final = hit
        self.num_external: Final = num_external
        self.asynchronous: Final = asynchronous
        num_local = request.num_computed_tokens if hit is None else hit.num_tokens
        self.num_computed: Final = num_local + num_external
        # Tokens that it computes in this step, if it is admitted; else why it is not.
        self.num_new: int = 0
        self.is_admitted: bool = False
        self.wait_reason: WaitReason = WaitReason.BLOCKS
        self.is_passed_over: bool = False
        # With a shorter hit, or none, it may fit where it never will with this one.
        self.hit_never_fits: bool = False


class WaitingPass:
    """The second half of schedule(). The first request that does not fit ends it: nobody overtakes."""

    def __init__(self, state: SchedulerState, source: ExternalKVSource | None) -> None:
        self._state: Final = state
        self._manager: Final = state.manager
        self._config: Final = state.config
        self._source: Final = source
        self._by_priority: Final = state.config.policy is SchedulingPolicy.PRIORITY
        # Slots of a request's first step with drafts.
        num_drafts = state.config.num_speculative_tokens + state.config.num_lookahead_tokens
        self._num_more: Final = 1 + num_drafts if num_drafts > 0 else 0
        # Admitted in this step, after a load: their first step with drafts is still to come.
        self._loaded: Final[list[Request]] = []

    def schedule(self, step: StepBuilder) -> None:
        state = self._state
        log = state.wait_log
        threshold = state.long_prefill_threshold()
        skipped: list[Request] = []
        has_lost_place = False
        self._loaded.clear()
        log.ended_by = WaitReason.MAX_NUM_SEQS
        while step.token_budget > 0 and len(state.running) < self._config.max_num_seqs:
            queue = state.waiting_holders if len(state.waiting_holders) > 0 else state.waiting
            if len(queue) == 0:
                break
            request = queue.pop()
            try:
                hindrance = self._hindrance(request)
                candidate = self._look_up(request) if hindrance is None else None
            except RequestError as wrong:
                state.fail(request, wrong)
                continue
            if candidate is not None:
                candidate = self._try(step, candidate, threshold)
            if candidate is None:
                log.pass_over(request, WaitReason.EXTERNAL_LOOKUP if hindrance is None else hindrance)
                skipped.append(request)
                if state.raised:
                    log.ended_by = WaitReason.EXTERNAL_LOOKUP
                    break
                continue
            num_new = candidate.num_new
            if not candidate.is_admitted:
                error = state.pool_error(request, request.num_tokens)
                if error is None and candidate.is_passed_over:
                    log.pass_over(request, candidate.wait_reason)
                    skipped.append(request)
                    continue
                if error is None:
                    log.block(request, candidate.wait_reason)
                    skipped.append(request)
                    has_lost_place = queue is state.waiting_holders and not self._manager.holds_blocks(request)
                    break
                # It generated more than the pool takes before it was preempted: waiting cannot help.
                state.fail(request, error)
                continue
            request.num_computed_tokens = candidate.num_computed
            if candidate.asynchronous:
                request.status = RequestStatus.WAITING_FOR_EXTERNAL_KV
                state.loads.start(request, step.output.step, candidate.num_computed - candidate.num_external)
                log.pass_over(request, WaitReason.EXTERNAL_LOAD)
                skipped.append(request)
                continue
            state.start(request, num_new)
            step.add_new(request, num_new, self._manager.get_blocks(request.request_id))
            if num_new > request.num_tokens - candidate.num_computed:
                step.output.draft_token_ids[request.request_id] = [-1] * self._config.num_speculative_tokens
        if step.token_budget <= 0 and log.blocker is None:
            log.ended_by = WaitReason.TOKEN_BUDGET
        log.token_budget_left = step.token_budget
        for request in reversed(skipped):
            holds = self._manager.holds_blocks(request)
            (state.waiting_holders if holds else state.waiting).add_first(request)
        if has_lost_place:
            self._pass_over_before(skipped)

    def _pass_over_before(self, looked_at: list[Request]) -> None:
        """The load of the last one looked at failed: those who hold blocks, or are more urgent, go before it now."""
        log = self._state.wait_log
        for other in self._state.waiting_requests():
            if other is looked_at[-1]:
                break
            if other not in looked_at:
                is_load = other.status is RequestStatus.WAITING_FOR_EXTERNAL_KV
                log.pass_over(other, WaitReason.EXTERNAL_LOAD if is_load else WaitReason.NOT_CONSIDERED)

    def _try(self, step: StepBuilder, first: Candidate, threshold: int) -> Candidate | None:
        """Admits a candidate if it fits, or another of the same request. None while the source does not know yet.

        A hit that ends inside a block is copied from there, so for a while it costs more blocks than computing the same
        tokens. Where the whole pool has not so many, a shorter hit is taken, or none.
        """
        candidate: Candidate | None = first
        while candidate is not None:
            if not candidate.asynchronous:
                candidate.num_new = self._num_new_tokens(step, candidate, threshold)
            if candidate.num_new > 0 or candidate.asynchronous:
                candidate.is_admitted = self._allocate(candidate, candidate.num_new)
            if candidate.is_admitted or not candidate.hit_never_fits or candidate.hit is None:
                break
            candidate = self._look_up(first.request, candidate.hit.num_tokens - 1)
        return candidate

    def _hindrance(self, request: Request) -> WaitReason | None:
        """Why a request must be passed over in this step; None when it need not."""
        if request.status is RequestStatus.WAITING_FOR_EXTERNAL_KV:
            num_valid = self._state.loads.take_arrival(request)
            if num_valid is None:
                return WaitReason.EXTERNAL_LOAD
            self._end_load(request, num_valid)
        if request.num_stale_tokens > 0 and not request.drops_stale_output:
            # Its output is still to be delivered: computing the same positions again could sample them differently.
            return WaitReason.STALE_OUTPUT
        return None

    def _end_load(self, request: Request, num_valid_tokens: int) -> None:
        request.status = RequestStatus.PREEMPTED if request.num_preemptions > 0 else RequestStatus.WAITING
        num_resumable = self._manager.num_resumable_tokens(request, num_valid_tokens)
        if num_resumable == 0:
            # What is read from where the values end has no blocks, or there are none: what is cached is found again.
            self._manager.free(request)
        else:
            self._manager.cache_blocks(request, min(num_valid_tokens, request.num_computed_tokens))
        request.num_computed_tokens = num_resumable
        if self._state.accounting is not None:
            self._state.accounting.load(request)

    def _look_up(self, request: Request, max_hit: int = -1) -> Candidate | None:
        """What the prefix cache, up to max_hit tokens if that is not negative, and the external source have. None while
        the source does not know yet."""
        if self._manager.holds_blocks(request):
            return Candidate(request, None, 0, False)
        hit = self._manager.get_computed_blocks(request, max_hit)
        if max_hit < 0:
            request.shared_prefix_boundary = hit.shared_prefix_boundary
        if self._source is None or request.skip_prefix_lookup:
            return Candidate(request, hit, 0, False)
        whole = self._manager.whole_blocks_of(hit)
        offer = self._ask_source(self._source, request, whole.num_tokens)
        if offer is None:
            return None
        # The last token is computed here. Attention overwrites what arrives of it; a state cannot go a token back.
        leaves_last = not offer.asynchronous or not self._manager.can_step_back or request.num_tokens == 1
        num_known = request.num_tokens - 1 if leaves_last else request.num_tokens
        num_external = min(offer.num_tokens, num_known - whole.num_tokens)
        if num_external <= hit.num_tokens - whole.num_tokens:
            return Candidate(request, hit, 0, False)
        return Candidate(request, whole, num_external, offer.asynchronous)

    def _ask_source(self, source: ExternalKVSource, request: Request, num_local_tokens: int) -> ExternalHit | None:
        """A source that raises does not know yet."""
        offer: ExternalHit | None = None
        try:
            offer = source.lookup(request, num_local_tokens)
        except BaseException as error:
            self._state.raised.append(error)
        return offer

    def _tell_source(self, source: ExternalKVSource, candidate: Candidate, hit: PrefixHit) -> bool:
        """False when the source raises: then it loads nothing, and the request has its blocks no more."""
        request = candidate.request
        block_ids = self._manager.get_block_ids(request.request_id)
        try:
            source.allocated(request, block_ids, candidate.num_external)
        except BaseException as error:
            self._state.raised.append(error)
        if not self._state.raised:
            return True
        # What its step would have filled are hits already.
        self._manager.uncache_beyond(request, hit.num_tokens)
        self._manager.free(request)
        candidate.wait_reason = WaitReason.EXTERNAL_LOOKUP
        return False

    def _num_new_tokens(self, step: StepBuilder, candidate: Candidate, threshold: int) -> int:
        """Tokens to compute for a request that starts now; 0 when it had better not start in this step."""
        config = self._config
        num_computed = candidate.num_computed
        num_new = candidate.request.num_tokens - num_computed
        padded = 1 + config.num_speculative_tokens
        if (
            num_new == 1 < padded <= config.max_num_batched_tokens
            and not step.has_prefill
            and (step.has_running or num_computed > 0)
            and num_computed + padded + 1 <= self._manager.max_model_len
            and self._state.pool_error(candidate.request, num_computed + padded) is None
        ):
            # A lone decode joins a batch of decodes that verify drafts: it is padded with unknown drafts, so that every
            # row has the same length (CUDA graphs need that), or it waits.
            if padded > step.token_budget:
                return self._wait(candidate, WaitReason.PADDED_DECODE, padded)
            # What does not get through in whole is not padded.
            return padded if self._clip(candidate, padded) == padded else self._clip(candidate, 1)
        if 0 < threshold < num_new:
            num_new = threshold
        if not config.enable_chunked_prefill and num_new > step.token_budget:
            return self._wait(candidate, WaitReason.WHOLE_PROMPT, num_new)
        return self._clip(candidate, min(num_new, step.token_budget))

    def _clip(self, candidate: Candidate, num_new: int) -> int:
        if not self._manager.clips_chunks:
            return num_new
        clipped = self._manager.clip_chunk(
            candidate.request, candidate.num_computed, num_new, self._config.max_prefill_chunk
        )
        if clipped > 0:
            return clipped
        candidate.is_passed_over = self._manager.decisions.skips_reserved_chunks and self._manager.waits_for_rest(
            candidate.request, candidate.num_computed, num_new, self._config.max_prefill_chunk
        )
        return self._wait(candidate, WaitReason.CHUNK_CLIPPED, num_new)

    def _wait(self, candidate: Candidate, reason: WaitReason, num_tokens: int) -> int:
        """No tokens for this candidate, which wanted so many."""
        candidate.wait_reason = reason
        self._state.wait_log.num_tokens_wanted = num_tokens
        return 0

    def _allocate(self, candidate: Candidate, num_new: int) -> bool:
        request = candidate.request
        if candidate.asynchronous and not self._may_load(candidate):
            return False
        has_hit = candidate.hit is not None and candidate.hit.num_tokens > 0
        shortage = self._take_slots(candidate, num_new, self._config.reserve_full_sequence)
        if shortage is not None and shortage.never_fits and shortage.is_whole_sequence and not has_hit:
            # With all the steps in flight that may be, it can hold more than the pool has. It was not refused, so with
            # one at a time it cannot, and it need not wait for what will never be free.
            shortage = self._take_slots(candidate, num_new, False)
        if shortage is not None:
            self._state.wait_log.shortage = shortage
            candidate.hit_never_fits = shortage.never_fits and has_hit
            candidate.wait_reason = WaitReason.HIT_IN_WRITING if shortage.is_in_writing else WaitReason.BLOCKS
            return False
        if candidate.hit is None:
            self._loaded.append(request)
            return True
        if self._source is not None:
            if not self._tell_source(self._source, candidate, candidate.hit):
                return False
            self._manager.record_external_lookup(request, candidate.hit.num_tokens, candidate.num_external)
        self._manager.record_prefix_lookup(request, candidate.hit.num_tokens, candidate.hit)
        if self._state.accounting is not None:
            self._state.accounting.admit(request, candidate.hit.num_tokens, candidate.num_external)
        return True

    def _take_slots(self, candidate: Candidate, num_new: int, must_fit: bool) -> BlockShortage | None:
        """Gives the candidate its blocks; what lacks, if they are not free. `must_fit`: for all its tokens."""
        request = candidate.request
        rule = AdmissionRule(
            must_fit,
            self._num_blocks_spoken_for() if candidate.asynchronous else 0,
            len(self._state.running) > 0,
        )
        blocks = self._manager.allocate_slots(
            request,
            num_new,
            candidate.hit,
            num_lookahead_tokens=0 if candidate.asynchronous else self._config.num_lookahead_tokens,
            num_external_computed_tokens=candidate.num_external,
            delay_cache_blocks=candidate.asynchronous,
            admission=rule,
        )
        return self._manager.shortage if blocks is None else None

    def _may_load(self, candidate: Candidate) -> bool:
        request = candidate.request
        if self._by_priority and not self._fits_beside_loads(request):
            return False
        hit = candidate.hit
        if hit is not None and self._manager.demand.lacks_host_blocks_beside(
            request, hit, candidate.num_external, self._not_decoding_yet(), self._num_more
        ):
            self._state.wait_log.shortage = BlockShortage(request.request_id, 0, 0, is_host_pool=True)
            return False
        return True

    def _fits_beside_loads(self, request: Request) -> bool:
        """Whether it could go on after its load while all others that load keep what they hold.

        In the order in which they began, each finds what was left free for it. A more urgent one goes first, and those
        behind it wait for it with all their blocks. (Running requests end, or are preempted.)
        """
        manager = self._manager
        num_held = 0
        for other in self._state.loads.loading.values():
            num_held += manager.num_blocks_held(other)
        if num_held == 0:
            return True
        config = self._config
        num_drafts = config.num_speculative_tokens + config.num_lookahead_tokens
        num_needed = manager.num_blocks_for(request.num_tokens + num_drafts, request.num_encoder_tokens)
        num_left = manager.num_usable_blocks - num_held
        if num_needed <= num_left:
            return True
        self._state.wait_log.shortage = BlockShortage(
            request.request_id, num_needed, num_left, is_whole_sequence=True, is_beside_loads=True
        )
        return False

    def _num_blocks_spoken_for(self) -> int:
        """Blocks that a load must leave free, as nobody can preempt it: what prompts in flight and loads under way
        still need to get to their first decode step, and what its own step with drafts may take.

        None when all blocks are free: a load that does not fit then never will, and drafts can be left out.
        """
        manager = self._manager
        if manager.num_free_blocks == manager.num_usable_blocks:
            return 0
        num_blocks = manager.demand.num_draft_blocks(self._num_more)
        for other in self._not_decoding_yet():
            num_blocks += manager.demand.num_blocks_missing(other, self._num_more)
        return num_blocks

    def _not_decoding_yet(self) -> list[Request]:
        """Holders of blocks that still need more of them to get to their first decode step."""
        prefills = self._state.in_prefill() + [other for other in self._loaded if not other.is_prefill_chunk]
        return prefills + list(self._state.loads.loading.values())
