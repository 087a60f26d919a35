"""PrefixTrees: what the events of a cache say of the prefixes in it."""

from hypothesis import given
from hypothesis import strategies as st

from kvledger.events.event_types import AllBlocksCleared, BlockRemoved, BlockStored
from kvledger.events.prefix_trees import PrefixTree, PrefixTrees


def stored(*hashes: int, parent: int | None = None, group: int | None = None) -> BlockStored:
    return BlockStored(list(hashes), parent, [], 16, None, "GPU", None, group_idx=group)


def test_prompts_of_one_beginning_are_a_tree() -> None:
    trees = PrefixTrees()
    trees.apply([stored(1, 2, 3)], 10.0)
    trees.apply([stored(4, parent=2), stored(9)], 20.0)
    # 1 - 2 - 3 and 1 - 2 - 4: 32 tokens are shared; and 9 alone.
    assert trees.largest(5) == [PrefixTree(4, 32, 2, 10.0, 20.0), PrefixTree(1, 16, 1, 20.0, 20.0)]
    assert trees.num_blocks == 5


def test_what_is_removed_is_in_no_tree() -> None:
    trees = PrefixTrees()
    trees.apply([stored(1, 2, 3), stored(4, parent=2)], 10.0)
    trees.apply([BlockRemoved([3], "GPU"), BlockRemoved([77], "GPU")], 11.0)
    assert trees.largest(5) == [PrefixTree(3, 48, 1, 10.0, 10.0)]
    trees.apply([AllBlocksCleared()], 12.0)
    assert (trees.largest(5), trees.num_blocks) == ([], 0)


def test_groups_are_apart() -> None:
    trees = PrefixTrees()
    trees.apply([stored(1, 2, group=0), stored(1, group=1)], 10.0)
    assert [tree.num_blocks for tree in trees.largest(5)] == [2, 1]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 8), st.integers(0, 8)), max_size=40))
def test_random_streams_against_paths(moves: list[tuple[bool, int, int]]) -> None:
    """Every cached block is in one tree, and a tree has as many ends as blocks without a child."""
    trees = PrefixTrees()
    parents: dict[int, int] = {}
    for time, (adds, name, parent) in enumerate(moves):
        if not adds:
            trees.apply([BlockRemoved([name], "GPU")], float(time))
            parents.pop(name, None)
        elif name not in parents and parent < name:  # a hash never comes before what it hangs on
            trees.apply([stored(name, parent=parent or None)], float(time))
            parents[name] = parent
    found = trees.largest(99)
    assert sum(tree.num_blocks for tree in found) == len(parents) == trees.num_blocks
    ends = [name for name in parents if name not in {parent for child, parent in parents.items() if parent in parents}]
    assert sum(tree.num_leaves for tree in found) == len(ends)
