"""Recurrent states: mode "none" and mode "align"; blocks of 4 tokens unless said otherwise."""

from typing import Any

import pytest

from kvledger import KVCacheManager, Request, Sha256BlockHasher
from kvledger.core.groups.aligned_mamba import StateBlocks, checkpoint_position
from kvledger.core.groups.decisions import decisions_of
from kvledger.core.groups.policy import DraftRule, GroupPolicy
from tests.groups import chunks, compute, full, held, hybrid, managers_of, record_of, state, tables
from tests.helpers import admit, admitted, draft, hit, leave, pool_of, request, snapshot
from tests.tables import Stack

# Mode "none"


def test_without_caching_a_request_holds_one_state_and_one_a_draft() -> None:
    manager = hybrid(20, full(), state(4096, "none", drafts=2), enable_caching=False)
    a = admitted(manager, "a", 9)
    assert held(manager, a) == [3, 3]
    compute(manager, a, 30)
    assert held(manager, a)[1] == 3 == managers_of(manager)[1].policy.max_admission_blocks
    leave(manager, a)
    assert hit(manager, request("b", 9)) == 0


def test_a_fork_copies_every_state() -> None:
    manager = hybrid(20, full(), state(4096, "none", drafts=1), enable_caching=False)
    a = admitted(manager, "a", 8)
    b = a.twin("b")
    assert manager.num_blocks_to_fork(a) == 2
    assert manager.fork(a, b) is not None
    copies = manager.take_block_copies()
    # After an accepted draft the state lies in the second block.
    assert [c.source_block_id for c in copies] == tables(manager, a)[1]
    assert [c.target_block_id for c in copies] == tables(manager, b)[1]
    manager.release_block_copies(copies)
    leave(manager, a)
    manager.free(b)
    assert manager.num_free_blocks == 20


# Mode "align": what is held


def test_states_are_left_behind_at_block_boundaries() -> None:
    manager = hybrid(20, full(), state())
    a = request("a", 13)
    assert chunks(manager, a, 4) == [4, 4, 4, 1]
    # Of full attention 4 blocks. The state after 8 went when the step from 12 on began; the one after 12 is the last
    # boundary, the running state stands behind it.
    assert [block_id != 0 for block_id in tables(manager, a)[1]] == [False, False, True, True]
    # All boundary states that were left are cached.
    assert [hit(manager, request("b", n)) for n in (4, 5, 9, 13, 14)] == [0, 4, 8, 12, 12]


def test_a_long_chunk_leaves_null_entries() -> None:
    manager = hybrid(20, full(), state())
    a = request("a", 13)
    assert chunks(manager, a) == [12, 1]
    assert [block_id != 0 for block_id in tables(manager, a)[1]] == [False, False, True, True]
    assert [hit(manager, request("b", n)) for n in (9, 13)] == [0, 12]


def test_a_request_holds_what_is_reserved_for_it() -> None:
    manager = hybrid(40, full(), state(drafts=2))
    a = request("a", 9)
    chunks(manager, a)
    most = managers_of(manager)[1].policy.max_admission_blocks
    assert most == 4
    for accepted in (0, 1, 2, 2, 0, 2, 1, 1, 2):
        manager.start_step()
        assert draft(manager, a, 2, accepted) is not None
        assert held(manager, a)[1] <= most
        manager.check()


def test_draft_states_move_along() -> None:
    manager = hybrid(40, state(drafts=2))
    a = admitted(manager, "a", 4)
    assert tables(manager, a) == ([1, 2, 3],)
    manager.start_step()
    compute(manager, a, 1)
    # The boundary state stays at its place; the drafts' blocks 2 and 3 are taken over and one block is new.
    assert tables(manager, a) == ([1, 2, 3, 4],)
    manager.start_step()
    compute(manager, a, 4)
    # Block 2 was the running state: kept until it was read. Block 3 and 4 moved behind it.
    assert tables(manager, a) == ([0, 2, 3, 4, 5],)


