"""Cross attention and rings: blocks of one request that no other can use."""

from tests.groups import compute, cross, full, held, hybrid, managers_of, ring, tables, window
from tests.helpers import admit, admitted, decode, hit, leave, request


def test_cross_attention_holds_the_encoder_and_never_grows() -> None:
    manager = hybrid(20, full(), cross(16))
    a = admitted(manager, "a", 5, num_encoder_tokens=9)
    assert held(manager, a) == [2, 3]
    decode(manager, a, 8)
    assert held(manager, a) == [4, 3]
    assert managers_of(manager)[1].policy.max_admission_blocks == 4


def test_a_request_without_an_encoder_holds_none_of_it() -> None:
    manager = hybrid(20, full(), cross())
    assert held(manager, admitted(manager, "a", 5)) == [2, 0]


def test_an_encoder_group_stands_beside_cached_groups() -> None:
    manager = hybrid(30, full(), window(8), cross())
    leave(manager, admitted(manager, "a", 17, num_encoder_tokens=9))
    b = request("b", 17, num_encoder_tokens=9)
    found = manager.get_computed_blocks(b)
    assert found.num_tokens == 16
    assert found.blocks.blocks[2] == []
    num_free = manager.num_free_blocks
    admit(manager, b, found=found)
    # 4 and 2 hits, a block each for the last token, 3 for the encoder: its states are computed anew.
    assert num_free - manager.num_free_blocks == 4 + 2 + 1 + 1 + 3
    manager.check()


def test_a_ring_is_one_block_for_good() -> None:
    manager = hybrid(20, full(), ring())
    a = admitted(manager, "a", 13)
    assert held(manager, a) == [4, 1]
    mine = tables(manager, a)[1]
    compute(manager, a, 9)
    assert tables(manager, a)[1] == mine
    leave(manager, a)
    assert hit(manager, request("b", 13)) == 12


def test_external_tokens_get_a_ring_but_no_encoder() -> None:
    manager = hybrid(20, full(), ring(), cross())
    a = request("a", 12, num_encoder_tokens=5)
    admit(manager, a, 4, num_external_computed_tokens=8)
    assert held(manager, a) == [3, 1, 2]
    b = request("b", [7] * 12)
    assert manager.allocate_slots(b, 0, num_external_computed_tokens=8, delay_cache_blocks=True) is not None
    assert held(manager, b) == [2, 1, 0]
    manager.check()


def test_a_fork_shares_the_encoder_and_copies_the_ring() -> None:
    manager = hybrid(20, full(), ring(), cross())
    a = admitted(manager, "a", 8, num_encoder_tokens=5)
    b = a.twin("b")
    assert manager.num_blocks_to_fork(a) == 1
    assert manager.fork(a, b) is not None
    mine, its = tables(manager, a), tables(manager, b)
    assert (mine[0], mine[2]) == (its[0], its[2])
    assert mine[1] != its[1]
    copies = manager.take_block_copies()
    assert [(c.group_id, c.source_block_id, c.target_block_id) for c in copies] == [(1, mine[1][0], its[1][0])]
    manager.check()
    leave(manager, a)
    manager.release_block_copies(copies)
    manager.free(b)
    assert manager.num_free_blocks == 20
