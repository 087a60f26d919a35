"""vLLM's manager and the adapter, driven by the same calls with the same vLLM requests, and compared after each.

Neither writes to a request, so one serves both. Unlike the side-by-side suite this compares what vLLM's own objects
say: block hashes, events, statistics, ids to zero, and what connectors do to the pool.
"""

import random
from inspect import signature
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request, RequestStatus

from kvledger.integrations.vllm.manager import VllmKVCacheManager
from tests.side_by_side.external_pair import count_external_states
from tests.side_by_side.layouts import Layout
from tests.side_by_side.reference import RequestFactory, hash_lookahead, manager_arguments

MAX_MODEL_LEN = 160
THEIR_ARGUMENTS = signature(KVCacheManager.allocate_slots).parameters


def make_managers(layout: Layout, num_blocks: int, **changes: Any) -> tuple[KVCacheManager, VllmKVCacheManager]:
    """vLLM's manager and ours, made with equal arguments."""
    arguments = manager_arguments(
        layout, num_blocks, MAX_MODEL_LEN, **{"enable_kv_cache_events": layout.enable_caching, **changes}
    )
    return KVCacheManager(**arguments), VllmKVCacheManager(**arguments)


class Collector:
    """Notes what a pool tells of its blocks' stays. Of the null block, which stays for ever, only vLLM's speaks."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def on_block_allocated(self, block: Any) -> None:
        self._note("allocated", block)

    def on_block_accessed(self, block: Any) -> None:
        self._note("accessed", block)

    def on_block_evicted(self, block: Any) -> None:
        self._note("evicted", block)

    def reset(self) -> None:
        self.told.append(("reset", 0))

    def _note(self, what: str, block: Any) -> None:
        if block.block_id != 0:
            self.told.append((what, block.block_id))

    def take(self) -> list[tuple[str, int]]:
        told = self.told
        self.told = []
        return told


class ManagerPair:
    """Random life on both."""

    def __init__(self, layout: Layout, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.layout = layout
        num_blocks = rng.choice([12, 24, 48]) * len(layout.groups)
        watermark = rng.choice([0.0, 0.0, 0.1])
        # Not served where a prefill exports states.
        self.collectors = [] if layout.has_checkpoints else [Collector(), Collector()]
        theirs, ours = self.collectors or (None, None)
        self.theirs = make_managers(layout, num_blocks, watermark=watermark, metrics_collector=theirs)[0]
        self.ours = make_managers(layout, num_blocks, watermark=watermark, metrics_collector=ours)[1]
        count_external_states(SimpleNamespace(kv_cache_manager=self.theirs))
        kinds = {group.kind for group in layout.groups}
        self.has_states = any(kind.startswith("mamba") for kind in kinds)
        self.has_windows = any("window" in kind or kind == "chunked" for kind in kinds)
        # A decode step whose drafts run over a checkpoint fails an assertion in vLLM.
        self.can_draft = not any(group.checkpoint_alignment for group in layout.groups)
        self.has_encoder = "cross" in kinds
        # Reports of hits fail in vLLM where a hash covers less than a block, or a block is spread over ranks.
        self.can_report_hits = (
            layout.block_sizes() == [group.block_size for group in layout.groups] == [layout.unit] * len(layout.groups)
        )
        self.factory = RequestFactory(layout)
        self.texts = [[rng.randrange(50) for _ in range(MAX_MODEL_LEN)] for _ in range(3)]
        self.prompts: list[list[int]] = []
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loading: list[Request] = []
        # Blocks of requests that ended while a step still wrote them, and blocks that a connector reads.
        self.deferred: list[tuple[list[Any], list[Any]]] = []
        self.pinned: list[list[int]] = []
        self.num_made = 0
        self.num_calls = 0
        # States that were offered, hits whose states ended early, and of those the ones that were taken.
        self.offers_are_fresh = True
        self.num_offers = self.num_diverged = self.num_diverged_taken = 0

    def run(self, num_calls: int) -> None:
        actions = [
            (self.new_request, 3),
            (self.go_on, 1),
            (self.admit, 5),
            (self.decode, 12),
            (self.finish, 2),
            (self.finish_late, 0.5),
            (self.preempt, 1),
            (self.load_arrives, 1),
            (self.settle, 2),
            (self.pin, 0.5),
            (self.unpin, 0.5),
            (self.reset, 0.3),
            (self.evict, 0.5),
            (self.start_step, 3),
            (self.drain_copies, 2),
        ]
        names, weights = zip(*actions, strict=True)
        while self.num_calls < num_calls:
            self.rng.choices(names, weights)[0]()

    # Actions

    def new_request(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.texts)[: rng.randint(1, 60)]
        if rng.random() < 0.4:
            prompt = prompt + [rng.randrange(50) for _ in range(rng.randint(1, 12))]
        request = self.add(prompt, rng.choice(["", "", "", "tenant"]))
        if self.can_report_hits and rng.random() < 0.2:
            request.kv_cache_report_mode = "full"

    def add(self, prompt: list[int], salt: str = "") -> Request:
        self.num_made += 1
        self.waiting.append(self.factory.make(f"r{self.num_made}", prompt, max_tokens=100, cache_salt=salt))
        if len(prompt) < MAX_MODEL_LEN // 2:
            self.prompts = [*self.prompts[-5:], prompt]
        return self.waiting[-1]

    def go_on(self) -> None:
        """Two conversations get a turn each and are served in one step: hits end where their last prompts did."""
        for prompt in self.rng.sample(self.prompts, min(2, len(self.prompts))):
            self.add(prompt + [self.rng.randrange(50) for _ in range(5)])
            self.admit(self.waiting[-1])

    def admit(self, request: Request | None = None) -> None:
        if not self.waiting:
            return
        rng = self.rng
        if request is None:
            request = rng.choice(self.waiting)
        found = self.look_up(request)
        delay = rng.random() < 0.1
        num_external = 0
        if delay or rng.random() < (0.6 if found[0][3] else 0.1):
            found, num_external = self.offer_external(request, found, delay)
        if num_external == 0:
            delay = False
            if found[0][3]:
                # Nobody brings the states that the hit lacks.
                found = self.look_up(request, diverging=False)
        is_diverged = found[0][3]
        num_hit = found[0][1]
        if any(num_hit % size for size in self.layout.block_sizes()):
            # A known difference: ours waits for a step that writes the block in which a hit ends.
            self.start_step()
        room = request.num_tokens - num_hit
        num_new = 0 if delay else rng.randint(1, room - num_external)
        request.shared_prefix_boundary = found[0][2]
        if not delay:
            num_new = self.clip(request, num_hit + num_external, num_new)
            if num_new == 0:
                return
        arguments = {
            "num_new_computed_tokens": num_hit,
            "num_lookahead_tokens": rng.choice([0, 0, 1, 3]),
            "num_external_computed_tokens": num_external,
            "delay_cache_blocks": delay,
            "num_encoder_tokens": rng.randint(1, 64) if self.has_encoder else 0,
            "full_sequence_must_fit": rng.random() < 0.7,
            "reserved_blocks": rng.choice([0, 0, 0, 2]),
            "has_scheduled_reqs": rng.random() < 0.7,
            "skip_zeroing_group_ids": tuple(g for g in range(len(self.layout.groups)) if delay and rng.random() < 0.5),
        }
        # A release from before one of them came is looked at too (search.py).
        arguments = {name: value for name, value in arguments.items() if name in THEIR_ARGUMENTS}
        new = [
            manager.allocate_slots(request, num_new, new_computed_blocks=blocks, **arguments)
            for manager, (blocks, *_) in zip((self.theirs, self.ours), found, strict=True)
        ]
        self.same_allocation(*new)
        if new[0] is not None:
            self.num_diverged_taken += is_diverged
            for manager in (self.theirs, self.ours):
                manager.record_prefix_cache_stats(request, num_hit)
            self.waiting.remove(request)
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS if delay else RequestStatus.RUNNING
            request.num_computed_tokens = num_hit + num_external + num_new
            (self.loading if delay else self.running).append(request)
        self.compare()

    def look_up(self, request: Request, diverging: bool = True) -> list[tuple[Any, int, int, bool]]:
        """What each finds: blocks, tokens, where a longer prefix ends, and whether states end before them."""
        managers = (self.theirs, self.ours)
        # vLLM fails where several tokens behind a block decide about its hash, which no connector can have.
        if diverging and hash_lookahead(self.layout) < 2 and self.rng.random() < 0.4:
            found = [manager.get_computed_blocks_for_connector(request) for manager in managers]
            if self.others_lag(request, found[0]):
                # A known difference: what vLLM takes has no values where a window or another attention will read.
                found[0] = (*self.theirs.get_computed_blocks(request), False)
        else:
            found = [(*manager.get_computed_blocks(request), False) for manager in managers]
        self.same(found[0][1:], found[1][1:])
        self.same(found[0][0].get_block_ids(), found[1][0].get_block_ids())
        coordinators = [manager.coordinator for manager in managers]
        self.same(*[isinstance(each, HybridKVCacheCoordinator) for each in coordinators])
        if isinstance(coordinators[0], HybridKVCacheCoordinator) and self.rng.random() < 0.3:
            self.same(*[each.full_attention_group_id for each in coordinators])
            most = min(request.num_tokens - 1, len(request.block_hashes) * self.layout.unit)
            apart = [each.find_longest_cache_hit_per_group(request.block_hashes, most) for each in coordinators]
            self.same(apart[0][1], apart[1][1])
            self.same(*[[[block.block_id for block in blocks] for blocks in groups] for groups, _ in apart])
        self.compare()
        self.num_diverged += found[0][3]
        return found

    def others_lag(self, request: Request, found: tuple[Any, int, int, bool]) -> bool:
        """Whether a group that is no state has less than such a hit."""
        num_hit, is_diverged = found[1], found[3]
        if not is_diverged:
            return False
        _, lengths = self.theirs.coordinator.find_longest_cache_hit_per_group(
            request.block_hashes, request.num_tokens - 1
        )
        kinds = [group.kind for group in self.layout.groups]
        return any(
            length < num_hit and kind not in ("mamba_align", "ring")
            for kind, length in zip(kinds, lengths, strict=True)
        )

    def offer_external(self, request: Request, found: list[Any], delay: bool) -> tuple[list[Any], int]:
        """A connector has tokens behind the hit: the hit, without what it has inside a block, and how many."""
        num_hit, room = found[0][1], request.num_tokens - found[0][1]
        if not self.has_states:
            # A known difference: of a prompt that is loaded whole, ours keeps what its last token reads.
            most = room if delay and not self.has_windows else room - 1
            return found, self.rng.randint(1, most) if most > 0 else 0
        base = self.layout.base_block_size
        start = num_hit - num_hit % base
        num_blocks = self.rng.randint(0, (request.num_tokens - 1 - start) // base)
        if num_blocks == 0:
            return found, 0
        if start < num_hit:
            cut = [
                manager.truncate_computed_blocks(blocks, start)
                for manager, (blocks, *_) in zip((self.theirs, self.ours), found, strict=True)
            ]
            self.same(cut[0].get_block_ids(), cut[1].get_block_ids())
            found = [(blocks, start, *rest) for blocks, (_, _, *rest) in zip(cut, found, strict=True)]
        return found, num_blocks * base

    def decode(self) -> None:
        if not self.running:
            return
        rng = self.rng
        request = rng.choice(self.running)
        if request.num_computed_tokens >= request.num_tokens:
            request.append_output_token_ids(rng.randrange(50))
        behind = request.num_tokens - request.num_computed_tokens
        num_drafts = rng.choice([0, 0, 0, 1, 2, 5]) if behind == 1 and self.can_draft else 0
        num_new = min(rng.randint(1, behind) + num_drafts, MAX_MODEL_LEN - request.num_computed_tokens - 1)
        if num_new <= 0:
            self.release(request)
            return
        num_new = self.clip(request, request.num_computed_tokens, num_new)
        if num_new == 0:
            return
        last_step = getattr(request, "last_step", 0)
        may_be_out = min(last_step, request.num_computed_tokens)
        request.num_in_flight_tokens = rng.randint(0, may_be_out) if rng.random() < 0.3 else 0
        lookahead = rng.choice([0, 0, 2])
        new = [
            manager.allocate_slots(request, num_new, num_lookahead_tokens=lookahead)
            for manager in (self.theirs, self.ours)
        ]
        self.same_allocation(*new)
        self.compare()
        if new[0] is None:
            self.release(request)
            request.num_preemptions += 1
            self.waiting.append(request)
            return
        num_known = min(num_new, behind)
        request.last_step = num_known
        request.num_computed_tokens += num_known
        for _ in range(min(rng.randint(0, num_drafts) if num_drafts else 0, num_new - num_known)):
            request.append_output_token_ids(rng.randrange(50))
            request.num_computed_tokens += 1

    def finish(self) -> None:
        if self.running:
            request = self.rng.choice(self.running)
            if self.rng.random() < 0.5:
                offers = [manager.finalize_partial_tail_offloads(request) for manager in (self.theirs, self.ours)]
                self.same(*offers)
                self.hold([block_id for _, block_id, _ in offers[0]])
            self.release(request)

    def finish_late(self) -> None:
        """Its blocks stay away from the pool until a step that may write them is done."""
        if not self.running:
            return
        request = self.running.pop()
        popped = [manager.pop_blocks_for_free(request) for manager in (self.theirs, self.ours)]
        self.same(*[[b.block_id for b in blocks if not b.is_null] for blocks in popped])
        self.deferred.append((popped[0], popped[1]))
        self.compare()

    def settle(self) -> None:
        if self.deferred:
            for manager, blocks in zip((self.theirs, self.ours), self.deferred.pop(0), strict=True):
                manager.block_pool.free_blocks(reversed(blocks))
            self.compare()

    def preempt(self) -> None:
        if self.running:
            request = self.rng.choice(self.running)
            self.release(request)
            request.num_preemptions += 1
            self.waiting.append(request)

    def load_arrives(self) -> None:
        if not self.loading:
            return
        request = self.loading.pop()
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        if self.rng.random() < 0.3:
            self.release(request)
            return
        for manager in (self.theirs, self.ours):
            manager.cache_blocks(request, request.num_computed_tokens)
        self.compare()

    def pin(self) -> None:
        """A connector reads some blocks of a request."""
        if not self.running or len(self.pinned) > 2 or self.has_states:
            return
        request = self.rng.choice(self.running)
        self.hold([block_id for block_id in self.theirs.get_block_ids(request.request_id)[0] if block_id][:3])
        self.compare()

    def hold(self, ids: list[int]) -> None:
        for manager in (self.theirs, self.ours):
            manager.block_pool.touch([manager.block_pool.blocks[block_id] for block_id in ids])
        self.pinned.append(ids)

    def unpin(self) -> None:
        if self.pinned:
            ids = self.pinned.pop(0)
            for manager in (self.theirs, self.ours):
                manager.block_pool.free_blocks(manager.block_pool.blocks[block_id] for block_id in ids)
            self.compare()

    def reset(self) -> None:
        if self.rng.random() < 0.5:
            for request in [*self.running, *self.loading]:
                self.release(request)
        self.same(self.theirs.reset_prefix_cache(), self.ours.reset_prefix_cache())
        self.compare()

    def evict(self) -> None:
        ids = {self.rng.randrange(self.theirs.block_pool.num_gpu_blocks) for _ in range(self.rng.randint(1, 4))}
        for manager in (self.theirs, self.ours):
            manager.evict_blocks(ids)
        self.compare()

    def start_step(self) -> None:
        for manager in (self.theirs, self.ours):
            manager.new_step_starts()

    # Helpers

    def clip(self, request: Request, start: int, num_new: int) -> int:
        """Chunks that end where states can be cached, which is the scheduler's business."""
        ours = self.ours._ours(request)
        return self.ours.ledger.clip_chunk(ours, start, num_new, 64)

    def release(self, request: Request) -> None:
        for place in (self.running, self.loading):
            if request in place:
                place.remove(request)
        for manager in (self.theirs, self.ours):
            manager.free(request)
        request.num_computed_tokens = 0
        request.num_in_flight_tokens = 0
        request.status = RequestStatus.PREEMPTED
        self.compare()

    def same(self, theirs: Any, ours: Any) -> None:
        assert theirs == ours, f"vLLM: {theirs}; here: {ours}"

    def same_allocation(self, theirs: Any, ours: Any) -> None:
        self.same(theirs is None, ours is None)
        if ours is not None:
            self.same(theirs.get_block_ids(), ours.get_block_ids())
            self.same(theirs.get_block_ids(allow_none=True), ours.get_block_ids(allow_none=True))
            self.same(theirs.get_unhashed_block_ids_all_groups(), ours.get_unhashed_block_ids_all_groups())

    def drain_copies(self) -> None:
        """At the end of a step, which may have let in several requests that start inside a block."""
        (their_copies, their_ends), (our_copies, our_ends) = (
            manager.take_kv_cache_block_copies() for manager in (self.theirs, self.ours)
        )
        self.same(their_copies, our_copies)
        self.theirs.block_pool.free_blocks(their_ends)
        self.ours.block_pool.free_blocks(our_ends)
        self.compare()

    def take_offers(self) -> None:
        offers = [manager.take_boundary_state_offloads() for manager in (self.theirs, self.ours)]
        self.same(*offers)
        self.num_offers += sum(map(len, offers[1].values()))
        for entries in offers[0].values():
            if self.offers_are_fresh and self.rng.random() < 0.3 and len(self.pinned) < 3:
                # A connector that stores them reads them later.
                self.hold([block_id for _, block_id, _ in entries])

    def compare(self) -> None:
        self.num_calls += 1
        theirs, ours = self.theirs, self.ours
        # Those of an earlier call may name blocks that a later one gave back, unlike those of a step.
        takes_offers = self.rng.random() < 0.7
        if takes_offers:
            self.take_offers()
        self.offers_are_fresh = takes_offers
        for their_event, our_event in zip_longest(_events(theirs), _events(ours)):
            self.same(their_event, our_event)
        self.same(theirs.take_new_block_ids(), ours.take_new_block_ids())
        if self.collectors:
            self.same(*[collector.take() for collector in self.collectors])
        self.same(theirs.usage, ours.usage)
        assert_same_pool(theirs.block_pool, ours.block_pool)
        for request in [*self.running, *self.loading, *self.waiting]:
            request_id = request.request_id
            self.same(theirs.get_block_ids(request_id), ours.get_block_ids(request_id))
            if self.num_calls % 4 == 0:
                self.same(theirs.estimate_cached_tokens(request), ours.estimate_cached_tokens(request))
                num_computed = request.num_computed_tokens
                self.same(
                    theirs.get_block_ids_for_computed_tokens(request_id, num_computed),
                    ours.get_block_ids_for_computed_tokens(request_id, num_computed),
                )
                self.same(_blocks_to_finish(theirs, request), _blocks_to_finish(ours, request))
        if self.num_calls % 16 == 0:
            ours.ledger.check()
            self.same(theirs.make_prefix_cache_stats(), ours.make_prefix_cache_stats())


