"""A random life of a ledger over random groups, with workers that remember what lies in every slot of every block.

After every step: check(), every group within the number of blocks that sizing reserves for a request, and every token
that a group's attention reads in a held block with the right content - whether the request computed it, hit it, got it
from a connector or by a copy.
"""

import random
from dataclasses import dataclass, field
from math import lcm

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvledger import AdmissionRule, BlockCopy, KVCacheManager, KVCacheSpec, Request, Sha256BlockHasher
from kvledger.core.groups.aligned_mamba import AlignedMambaManager, StateBlocks
from kvledger.core.groups.base import SingleTypeKVCacheManager
from kvledger.core.groups.policy import DraftRule
from kvledger.core.groups.spec import ChunkedLocalAttentionSpec
from tests import groups
from tests.conftest import LONG
from tests.groups import held, hybrid, managers_of, tables
from tests.property.worker import Sequence, Table, Worker, first_read

MAX_MODEL_LEN = 48
MAX_CHUNK = 16
PICK = st.integers(0, 99)
# Tokens that all prompts share, then tokens of one of two families.
PROMPTS = st.builds(
    lambda shared, own, family: list(range(shared)) + [1000 * family + n for n in range(own)],
    st.integers(0, 24),
    st.integers(1, 9),
    st.integers(1, 2),
)


@dataclass
class Layout:
    """Groups that can stand together, and the rules of their ledger."""

    specs: list[KVCacheSpec]
    caching: bool = True
    num_lookahead: int = 0
    draft: int = -1
    num_state_drafts: int = 0
    num_in_flight: int | None = None
    retention: int | None = None
    pins: bool = False
    ranks: int = 1
    # Tokens under a hash; 0: as many as fit all blocks.
    unit: int = 0

    def build(self, usable: int) -> KVCacheManager:
        return hybrid(
            usable,
            *self.specs,
            draft=self.draft,
            max_model_len=MAX_MODEL_LEN,
            enable_caching=self.caching,
            hasher=Sha256BlockHasher(self.unit) if self.unit else None,
            drafts=DraftRule(self.num_lookahead) if self.num_lookahead else None,
            max_in_flight_tokens=self.num_in_flight,
            retention_interval=self.retention,
            pins_shared_prefix=self.pins,
            context_parallel_size=self.ranks,
        )


def draw_layout(rng: random.Random) -> Layout:
    caching = rng.random() < 0.85
    size = rng.choice([2, 4])
    mixed = rng.random() < 0.4
    num_lookahead = rng.choice([0, 0, 1, size]) if caching else 0
    has_states = rng.random() < 0.5
    num_state_drafts = rng.choice([0, 2]) if has_states else 0
    checkpoint = rng.choice([0, 0, size])
    kinds = ["full", "window", "window", "mla", "sink", "window_mla", "ring", "cross", "host"]
    if has_states:
        kinds += ["state", "state", "state"]
    elif not mixed and not num_lookahead:
        kinds += ["chunked", "chunked"]

    def block_size() -> int:
        return size * rng.choice([1, 2]) if mixed else size

    def spec(kind: str) -> KVCacheSpec:
        reach = rng.choice([1, size, 2 * size, 3 * size + 1, 5 * size])
        heads = rng.choice([1, 1, 2])
        match kind:
            case "full":
                return groups.full(block_size(), heads)
            case "mla":
                return groups.mla(block_size())
            case "sink":
                return groups.sink(2 * size, block_size())
            case "window":
                return groups.window(reach, block_size(), heads, rng.choice([0, 2]))
            case "window_mla":
                return groups.window_mla(reach, block_size())
            case "chunked":
                return groups.chunked(rng.choice([size + 1, 2 * size, 4 * size]), size)
            case "cross":
                return groups.cross(6, size)
            case "ring":
                return groups.ring(size)
            case "host":
                return groups.host(rng.choice([8, 30]), block_size())
        if not caching:
            return groups.state(MAX_MODEL_LEN, "none", num_state_drafts, heads=heads)
        return groups.state(block_size(), "align", num_state_drafts, checkpoint, heads)

    chosen = [spec("full")] if rng.random() < 0.8 else []
    chosen += [spec(rng.choice(kinds)) for _ in range(rng.randint(0 if chosen else 1, 5))]
    if not any(each.prefix_cacheable for each in chosen):
        chosen.append(spec("full"))
    markable = [i for i, each in enumerate(chosen) if type(each).__name__ in ("FullAttentionSpec", "SlidingWindowSpec")]
    base = lcm(*[each.block_size for each in chosen])
    can_shard = all(each.shards_over_context or type(each).__name__ == "MambaSpec" for each in chosen)
    ranks = 2 if can_shard and caching and rng.random() < 0.3 else 1
    return Layout(
        chosen,
        caching,
        num_lookahead,
        rng.choice(markable) if num_lookahead and markable and rng.random() < 0.5 else -1,
        num_state_drafts,
        rng.choice([None, 20]),
        rng.choice([None, None, 0, 2 * base * ranks]) if caching else None,
        rng.random() < 0.3,
        ranks,
        rng.choice([0, 1, 2]) if len(chosen) > 1 and caching else 0,
    )


