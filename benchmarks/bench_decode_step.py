"""What does allocate_slots cost at decode? One call a request, from interpreted Python, at all phases of a block.

vLLM hashes a block that became full when its last token is appended, ours within allocate_slots. So the first rows bill
that hash to us alone; the rows "with append" bill it to both.
"""

from benchmarks.measure import Row, Side, compare, num_runs
from benchmarks.subjects import (
    BLOCK_SIZE,
    decoding_prompts,
    our_admit,
    our_manager,
    their_admit,
    their_factory,
    their_manager,
)
from kvledger import Request

QUESTION = "allocate_slots at decode, a call"


class Ours(Side):
    def __init__(self, prompts: list[list[int]], num_blocks: int) -> None:
        self.manager = our_manager(num_blocks)
        self.requests = [Request(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
        for request in self.requests:
            our_admit(self.manager, request)
            request.append_token(7)

    def run(self) -> None:
        allocate_slots = self.manager.allocate_slots
        for request in self.requests:
            allocate_slots(request, 1)

    def after(self) -> None:
        for request in self.requests:
            request.num_computed_tokens += 1
            request.append_token(7)


class OursWithAppend(Ours):
    def run(self) -> None:
        allocate_slots = self.manager.allocate_slots
        for request in self.requests:
            request.append_token(7)
            allocate_slots(request, 1)

    def before(self) -> None:
        for request in self.requests:
            request.num_computed_tokens += 1

    def after(self) -> None:
        pass


class Theirs(Side):
    def __init__(self, prompts: list[list[int]], num_blocks: int) -> None:
        self.manager = their_manager(num_blocks)
        factory = their_factory()
        self.requests = [factory.make(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
        for request in self.requests:
            their_admit(self.manager, request)
            request.append_output_token_ids(7)

    def run(self) -> None:
        allocate_slots = self.manager.allocate_slots
        for request in self.requests:
            allocate_slots(request, 1)

    def after(self) -> None:
        for request in self.requests:
            request.num_computed_tokens += 1
            request.append_output_token_ids(7)


class TheirsWithAppend(Theirs):
    def run(self) -> None:
        allocate_slots = self.manager.allocate_slots
        for request in self.requests:
            request.append_output_token_ids(7)
            allocate_slots(request, 1)

    def before(self) -> None:
        for request in self.requests:
            request.num_computed_tokens += 1

    def after(self) -> None:
        pass


def run(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for suffix, ours, theirs in (("", Ours, Theirs), (", with append", OursWithAppend, TheirsWithAppend)):
        for num_running in (64, 256, 1024):
            # Whole rounds of all phases.
            repeats = BLOCK_SIZE if quick else BLOCK_SIZE * (4 if num_running == 1024 else 12)
            num_blocks = num_running * (256 + num_runs(repeats) + 3 * BLOCK_SIZE) // BLOCK_SIZE + 1
            prompts = decoding_prompts(num_running)
            sides = ours(prompts, num_blocks), theirs(prompts, num_blocks)
            rows.append(compare(QUESTION, f"{num_running} running{suffix}", *sides, repeats, per=num_running))
    return rows