def test_a_state_cached_in_this_step_is_nobodys_hit_yet() -> None:
    manager = hybrid(20, full(), state())
    manager.start_step()
    a = admitted(manager, "a", 8)
    b = request("b", 9)
    found = manager.get_computed_blocks(b)
    assert found.num_tokens == 8
    before = snapshot(pool_of(manager))
    assert admit(manager, b, found=found) is None
    assert snapshot(pool_of(manager)) == before
    manager.start_step()
    assert admit(manager, b, found=found) is not None
    manager.check()
    leave(manager, a)


def test_a_fork_copies_the_running_state_and_goes_on_from_it() -> None:
    manager = hybrid(30, full(), state(drafts=1))
    a = request("a", 10)
    chunks(manager, a)
    b = a.twin("b")
    assert manager.num_blocks_to_fork(a) == 1 + 2
    assert manager.fork(a, b) is not None
    b.num_computed_tokens = 10
    running = tables(manager, a)[1][2:]
    assert tables(manager, b)[1][:2] == [0, 0]
    copies = [c for c in manager.take_block_copies() if c.group_id == 1]
    assert [c.source_block_id for c in copies] == running
    assert [c.target_block_id for c in copies] == tables(manager, b)[1][2:]
    for length in range(11, 20):
        manager.start_step()
        assert compute(manager, b, 1)
        assert held(manager, b)[1] <= 3, length
        manager.check()


def test_a_state_that_a_connector_delivers_has_a_block_of_its_own() -> None:
    manager = hybrid(4, full(), state())
    a = request("a", 12)
    # Full attention takes 3 blocks, the delivered state one and the running state another: 5 do not fit.
    before = snapshot(pool_of(manager))
    assert admit(manager, a, 4, num_external_computed_tokens=8) is None
    assert snapshot(pool_of(manager)) == before
    # Within one block the step goes on in the delivered state: 3 and 1.
    assert admit(manager, a, 2, num_external_computed_tokens=10) is not None
    assert held(manager, a) == [3, 1]


def test_a_state_of_the_mode_none_is_nobody_elses() -> None:
    """Its blocks are those of a step's tokens, and the state runs on: none of them stands for a prefix."""
    manager = hybrid(20, full(), state(mode="none"))
    leave(manager, admitted(manager, "a", 17))
    assert hit(manager, request("b", 17)) == 0
    assert manager.group_occupancies()[1].num_cached == 0
    manager.check()


# Drafts and retention


def test_a_draft_has_no_recurrent_layers() -> None:
    manager = hybrid(40, full(), state(drafts=1), drafts=DraftRule(hashes_ahead=False))
    chunks(manager, request("a", 17))
    # Full attention gives up a block of its 16 tokens; the state after 12 was left behind for that.
    assert hit(manager, request("b", 17)) == 12


@pytest.mark.parametrize(
    ("num_tokens", "unit", "drops", "num_ahead", "position"),
    [
        (17, 4, False, 0, 16),
        (16, 4, False, 0, 12),
        (17, 4, True, 0, 12),
        (16, 4, True, 0, 12),
        (3, 4, True, 0, 0),
        (1, 4, False, 0, 0),
        # A hash that covers the token behind needs it; one that covers three needs all of them.
        (17, 4, False, 1, 16),
        (18, 4, False, 3, 12),
        (19, 4, False, 3, 16),
        (2, 4, False, 3, 0),
    ],
)
def test_where_a_prompt_sent_again_can_resume(
    num_tokens: int, unit: int, drops: bool, num_ahead: int, position: int
) -> None:
    policy = GroupPolicy(4, 4, 4, any_draft=drops, num_hash_lookahead=num_ahead)
    assert checkpoint_position(num_tokens, unit, policy) == position


def hits_by_length(retention: int | None, up_to: int, prompt: int = 33) -> list[int]:
    manager = hybrid(80, full(), state(), retention_interval=retention)
    chunks(manager, request("a", prompt), 4)
    return [hit(manager, request("b", n)) for n in range(1, up_to, 4)]


def test_retention_of_states() -> None:
    assert hits_by_length(None, 34) == [0, 4, 8, 12, 16, 20, 24, 28, 32]
    # Once in 12 tokens, and where the same prompt resumes.
    assert hits_by_length(12, 34) == [0, 0, 0, 12, 12, 12, 24, 24, 32]
    assert hits_by_length(0, 34) == [0, 0, 0, 0, 0, 0, 0, 0, 32]


