"""A random life of a scheduler with a worker's block tables behind it, over one group and over several.

After every step the rows are the ledger's tables: same length, same ids, but for entries that the ledger has taken back
from a request that runs on, which must lie where nobody reads (tests/tables.py).
"""

import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvledger import KVCacheSpec, RequestStatus
from kvledger.errors import RequestTooLargeError
from tests import groups
from tests.conftest import LONG
from tests.tables import Stack

MAX_MODEL_LEN = 48
PICK = st.integers(0, 99)
# Tokens that all prompts share, then tokens of one of two families.
PROMPTS = st.builds(
    lambda shared, own, family: list(range(shared)) + [1000 * family + n for n in range(own)],
    st.integers(0, 20),
    st.integers(1, 12),
    st.integers(1, 2),
)


def draw_specs(rng: random.Random, caching: bool, num_drafts: int) -> list[KVCacheSpec]:
    """One to four groups that can stand together."""
    size = rng.choice([2, 4])

    def spec(kind: str) -> KVCacheSpec:
        match kind:
            case "full":
                return groups.full(size * rng.choice([1, 1, 2]))
            case "window":
                return groups.window(rng.choice([1, size, 3 * size + 1]), size)
            case "chunked":
                return groups.chunked(rng.choice([size + 1, 2 * size]), size)
        if not caching:
            return groups.state(MAX_MODEL_LEN, "none", num_drafts)
        return groups.state(size, "align", num_drafts, rng.choice([0, size]))

    kinds = rng.choice([["full", "window"], ["full", "state"], ["full", "window", "state"], ["window", "chunked"]])
    return [spec(rng.choice(kinds)) for _ in range(rng.randint(1, 4))]


class TablesMachine(RuleBasedStateMachine):
    @initialize(
        rng=st.randoms(use_true_random=False),
        usable=st.integers(16, 70),
        caching=st.booleans(),
        steps_in_flight=st.integers(1, 2),
        num_drafts=st.sampled_from([0, 0, 2]),
        options=st.fixed_dictionaries(
            {
                "max_num_seqs": st.integers(2, 6),
                "max_num_batched_tokens": st.integers(8, 40),
                "reserve_full_sequence": st.booleans(),
                "num_lookahead_tokens": st.sampled_from([0, 0, 3]),
            }
        ),
    )
    def build(
        self,
        rng: random.Random,
        usable: int,
        caching: bool,
        steps_in_flight: int,
        num_drafts: int,
        options: dict[str, Any],
    ) -> None:
        self.stack = Stack(
            usable,
            *draw_specs(rng, caching, num_drafts),
            max_model_len=MAX_MODEL_LEN,
            caching=caching,
            steps_in_flight=steps_in_flight,
            num_speculative_tokens=num_drafts,
            **options,
        )
        self.num_made = 0
        self.is_whole = True
        self.add([list(range(12)), list(range(9))], 10)

    def pick(self, number: int, *statuses: RequestStatus) -> str | None:
        scheduler = self.stack.scheduler
        live = scheduler.running_requests() + scheduler.waiting_requests()
        found = [each.request_id for each in live if not statuses or each.status in statuses]
        return found[number % len(found)] if found else None

    # Requests come and go

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=5), max_tokens=st.integers(1, 30))
    def add(self, prompts: list[list[int]], max_tokens: int) -> None:
        for prompt in prompts:
            self.num_made += 1
            try:
                self.stack.add(str(self.num_made), prompt, max_tokens=max_tokens)
            except RequestTooLargeError:
                continue

    @rule(number=PICK, comes_back=st.booleans(), mind=st.integers(0, 3))
    def abort(self, number: int, comes_back: bool, mind: int) -> None:
        """Aborted, and perhaps sent again under the same id before the workers hear of it."""
        name = self.pick(number)
        if name is None or mind != 3:
            return
        self.stack.scheduler.abort(name)
        if comes_back and all(name not in output.request_ids for output, _ in self.stack.in_flight):
            self.stack.add(name, 5, max_tokens=3)

    @rule(number=PICK, num_children=st.integers(1, 3))
    def fork(self, number: int, num_children: int) -> None:
        while self.stack.in_flight:
            self.stack.deliver()
        name = self.pick(number, RequestStatus.RUNNING)
        if name is None:
            return
        if self.stack.scheduler.get_request(name).num_processed_tokens == 0:
            return
        names = [str(self.num_made + child) for child in range(1, num_children + 1)]
        self.num_made += num_children
        self.stack.scheduler.fork(name, names)

    @rule(mind=st.integers(0, 3))
    def preempt_all(self, mind: int) -> None:
        if mind == 3:
            self.stack.scheduler.reset_prefix_cache(preempt_running=True)

    # Steps

    @rule(luck=st.lists(st.integers(0, 3), min_size=1, max_size=8))
    def go_on(self, luck: list[int]) -> None:
        for each in luck:
            if len(self.stack.in_flight) == self.stack.scheduler.config.max_steps_in_flight:
                self.stack.deliver()
            self.is_whole = False
            self.stack.schedule(lambda num_drafts, most=each: min(num_drafts, most))
            self.is_whole = True

    @precondition(lambda self: self.stack.in_flight)
    @rule()
    def deliver(self) -> None:
        self.stack.deliver()

    # The end

    def teardown(self) -> None:
        if not hasattr(self, "stack") or not self.is_whole:
            return
        stack = self.stack
        while stack.in_flight:
            stack.deliver()
        for name in [each.request_id for each in stack.scheduler.running_requests()]:
            stack.scheduler.abort(name)
        for name in [each.request_id for each in stack.scheduler.waiting_requests()]:
            stack.scheduler.abort(name)
        stack.step()
        assert stack.tables.num_requests == 0
        assert stack.manager.num_free_blocks == stack.manager.num_usable_blocks


TestTables = TablesMachine.TestCase
TestTables.settings = settings(max_examples=200 * LONG, stateful_step_count=40)
