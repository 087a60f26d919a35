"""vLLM's scheduler and ours, given the same requests, aborts and sampled tokens, and compared after every step."""

import random
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput as TheirOutput
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request as TheirRequest
from vllm.v1.request import RequestStatus as TheirStatus

from kvledger import KVCacheManager, MissExplainer, Request, RequestStatus
from kvledger.scheduler import Scheduler, SchedulerConfig, SchedulerOutput, SchedulingPolicy
from tests.engine import flat_update
from tests.side_by_side import reference
from tests.side_by_side.external_pair import Loads, OurSource, Store, connect
from tests.side_by_side.layouts import Layout
from tests.side_by_side.ledger_pair import ExplainedStats, make_ours

FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    None: None,
}


@dataclass(frozen=True)
class Limits:
    """Both schedulers' configuration."""

    num_blocks: int
    layout: Layout
    max_model_len: int = 128
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    by_priority: bool = False
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    reserve_full_sequence: bool = True
    watermark: float = 0.0
    num_speculative_tokens: int = 0
    num_lookahead_tokens: int = 0
    steps_in_flight: int = 1
    has_source: bool = False

    def __post_init__(self) -> None:
        # What vLLM's configuration makes of them; a ledger made for smaller steps is refused by our scheduler.
        most = self.steps_in_flight * self.max_num_batched_tokens
        object.__setattr__(self, "layout", replace(self.layout, max_in_flight_tokens=most))


@dataclass
class Work:
    """One request to come."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    priority: int = 0
    arrival_time: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    skips_lookup: bool = False


@dataclass
class InFlight:
    """A scheduled step with the tokens that its forward pass will sample."""

    ours: SchedulerOutput
    theirs: TheirOutput
    sampled: dict[str, list[int]] = field(default_factory=dict)
    copy_ends: list[KVCacheBlock] = field(default_factory=list)


class ExternalCounts:
    """vLLM's counts of lookups in the connector, summed over the steps that tell them."""

    def __init__(self) -> None:
        self.requests = self.queries = self.hits = 0

    def add(self, stats: Any) -> None:
        if stats is not None and stats.connector_prefix_cache_stats is not None:
            self.add_counts(stats.connector_prefix_cache_stats)

    def add_counts(self, counts: Any) -> None:
        self.requests += counts.requests
        self.queries += counts.queries
        self.hits += counts.hits

    def compare(self, manager: KVCacheManager) -> None:
        ours = manager.prefix_cache_totals()
        told = (ours.external_requests, ours.external_queries, ours.external_hits)
        assert told == (self.requests, self.queries, self.hits)


