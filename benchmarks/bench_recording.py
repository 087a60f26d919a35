"""What does it cost to record traffic inside vLLM? Without and with, in turns; CPU time of the whole process.

    scripts/reference_python.sh compiled -m benchmarks.bench_recording

Both sides are vLLM's scheduler with its own manager, 128 requests that run, and one that ends and one that comes in
every step: more than a server has, whose answers take hundreds of steps. There is no model: a real step takes 10 to
50 ms besides.
"""

import gc
import os
from statistics import median
from tempfile import TemporaryDirectory, mkdtemp
from time import process_time
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput

from kvledger import build_info
from kvledger.integrations.vllm.plugin import RECORD
from kvledger.integrations.vllm.recorder import TrafficRecorder
from tests.side_by_side import reference
from tests.side_by_side.layouts import Group, Layout

BLOCK_SIZE = 16
NUM_RUNNING = 128
PROMPT_TOKENS = 2048
STEPS = 128
ROUNDS = 15
LAYOUT = Layout("1 group", (Group("full", BLOCK_SIZE),))


class Traffic:
    def __init__(self, records: bool) -> None:
        self.scheduler = reference.make_scheduler(
            mkdtemp(),
            layout=LAYOUT,
            num_blocks=(NUM_RUNNING + 2) * (PROMPT_TOKENS // BLOCK_SIZE + NUM_RUNNING),
            max_model_len=1 << 14,
            max_num_seqs=NUM_RUNNING,
            max_num_batched_tokens=4 * PROMPT_TOKENS,
        )
        self.factory = reference.RequestFactory(LAYOUT)
        self.num_added = 0
        self.recorder: TrafficRecorder | None = None
        if records:
            self.recorder = TrafficRecorder(self.scheduler, self.scheduler.vllm_config)
            self.recorder.attach()
        for _ in range(2 * NUM_RUNNING):
            self.step()

    def step(self) -> None:
        """One comes; of those that run, one ends, once all seats are taken."""
        self.num_added += 1
        prompt = [self.num_added % 4] * 1024 + [self.num_added] * (PROMPT_TOKENS - 1024)
        self.scheduler.add_request(self.factory.make(f"r{self.num_added}", prompt, max_tokens=NUM_RUNNING))
        output = self.scheduler.schedule()
        self.scheduler.update_from_output(output, self.answer(output))

    def answer(self, output: Any) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        tokens = [[] if requests[each].is_prefill_chunk else [7] for each in ids]
        return ModelRunnerOutput(ids, {each: row for row, each in enumerate(ids)}, tokens)

    def run(self) -> float:
        """Microseconds of CPU a step, what the recorder's thread takes included."""
        started = process_time()
        for _ in range(STEPS):
            self.step()
        log = None if self.recorder is None else self.recorder.log
        while log is not None and log._queue.qsize() > 0:
            pass
        return (process_time() - started) / STEPS * 1e6


def main() -> None:
    print(build_info())
    with TemporaryDirectory() as directory:
        os.environ[RECORD] = os.path.join(directory, "traffic.jsonl.gz")
        off, on = Traffic(records=False), Traffic(records=True)
        gc.freeze()
        times = [(off.run(), on.run()) for _ in range(ROUNDS)]
        assert on.recorder is not None
        on.recorder.close()
        size = os.path.getsize(on.recorder.log.file)
        num_rows = on.recorder.log.num_written
    without, recording = (median(column) for column in zip(*times, strict=True))
    extra = median([with_it - without_it for without_it, with_it in times])
    print(f"a step without {without:,.0f} us, recording {recording:,.0f} us: {extra:+,.0f} us a request that ends")
    print(f"{size / num_rows:,.0f} bytes a request of {PROMPT_TOKENS} tokens, packed")


if __name__ == "__main__":
    main()
