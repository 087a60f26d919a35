"""vLLM's manager and ours, driven by the same random calls and compared in full after each of them."""

import random
from collections import Counter
from dataclasses import dataclass

from vllm.v1.core.kv_cache_manager import KVCacheBlocks as TheirBlocks
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.request import Request as TheirRequest
from vllm.v1.request import RequestStatus as TheirStatus

from kvledger import (
    AdmissionRule,
    BlockHasher,
    KVCacheManager,
    LedgerObserver,
    MissExplainer,
    PrefixHit,
    Request,
    Sha256BlockHasher,
)
from kvledger.core.groups.policy import DraftRule
from tests.side_by_side import reference
from tests.side_by_side.layouts import Layout

MAX_MODEL_LEN = 160


def make_ours(
    layout: Layout,
    num_blocks: int,
    watermark: float = 0.0,
    max_model_len: int = MAX_MODEL_LEN,
    *,
    hasher: BlockHasher | None = None,
    observer: LedgerObserver | None = None,
) -> KVCacheManager:
    return KVCacheManager(
        layout.our_config(num_blocks),
        max_model_len,
        enable_caching=layout.enable_caching,
        hasher=Sha256BlockHasher(layout.unit) if hasher is None else hasher,
        watermark=watermark,
        max_in_flight_tokens=layout.max_in_flight_tokens,
        drafts=DraftRule(layout.num_draft_lookahead) if layout.num_draft_lookahead else None,
        retention_interval=layout.retention_interval,
        pins_shared_prefix=layout.pins_shared_prefix,
        context_parallel_size=layout.context_parallel_size,
        decisions=reference.decisions,
        observer=observer,
    )


class ExplainedStats:
    """What our explanation of the misses must sum to: vLLM's own counts of lookups, taken now and then."""

    def __init__(self) -> None:
        self.sums = dict.fromkeys(("requests", "queries", "hits"), 0)
        self.preempted_sums = dict.fromkeys(("requests", "queries", "hits"), 0)
        # Some requests skip the lookup, which vLLM does not count.
        self.some_skip = False

    def add(self, theirs: object) -> None:
        """vLLM's counts since the last call."""
        for name in self.sums:
            self.sums[name] += getattr(theirs, name)
            self.preempted_sums[name] += getattr(theirs, f"preempted_{name}")

    def compare(self, misses: MissExplainer) -> None:
        if self.some_skip:
            totals = misses.ledger.prefix_cache_totals()
            assert self.sums == {"requests": totals.requests, "queries": totals.queries, "hits": totals.hits}
            return
        for sums, ours in ((self.sums, misses.new), (self.preempted_sums, misses.resumed)):
            assert sums == {"requests": ours.num_requests, "queries": ours.num_tokens, "hits": ours.split.hit}
            assert ours.split.num_tokens() == ours.num_tokens
            # Everybody looks here, and full attention tells exactly what it has.
            assert ours.split.lookup_off == 0


@dataclass
class Pair:
    """One request on both sides. `status` is what the scheduler would say; counters are moved together."""

    ours: Request
    theirs: TheirRequest
    last_step: int = 0

    @property
    def num_computed(self) -> int:
        return self.ours.num_computed_tokens

    def set_computed(self, num_tokens: int) -> None:
        self.ours.num_computed_tokens = num_tokens
        self.theirs.num_computed_tokens = num_tokens

    def append(self, token_id: int) -> None:
        self.ours.append_token(token_id)
        self.theirs.append_output_token_ids(token_id)


