"""500 requests of a real chat service through both schedulers: per step the same tokens, block ids and preemptions."""

from pathlib import Path

from kvledger import Sha256BlockHasher
from kvledger.traces.formats import open_trace, sample_path
from kvledger.traces.prompts import TokenPrompts
from tests.side_by_side.layouts import Group, Layout
from tests.side_by_side.scheduler_pair import Limits, SchedulerPair, Work

NUM_REQUESTS = 500
BLOCK_SIZE = 16
# About forty requests of this trace: small enough to preempt, large enough to hit.
NUM_BLOCKS = 30_000


def work() -> list[Work]:
    maker = TokenPrompts(Sha256BlockHasher(BLOCK_SIZE))
    made: list[Work] = []
    for serial, recorded in enumerate(open_trace(sample_path()).requests()):
        if len(made) == NUM_REQUESTS:
            break
        request = maker.make(recorded, serial)
        prompt = request.tokens.token_ids(0, request.num_tokens)
        made.append(Work(str(serial), prompt, request.max_tokens))
    return made


def test_the_real_trace(tmp_path: Path) -> None:
    limits = Limits(
        num_blocks=NUM_BLOCKS,
        layout=Layout("full", (Group("full", BLOCK_SIZE),)),
        max_model_len=131_072,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        reserve_full_sequence=False,
    )
    pair = SchedulerPair(limits, str(tmp_path), seed=0, steps_between_states=100)
    # What outgrows the pool ends with an error in ours and stalls vLLM, so it is left out.
    fitting = [each for each in work() if len(each.prompt) + each.max_tokens < (NUM_BLOCKS - 1) * BLOCK_SIZE]
    assert len(fitting) > 450
    waiting = fitting.copy()
    while waiting:
        for each in waiting[:3]:
            pair.add(each)
        del waiting[:3]
        pair.step()
    pair.drain()
    assert pair.num_tokens == sum(each.max_tokens for each in fitting)
    assert pair.ours.num_preemptions > 0
    stats = pair.ours.manager.take_prefix_cache_stats()
    assert 0 < stats.hits < stats.queries
