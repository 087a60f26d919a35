"""Any order of adding, aborting, forking and stepping in a pool that is too small: every story stays the language's."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvledger import RequestStatus
from kvledger.engine.ngram_drafter import NgramDrafter
from kvledger.errors import RequestTooLargeError
from tests.unit.engine.storyteller import Stage, chanting, rambling

MAX_MODEL_LEN = 40
PICK = st.integers(0, 99)
PROMPTS = st.builds(
    lambda shared, own, family: list(range(shared)) + [100 * family + number for number in range(own)],
    st.integers(0, 14),
    st.integers(1, 10),
    st.integers(1, 3),
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_slots=st.integers(12, 80),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(8, 40),
        num_drafts=st.sampled_from([0, 2, 3]),
        caching=st.sampled_from([True, True, False]),
        language=st.sampled_from([rambling, chanting]),
    )
    def build(self, num_slots: int, block_size: int, budget: int, num_drafts: int, **options: object) -> None:
        self.stage = Stage(
            usable=max(num_slots // block_size, 3),
            block_size=block_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=budget,
            drafter=NgramDrafter(num_drafts, 1, 3) if num_drafts else None,
            num_speculative_tokens=num_drafts,
            **options,  # type: ignore[arg-type]
        )
        # Request -> its prompt; for a fork also what its parent had said.
        self.prompts: dict[str, list[int]] = {}
        self.num_added = 0

    def new_id(self) -> str:
        self.num_added += 1
        return f"r{self.num_added}"

    def alive(self) -> list[str]:
        scheduler = self.stage.engine.scheduler
        return [one.request_id for one in scheduler.running_requests() + scheduler.waiting_requests()]

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 20))
    def add(self, prompt: list[int], max_tokens: int) -> None:
        request_id = self.new_id()
        try:
            self.stage.add(request_id, prompt, max_tokens=max_tokens)
        except RequestTooLargeError:
            return
        self.prompts[request_id] = prompt
        self.stage.heard[request_id] = []

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.stage.step()

    @precondition(lambda self: self.alive())
    @rule(pick=PICK)
    def abort(self, pick: int) -> None:
        alive = self.alive()
        request_id = alive[pick % len(alive)]
        self.stage.engine.abort(request_id)
        self.verify(request_id)
        self.stage.check()

    @precondition(lambda self: self.stage.engine.scheduler.num_running > 0)
    @rule(pick=PICK, num_children=st.integers(1, 2))
    def fork(self, pick: int, num_children: int) -> None:
        running = self.stage.engine.scheduler.running_requests()
        parent = running[pick % len(running)]
        assert parent.status is RequestStatus.RUNNING
        children = [self.new_id() for _ in range(num_children)]
        if parent.num_computed_tokens > 0 and self.stage.engine.fork(parent.request_id, children, self.stage.hear):
            for child in children:
                self.prompts[child] = self.prompts[parent.request_id] + self.stage.heard[parent.request_id]
                self.stage.heard[child] = []
        self.stage.check()

    def verify(self, request_id: str) -> None:
        """What was heard is what the language alone says after that prompt."""
        heard = self.stage.heard[request_id]
        if heard:
            assert heard == self.stage.told(self.prompts[request_id], len(heard)), request_id

    def teardown(self) -> None:
        if not hasattr(self, "stage"):
            return
        self.stage.run()
        for request_id in self.prompts:
            self.verify(request_id)
        self.stage.step()
        assert self.stage.worker.rows == {}, "the worker still has rows"
        assert self.stage.manager.num_free_blocks == self.stage.manager.num_usable_blocks


TestEngine = EngineMachine.TestCase
