"""Reports from the field, section E, as the workers see them: which blocks and slots a step gives them."""

import pytest

from kvledger import KVCacheSpec
from kvledger.core.tables import NO_SLOT
from tests.groups import full, window
from tests.tables import Stack

# B57: a prompt that is cached whole computes its last token, at least, and in a block of its own


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(11, 8), (12, 8), (13, 12)])
def test_b57_what_a_cached_prompt_still_computes_goes_to_a_block_that_nobody_shares(
    num_tokens: int, num_hit: int
) -> None:
    stack = Stack(12, full())
    stack.add("a", 16, max_tokens=9)
    stack.step()
    stack.add("b", num_tokens)
    output = stack.step()
    assert output.ranges_by_request() == {"a": (16, 17), "b": (num_hit, num_tokens)}
    num_shared = num_hit // 4
    assert stack.row("b")[:num_shared] == stack.row("a")[:num_shared]
    own = stack.row("b")[num_shared]
    assert own not in stack.row("a")
    slots = stack.tables.slots(0, [stack.tables.row("b")], [num_hit], [num_tokens - num_hit])
    assert slots.tolist() == [own * 4 + offset for offset in range(num_tokens - num_hit)]


# B59: drafts fill the pool and are rejected


def test_b59_rejected_drafts_leave_the_row_as_it_is_and_their_slots_are_written_again() -> None:
    stack = Stack(4, full(), max_num_batched_tokens=16)
    stack.add("a", 8, max_tokens=9)
    stack.step()
    # The sampled token and 7 drafts take the last two blocks; then drafts that the pool has no room for are left out.
    for num_drafts, first, num_new, grown in ((7, 8, 8, {"a": ([3, 4],)}), (7, 9, 1, {}), (5, 10, 6, {})):
        stack.scheduler.update_draft_tokens("a", [7] * num_drafts)
        output = stack.step()
        assert output.ranges_by_request() == {"a": (first, first + num_new)}
        assert output.new_block_ids_by_request() == grown
        assert stack.row("a") == stack.ids("a") == [1, 2, 3, 4]
        # Token 8 is the first of block 3, whose slots start at 12.
        slots = stack.tables.slots(0, [0], [first], [num_new])
        assert slots.tolist() == list(range(first + 4, first + 4 + num_new))
    assert stack.manager.num_free_blocks == 0


# B61: every block handed out is in exactly one step's output


@pytest.mark.parametrize("specs", [[full()], [full(), window(4)], [full(8), full(4), window(8)]])
def test_b61_the_ids_of_all_steps_together_are_the_table(specs: list[KVCacheSpec]) -> None:
    stack = Stack(40, *specs)
    stack.add("a", 6, max_tokens=30)
    reported: list[list[int]] = [[] for _ in specs]
    for _ in range(14):
        output = stack.step()
        for data in output.new_requests:
            for group_id, block_ids in enumerate(data.block_ids):
                reported[group_id] += block_ids
        for grown in output.new_block_ids_by_request().values():
            for group_id, block_ids in enumerate(grown):
                reported[group_id] += block_ids
    # 6 + 13 tokens computed: three boundaries of 4-token blocks passed while decoding.
    for group_id, spec in enumerate(specs):
        row = stack.row("a", group_id)
        assert len(row) == -(-19 // spec.block_size)
        assert reported[group_id] == row
        slots = stack.tables.slots(group_id, [0], [0], [19]).tolist()
        assert len(set(slots)) == 19
        assert NO_SLOT not in slots
