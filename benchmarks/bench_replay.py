"""What does real traffic cost? The bundled trace through both sides, prompts hashed with sha256.

"one after another": look up, allocate the prompt, free; 120 requests into a pool that keeps about ten of them.
"scheduled": 24 requests at once through the whole scheduler, outputs cut to 64 tokens, until all are finished.
"""

from tempfile import mkdtemp

from vllm.v1.outputs import ModelRunnerOutput

from benchmarks.measure import Row, Side, compare
from benchmarks.subjects import (
    BLOCK_SIZE,
    LAYOUT,
    our_admit,
    our_manager,
    their_admit,
    their_factory,
    their_manager,
)
from kvledger import Request, Sha256BlockHasher
from kvledger.replay.prompts import TokenPrompts
from kvledger.replay.trace_formats import open_trace, sample_path
from kvledger.scheduler import Scheduler, SchedulerConfig
from tests.side_by_side import reference

QUESTION = "replay of real traffic"
NUM_BLOCKS = 10_000
MAX_PROMPT_TOKENS = 60_000
TOKEN_BUDGET = 8192
MAX_TOKENS = 64


def recorded_prompts(num_requests: int) -> list[list[int]]:
    maker = TokenPrompts(Sha256BlockHasher(BLOCK_SIZE))
    prompts: list[list[int]] = []
    for serial, recorded in enumerate(open_trace(sample_path()).requests()):
        if recorded.num_prompt_tokens <= MAX_PROMPT_TOKENS:
            tokens = maker.make(recorded, serial).tokens
            prompts.append(tokens.token_ids(0, len(tokens)))
        if len(prompts) == num_requests:
            break
    return prompts


class OursInTurn(Side):
    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts

    def before(self) -> None:
        self.manager = our_manager(NUM_BLOCKS)

    def run(self) -> None:
        for index, prompt in enumerate(self.prompts):
            request = Request(str(index), prompt)
            our_admit(self.manager, request)
            self.manager.free(request)


class TheirsInTurn(Side):
    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self.factory = their_factory()

    def before(self) -> None:
        self.manager = their_manager(NUM_BLOCKS)

    def run(self) -> None:
        for index, prompt in enumerate(self.prompts):
            request = self.factory.make(str(index), prompt)
            their_admit(self.manager, request)
            self.manager.free(request)


class OursScheduled(Side):
    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts

    def before(self) -> None:
        config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=TOKEN_BUDGET)
        self.scheduler = Scheduler(our_manager(10 * NUM_BLOCKS), config)

    def run(self) -> None:
        scheduler = self.scheduler
        for index, prompt in enumerate(self.prompts):
            scheduler.add_request(Request(str(index), prompt, max_tokens=MAX_TOKENS))
        while scheduler.has_unfinished_requests:
            output = scheduler.schedule()
            sampled = [[] if request.is_prefill_chunk else [7] for request in output.requests]
            scheduler.update_from_output(output, sampled)


class TheirsScheduled(Side):
    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self.factory = their_factory()
        self.directory = mkdtemp()

    def before(self) -> None:
        self.scheduler = reference.make_scheduler(
            self.directory,
            layout=LAYOUT,
            num_blocks=10 * NUM_BLOCKS,
            max_model_len=65_536,
            max_num_seqs=64,
            max_num_batched_tokens=TOKEN_BUDGET,
        )

    def run(self) -> None:
        scheduler = self.scheduler
        for index, prompt in enumerate(self.prompts):
            scheduler.add_request(self.factory.make(str(index), prompt, MAX_TOKENS))
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            ids = list(output.num_scheduled_tokens)
            sampled = [[] if scheduler.requests[each].is_prefill_chunk else [7] for each in ids]
            index_of = {each: index for index, each in enumerate(ids)}
            scheduler.update_from_output(
                output, ModelRunnerOutput(req_ids=ids, req_id_to_index=index_of, sampled_token_ids=sampled)
            )


def run(quick: bool) -> list[Row]:
    repeats = 2 if quick else 8
    in_turn, at_once = recorded_prompts(120), recorded_prompts(24)
    return [
        compare(QUESTION, "one after another, a request", OursInTurn(in_turn), TheirsInTurn(in_turn), repeats, per=120),
        compare(QUESTION, "scheduled, a request", OursScheduled(at_once), TheirsScheduled(at_once), repeats, per=24),
    ]
