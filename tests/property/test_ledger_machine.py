"""A random life of KVCacheManager, compared with the model on paper after every step."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvledger import AdmissionRule, BlockCopy, Request
from kvledger.errors import KVLedgerError
from tests.conftest import LONG
from tests.helpers import free_order, ledger, pool_of
from tests.property.model import Model

MAX_MODEL_LEN = 48
PICK = st.integers(0, 99)
# Tokens that all prompts share, then tokens of one of three families.
PROMPTS = st.builds(
    lambda shared, own, family: list(range(shared)) + [1000 * family + n for n in range(own)],
    st.integers(0, 20),
    st.integers(1, 10),
    st.integers(1, 3),
)
RULES = st.none() | st.builds(AdmissionRule, st.booleans(), st.integers(0, 3), st.booleans())


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        usable=st.integers(1, 24),
        block_size=st.sampled_from([1, 2, 3, 4, 8]),
        caching=st.sampled_from([True, True, True, False]),
        watermark=st.sampled_from([0.0, 0.2]),
    )
    def build(self, usable: int, block_size: int, caching: bool, watermark: float) -> None:
        self.usable, self.block_size = usable, block_size
        self.manager = ledger(usable, block_size, MAX_MODEL_LEN, enable_caching=caching, watermark=watermark)
        self.model = Model(usable, block_size, MAX_MODEL_LEN, caching, int(watermark * (usable + 1)))
        self.held: list[Request] = []
        self.delayed: dict[str, int] = {}
        self.waiting: list[Request] = []
        self.copies: list[tuple[BlockCopy, tuple[int, int]]] = []
        self.untold: list[tuple[int, int]] = []
        self.num_made = 0

    def pick(self, number: int, *, idle: bool = False) -> Request | None:
        """One of the requests that hold blocks."""
        found = self.idle() if idle else self.held
        return found[number % len(found)] if found else None

    def idle(self) -> list[Request]:
        """Those that hold blocks, have no load under way, and are not at the model's end."""
        return [
            each for each in self.held if each.request_id not in self.delayed and each.num_tokens < MAX_MODEL_LEN - 6
        ]

    # A request starts

    @rule(prompt=PROMPTS, salt=st.sampled_from(["", "", "salt"]))
    def arrive(self, prompt: list[int], salt: str) -> None:
        self.num_made += 1
        self.waiting.append(Request(str(self.num_made), prompt, cache_salt=salt))

    @precondition(lambda self: self.waiting)
    @rule(number=PICK, chunk=st.integers(0, 30), lookahead=st.sampled_from([0, 0, 1, 5]), admission=RULES)
    def admit(self, number: int, chunk: int, lookahead: int, admission: AdmissionRule | None) -> None:
        self.start(self.waiting[number % len(self.waiting)], chunk, lookahead, 0, False, admission)

    @precondition(lambda self: self.waiting)
    @rule(number=PICK, external=st.integers(1, 20), delay=st.booleans(), admission=RULES)
    def admit_external(self, number: int, external: int, delay: bool, admission: AdmissionRule | None) -> None:
        self.start(self.waiting[number % len(self.waiting)], 0 if delay else 30, 0, external, delay, admission)

    def start(
        self, req: Request, chunk: int, lookahead: int, external: int, delay: bool, admission: AdmissionRule | None
    ) -> None:
        found = self.manager.get_computed_blocks(req)
        hit = self.model.lookup(req)
        assert found.blocks.get_block_ids() == (hit,)
        assert found.num_tokens == len(hit) * self.block_size
        external = min(external, req.num_tokens - found.num_tokens)
        num_new = min(chunk, req.num_tokens - found.num_tokens - external)
        if num_new + external + found.num_tokens == 0:
            num_new = 1
        blocks = self.manager.allocate_slots(
            req,
            num_new,
            found,
            num_lookahead_tokens=lookahead,
            num_external_computed_tokens=external,
            delay_cache_blocks=delay,
            admission=admission,
        )
        expected = self.model.allocate(req, num_new, hit, lookahead, external, delay, admission)
        assert (None if blocks is None else blocks.get_block_ids()[0]) == expected
        if blocks is None:
            return
        req.num_computed_tokens = found.num_tokens + external + num_new
        self.waiting.remove(req)
        self.held.append(req)
        if delay:
            self.delayed[req.request_id] = req.num_computed_tokens

    @precondition(lambda self: self.delayed)
    @rule(number=PICK, lost=st.integers(0, 4))
    def load_arrives(self, number: int, lost: int) -> None:
        request_id = sorted(self.delayed)[number % len(self.delayed)]
        req = next(each for each in self.held if each.request_id == request_id)
        req.num_computed_tokens = max(1, self.delayed.pop(request_id) - lost)
        self.manager.cache_blocks(req, req.num_computed_tokens)
        self.model.cache(req, req.num_computed_tokens)

    # A request goes on

    def grow(self, req: Request, num_new: int, lookahead: int = 0) -> bool:
        blocks = self.manager.allocate_slots(req, num_new, num_lookahead_tokens=lookahead)
        expected = self.model.allocate(req, num_new, [], lookahead)
        assert (None if blocks is None else blocks.get_block_ids()[0]) == expected
        return blocks is not None

    @rule(number=PICK, chunk=st.integers(1, 9), lookahead=st.sampled_from([0, 0, 3]))
    def compute(self, number: int, chunk: int, lookahead: int) -> None:
        req = self.pick(number, idle=True)
        if req is None:
            return
        if req.num_computed_tokens == req.num_tokens:
            req.append_token(req.num_tokens % 3)
        num_new = min(chunk, req.num_tokens - req.num_computed_tokens)
        if self.grow(req, num_new, lookahead):
            req.num_computed_tokens += num_new

    @rule(chunks=st.lists(st.integers(1, 9), max_size=4), lookahead=st.sampled_from([0, 0, 3]))
    def compute_together(self, chunks: list[int], lookahead: int) -> None:
        """One call for several requests is one call each in order, up to the first that does not fit."""
        requests = self.idle()[: len(chunks)]
        num_new: list[int] = []
        for req, chunk in zip(requests, chunks, strict=False):
            if req.num_computed_tokens == req.num_tokens:
                req.append_token(req.num_tokens % 3)
            num_new.append(min(chunk, req.num_tokens - req.num_computed_tokens))
        slots = self.manager.allocate_running(requests, num_new, num_lookahead_tokens=lookahead)
        new_ids = {row: ids for row, (ids,) in slots.new_blocks.ids_by_row(1).items()}
        for row, req in enumerate(requests):
            expected = self.model.allocate(req, num_new[row], [], lookahead)
            if expected is None:
                assert slots.num_allocated == row
                break
            assert new_ids.pop(row, []) == expected
            req.num_computed_tokens += num_new[row]
        else:
            assert slots.num_allocated == len(requests)
        assert new_ids == {}

    @rule(number=PICK, num_drafts=st.integers(1, 5), accepted=st.integers(0, 5), lookahead=st.integers(0, 2))
    def verify_drafts(self, number: int, num_drafts: int, accepted: int, lookahead: int) -> None:
        req = self.pick(number, idle=True)
        if req is None or req.num_computed_tokens < req.num_tokens - 1:
            return
        if req.num_computed_tokens == req.num_tokens:
            req.append_token(7)
        if self.grow(req, 1 + num_drafts, lookahead):
            req.num_computed_tokens += 1 + min(accepted, num_drafts)
            for _ in range(min(accepted, num_drafts)):
                req.append_token(8)

    @rule(number=PICK)
    def fork(self, number: int) -> None:
        parent = self.pick(number, idle=True)
        if parent is None:
            return
        self.num_made += 1
        child = parent.twin(str(self.num_made))
        needs_copy = parent.num_computed_tokens % self.block_size != 0
        blocks = self.manager.fork(parent, child)
        if needs_copy and not self.model.free_order:
            assert blocks is None
            return
        copy = self.model.fork(parent, child, parent.num_computed_tokens)
        self.untold += [] if copy is None else [copy]
        assert blocks is not None
        assert blocks.get_block_ids() == (self.model.tables[child.request_id],)
        child.num_computed_tokens = parent.num_computed_tokens
        self.held.append(child)

    @rule()
    def take_copies(self) -> None:
        copies = self.manager.take_block_copies()
        assert [(copy.source_block_id, copy.target_block_id) for copy in copies] == self.untold
        self.copies += zip(copies, self.untold, strict=True)
        self.untold = []

    @precondition(lambda self: self.copies)
    @rule(number=PICK)
    def worker_has_copied(self, number: int) -> None:
        copy, (source, target) = self.copies.pop(number % len(self.copies))
        self.manager.release_block_copies([copy])
        self.model.release([source, target])

    # A request goes

    @rule(number=PICK, preempted=st.booleans())
    def leave(self, number: int, preempted: bool) -> None:
        req = self.pick(number)
        if req is None:
            return
        self.manager.free(req)
        self.model.leave(req)
        self.held.remove(req)
        self.delayed.pop(req.request_id, None)
        req.num_computed_tokens = 0
        if preempted:
            self.waiting.append(req)

    # The cache as a whole

    @rule(blocks=st.lists(st.integers(1, 24), max_size=4))
    def evict(self, blocks: list[int]) -> None:
        blocks = [block for block in blocks if block <= self.usable]
        self.manager.evict_blocks(blocks)
        self.model.evict(blocks)

    @rule()
    def reset(self) -> None:
        idle = len(self.model.free_order) == self.usable
        assert self.manager.reset_prefix_cache() == idle
        if idle:
            self.model.evict(list(self.model.content))

    @rule()
    def start_epoch(self) -> None:
        self.manager.start_epoch()
        self.model.epoch += 1

    # Misuse changes nothing: the comparison below would show it

    @rule(number=PICK)
    def misuse(self, number: int) -> None:
        def refused(call: object, *arguments: object) -> None:
            try:
                call(*arguments)  # type: ignore[operator]
            except KVLedgerError:
                return
            raise AssertionError(f"{call} accepted {arguments}")

        pool = pool_of(self.manager)
        refused(self.manager.free, Request("nobody", [1]))
        refused(self.manager.evict_blocks, [1, self.usable + 1])
        refused(pool.get_new_blocks, self.usable + 1)
        if self.model.free_order:
            refused(pool.free_blocks, [pool.blocks[self.model.free_order[number % len(self.model.free_order)]]])
        req = self.pick(number)
        if req is not None:
            blocks = self.manager.get_blocks(req.request_id).blocks[0]
            refused(self.manager.get_computed_blocks, req)
            refused(self.manager.allocate_slots, req, 0)
            refused(pool.free_blocks, [*blocks, blocks[number % len(blocks)]])

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, model, pool = self.manager, self.model, pool_of(self.manager)
        manager.check()
        assert free_order(manager) == model.free_order
        assert {int(block.block_id): int(block.ref_cnt) for block in pool.blocks[1:]} == model.ref_cnt
        for req in self.held:
            assert manager.get_block_ids(req.request_id) == (model.tables[req.request_id],)
        # The names of contents differ (hashes there, tokens here); the blocks under each name may not.
        indexed = sorted([int(block.block_id) for block in blocks] for blocks in pool.indexes[0].blocks().values())
        assert indexed == sorted(model.index.values())
        for name, blocks in model.index.items():
            assert {int(pool.blocks[block].num_hash_tokens) for block in blocks} == {len(name[2])}
        occupancy = manager.occupancy()
        assert occupancy.live == self.usable - len(model.free_order)
        assert occupancy.cached == sum(block in model.content for block in model.free_order)
        assert manager.usage == 1.0 - len(model.free_order) / self.usable


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=400 * LONG, stateful_step_count=50)