# States inside blocks of 16, hashes of 4


def fine(retention: int | None = None, checkpoint: int = 0, usable: int = 60, **options: Any) -> KVCacheManager:
    return hybrid(usable, full(), state(16, checkpoint=checkpoint), retention_interval=retention, **options)


def test_chunks_end_where_a_state_can_be_cached() -> None:
    manager = fine()
    a = request("a", 43)
    # At block ends, then at the prompt's last hash unit, then the rest.
    assert chunks(manager, a, 64) == [32, 8, 3]
    assert [hit(manager, request("b", n)) for n in (33, 41, 43, 45)] == [32, 40, 40, 40]
    # A block that is longer than a chunk is crossed in several.
    assert chunks(manager, request("b", [7] * 43), 6) == [6, 6, 4, 6, 6, 4, 6, 2, 3]


def test_a_chunk_waits_for_the_budget_of_a_block() -> None:
    manager = hybrid(20, full(), state())
    a = request("a", 13)
    # 3 tokens of budget reach no boundary; with steps of up to 8 it waits, with steps of up to 3 it goes on.
    assert manager.clip_chunk(a, 0, 3, 8) == 0
    assert manager.clip_chunk(a, 0, 3, 3) == 3
    assert manager.clip_chunk(a, 3, 8, 8) == 1
    assert manager.clip_chunk(a, 12, 1, 8) == 1
    # A decode is never cut.
    assert manager.clip_chunk(a, 13, 3, 8) == 3


def test_several_states_stop_a_chunk_where_one_alone_would() -> None:
    one, three = hybrid(40, full(), state(16)), hybrid(40, full(), *[state(16)] * 3)
    # 12 is the last hash unit of 13 tokens, inside the block; each group stops there, none waits for a whole block.
    assert chunks(one, request("a", 13)) == chunks(three, request("a", 13)) == [12, 1]
    # Of 43 tokens: the last block that ends before, the last hash unit, the rest.
    assert chunks(one, request("b", [7] * 43)) == chunks(three, request("b", [7] * 43)) == [32, 8, 3]


def test_states_of_two_block_sizes_stop_at_the_ends_of_both() -> None:
    manager = hybrid(40, full(), state(8), state(16))
    # 16 is the last end of a block of 16, 24 of one of 8, 28 the last hash unit.
    assert chunks(manager, request("a", 30)) == [16, 8, 4, 2]


def test_several_draft_modules_keep_their_distance_to_the_prompts_end() -> None:
    manager = hybrid(20, full(), drafts=DraftRule(num_lookahead_tokens=3, hashes_ahead=False))
    a = request("a", 13)
    assert manager.clips_chunks
    # 12 would leave one token, and modules would guess what the prompt has: 3 stay.
    assert [manager.clip_chunk(a, 0, n, 64) for n in (8, 11, 12, 13)] == [8, 10, 10, 13]
    assert manager.clip_chunk(a, 10, 2, 64) == 0
    # Steps of 2 tokens cannot leave 3 and then compute 3 at a time.
    assert manager.clip_chunk(a, 10, 2, 2) == 2
    assert not hybrid(20, full(), drafts=DraftRule(hashes_ahead=False)).clips_chunks


def test_the_state_at_the_prompts_end_is_copied_away_before_it_is_written() -> None:
    """The request keeps its block; the copy takes over what it was a hit for."""
    manager = fine()
    a = request("a", 27)
    found = manager.get_computed_blocks(a)
    admit(manager, a, 16, found=found)
    manager.start_step()
    compute(manager, a, 8)
    mine = tables(manager, a)[1][1]
    block = pool_of(manager).blocks[mine]
    assert (int(block.num_hash_tokens), record_of(manager, a, 1).shared_tail) == (24, block)
    manager.start_step()
    compute(manager, a, 3)
    assert tables(manager, a)[1][1] == mine
    (copy,) = manager.take_block_copies()
    assert (copy.group_id, copy.source_block_id) == (1, mine)
    kept = pool_of(manager).blocks[copy.target_block_id]
    assert (block.block_hash, int(kept.num_hash_tokens), int(kept.ref_cnt)) == (None, 24, 1)
    manager.check()
    # In the step that copies the state it is still where it was; when that is done, it is where it was copied to.
    for request_id, source in (("b", mine), ("c", copy.target_block_id)):
        other_request = request(request_id, 27)
        assert admit(manager, other_request, 3, found=manager.get_computed_blocks(other_request)) is not None
        (second,) = manager.take_block_copies()
        assert (second.source_block_id, second.target_block_id) == (source, tables(manager, other_request)[1][1])
        manager.check()
        if request_id == "b":
            manager.release_block_copies([copy, second])
    assert int(kept.ref_cnt) == 1