class LedgerPair:
    """Random life on both managers. Every public step is one call on each, followed by a comparison of everything."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout = layout
        self.rng = random.Random(seed)
        rng = self.rng
        self.enable_caching = layout.enable_caching
        num_blocks = rng.choice([12, 24, 48]) * len(layout.groups)
        if len(layout.groups) == 1:
            num_blocks = rng.choice([2, 5, 12, 24, 48])
        watermark = rng.choice([0.0, 0.0, 0.1])
        self.ours = self.make_ours(num_blocks, watermark)
        self.misses = MissExplainer(self.ours)
        self.theirs = reference.make_manager(layout, num_blocks, MAX_MODEL_LEN, watermark)
        self.has_states = any(group.kind.startswith("mamba") for group in layout.groups)
        self.has_windows = any("window" in group.kind or group.kind == "chunked" for group in layout.groups)
        # A known difference: a decode step whose drafts run over a checkpoint fails an assertion in vLLM.
        self.can_draft = not any(group.checkpoint_alignment for group in layout.groups)
        self.has_encoder = any(group.kind == "cross" for group in layout.groups)
        self.factory = reference.RequestFactory(layout)
        # Few different texts, so that prefixes meet.
        self.texts = [[rng.randrange(50) for _ in range(MAX_MODEL_LEN)] for _ in range(3)]
        self.prompts: list[list[int]] = []
        self.waiting: list[Pair] = []
        self.running: list[Pair] = []
        self.loading: list[Pair] = []
        self.num_made = 0
        self.num_calls = 0
        self.explained = ExplainedStats()

    def run(self, num_calls: int) -> None:
        actions = [
            (self.new_request, 3),
            (self.go_on, 1),
            (self.admit, 5),
            (self.decode, 12),
            (self.decode_together, 4),
            (self.finish, 2),
            (self.preempt, 1),
            (self.load_arrives, 1),
            (self.reset, 0.3),
            (self.evict, 0.5),
            (self.start_step, 3),
            (self.drain_copies, 2),
        ]
        names, weights = zip(*actions, strict=True)
        while self.num_calls < num_calls:
            self.rng.choices(names, weights)[0]()

    def make_ours(self, num_blocks: int, watermark: float) -> KVCacheManager:
        return make_ours(self.layout, num_blocks, watermark)

    # Actions

    def new_request(self) -> None:
        rng = self.rng
        text = rng.choice(self.texts)
        prompt = text[: rng.randint(1, 60)]
        if rng.random() < 0.4:
            prompt = prompt + [rng.randrange(50) for _ in range(rng.randint(1, 12))]
        self.new_pair(prompt, rng.choice(["", "", "", "tenant"]))

    def make_pair(self, request_id: str, prompt: list[int], salt: str) -> Pair:
        num_encoder_tokens = self.rng.randint(1, 64) if self.has_encoder else 0
        return Pair(
            Request(request_id, prompt, cache_salt=salt, num_encoder_tokens=num_encoder_tokens),
            self.factory.make(request_id, prompt, cache_salt=salt),
        )

    def go_on(self) -> None:
        """Two conversations get a turn each and are served in one step: hits end where their last prompts did."""
        for prompt in self.rng.sample(self.prompts, min(2, len(self.prompts))):
            self.new_pair(prompt + [self.rng.randrange(50) for _ in range(5)])
            self.admit(self.waiting[-1])

    def new_pair(self, prompt: list[int], salt: str = "") -> None:
        self.num_made += 1
        self.waiting.append(self.make_pair(f"r{self.num_made}", prompt, salt))
        if len(prompt) < MAX_MODEL_LEN // 2:
            self.prompts = [*self.prompts[-5:], prompt]

    def admit(self, pair: Pair | None = None) -> None:
        if not self.waiting:
            return
        rng = self.rng
        if pair is None:
            pair = rng.choice(self.waiting)
        our_hit, their_hit, num_hit = self.look_up(pair)
        if any(num_hit % size for size in self.layout.block_sizes()):
            # A known difference: ours waits for a step that writes the block in which a hit ends.
            self.start_step()
        if rng.random() < 0.1:
            return
        num_tokens = pair.ours.num_tokens
        room = num_tokens - num_hit
        delay = rng.random() < 0.1 and not self.has_states
        # At least one token is computed, unless the values of all are on their way.
        # A known difference: of a prompt that is loaded whole, ours keeps what its last token reads.
        most = room - 1 if self.has_windows else room
        num_external = 0
        delay = delay and most > 0
        if not self.has_states:
            num_external = rng.randint(1, most) if delay else rng.randint(0, room - 1) if rng.random() < 0.1 else 0
        num_new = 0 if delay else rng.randint(1, room - num_external)
        pair.ours.shared_prefix_boundary = our_hit.shared_prefix_boundary
        pair.theirs.shared_prefix_boundary = our_hit.shared_prefix_boundary
        if not delay:
            num_new = self.ours.clip_chunk(pair.ours, num_hit + num_external, num_new, 64)
            if num_new == 0:
                return
        lookahead = rng.choice([0, 0, 1, 3])
        admission = AdmissionRule(rng.random() < 0.7, rng.choice([0, 0, 0, 2]), rng.random() < 0.7)
        ours = self.ours.allocate_slots(
            pair.ours,
            num_new,
            our_hit,
            num_lookahead_tokens=lookahead,
            num_external_computed_tokens=num_external,
            delay_cache_blocks=delay,
            admission=admission,
        )
        theirs = self.theirs.allocate_slots(
            pair.theirs,
            num_new,
            num_new_computed_tokens=num_hit,
            new_computed_blocks=their_hit,
            num_lookahead_tokens=lookahead,
            num_external_computed_tokens=num_external,
            delay_cache_blocks=delay,
            num_encoder_tokens=pair.ours.num_encoder_tokens,
            full_sequence_must_fit=admission.full_sequence_must_fit,
            reserved_blocks=admission.reserved_blocks,
            has_scheduled_reqs=admission.has_scheduled_requests,
        )
        self.same_blocks(ours, theirs)
        if ours is not None:
            self.ours.record_prefix_lookup(pair.ours, num_hit)
            self.theirs.record_prefix_cache_stats(pair.theirs, num_hit)
            self.waiting.remove(pair)
            pair.theirs.status = TheirStatus.RUNNING
            pair.set_computed(num_hit + num_external + num_new)
            (self.loading if delay else self.running).append(pair)
        self.compare()

    def decode(self) -> None:
        """One step of a running request: the rest of a prompt in chunks, or a token with drafts."""
        if not self.running:
            return
        rng = self.rng
        pair = rng.choice(self.running)
        request = pair.ours
        if pair.num_computed >= request.num_tokens:
            pair.append(rng.randrange(50))
        behind = request.num_tokens - pair.num_computed
        num_drafts = rng.choice([0, 0, 0, 1, 2, 5]) if behind == 1 and self.can_draft else 0
        room = MAX_MODEL_LEN - pair.num_computed - 1
        num_new = min(rng.randint(1, behind) + num_drafts, room)
        if num_new <= 0:
            self.release(pair)
            return
        num_new = self.ours.clip_chunk(request, pair.num_computed, num_new, 64)
        if num_new == 0:
            return
        # As if the last step were still out: what it computes may be taken back, so nothing of it may be released.
        num_in_flight = rng.randint(0, min(pair.last_step, pair.num_computed)) if rng.random() < 0.3 else 0
        pair.ours.num_in_flight_tokens = pair.theirs.num_in_flight_tokens = num_in_flight
        lookahead = rng.choice([0, 0, 2])
        ours = self.ours.allocate_slots(request, num_new, num_lookahead_tokens=lookahead)
        theirs = self.theirs.allocate_slots(pair.theirs, num_new, num_lookahead_tokens=lookahead)
        self.same_blocks(ours, theirs)
        self.compare()
        if ours is None:
            self.release(pair)
            pair.ours.num_preemptions += 1
            pair.theirs.num_preemptions += 1
            self.waiting.append(pair)
            return
        num_accepted = rng.randint(0, num_drafts) if num_drafts else 0
        num_known = min(num_new, behind)
        pair.last_step = num_known
        pair.set_computed(pair.num_computed + num_known)
        for _ in range(min(num_accepted, num_new - num_known)):
            pair.append(rng.randrange(50))
            pair.set_computed(pair.num_computed + 1)

    def decode_together(self) -> None:
        """The next tokens of many running requests: one call on our side, one call a request on theirs."""
        rng = self.rng
        pairs: list[Pair] = []
        num_new: list[int] = []
        for pair in rng.sample(self.running, rng.randint(0, len(self.running))):
            request = pair.ours
            if pair.num_computed >= request.num_tokens:
                pair.append(rng.randrange(50))
            most = min(request.num_tokens, MAX_MODEL_LEN - 1) - pair.num_computed
            wanted = rng.choice([1, 1, most])
            if most > 0:
                wanted = self.ours.clip_chunk(request, pair.num_computed, wanted, 64)
            if most > 0 and wanted > 0:
                request.num_in_flight_tokens = pair.theirs.num_in_flight_tokens = 0
                pairs.append(pair)
                num_new.append(wanted)
        lookahead = rng.choice([0, 0, 2])
        slots = self.ours.allocate_running([pair.ours for pair in pairs], num_new, num_lookahead_tokens=lookahead)
        ours = slots.new_blocks.ids_by_row(len(self.layout.groups))
        num_allocated = len(pairs)
        for row, pair in enumerate(pairs):
            theirs = self.theirs.allocate_slots(pair.theirs, num_new[row], num_lookahead_tokens=lookahead)
            if theirs is None:
                num_allocated = row
                break
            assert ours.pop(row, None) == theirs.get_block_ids(allow_none=True)
            pair.last_step = num_new[row]
            pair.set_computed(pair.num_computed + num_new[row])
        assert (slots.num_allocated, ours) == (num_allocated, {})
        self.compare()

    def finish(self) -> None:
        if self.running:
            self.release(self.rng.choice(self.running))

    def preempt(self) -> None:
        if not self.running:
            return
        pair = self.rng.choice(self.running)
        self.release(pair)
        pair.ours.num_preemptions += 1
        pair.theirs.num_preemptions += 1
        self.waiting.append(pair)

    def load_arrives(self) -> None:
        """Blocks taken with delay_cache_blocks are cached, or given back because the load failed."""
        if not self.loading:
            return
        pair = self.loading.pop()
        self.running.append(pair)
        if self.rng.random() < 0.3:
            self.release(pair)
            return
        self.ours.cache_blocks(pair.ours, pair.num_computed)
        self.theirs.cache_blocks(pair.theirs, pair.num_computed)
        self.compare()

    def reset(self) -> None:
        if self.rng.random() < 0.5:
            for pair in [*self.running, *self.loading]:
                self.release(pair)
        assert self.ours.reset_prefix_cache() == self.theirs.reset_prefix_cache()
        self.compare()

    def start_step(self) -> None:
        self.ours.start_step()
        self.theirs.new_step_starts()

    def evict(self) -> None:
        usable = self.ours.num_usable_blocks
        ids = [self.rng.randint(1, usable) for _ in range(self.rng.randint(1, 4))]
        self.ours.evict_blocks(ids)
        self.theirs.evict_blocks(set(ids))
        self.compare()

    # Helpers

    def look_up(self, pair: Pair) -> tuple[PrefixHit, TheirBlocks, int]:
        ours = self.ours.get_computed_blocks(pair.ours)
        their_blocks, num_hit, boundary = self.theirs.get_computed_blocks(pair.theirs)
        assert ours.num_tokens == num_hit, f"a hit of {ours.num_tokens} tokens here, {num_hit} there"
        assert ours.shared_prefix_boundary == boundary, f"{ours.shared_prefix_boundary} here, {boundary} there"
        assert ours.blocks.get_block_ids() == their_blocks.get_block_ids()
        self.compare()
        return ours, their_blocks, num_hit

    def release(self, pair: Pair) -> None:
        for places in (self.running, self.loading):
            if pair in places:
                places.remove(pair)
        self.ours.free(pair.ours)
        self.theirs.free(pair.theirs)
        pair.set_computed(0)
        pair.theirs.status = TheirStatus.PREEMPTED
        self.compare()

    def same_blocks(self, ours: object, theirs: object) -> None:
        assert (ours is None) == (theirs is None), (ours, theirs)
        if ours is not None:
            assert ours.get_block_ids() == theirs.get_block_ids()

    def drain_copies(self) -> None:
        """At the end of a step, which may have let in several requests that start inside a block."""
        our_copies = self.ours.take_block_copies()
        their_copies, their_ends = self.theirs.take_kv_cache_block_copies()
        assert [(c.source_block_id, c.target_block_id) for c in our_copies] == [
            (c.src_block_id, c.dst_block_id) for c in their_copies
        ]
        self.ours.release_block_copies(our_copies)
        self.theirs.block_pool.free_blocks(their_ends)
        self.theirs.take_boundary_state_offloads()
        self.compare()

    def compare(self) -> None:
        """Everything a caller can ever see of the ledger is the same on both sides."""
        self.num_calls += 1
        our_pool = self.ours._pool
        their_pool = self.theirs.block_pool
        assert our_pool.free_queue.block_ids() == [
            b.block_id for b in their_pool.free_block_queue.get_all_free_blocks()
        ]
        assert [b.ref_cnt for b in our_pool.blocks[1:]] == [b.ref_cnt for b in their_pool.blocks[1:]]
        ours, theirs = _index(our_pool), _their_index(their_pool)
        assert ours == theirs, _apart(ours, theirs)
        assert [b.num_hash_tokens for b in our_pool.blocks] == [b.block_hash_num_tokens or 0 for b in their_pool.blocks]
        assert self.ours.usage == self.theirs.usage
        for pair in [*self.running, *self.loading]:
            request_id = pair.ours.request_id
            assert self.ours.get_block_ids(request_id) == self.theirs.get_block_ids(request_id)
        if self.num_calls % 16 == 0:
            self.ours.check()
        if self.num_calls % 64 == 0:
            self.same_stats()

    def same_stats(self) -> None:
        ours = self.ours.take_prefix_cache_stats()
        theirs = self.theirs.make_prefix_cache_stats()
        names = ("reset", "requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
        for name in names:
            if self.enable_caching or name == "reset":
                assert getattr(ours, name) == getattr(theirs, name), name
        if self.enable_caching:
            self.explained.add(theirs)
            self.explained.compare(self.misses)


def _index(pool: object) -> list[tuple[int, list[int]]]:
    """Block ids per hash, in the order in which they answer. Hash values differ between the two, so sorted by ids."""
    return sorted(
        (group_id, [block.block_id for block in blocks])
        for group_id, index in enumerate(pool.indexes)
        for blocks in index.blocks().values()
    )


def _apart(ours: list[tuple[int, list[int]]], theirs: list[tuple[int, list[int]]]) -> str:
    """What only one of two indexes has."""
    mine, other = ([(group_id, tuple(ids)) for group_id, ids in entries] for entries in (ours, theirs))
    here, there = Counter(mine) - Counter(other), Counter(other) - Counter(mine)
    return f"cached, as (group, blocks): only here {[*here.elements()]}, only there {[*there.elements()]}"


def _their_index(pool: object) -> list[tuple[int, list[int]]]:
    return sorted(
        (get_group_id(key), [*entry] if isinstance(entry, dict) else [entry.block_id])
        for key, entry in pool.cached_block_hash_to_block._cache.items()
    )
