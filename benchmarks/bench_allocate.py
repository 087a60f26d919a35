"""What does one decode step of one request cost the ledger, by what it does to blocks? Append the token, allocate."""

from benchmarks.bench_decode_step import OursWithAppend, TheirsWithAppend
from benchmarks.measure import Row, Side, compare, num_runs
from benchmarks.subjects import BLOCK_SIZE, prompts

QUESTION = "append + allocate_slots, by phase"
NUM_RUNNING = 256
PROMPT_TOKENS = 256
# Case -> tokens in the last block after the step.
PHASES = {"stays within a block": 8, "fills a block": 0, "starts a block": 1}


def at_one_phase(side: OursWithAppend | TheirsWithAppend, phase: int) -> Side:
    """The side with all its requests at the same phase, of which only that phase's steps are timed."""

    class OnePhase(Side):
        def before(self) -> None:
            for request in side.requests:
                request.num_computed_tokens += 1
            while (side.requests[0].num_tokens + 1) % BLOCK_SIZE != phase:
                side.run()
                for request in side.requests:
                    request.num_computed_tokens += 1

        def run(self) -> None:
            side.run()

    return OnePhase()


def run(quick: bool) -> list[Row]:
    return [_row(case, phase, 3 if quick else 15) for case, phase in PHASES.items()]


def _row(case: str, phase: int, repeats: int) -> Row:
    # A round of all phases for each timed step.
    num_blocks = NUM_RUNNING * (PROMPT_TOKENS // BLOCK_SIZE + num_runs(repeats) + 4) + 1
    same_length = prompts(NUM_RUNNING, PROMPT_TOKENS, seed=4)
    ours, theirs = OursWithAppend(same_length, num_blocks), TheirsWithAppend(same_length, num_blocks)
    sides = at_one_phase(ours, phase), at_one_phase(theirs, phase)
    return compare(QUESTION, case, *sides, repeats, per=NUM_RUNNING)
