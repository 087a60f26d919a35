"""What does vLLM's own schedule() cost with the ledger inside? Without and with, in turns.

    scripts/reference_python.sh compiled -m benchmarks.bench_vllm_plugin

Both sides are vLLM's scheduler in a step in which every request decodes, at all phases of their blocks; one of them
has the adapter in the place of its KVCacheManager. The way back from the workers (update_from_output) hardly asks the
manager and is not timed.
"""

import random
from tempfile import mkdtemp

from vllm.v1.outputs import ModelRunnerOutput

from benchmarks.measure import Row, compare
from benchmarks.peers.operation import Operation, num_runs
from kvledger import build_info
from kvledger.integrations.vllm.manager import VllmKVCacheManager
from tests.side_by_side import reference
from tests.side_by_side.layouts import Group, Layout

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1 << 16
SHORTEST_PROMPT = 256
ONE_GROUP = Layout("1 group", (Group("full", BLOCK_SIZE),))
# Gemma 3's shape: one group of full attention, five of windows that the prompts have outgrown.
SIX_GROUPS = Layout("6 groups", (Group("full", BLOCK_SIZE), *[Group("window", BLOCK_SIZE, window=128)] * 5))


class Schedule(Operation):
    def __init__(self, layout: Layout, num_running: int, num_steps: int, *, with_ledger: bool) -> None:
        longest = SHORTEST_PROMPT + BLOCK_SIZE + num_steps
        num_blocks = num_running * (longest // BLOCK_SIZE + 1) * len(layout.groups) + 1
        self.scheduler = reference.make_scheduler(
            mkdtemp(),
            layout=layout,
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=num_running,
            max_num_batched_tokens=num_running * longest,
        )
        if with_ledger:
            arguments = reference.manager_arguments(layout, num_blocks, MAX_MODEL_LEN)
            self.scheduler.kv_cache_manager = VllmKVCacheManager(**arguments)
        rng = random.Random(num_running)
        factory = reference.RequestFactory(layout)
        self.ids = [f"r{index}" for index in range(num_running)]
        for index, request_id in enumerate(self.ids):
            prompt = [rng.randrange(100_000) for _ in range(SHORTEST_PROMPT + index % BLOCK_SIZE)]
            self.scheduler.add_request(factory.make(request_id, prompt, max_tokens=10_000))
        # The prefills, all in one step.
        self.run()
        self.after()
        if len(self.scheduler.running) != num_running:
            raise RuntimeError("not everything runs")

    def run(self) -> None:
        self.output = self.scheduler.schedule()

    def after(self) -> None:
        sampled = ModelRunnerOutput(
            req_ids=self.ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(self.ids)},
            sampled_token_ids=[[7] for _ in self.ids],
        )
        self.scheduler.update_from_output(self.output, sampled)


def run() -> list[Row]:
    rows: list[Row] = []
    for layout in (ONE_GROUP, SIX_GROUPS):
        for num_running in (64, 256, 1024):
            repeats = BLOCK_SIZE * (4 if num_running == 1024 else 8)
            num_steps = num_runs(repeats) + 1
            ours, theirs = (Schedule(layout, num_running, num_steps, with_ledger=on) for on in (True, False))
            rows.append(compare("schedule()", f"{num_running} running, {layout.name}", ours, theirs, repeats))
    return rows


def main() -> None:
    print(build_info())
    print("| case | with the ledger | vLLM's manager | ratio |\n|---|---:|---:|---:|")
    for row in run():
        print(f"| {row.case} | {row.ours:.4g} us | {row.theirs:.4g} us | {row.ratio:.1f}x |", flush=True)


if __name__ == "__main__":
    main()
