"""vLLM's manager and ours, driven by the same random calls and compared in full after each of them."""

import random
from dataclasses import dataclass

from vllm.v1.core.kv_cache_manager import KVCacheBlocks as TheirBlocks
from vllm.v1.request import Request as TheirRequest
from vllm.v1.request import RequestStatus as TheirStatus

from kvledger import (
    AdmissionRule,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    PrefixHit,
    Request,
)
from tests.side_by_side import reference

MAX_MODEL_LEN = 160


@dataclass
class Pair:
    """One request on both sides. `status` is what the scheduler would say; counters are moved together."""

    ours: Request
    theirs: TheirRequest

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

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.enable_caching = rng.random() < 0.8
        self.block_size = rng.choice([1, 2, 4, 8, 16])
        num_blocks = rng.choice([2, 5, 12, 24, 48])
        watermark = rng.choice([0.0, 0.0, 0.1])
        spec = FullAttentionSpec(self.block_size, num_kv_heads=1, head_size=8, dtype="float16")
        self.ours = KVCacheManager(
            KVCacheConfig(num_blocks, (KVCacheGroupSpec(("layer.0",), spec),)),
            MAX_MODEL_LEN,
            enable_caching=self.enable_caching,
            watermark=watermark,
        )
        self.theirs = reference.make_manager(
            num_blocks, self.block_size, MAX_MODEL_LEN, self.enable_caching, watermark
        )
        self.factory = reference.RequestFactory(self.block_size, self.enable_caching)
        # Few different texts, so that prefixes meet.
        self.texts = [[rng.randrange(50) for _ in range(MAX_MODEL_LEN)] for _ in range(3)]
        self.waiting: list[Pair] = []
        self.running: list[Pair] = []
        self.loading: list[Pair] = []
        self.num_made = 0
        self.num_calls = 0

    def run(self, num_calls: int) -> None:
        actions = [
            (self.new_request, 3),
            (self.admit, 5),
            (self.decode, 12),
            (self.finish, 2),
            (self.preempt, 1),
            (self.load_arrives, 1),
            (self.reset, 0.3),
            (self.evict, 0.5),
        ]
        names, weights = zip(*actions, strict=True)
        while self.num_calls < num_calls:
            self.rng.choices(names, weights)[0]()

    # Actions

    def new_request(self) -> None:
        rng = self.rng
        text = rng.choice(self.texts)
        prompt = text[: rng.randint(1, 60)]
        if rng.random() < 0.4:
            prompt = prompt + [rng.randrange(50) for _ in range(rng.randint(1, 12))]
        salt = rng.choice(["", "", "", "tenant"])
        self.num_made += 1
        request_id = f"r{self.num_made}"
        self.waiting.append(
            Pair(Request(request_id, prompt, cache_salt=salt), self.factory.make(request_id, prompt, cache_salt=salt))
        )

    def admit(self) -> None:
        if not self.waiting:
            return
        rng = self.rng
        pair = rng.choice(self.waiting)
        our_hit, their_hit, num_hit = self.look_up(pair)
        if rng.random() < 0.1:
            return
        num_tokens = pair.ours.num_tokens
        room = num_tokens - num_hit
        delay = rng.random() < 0.1
        # At least one token is computed, unless the values of all are on their way.
        num_external = rng.randint(1, room) if delay else rng.randint(0, room - 1) if rng.random() < 0.1 else 0
        num_new = 0 if delay else rng.randint(1, room - num_external)
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
        num_drafts = rng.choice([0, 0, 0, 1, 2, 5]) if behind == 1 else 0
        room = MAX_MODEL_LEN - pair.num_computed - 1
        num_new = min(rng.randint(1, behind) + num_drafts, room)
        if num_new <= 0:
            self.release(pair)
            return
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
        pair.set_computed(pair.num_computed + num_known)
        for _ in range(min(num_accepted, num_new - num_known)):
            pair.append(rng.randrange(50))
            pair.set_computed(pair.num_computed + 1)

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

    def evict(self) -> None:
        usable = self.ours.num_usable_blocks
        ids = [self.rng.randint(1, usable) for _ in range(self.rng.randint(1, 4))]
        self.ours.evict_blocks(ids)
        self.theirs.evict_blocks(set(ids))
        self.compare()

    # Helpers

    def look_up(self, pair: Pair) -> tuple[PrefixHit, TheirBlocks, int]:
        ours = self.ours.get_computed_blocks(pair.ours)
        their_blocks, num_hit, _ = self.theirs.get_computed_blocks(pair.theirs)
        assert ours.num_tokens == num_hit
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

    def compare(self) -> None:
        """Everything a caller can ever see of the ledger is the same on both sides."""
        self.num_calls += 1
        our_pool = self.ours._pool
        their_pool = self.theirs.block_pool
        assert our_pool.free_queue.block_ids() == [b.block_id for b in their_pool.free_block_queue.get_all_free_blocks()]
        assert [b.ref_cnt for b in our_pool.blocks[1:]] == [b.ref_cnt for b in their_pool.blocks[1:]]
        assert _index(our_pool) == _their_index(their_pool)
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


def _index(pool: object) -> list[list[int]]:
    """Block ids per hash, in the order in which they answer. Hash values differ between the two, so sorted by ids."""
    return sorted([block.block_id for block in blocks] for blocks in pool.indexes[0].blocks().values())


def _their_index(pool: object) -> list[list[int]]:
    entries = pool.cached_block_hash_to_block._cache.values()
    return sorted([*entry] if isinstance(entry, dict) else [entry.block_id] for entry in entries)
