"""A spec and a manager of one's own, from interpreted code: those of docs/attention-types.md, put to the test.

Attention that looks back one block: a token reads its own block and the one before.
"""

from dataclasses import dataclass

import pytest

from kvledger import KVCacheSpec
from kvledger.core.groups.base import GroupBlocks, GroupHit, SingleTypeKVCacheManager
from kvledger.core.groups.registry import ManagerRegistry
from tests.groups import compute, full, held, hybrid, managers_of, tables, window
from tests.helpers import admit, admitted, hit, leave, request
from tests.unit.core.groups.test_sliding_window import walk


@dataclass(frozen=True)
class LookBackSpec(KVCacheSpec):
    bytes_per_token: int = 64

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.bytes_per_token

    def max_admission_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        in_flight = -(-(max_in_flight_tokens - 1) // self.block_size)
        return min(-(-max_model_len // self.block_size), in_flight + 2)


class LookBackManager(SingleTypeKVCacheManager):
    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens // self.block_size - 1) * self.block_size

    def next_release(self, held: GroupBlocks) -> int:
        return (held.num_released_blocks + 2) * self.block_size

    def find_longest_hit(
        self, block_hashes: list[bytes], max_tokens: int, group_ids: list[int], drops_last: bool
    ) -> GroupHit:
        for end in range(max_tokens // self.block_size, 0, -1):
            num_tokens = end * self.block_size
            if num_tokens % self.policy.hit_alignment == 0:
                block_hash = block_hashes[end * self.hashes_per_block - 1]
                found = [self.pool.get_cached_block(block_hash, group_id) for group_id in group_ids]
                tables = [[*[self.pool.null_block] * (end - 1), block] for block in found if block is not None]
                if len(tables) == len(group_ids):
                    return GroupHit(tables, num_tokens)
        return GroupHit([[] for _ in group_ids], 0)


def registry() -> ManagerRegistry:
    made = ManagerRegistry()
    made.register(LookBackSpec, LookBackManager)
    return made


def test_it_holds_two_blocks_of_a_decoding_request() -> None:
    manager = hybrid(20, LookBackSpec(4), registry=registry(), max_in_flight_tokens=4)
    a = admitted(manager, "a", 4)
    for _ in range(20):
        assert compute(manager, a, 1)
        assert held(manager, a)[0] <= 2
        manager.check()
    assert managers_of(manager)[0].policy.max_admission_blocks == 3


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("in_flight", [0, 1, 5])
def test_every_token_that_is_read_is_held_and_little_more(block_size: int, in_flight: int) -> None:
    def first_read(token: int) -> int:
        return max(0, token // block_size - 1) * block_size

    for steps in ([1], [2], [3], [7], [5, 1], [1, 4, 2]):
        walk(LookBackSpec(block_size), first_read, 25, steps, in_flight, 64, registry=registry())


def test_it_agrees_with_other_groups_on_a_hit() -> None:
    manager = hybrid(60, full(), LookBackSpec(8), window(8), LookBackSpec(8), registry=registry())
    a = admitted(manager, "a", 41)
    mine = tables(manager, a)
    leave(manager, a)
    found = manager.get_computed_blocks(request("b", 41))
    assert found.num_tokens == 40
    assert found.blocks.get_block_ids()[1] == [0, 0, 0, 0, mine[1][4]]
    manager.evict_blocks([mine[3][4]])
    assert hit(manager, request("b", 41)) == 32
    b = request("b", 41)
    assert admit(manager, b, found=manager.get_computed_blocks(b)) is not None
    manager.check()
    assert manager.fork(b, b.twin("c")) is not None
    manager.check()


def test_what_its_base_class_does_for_it() -> None:
    """Caching, admission and external tokens come from the answers above alone."""
    manager = hybrid(40, full(), LookBackSpec(4), registry=registry(), max_in_flight_tokens=8)
    assert manager.num_blocks_for(40) == 10 + 4
    a = request("a", 40)
    assert admit(manager, a, 4, num_external_computed_tokens=32) is not None
    # Token 32 reads from 28 on.
    assert tables(manager, a)[1][:8].count(0) == 7
    manager.check()
