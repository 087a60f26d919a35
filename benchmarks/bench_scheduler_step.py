"""What does a whole decode step cost the scheduler: schedule() and update_from_output(), caching on?

Measured with warm caches, and for the largest batch also with cold ones, as an engine has them when the model runs in
between on the same core.

Every request is at another phase of its block, so each step one in 16 fills a block and one in 16 starts one. What the
model runner hands over is made outside the timed part on both sides.
"""

from tempfile import mkdtemp

from vllm.v1.outputs import ModelRunnerOutput

from benchmarks.measure import Row, Side, compare, num_runs
from benchmarks.subjects import BLOCK_SIZE, HYBRID, LAYOUT, MAX_MODEL_LEN, decoding_prompts, our_manager, their_factory
from kvledger import Request
from kvledger.scheduler import Scheduler, SchedulerConfig
from tests.side_by_side import reference
from tests.side_by_side.layouts import Layout

QUESTION = "scheduler step: schedule + update"
MAX_TOKENS = 10_000
TOKEN_BUDGET = 1024 * 512


class Ours(Side):
    def __init__(self, num_running: int, num_blocks: int, layout: Layout) -> None:
        config = SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=TOKEN_BUDGET)
        self.scheduler = Scheduler(our_manager(num_blocks, layout=layout), config)
        for index, prompt in enumerate(decoding_prompts(num_running)):
            self.scheduler.add_request(Request(f"r{index}", prompt, max_tokens=MAX_TOKENS))
        self.sampled = [[7] for _ in range(num_running)]
        # The prefills, all in one step.
        self.run()
        if self.scheduler.num_running != num_running:
            raise RuntimeError("not everything runs")

    def before(self) -> None:
        self.sampled = [[7] for _ in self.sampled]

    def run(self) -> None:
        output = self.scheduler.schedule()
        self.scheduler.update_from_output(output, self.sampled)


class Theirs(Side):
    def __init__(self, num_running: int, num_blocks: int, layout: Layout) -> None:
        self.scheduler = reference.make_scheduler(
            mkdtemp(),
            layout=layout,
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=num_running,
            max_num_batched_tokens=TOKEN_BUDGET,
        )
        factory = their_factory()
        ids = [f"r{index}" for index in range(num_running)]
        for request_id, prompt in zip(ids, decoding_prompts(num_running), strict=True):
            self.scheduler.add_request(factory.make(request_id, prompt, MAX_TOKENS))
        self.request_ids = ids
        self.before()
        self.run()
        if len(self.scheduler.running) != num_running:
            raise RuntimeError("not everything runs")

    def before(self) -> None:
        self.sampled = ModelRunnerOutput(
            req_ids=self.request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(self.request_ids)},
            sampled_token_ids=[[7] for _ in self.request_ids],
        )

    def run(self) -> None:
        output = self.scheduler.schedule()
        self.scheduler.update_from_output(output, self.sampled)


class Cold(Side):
    """A side before whose runs more memory is touched than the CPU's caches next to the core hold."""

    def __init__(self, side: Ours | Theirs) -> None:
        self.side = side
        self.memory = bytearray(64 << 20)

    def before(self) -> None:
        self.side.before()
        self.memory[::64] = bytes(len(self.memory) // 64)

    def run(self) -> None:
        self.side.run()


def run(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for num_running, layout in ((64, LAYOUT), (256, LAYOUT), (1024, LAYOUT), (1024, HYBRID)):
        repeats = BLOCK_SIZE if quick else BLOCK_SIZE * (5 if num_running == 1024 else 12)
        blocks_a_group = num_running * (256 + 2 * num_runs(repeats) + 3 * BLOCK_SIZE) // BLOCK_SIZE
        num_blocks = blocks_a_group * len(layout.groups) + 1
        ours, theirs = Ours(num_running, num_blocks, layout), Theirs(num_running, num_blocks, layout)
        case = f"{num_running} running, {layout.name}"
        rows.append(compare(QUESTION, case, ours, theirs, repeats))
        if num_running == 1024:
            rows.append(compare(QUESTION, f"{case}, cold caches", Cold(ours), Cold(theirs), repeats))
    return rows