@dataclass
class Planned:
    """What a step computes for one request."""

    seq: "Running"
    num_new: int
    num_drafts: int
    num_accepted: int
    num_lookahead: int
    tables: list[Table]
    checkpoints: dict[int, tuple[int, int]]
    num_external: int = 0
    external_start: int = 0


@dataclass
class Sent:
    """A step in flight: what each request will be told, and the copies that it carries."""

    told: list[tuple["Running", int, int, list[int]]] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)


class Running:
    """A request, what workers know of it, and where it will be if all drafts in flight are accepted."""

    def __init__(self, req: Request) -> None:
        self.req = req
        self.seq = Sequence(req.request_id, req.tokens.token_ids(0, req.num_tokens), req.num_encoder_tokens)
        self.num_expected = req.num_tokens
        self.is_gone = False


class HybridMachine(RuleBasedStateMachine):
    @initialize(rng=st.randoms(use_true_random=False), usable=st.integers(12, 60))
    def build(self, rng: random.Random, usable: int) -> None:
        self.layout = draw_layout(rng)
        self.manager = self.layout.build(usable)
        sizes = [manager.block_size for manager in managers_of(self.manager)]
        self.worker = Worker(self.layout.specs, sizes)
        self.has_states = any(type(spec).__name__ == "MambaSpec" for spec in self.layout.specs)
        self.running: list[Running] = []
        self.waiting: list[Request] = []
        self.in_flight: list[Sent] = []
        self.num_made = 0
        self.is_whole = True

    def pick(self, number: int) -> Running | None:
        return self.running[number % len(self.running)] if self.running else None

    def new_request(self, tokens: list[int]) -> Request:
        self.num_made += 1
        return Request(str(self.num_made), tokens, num_encoder_tokens=5)

    @rule(prompt=PROMPTS)
    def arrive(self, prompt: list[int]) -> None:
        self.waiting.append(self.new_request(prompt))

    # A step: some requests go on, some start, then the workers run it

    @precondition(lambda self: self.running or self.waiting)
    @rule(
        moves=st.lists(
            st.tuples(PICK, st.sampled_from([1, 3, 8, MAX_CHUNK]), st.integers(0, 3), st.integers(0, 3)),
            min_size=1,
            max_size=5,
        ),
        lookahead=st.sampled_from([0, 0, 2]),
    )
    def step(self, moves: list[tuple[int, int, int, int]], lookahead: int) -> None:
        if len(self.in_flight) > (0 if self.has_states and self.layout.num_state_drafts else 1):
            self.come_back()
        self.is_whole = False
        self.manager.start_step()
        plan: dict[str, Planned] = {}
        for number, chunk, num_drafts, num_accepted in moves:
            num_all = len(self.running) + len(self.waiting)
            if num_all == 0:
                continue
            index = number % num_all
            if index >= len(self.running):
                self.admit(plan, self.waiting[index - len(self.running)], chunk, num_drafts, lookahead)
            elif self.running[index].req.request_id not in plan:
                self.go_on(plan, self.running[index], chunk, num_drafts, num_accepted, lookahead)
        self.run(list(plan.values()))

    def allows(self, req: Request, num_new: int, lookahead: int) -> bool:
        """In flight no more than was promised, and room in the model."""
        most = self.layout.num_in_flight or MAX_MODEL_LEN
        if req.num_in_flight_tokens + num_new + lookahead > most:
            return False
        return num_new > 0 and req.num_computed_tokens + num_new < MAX_MODEL_LEN

    def go_on(
        self, plan: dict[str, Planned], run: Running, chunk: int, num_drafts: int, num_accepted: int, lookahead: int
    ) -> None:
        req = run.req
        remaining = run.num_expected - req.num_computed_tokens
        if remaining > 1:
            num_drafts = 0
            num_new = min(chunk, remaining)
            if req.num_computed_tokens + num_new > req.num_tokens:
                return  # a resumed tail that is not known yet
            num_new = self.manager.clip_chunk(req, req.num_computed_tokens, num_new, MAX_CHUNK)
        else:
            if not self.layout.num_lookahead and not self.layout.num_state_drafts:
                num_drafts = 0
            if self.has_states:
                num_drafts = min(num_drafts, self.layout.num_state_drafts)
            num_new = 1 + num_drafts
        if not self.allows(req, num_new, lookahead):
            return
        if self.manager.allocate_slots(req, num_new, num_lookahead_tokens=lookahead) is not None:
            self.schedule(plan, run, num_new, num_drafts, min(num_accepted, num_drafts), lookahead, 0)

    def admit(self, plan: dict[str, Planned], req: Request, chunk: int, external: int, lookahead: int) -> None:
        found = self.manager.get_computed_blocks(req)
        assert found.num_tokens < req.num_tokens
        req.shared_prefix_boundary = found.shared_prefix_boundary
        num_external = 0
        if external == 3 and not self.layout.num_state_drafts:
            num_external = min(2 * self.worker.block_sizes[0], req.num_tokens - 1 - found.num_tokens)
        start = found.num_tokens + num_external
        num_new = self.manager.clip_chunk(req, start, min(chunk, req.num_tokens - start), MAX_CHUNK)
        if not self.allows(req, num_new, lookahead):
            return
        blocks = self.manager.allocate_slots(
            req,
            num_new,
            found,
            num_lookahead_tokens=lookahead,
            num_external_computed_tokens=num_external,
            admission=AdmissionRule(chunk == 8),
        )
        if blocks is None:
            return
        run = Running(req)
        req.num_computed_tokens = start
        run.seq.num_done = start
        self.waiting.remove(req)
        self.running.append(run)
        self.schedule(plan, run, num_new, 0, 0, lookahead, num_external)

    def schedule(
        self,
        plan: dict[str, Planned],
        run: Running,
        num_new: int,
        num_drafts: int,
        num_accepted: int,
        lookahead: int,
        num_external: int,
    ) -> None:
        req = run.req
        start = req.num_computed_tokens
        req.num_computed_tokens += num_new
        req.num_in_flight_tokens += num_new
        if req.num_computed_tokens >= run.num_expected:
            # This step samples a token, behind all accepted drafts.
            run.num_expected = req.num_computed_tokens + 1
        checkpoints: dict[int, tuple[int, int]] = {}
        records = self.manager._coordinator.require_held(req.request_id).groups
        for group, record in enumerate(records):
            if isinstance(record, StateBlocks) and record.checkpoint > 0:
                checkpoints[group] = (record.checkpoint, record.checkpoint_index)
        plan[req.request_id] = Planned(
            run,
            num_new,
            num_drafts,
            num_accepted,
            min(lookahead, MAX_MODEL_LEN - start - num_new),
            [list(table) for table in tables(self.manager, req)],
            checkpoints,
            num_external,
            start - num_external,
        )

    def run(self, plan: list[Planned]) -> None:
        """The workers' part: loads and copies, then values, then reads; states are read before any is written."""
        self.is_whole = False
        copies = self.manager.take_block_copies()
        self.worker.copy(copies)
        sent = Sent(copies=copies)
        ends: list[int] = []
        for each in plan:
            seq = each.seq.seq
            if each.num_external:
                self.worker.load(seq, each.tables, each.external_start, each.external_start + each.num_external)
            self.worker.recur_read(seq, each.tables)
            for _ in range(each.num_accepted):
                seq.tokens.append(len(seq.tokens))
            ends.append(seq.num_done + each.num_new - each.num_drafts + each.num_accepted)
            seq.verifies_drafts = each.num_drafts > 0
        for each, end in zip(plan, ends, strict=True):
            self.worker.attend(each.seq.seq, each.tables, each.num_new, each.num_lookahead, end)
        for each, end in zip(plan, ends, strict=True):
            self.worker.read(each.seq.seq, each.tables, each.num_new, end)
        for each, end in zip(plan, ends, strict=True):
            seq = each.seq.seq
            self.worker.recur_write(seq, each.tables, each.num_new, end, each.checkpoints)
            num_before = len(seq.tokens) - each.num_accepted
            seq.num_done = end
            if end == len(seq.tokens):
                seq.tokens.append(end if each.num_drafts == 0 else 5000 + end)
            sent.told.append((each.seq, each.num_new, each.num_drafts - each.num_accepted, seq.tokens[num_before:]))
        self.in_flight.append(sent)
        self.is_whole = True

    @precondition(lambda self: self.in_flight)
    @rule()
    def come_back(self) -> None:
        sent = self.in_flight.pop(0)
        for run, num_new, num_rejected, tokens in sent.told:
            if run.is_gone:
                continue
            run.req.num_in_flight_tokens -= num_new
            run.req.num_computed_tokens -= num_rejected
            run.num_expected -= num_rejected
            for token in tokens:
                run.req.append_token(token)
        self.manager.release_block_copies(sent.copies)

    # A request goes

    @rule(number=PICK, preempted=st.booleans())
    def leave(self, number: int, preempted: bool) -> None:
        run = self.pick(number)
        if run is None:
            return
        self.manager.free(run.req)
        run.is_gone = True
        self.running.remove(run)
        if preempted and run.req.num_tokens < MAX_MODEL_LEN - 4:
            self.waiting.append(self.new_request(run.req.tokens.token_ids(0, run.req.num_tokens)))

    @rule(number=PICK)
    def fork(self, number: int) -> None:
        parent = self.pick(number)
        if parent is None or parent.req.num_processed_tokens == 0:
            return
        if self.has_states and parent.req.num_in_flight_tokens:
            return
        self.num_made += 1
        twin = parent.req.twin(str(self.num_made))
        num_free = self.manager.num_free_blocks
        num_needed = self.manager.num_blocks_to_fork(parent.req)
        done = self.manager.fork(parent.req, twin)
        assert (done is not None) == (num_needed <= num_free)
        if done is None:
            assert self.manager.num_free_blocks == num_free
            return
        twin.num_computed_tokens = parent.req.num_processed_tokens
        child = Running(twin)
        child.seq.num_done = twin.num_computed_tokens
        self.worker.fork(parent.seq, child.seq, *[list(tables(self.manager, req)) for req in (parent.req, twin)])
        self.running.append(child)

    # The cache as a whole

    @rule(blocks=st.lists(st.integers(1, 60), max_size=4))
    def evict(self, blocks: list[int]) -> None:
        self.manager.evict_blocks([block for block in blocks if block <= self.manager.num_usable_blocks])

    @rule()
    def reset(self) -> None:
        num_held = self.manager.num_usable_blocks - self.manager.num_free_blocks
        done = self.manager.reset_prefix_cache()
        assert not (done and num_held)
        # What nobody reads any more needs no cached block, so chunks and windows of one token alone hit without any.
        if done and any(needs_cached_blocks(spec) for spec in self.layout.specs):
            for req in self.waiting:
                assert self.manager.get_computed_blocks(req).num_tokens == 0

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.is_whole = False
        self.manager.check()
        for run in self.running:
            for manager, num_held in zip(managers_of(self.manager), held(self.manager, run.req), strict=True):
                most = manager.policy.max_admission_blocks
                assert num_held <= most + self.num_more_states(manager), (
                    f"{manager.spec}: {num_held} blocks held, {most} reserved"
                )
        self.is_whole = True

    def num_more_states(self, manager: SingleTypeKVCacheManager) -> int:
        """Beyond what sizing reserves, as in vLLM: with two steps in flight one step's states, and one state where a
        step with drafts is longer than a block."""
        if not isinstance(manager, AlignedMambaManager):
            return 0
        if self.layout.num_state_drafts:
            return 1 if manager.block_size <= self.layout.num_state_drafts else 0
        return 2 if manager.has_checkpoint_blocks else 1

    def teardown(self) -> None:
        if not hasattr(self, "manager") or not self.is_whole:
            return
        while self.in_flight:
            self.come_back()
        self.manager.release_block_copies(self.manager.take_block_copies())
        for run in self.running:
            self.manager.free(run.req)
        self.manager.check()
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks
        assert self.manager.reset_prefix_cache()


def needs_cached_blocks(spec: KVCacheSpec) -> bool:
    """Whether every hit in such a group has a cached block."""
    return (
        spec.prefix_cacheable
        and not isinstance(spec, ChunkedLocalAttentionSpec)
        and first_read(spec, MAX_MODEL_LEN) < MAX_MODEL_LEN
    )


TestHybrid = HybridMachine.TestCase
TestHybrid.settings = settings(max_examples=600 * LONG, stateful_step_count=40)