def test_who_hits_a_state_inside_a_block_goes_on_in_a_copy() -> None:
    manager = fine()
    chunks(manager, request("a", 27))
    manager.release_block_copies(manager.take_block_copies())
    b = request("b", 27)
    found = manager.get_computed_blocks(b)
    tail = int(found.blocks.blocks[1][1].block_id)
    blocks = admit(manager, b, found=found)
    assert blocks is not None
    assert blocks.get_block_ids()[1] == tables(manager, b)[1][1:] != [tail]
    (copy,) = manager.take_block_copies()
    assert (copy.source_block_id, copy.target_block_id) == (tail, tables(manager, b)[1][1])
    assert int(pool_of(manager).blocks[tail].num_hash_tokens) == 24
    manager.check()


def test_a_shared_prefix_is_a_stop_of_the_next_prefill() -> None:
    manager = fine()
    chunks(manager, request("a", 42))
    b = request("b", list(range(20)) + [5] * 18)
    found = manager.get_computed_blocks(b)
    # Full attention has 20 tokens of it; the only states are those after 32 and 40.
    assert (found.num_tokens, found.shared_prefix_boundary) == (0, 20)
    # The stop is at the block below, 16; then the prompt's last hash unit.
    assert chunks(manager, b, 24) == [16, 16, 4, 2]
    assert hit(manager, request("c", list(range(20)) + [6] * 18)) == 16


def test_a_shared_prefix_can_be_pinned_where_it_ends() -> None:
    manager = fine(pins_shared_prefix=True, drafts=DraftRule(hashes_ahead=False), usable=90)
    chunks(manager, request("a", 42))
    b = request("b", list(range(24)) + [5] * 18)
    found = manager.get_computed_blocks(b)
    # 24 tokens are shared, of which the draft gives up a unit; the state below is the one after 16.
    assert (found.num_tokens, found.shared_prefix_boundary) == (16, 20)
    assert chunks(manager, b, 16)[0] == 4
    assert hit(manager, request("c", list(range(24)) + [6] * 18)) == 20


# Checkpoints: states that a prefill exports on its way


def test_one_prefill_step_also_leaves_the_state_that_others_can_resume_from() -> None:
    manager = fine(checkpoint=4)
    a = request("a", 43)
    # No stop at 32 or 40: the kernel writes the state after 40 while it goes on to 43.
    assert chunks(manager, a) == [43]
    assert held(manager, a)[1] == 2
    record = record_of(manager, a, 1)
    assert isinstance(record, StateBlocks)
    assert (record.checkpoint, record.checkpoint_index) == (40, 1)
    assert hit(manager, request("b", 43)) == 40
    manager.check()


def test_checkpoints_with_sparse_retention_only_at_the_end() -> None:
    for retention, hits in [(None, [32, 80]), (0, [0, 80])]:
        manager = fine(retention=retention, checkpoint=4)
        a = request("a", 83)
        assert chunks(manager, a, 40) == [32, 32, 19]
        assert [hit(manager, request("b", n)) for n in (35, 83)] == hits


def test_a_checkpoint_that_nobody_can_use_is_not_named() -> None:
    """A chunk in the middle of a prompt exports a state that is neither a segment's end nor the prompt's."""
    manager = fine(checkpoint=4)
    a = request("a", 100)
    found = manager.get_computed_blocks(a)
    admit(manager, a, 44, found=found)
    record = record_of(manager, a, 1)
    assert isinstance(record, StateBlocks)
    assert record.checkpoint == 40
    assert pool_of(manager).blocks[tables(manager, a)[1][1]].block_hash is None
    assert hit(manager, request("b", 43)) == 0
    manager.check()


