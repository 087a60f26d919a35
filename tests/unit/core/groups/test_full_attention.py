"""Full attention and MLA: blocks are only appended; hits are runs from the start; tails inside blocks."""

import pytest

from kvledger import KVCacheManager, KVCacheSpec, Request
from tests.groups import chunks, compute, full, groups_of, held, hybrid, managers_of, mla, sink, state, tables
from tests.helpers import admit, admitted, decode, hit, leave, ledger, other, pool_of, request


@pytest.mark.parametrize("spec", [full(), mla(), sink()])
def test_every_token_keeps_its_block(spec: KVCacheSpec) -> None:
    manager = hybrid(20, spec)
    a = admitted(manager, "a", 6)
    decode(manager, a, 10)
    assert held(manager, a) == [4]
    assert managers_of(manager)[0].policy.max_admission_blocks == 4096 // 4


def test_a_hit_ends_at_the_first_block_that_is_missing() -> None:
    manager = ledger(usable=8)
    leave(manager, admitted(manager, "a", 17))
    assert hit(manager, request("b", 17)) == 16
    manager.evict_blocks([2])
    # Blocks 3 and 4 are cached still, but unreachable.
    assert hit(manager, request("b", 17)) == 4


def test_groups_that_are_looked_up_together_must_all_have_a_block() -> None:
    manager = hybrid(20, full(), full(), full(8))
    a = admitted(manager, "a", 17)
    manager.evict_blocks(tables(manager, a)[1][2:3])
    # The second of the equal groups lost its third block: 8 tokens are left, in one block of the third group.
    assert [len(blocks) for blocks in manager.get_computed_blocks(request("b", 17)).blocks.blocks] == [2, 2, 1]


# Hits inside blocks: full blocks of 16 beside states of 16, hashes of 4 (a third group has blocks of 4).


def fine() -> tuple[KVCacheSpec, ...]:
    return full(16), state(16), full(4)


def in_steps(usable: int, prompt: int, *specs: KVCacheSpec) -> tuple[KVCacheManager, Request]:
    """A request whose chunks end where states can be cached."""
    manager = hybrid(usable, *specs)
    a = request("a", prompt)
    assert chunks(manager, a)
    return manager, a


def test_the_end_of_a_prompt_is_a_hit_inside_its_block() -> None:
    manager, _ = in_steps(40, 27, *fine())
    # The prompt's last whole hash unit ends at 24: 16 tokens in the first block, 8 in the second.
    again = request("b", 27)
    found = manager.get_computed_blocks(again)
    assert found.num_tokens == 24
    assert [len(blocks) for blocks in found.blocks.blocks] == [2, 2, 6]
    # A prompt that differs behind token 20 shares the first block only: units of 4 in a block are not all kept.
    assert hit(manager, request("c", list(range(20)) + [7] * 9)) == 16


def test_a_shared_tail_is_copied_before_it_is_written() -> None:
    manager, _ = in_steps(40, 27, *fine())
    manager.take_block_copies()
    manager.start_step()
    b = request("b", list(range(24)) + other(6))
    found = manager.get_computed_blocks(b)
    assert found.num_tokens == 24
    tail = int(found.blocks.blocks[0][1].block_id)
    assert admit(manager, b, found=found) is not None
    mine = tables(manager, b)[0][1]
    assert mine != tail
    copies = [c for c in manager.take_block_copies() if c.group_id == 0]
    assert [(c.source_block_id, c.target_block_id) for c in copies] == [(tail, mine)]
    # a and the copy hold the source; b and the copy hold the target.
    assert [int(pool_of(manager).blocks[i].ref_cnt) for i in (tail, mine)] == [2, 2]
    manager.check()


def test_a_hit_inside_a_block_counts_its_copy() -> None:
    manager, a = in_steps(40, 27, *fine())
    manager.release_block_copies(manager.take_block_copies())
    leave(manager, a)
    manager.start_step()
    b = request("b", 27)
    found = manager.get_computed_blocks(b)
    num_free = manager.num_free_blocks
    assert admit(manager, b, found=found) is not None
    # Full: 2 hits and a copy. State: 1 hit (the boundary state is not needed) and its copy. Fine: 6 hits and 1 new.
    assert num_free - manager.num_free_blocks == 3 + 2 + 7


def test_a_block_written_in_this_step_is_not_copied_in_it() -> None:
    manager = hybrid(60, full(8), state(8), full(4))
    a = request("a", 5)
    assert chunks(manager, a) == [4, 1]
    wide, _, narrow = tables(manager, a)
    leave(manager, a)
    manager.release_block_copies(manager.take_block_copies())
    # Of its prefix of 4 tokens only the state is left. Somebody computes those tokens again, and in the same step
    # another shares 8 tokens with him, of which the state has 4: half of a block that is written in this very step.
    manager.evict_blocks([*wide, *narrow])
    manager.start_step()
    c = request("c", 17)
    found = manager.get_computed_blocks(c)
    assert found.num_tokens == 0
    assert admit(manager, c, 16, found=found) is not None
    b = request("b", [*range(9), *other(5)])
    found = manager.get_computed_blocks(b)
    written = {block_id for table in tables(manager, c) for block_id in table}
    admit(manager, b, found=found)
    assert [copy.source_block_id for copy in manager.take_block_copies() if copy.source_block_id in written] == []


def test_a_full_block_drops_the_hash_of_its_tail() -> None:
    manager, a = in_steps(40, 27, *fine())
    tail = tables(manager, a)[0][1]
    block = pool_of(manager).blocks[tail]
    assert int(block.num_hash_tokens) == 24
    for _ in range(5):
        manager.start_step()
        assert compute(manager, a, 1)
    assert int(block.num_hash_tokens) == 32
    manager.check()


def test_groups_of_equal_layers_are_one_spec() -> None:
    assert groups_of(full(), full())[0].spec == groups_of(full(), full())[1].spec
