"""A random life of the scheduler with a worker that reads what it computes on (tests/engine.py).

After every move: check() of every layer, block tables equal to the worker's rows, only accepted tokens indexed. At the
end everything that is still there must finish within a bounded number of steps, and every block come back.
"""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvledger import Request, RequestStatus
from kvledger.errors import RequestTooLargeError
from kvledger.scheduler import ExternalHit, SchedulingPolicy
from tests.conftest import LONG
from tests.engine import DRAFT, Engine
from tests.helpers import other

MAX_MODEL_LEN = 40
PICK = st.integers(0, 99)
PROMPTS = st.builds(
    lambda shared, own, family: list(range(shared)) + other(own, family),
    st.integers(0, 14),
    st.integers(1, 10),
    st.integers(1, 3),
)
OFFERS = st.sampled_from(
    [ExternalHit(0)] * 4
    + [None, ExternalHit(3), ExternalHit(8), ExternalHit(5, asynchronous=True), ExternalHit(16, asynchronous=True)]
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_slots=st.integers(12, 80),
        block_size=st.sampled_from([1, 2, 4]),
        steps_in_flight=st.integers(1, 2),
        seats=st.integers(1, 6),
        budget=st.integers(6, 40),
        num_drafts=st.sampled_from([0, 0, 2]),
        options=st.fixed_dictionaries(
            {
                "policy": st.sampled_from(list(SchedulingPolicy)),
                "caching": st.sampled_from([True, True, False]),
                "watermark": st.sampled_from([0.0, 0.0, 0.2]),
                "enable_chunked_prefill": st.sampled_from([True, True, False]),
                "long_prefill_token_threshold": st.sampled_from([0, 0, 5]),
                "reserve_full_sequence": st.booleans(),
                "external_lease_steps": st.sampled_from([0, 4]),
                "num_lookahead_tokens": st.sampled_from([0, 0, 0, 3]),
            }
        ),
    )
    def build(
        self,
        num_slots: int,
        block_size: int,
        steps_in_flight: int,
        seats: int,
        budget: int,
        num_drafts: int,
        options: dict[str, Any],
    ) -> None:
        # Without chunks, a prompt needs a budget that takes it whole.
        budget = budget if options["enable_chunked_prefill"] else MAX_MODEL_LEN
        self.engine = Engine(
            num_slots // block_size,
            block_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            max_steps_in_flight=steps_in_flight,
            num_speculative_tokens=num_drafts,
            **options,
        )
        self.added: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.num_made = 0

    def pick(self, number: int, *statuses: RequestStatus) -> str | None:
        scheduler = self.engine.scheduler
        live = scheduler.running_requests() + scheduler.waiting_requests()
        found = [each.request_id for each in live if not statuses or each.status in statuses]
        return found[number % len(found)] if found else None

    # Requests come and go

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=4),
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "", "salt"]),
        offer=OFFERS,
    )
    def add(
        self, prompts: list[list[int]], max_tokens: int, priority: int, salt: str, offer: ExternalHit | None
    ) -> None:
        for prompt in prompts:
            self.num_made += 1
            name = str(self.num_made)
            self.engine.source.offers[name] = offer
            num_slots = len(prompt) + self.engine.config.num_lookahead_tokens
            num_blocks = -(-num_slots // self.engine.worker.block_size)
            try:
                self.added[name] = self.engine.add(
                    name, prompt, max_tokens=max_tokens, priority=priority, arrival_time=self.num_made, cache_salt=salt
                )
            except RequestTooLargeError:
                assert num_blocks > self.engine.usable
            else:
                assert num_blocks <= self.engine.usable

    @rule(number=PICK, mind=st.integers(0, 3))
    def abort(self, number: int, mind: int) -> None:
        name = self.pick(number)
        if name is not None and mind == 3:
            self.engine.scheduler.abort(name)
            self.aborted.add(name)
            self.engine.check()

    @rule(number=PICK, num_children=st.integers(1, 3))
    def fork(self, number: int, num_children: int) -> None:
        name = self.pick(number, RequestStatus.RUNNING)
        if name is None:
            return
        parent = self.engine.scheduler.get_request(name)
        if parent.num_computed_tokens <= parent.num_in_flight_tokens:
            return
        names = [str(self.num_made + child) for child in range(1, num_children + 1)]
        self.num_made += num_children
        num_free = self.engine.manager.num_free_blocks
        if self.engine.scheduler.fork(name, names):
            for child_name in names:
                self.added[child_name] = self.engine.scheduler.get_request(child_name)
                self.engine.tokens[child_name] = self.added[child_name].output_token_ids()
        elif num_children == 1:
            assert self.engine.manager.num_free_blocks == num_free
        self.engine.check()

    # Steps

    @precondition(lambda self: len(self.engine.in_flight) < self.engine.config.max_steps_in_flight)
    @rule(luck=st.integers(0, 3))
    def schedule(self, luck: int) -> None:
        self.engine.schedule(lambda request_id, num_drafts: min(num_drafts, luck))

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def deliver(self) -> None:
        self.engine.deliver()

    @rule(luck=st.lists(st.integers(0, 3), min_size=1, max_size=8))
    def go_on(self, luck: list[int]) -> None:
        for each in luck:
            if len(self.engine.in_flight) == self.engine.config.max_steps_in_flight:
                self.engine.deliver()
            self.schedule(each)

    @precondition(lambda self: self.engine.config.max_steps_in_flight == 1 and not self.engine.in_flight)
    @rule(number=PICK, num_drafts=st.integers(1, 4))
    def propose(self, number: int, num_drafts: int) -> None:
        name = self.pick(number, RequestStatus.RUNNING)
        if name is not None:
            self.engine.scheduler.update_draft_tokens(name, [DRAFT] * num_drafts)

    # The external source

    def loading(self) -> list[str]:
        return [
            each.request_id
            for each in self.engine.scheduler.waiting_requests()
            if each.status is RequestStatus.WAITING_FOR_EXTERNAL_KV and each.request_id in self.engine.source.taken
        ]

    @rule(number=PICK, lost=st.sampled_from([0, 0, 1, 3, 99]))
    def load_reports(self, number: int, lost: int) -> None:
        names = self.loading()
        if not names:
            return
        name = names[number % len(names)]
        num_tokens = self.engine.scheduler.get_request(name).num_computed_tokens
        num_external = self.engine.source.taken[name]
        self.engine.load(name, num_tokens - lost if lost < num_external else 0)
        self.engine.source.offers[name] = ExternalHit(0)
        self.engine.check()

    @rule(number=PICK, offer=OFFERS)
    def source_changes(self, number: int, offer: ExternalHit | None) -> None:
        name = self.pick(number, RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if name is not None:
            self.engine.source.offers[name] = offer

    # The cache

    @rule(force=st.booleans())
    def reset(self, force: bool) -> None:
        done = self.engine.scheduler.reset_prefix_cache(preempt_running=force)
        assert done == (self.engine.manager.num_free_blocks == self.engine.usable)
        self.engine.check()

    @rule(blocks=st.lists(st.integers(1, 3), max_size=3))
    def evict(self, blocks: list[int]) -> None:
        self.engine.manager.evict_blocks(blocks)

    @rule()
    def start_epoch(self) -> None:
        self.engine.manager.start_epoch()

    # The end

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine, scheduler = self.engine, self.engine.scheduler
        most_steps = 2000 + 60 * self.num_made
        for num_steps in range(most_steps + 1):
            assert num_steps < most_steps, f"no progress: {engine.describe()}"
            engine.source.offers.clear()
            for name in self.loading():
                engine.load(name)
            if engine.config.external_lease_steps == 0:  # else a load that never reports must not matter
                for name in list(scheduler._state.loads.orphans):
                    scheduler.external_load_finished(name, 0)
            if len(engine.in_flight) == engine.config.max_steps_in_flight:
                engine.deliver()
            elif scheduler.has_unfinished_requests:
                engine.schedule()
            elif engine.in_flight:
                engine.deliver()
            else:
                break
        for _ in range(engine.config.external_lease_steps + 1):
            engine.step()
        assert engine.manager.num_free_blocks == engine.usable
        assert scheduler.num_blocks_held_by_orphans == 0
        assert set(engine.finished) | self.aborted == set(self.added)
        for name, req in self.added.items():
            if engine.finished.get(name) == "FINISHED_LENGTH":
                num_tokens = min(req.max_tokens, MAX_MODEL_LEN - req.num_prompt_tokens)
                assert len(engine.tokens[name]) == num_tokens, name
                assert req.output_token_ids() == engine.tokens[name], name


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200 * LONG, stateful_step_count=40)
