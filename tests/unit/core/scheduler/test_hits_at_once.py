"""Hits on what an earlier step wrote, while the step that is being made names it again, moves it or writes behind it.

Blocks of 8 tokens, hashed in units of 4. Everything that is copied is copied before a step computes.
"""

from kvledger import KVCacheManager, Sha256BlockHasher
from kvledger.core.groups.decisions import decisions_of
from kvledger.scheduler import Scheduler, SchedulerConfig, SchedulerOutput, WaitReason
from tests.groups import full, hybrid, state
from tests.helpers import request


def scheduler(**options: object) -> Scheduler:
    manager: KVCacheManager = hybrid(40, full(8), state(8), hasher=Sha256BlockHasher(4), **options)
    return Scheduler(manager, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64))


def step(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.check()
    scheduler.update_from_tokens(output, [1 if r.num_tokens <= r.num_computed_tokens else -1 for r in output.requests])
    scheduler.check()
    return output


def test_a_state_that_moves_away_is_a_hit_in_the_very_step_that_moves_it() -> None:
    """As vLLM it waits for the step after, and so does everybody behind it."""
    for decisions, first in (("0.33", 3), (decisions_of("0.33").exact(), 4)):
        engine = scheduler(decisions=decisions)
        engine.add_request(request("a", 13, max_tokens=8))
        assert [step(engine).num_tokens_by_request() for _ in range(2)] == [{"a": 8}, {"a": 4}]
        engine.add_request(request("b", 13, max_tokens=8))
        engine.add_request(request("c", 13, max_tokens=8))
        third = step(engine)
        tail, own = engine.manager.get_block_ids("a")[1][1], [copy for copy in third.block_copies if copy.group_id == 1]
        if first == 3:
            assert third.num_tokens_by_request() == {"a": 1, "b": 1, "c": 1}
            # a goes on in its block; what it was a hit for moves on, and b and c start from where it still is.
            assert [copy.source_block_id for copy in own] == [tail] * 3
            assert [copy.target_block_id for copy in own[1:]] == [engine.manager.get_block_ids(i)[1][1] for i in "bc"]
        else:
            assert third.num_tokens_by_request() == {"a": 1}
            assert engine.explain("b").reason is WaitReason.HIT_IN_WRITING
            assert step(engine).num_tokens_by_request() == {"a": 1, "b": 1, "c": 1}


def test_the_start_of_a_block_is_a_hit_while_its_end_is_written() -> None:
    """The block fills in this step, and is named for all of its 8 tokens in it; its first 4 are there already."""
    engine = scheduler()
    engine.add_request(request("a", 5, max_tokens=8))
    for num_tokens in (4, 1, 1, 1):
        assert step(engine).num_tokens_by_request() == {"a": num_tokens}
    engine.add_request(request("b", 5, max_tokens=1))
    fills = step(engine)
    assert fills.num_tokens_by_request() == {"a": 1, "b": 1}
    full_copies = [copy for copy in fills.block_copies if copy.group_id == 0]
    assert [copy.source_block_id for copy in full_copies] == [engine.manager.get_block_ids("a")[0][0]]