def assert_same_pool(theirs: Any, ours: Any) -> None:
    """The free queue from end to end, and of every block who holds it and what it caches."""
    free_ids = [[b.block_id for b in pool.free_block_queue.get_all_free_blocks()] for pool in (theirs, ours)]
    assert free_ids[0] == free_ids[1], f"vLLM: {free_ids[0]}; here: {free_ids[1]}"
    for their_block in theirs.blocks[1:]:
        our_block = ours.blocks[their_block.block_id]
        assert their_block.ref_cnt == our_block.ref_cnt, their_block
        assert their_block.block_hash == our_block.block_hash, their_block
        assert their_block.block_hash_num_tokens == our_block.block_hash_num_tokens, their_block


def _events(manager: Any) -> list[str]:
    """As text: token ids are a list in one and a view of the request's in the other, and print alike."""
    return [repr(event) for event in manager.take_events()]


def _blocks_to_finish(manager: Any, request: Request) -> int:
    """As the scheduler asks before it lets an external load start."""
    return manager.coordinator.get_num_blocks_to_allocate(
        request_id=request.request_id,
        num_tokens=request.num_tokens,
        new_computed_blocks=manager.empty_kv_cache_blocks.blocks,
        num_encoder_tokens=0,
        total_computed_tokens=request.num_computed_tokens,
        num_local_computed_tokens=request.num_computed_tokens,
        num_tokens_main_model=request.num_tokens,
        apply_admission_cap=True,
        prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
    )