def test_a_name_that_a_checkpoint_takes_from_its_block_does_not_keep_others_waiting() -> None:
    """A chunk of 60 tokens leaves the state after 56 in the block of tokens 32 to 47, which it named by its end first.
    The state after 48 that others start from is an older one."""
    manager = hybrid(80, full(), state(16, checkpoint=4))
    a = request("a", 49)
    assert compute(manager, a, 48)
    leave(manager, a)
    manager.start_step()
    assert compute(manager, request("b", 60), 60)
    c = request("c", 52)
    found = manager.get_computed_blocks(c)
    assert found.num_tokens == 48
    assert manager.allocate_slots(c, 4, found) is not None
    manager.check()


def test_no_checkpoint_in_a_decode_step_whose_drafts_cross_one() -> None:
    manager = hybrid(60, full(), state(16, drafts=8, checkpoint=4))
    a = request("a", 28)
    chunks(manager, a)
    manager.start_step()
    num_before = held(manager, a)[1]
    assert draft(manager, a, 8, 0) is not None
    record = record_of(manager, a, 1)
    assert isinstance(record, StateBlocks)
    assert record.checkpoint == 0
    assert held(manager, a)[1] <= num_before + 1
    manager.check()


def test_no_checkpoint_behind_a_lone_token_that_is_padded_with_drafts() -> None:
    stack = Stack(16, full(2), state(2, drafts=2, checkpoint=2), num_speculative_tokens=2)
    stack.add("a", 9)
    stack.steps(2)
    # Its one token and 2 drafts cross a block, whose tokens nobody knows yet.
    stack.add("b", [7])
    output = stack.step()
    assert output.num_tokens_by_request() == {"a": 1, "b": 3}
    record = record_of(stack.manager, output.requests[1], 1)
    assert isinstance(record, StateBlocks)
    assert record.checkpoint == 0
    assert hit(stack.manager, request("c", [7, 8, 9, 10])) == 0


def test_a_state_that_has_gone_on_is_not_named_for_where_it_was() -> None:
    # Of 4 draft modules the last 3 tokens are not settled: at 17 tokens, 14 are, the last hash unit of this prompt that
    # a draft can use. The state in that block is the one after 16.
    manager = hybrid(40, full(8), state(8), hasher=Sha256BlockHasher(2), drafts=DraftRule(4), decisions="0.32")
    a = request("a", 16)
    assert chunks(manager, a) == [8, 4, 4]
    for _ in range(3):
        manager.start_step()
        assert compute(manager, a, 1)
        assert [block.num_hash_tokens for block in record_of(manager, a, 1).blocks[1:]] == [0, 0]
    manager.start_step()
    assert hit(manager, request("b", 17)) == 8


def test_exact_decisions_name_such_a_state_as_vllm_does() -> None:
    """b would go on at 14 from the state after 16; only inside vLLM, and in comparisons with it."""
    rules = decisions_of("0.32").exact()
    manager = hybrid(40, full(8), state(8), hasher=Sha256BlockHasher(2), drafts=DraftRule(4), decisions=rules)
    a = request("a", 16)
    assert chunks(manager, a) == [8, 4, 4]
    manager.start_step()
    assert compute(manager, a, 1)
    assert [block.num_hash_tokens for block in record_of(manager, a, 1).blocks[1:]] == [14, 0]
    for _ in range(2):
        manager.start_step()
        assert compute(manager, a, 1)
    manager.start_step()
    assert hit(manager, request("b", 17)) == 14


def test_two_steps_in_flight_hold_one_state_more_than_is_reserved() -> None:
    """As in vLLM: sizing counts the running state and the last boundary, not the one a step in flight started from."""
    manager = hybrid(40, full(), state())
    a: Request = request("a", 33)
    for in_flight in (0, 8, 8):
        manager.start_step()
        a.num_in_flight_tokens = in_flight
        assert (admit(manager, a, 8) is not None) if in_flight == 0 else compute(manager, a, 8)
    assert held(manager, a)[1] == 3 == managers_of(manager)[1].policy.max_admission_blocks + 1