class SchedulerPair:
    def __init__(self, limits: Limits, directory: str, seed: int, steps_between_states: int = 1) -> None:
        """`steps_between_states`: outputs are compared in every step, the whole state only once in so many."""
        self.limits = limits
        self.steps_between_states = steps_between_states
        self.rng = random.Random(seed)
        self.store = Store(limits.layout, random.Random(seed)) if limits.has_source else None
        self.ours = Scheduler(
            self.make_ours(),
            SchedulerConfig(
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                policy=SchedulingPolicy.PRIORITY if limits.by_priority else SchedulingPolicy.FCFS,
                enable_chunked_prefill=limits.enable_chunked_prefill,
                long_prefill_token_threshold=limits.long_prefill_token_threshold,
                reserve_full_sequence=limits.reserve_full_sequence,
                num_speculative_tokens=limits.num_speculative_tokens,
                num_lookahead_tokens=limits.num_lookahead_tokens,
                max_steps_in_flight=limits.steps_in_flight,
            ),
            None if self.store is None else OurSource(self.store),
        )
        self.misses = MissExplainer(self.ours.manager)
        is_async = limits.steps_in_flight > 1
        self.theirs = reference.make_scheduler(
            directory,
            layout=limits.layout,
            num_blocks=limits.num_blocks,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            policy="priority" if limits.by_priority else "fcfs",
            enable_chunked_prefill=limits.enable_chunked_prefill,
            long_prefill_token_threshold=limits.long_prefill_token_threshold,
            reserve_full_sequence=limits.reserve_full_sequence,
            watermark=limits.watermark,
            num_speculative_tokens=0 if is_async else limits.num_speculative_tokens,
            async_scheduling=is_async,
        )
        if is_async and limits.num_speculative_tokens:
            # Its configuration accepts drafts here only from a GPU drafter; the scheduler itself knows no difference.
            self.theirs.num_spec_tokens = limits.num_speculative_tokens
            self.theirs._spec_token_placeholders = [-1] * limits.num_speculative_tokens
        self.theirs.num_lookahead_tokens = limits.num_lookahead_tokens
        self.count_slots_of_drafts()
        # vLLM gives the ends of a copy back when it is scheduled, ours when it is done: theirs waits for that here.
        self.copy_ends: list[KVCacheBlock] = []
        self.load_beside_others = ""
        self.theirs._free_cow_retained_blocks = lambda blocks, fence: self.copy_ends.extend(blocks)
        self.apply_differences()
        self.loads: Loads | None = None
        if self.store is not None:
            connect(self.theirs, self.store, limits.steps_in_flight)
            self.loads = Loads(self.store, self.theirs)
        self.factory = reference.RequestFactory(limits.layout)
        self.in_flight: deque[InFlight] = deque()
        self.num_steps = 0
        self.num_tokens = 0
        # How many of the loads under way report with each step that comes back.
        self.share_of_loads = 0.3
        # What vLLM counted of lookups, step by step.
        self.their_lookups: list[Any] = []
        self.their_external = ExternalCounts()
        self.explained = ExplainedStats()

    def apply_differences(self) -> None:
        """Makes vLLM's side do what ours does on purpose where its own decision would serve what was never written
        (docs/differences.md), so that everything else can be compared."""
        manager, pool = self.theirs.kv_cache_manager, self.theirs.kv_cache_manager.block_pool
        allocate, preempt = manager.allocate_slots, self.theirs._preempt_request

        def allocate_outside_this_steps_blocks(request: Any, *args: Any, **options: Any) -> Any:
            if options.get("delay_cache_blocks") and request.request_id == self.load_beside_others:
                return None
            hit, num_hit = options.get("new_computed_blocks"), options.get("num_new_computed_tokens", 0)
            for group_id, ours in enumerate(self.ours.manager._coordinator.managers):
                written = getattr(ours, "_written_from", {})
                if hit is None or not hit.blocks[group_id] or num_hit % ours.block_size == 0:
                    continue
                if written.get(hit.blocks[group_id][-1].block_id, num_hit) < num_hit:
                    return None
            return allocate(request, *args, **options)

        def preempt_without_unwritten_hits(request: Any, *args: Any, **options: Any) -> None:
            for blocks in manager.get_blocks(request.request_id).blocks:
                beyond = {b.block_id for b in blocks if (b.block_hash_num_tokens or 0) > request.num_computed_tokens}
                pool.evict_blocks(beyond)
            preempt(request, *args, **options)

        manager.allocate_slots = allocate_outside_this_steps_blocks
        self.theirs._preempt_request = preempt_without_unwritten_hits

    def count_slots_of_drafts(self) -> None:
        """What vLLM's scheduler works out from its configuration, which was changed above."""
        theirs = self.theirs
        num_tokens = 1 + theirs.num_spec_tokens + theirs.num_lookahead_tokens if theirs.num_spec_tokens else 0
        theirs._spec_decode_step_blocks = sum(
            -(-num_tokens // manager.block_size)
            for manager in theirs.kv_cache_manager.coordinator.single_type_managers
            if not isinstance(manager, MambaManager)
        )

    def make_ours(self) -> KVCacheManager:
        limits = self.limits
        return make_ours(limits.layout, limits.num_blocks, limits.watermark, limits.max_model_len)

    def add(self, work: Work) -> None:
        ours, theirs = self.make_pair(work)
        self.explained.some_skip = self.explained.some_skip or work.skips_lookup
        if self.store is not None:
            self.store.change(work.request_id)
        self.ours.add_request(ours)
        self.theirs.add_request(theirs)

    def make_pair(self, work: Work) -> tuple[Request, TheirRequest]:
        ours = Request(
            work.request_id,
            work.prompt,
            max_tokens=work.max_tokens,
            priority=work.priority,
            arrival_time=work.arrival_time,
            stop_token_ids=work.stop_token_ids,
            skip_prefix_lookup=work.skips_lookup,
        )
        theirs = self.factory.make(
            work.request_id,
            work.prompt,
            work.max_tokens,
            priority=work.priority,
            arrival_time=work.arrival_time,
            stop_token_ids=work.stop_token_ids,
            skips_lookup=work.skips_lookup,
        )
        return ours, theirs

    def abort(self, request_id: str) -> None:
        self.ours.abort(request_id)
        self.theirs.finish_requests(request_id, TheirStatus.FINISHED_ABORTED)
        self.same_state()

    def reset(self, preempt_running: bool) -> None:
        if any(step.copy_ends for step in self.in_flight):
            # Blocks of copies under way are held, which is an error there when all that runs was preempted.
            preempt_running = False
        try:
            theirs = self.theirs.reset_prefix_cache(preempt_running)
        except RuntimeError:
            theirs = False  # ours says so; what it preempted is preempted on both sides
        assert self.ours.reset_prefix_cache(preempt_running) == theirs
        self.same_state()

    def step(self) -> None:
        """Schedules a step on both sides; closes the oldest one when as many are out as may be."""
        if len(self.in_flight) == self.limits.steps_in_flight:
            self.close()
        ours = self.ours.schedule()
        shortage = self.ours._state.wait_log.shortage
        # A load that others, which wait with blocks too, would not let go on (docs/differences.md).
        self.load_beside_others = "" if shortage is None or not shortage.is_beside_loads else shortage.request_id
        step = InFlight(ours, self.theirs.schedule())
        step.copy_ends, self.copy_ends = self.copy_ends, []
        self.num_steps += 1
        self.note_loads()
        self.same_step(step.ours, step.theirs)
        for request_id in step.theirs.num_scheduled_tokens:
            if not self.theirs.requests[request_id].is_prefill_chunk:
                num_drafts = len(step.theirs.scheduled_spec_decode_tokens.get(request_id, ()))
                num_accepted = self.rng.randint(0, num_drafts)
                step.sampled[request_id] = [self.rng.randrange(100) for _ in range(1 + num_accepted)]
        self.in_flight.append(step)
        self.same_state()

    def close(self) -> None:
        """Brings the oldest step's tokens back to both sides, then new drafts for the next step."""
        step = self.in_flight.popleft()
        reports = [] if self.loads is None else self.loads.draw(self.rng, self.share_of_loads)
        self.theirs.kv_cache_manager.block_pool.free_blocks(step.copy_ends)
        request_ids = step.ours.request_ids
        sampled = [step.sampled.get(request_id, []) for request_id in request_ids]
        is_flat = self.num_steps % 2 == 0 and all(len(tokens) <= 1 for tokens in sampled)
        update = partial(flat_update, self.ours) if is_flat else self.ours.update_from_output
        ours = update(step.ours, [list(tokens) for tokens in sampled])
        theirs = self.theirs.update_from_output(
            step.theirs,
            ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
                sampled_token_ids=[list(tokens) for tokens in sampled],
                kv_connector_output=None if self.loads is None else self.loads.for_them(reports),
            ),
        )
        for report in reports:
            assert self.ours.external_load_finished(report.request_id, report.num_valid)
        their_outputs = [
            (o.request_id, o.new_token_ids, None if o.finish_reason is None else str(o.finish_reason))
            for outputs in theirs.values()
            for o in outputs.outputs
        ]
        assert [(o.request_id, o.new_token_ids, FINISH_REASONS[o.finish]) for o in ours] == their_outputs
        self.num_tokens += sum(len(o.new_token_ids) for o in ours)
        self.their_lookups += [o.scheduler_stats.prefix_cache_stats for o in theirs.values() if o.scheduler_stats]
        for each in theirs.values():
            self.their_external.add(each.scheduler_stats)
        if self.limits.num_speculative_tokens and self.limits.steps_in_flight == 1:
            self.draft(request_ids)
        self.same_state()

    def drain(self) -> None:
        """Runs until both sides have nothing left to do."""
        self.share_of_loads = 0.5
        last_step = self.num_steps + 20_000
        while self.ours.has_unfinished_requests or self.in_flight or (self.loads and self.loads.under_way):
            self.stir_store(0.2)
            if self.in_flight and (len(self.in_flight) == self.limits.steps_in_flight or not self.ours.num_running):
                self.close()
            else:
                self.step()
            assert self.num_steps < last_step, "no progress"
        if self.limits.layout.enable_caching:
            for counts in (*self.their_lookups, self.theirs.kv_cache_manager.make_prefix_cache_stats()):
                self.explained.add(counts)
            self.explained.compare(self.misses)
        if self.store is not None:
            self.their_external.add_counts(self.theirs.connector_prefix_cache_stats)
            self.their_external.compare(self.ours.manager)

    def note_loads(self) -> None:
        if self.store is None or self.loads is None:
            return
        assert self.store.our_calls == self.store.their_calls
        waiting = self.ours.waiting_requests()
        loading = [r for r in waiting if r.status is RequestStatus.WAITING_FOR_EXTERNAL_KV]
        self.loads.note({r.request_id: int(r.num_computed_tokens) for r in loading})

    def stir_store(self, share: float) -> None:
        """Between steps: what the store has of those that wait changes."""
        if self.store is not None:
            for request in self.ours.waiting_requests():
                if self.rng.random() < share:
                    self.store.change(request.request_id)

    def draft(self, request_ids: list[str]) -> None:
        most = self.limits.num_speculative_tokens
        drafts = [[self.rng.randrange(100) for _ in range(self.rng.randint(0, most))] for _ in request_ids]
        for request_id, tokens in zip(request_ids, drafts, strict=True):
            self.ours.update_draft_tokens(request_id, list(tokens))
        self.theirs.update_draft_token_ids(DraftTokenIds(request_ids, [list(tokens) for tokens in drafts]))

    def same_step(self, ours: SchedulerOutput, theirs: TheirOutput) -> None:
        assert list(ours.num_tokens_by_request().items()) == list(theirs.num_scheduled_tokens.items())
        assert ours.total_num_scheduled_tokens == theirs.total_num_scheduled_tokens
        assert ours.draft_token_ids == theirs.scheduled_spec_decode_tokens
        assert set(ours.preempted_request_ids) == theirs.preempted_req_ids
        assert set(ours.finished_request_ids) == theirs.finished_req_ids
        copies = [(c.source_block_id, c.target_block_id) for c in ours.block_copies]
        assert copies == [(c.src_block_id, c.dst_block_id) for c in theirs.kv_cache_block_copies or ()]
        cached = theirs.scheduled_cached_reqs
        full_ids = {r.req_id: (r.block_ids, r.num_computed_tokens) for r in theirs.scheduled_new_reqs}
        new_ids = {}
        for index, request_id in enumerate(cached.req_ids):
            entry = (cached.new_block_ids[index], cached.num_computed_tokens[index])
            # Theirs sends a resumed request among the running ones, marked as resumed; ours always as a new one.
            (full_ids if request_id in cached.resumed_req_ids else new_ids)[request_id] = entry
        assert {r.request_id: (r.block_ids, r.num_computed_tokens) for r in ours.new_requests} == full_ids
        our_ids = ours.new_block_ids_by_request()
        our_new_ids = {
            request_id: (our_ids.get(request_id), start)
            for request_id, (start, _) in ours.ranges_by_request().items()
            if request_id not in full_ids
        }
        assert our_new_ids == new_ids

    def same_state(self) -> None:
        if self.num_steps % self.steps_between_states:
            return
        our_pool = self.ours.manager._pool
        their_pool = self.theirs.kv_cache_manager.block_pool
        assert [r.request_id for r in self.ours.running_requests()] == [r.request_id for r in self.theirs.running]
        waiting = [r.request_id for r in self.ours.waiting_requests()]
        # Before 0.31 those that wait with blocks stood among the others.
        with_blocks = getattr(self.theirs, "kv_holding_waiting", ())
        assert waiting == [r.request_id for r in (*with_blocks, *self.theirs.waiting)]
        assert our_pool.free_queue.block_ids() == [
            b.block_id for b in their_pool.free_block_queue.get_all_free_blocks()
        ]
        assert [b.ref_cnt for b in our_pool.blocks[1:]] == [b.ref_cnt for b in their_pool.blocks[1:]]
        for request in self.ours.running_requests():
            their = self.theirs.requests[request.request_id]
            assert request.num_computed_tokens == their.num_computed_tokens
            assert request.num_in_flight_tokens == their.num_in_flight_tokens
            assert request.num_output_placeholders == their.num_output_placeholders
        self.ours.check()
