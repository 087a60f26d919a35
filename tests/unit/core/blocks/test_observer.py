"""What the ledger tells whoever listens, in which order, and what an observer sees of the ledger at that moment."""

import inspect

from kvledger import (
    BlockResidency,
    EvictionCause,
    KVCacheBlock,
    KVCacheManager,
    LedgerObserver,
    LedgerObservers,
    MissExplainer,
    PrefixHit,
    Request,
)
from kvledger.core.blocks.observer import CacheObserver
from tests.groups import full, host, hybrid, state, window
from tests.helpers import admit, admitted, decode, leave, ledger, other, pool_of, request


class Diary(LedgerObserver):
    """Everything in a line each; block ids, which the ledger hands out as 1, 2, 3, ..."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.lines: list[str] = []
        self.manager = manager
        manager.observe(self)

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines

    def request_admitted(self, request: Request, hit: PrefixHit, num_external_tokens: int) -> None:
        self.lines.append(f"{request.request_id} admitted: {hit.num_tokens} hit, {num_external_tokens} external")
        # Nothing has changed yet, and nothing can fail any more.
        assert not self.manager.holds_blocks(request)

    def blocks_touched(self, blocks: list[KVCacheBlock]) -> None:
        self.lines.append(f"touched {ids(blocks)}")

    def blocks_taken(self, group_id: int, blocks: list[KVCacheBlock]) -> None:
        assert all(block.block_hash is None and block.ref_cnt == 1 for block in blocks)
        self.lines.append(f"group {group_id} took {ids(blocks)}")

    def blocks_cached(self, request: Request, group_id: int, blocks: list[KVCacheBlock]) -> None:
        self.lines.append(f"{request.request_id} cached {ids(blocks)}")

    def blocks_evicted(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> None:
        self.lines.append(f"evicted {ids(blocks)}: {cause.name}")


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [int(block.block_id) for block in blocks]


def test_a_request_from_its_admission_to_the_eviction_of_its_blocks() -> None:
    manager = ledger(usable=4)
    diary = Diary(manager)
    a = admitted(manager, "a", 9)
    assert diary.take() == [
        "a admitted: 0 hit, 0 external",
        "group 0 took [1, 2, 3]",
        "a cached [1, 2]",
    ]
    decode(manager, a, 4)
    assert diary.take() == ["a cached [3]", "group 0 took [4]"]
    leave(manager, a)
    assert diary.take() == []
    admitted(manager, "b", list(range(8)) + other(5))
    assert diary.take() == [
        "b admitted: 8 hit, 0 external",
        "touched [1, 2]",
        # Block 4 had no hash, and block 3 is the cached one that is next.
        "evicted [3]: REUSED",
        "group 0 took [4, 3]",
        "b cached [4]",
    ]


def test_a_request_that_does_not_fit_is_not_told() -> None:
    manager = ledger(usable=2)
    diary = Diary(manager)
    assert admit(manager, request("a", 12)) is None
    assert diary.take() == []


def test_external_tokens_take_blocks_before_the_step_does() -> None:
    manager = hybrid(20, full(), window(8))
    diary = Diary(manager)
    admit(manager, request("a", 14), num_external_computed_tokens=8)
    # Eight tokens are two blocks of each group, and the other six two more.
    assert diary.take()[:5] == [
        "a admitted: 0 hit, 8 external",
        "group 0 took [1, 2]",
        "group 1 took [3, 4]",
        "group 0 took [5, 6]",
        "group 1 took [7, 8]",
    ]


def test_forks_and_pins_touch() -> None:
    manager = ledger(usable=8)
    diary = Diary(manager)
    a = admitted(manager, "a", 6)
    diary.take()
    manager.fork(a, a.twin("b"))
    # The full block is shared; block 3 gets a copy of what block 2 has, and both ends of it are held.
    assert diary.take() == ["touched [1]", "group 0 took [3]", "touched [2, 3]"]
    manager.coordinator.outside.add([manager.block_pool.blocks[1]])
    assert diary.take() == ["touched [1]"]


def test_every_group_that_takes_blocks_says_so() -> None:
    manager = hybrid(40, full(), state(), window(8))
    diary = Diary(manager)
    a = admitted(manager, "a", 10)
    decode(manager, a, 10)
    taken = [line for line in diary.take() if "took" in line]
    # Whatever is held was told, each block once.
    told = [int(number) for line in taken for number in line.split("[")[1].rstrip("]").split(", ")]
    assert len(told) == len(set(told))
    assert {int(block.block_id) for block in pool_of(manager).blocks if block.ref_cnt > 0} <= set(told)
    assert {line.split(" took")[0] for line in taken} == {"group 0", "group 1", "group 2"}


def test_blocks_in_host_memory_are_told_as_cached_only() -> None:
    """Their ids are those of other blocks on the device."""
    manager = hybrid(8, full(), host(8))
    diary = Diary(manager)
    leave(manager, admitted(manager, "a", 9))
    cached = "a cached [1, 2]"
    assert diary.take() == ["a admitted: 0 hit, 0 external", "group 0 took [1, 2, 3]", cached, cached]
    admitted(manager, "b", 9)
    assert diary.take() == ["b admitted: 8 hit, 0 external", "touched [1, 2]", "group 0 took [3]"]


def test_an_observer_may_come_later_and_several_are_told_in_their_order() -> None:
    first = BlockResidency(lambda: 0.0, sample_rate=1.0)
    manager = ledger(usable=8, observer=first)
    misses = MissExplainer(manager)
    diary = Diary(manager)
    leave(manager, admitted(manager, "a", 9))
    assert first.num_samples == 3
    assert [account.request_id for account in misses.recent()] == ["a"]
    assert len(diary.take()) == 3
    manager.check()


def test_several_observers_and_host_pools_pass_on_all_that_they_should() -> None:
    """A method that is added to LedgerObserver is added to both, or left out of the second on purpose."""
    told = {name for name, _ in inspect.getmembers(LedgerObserver, callable) if not name.startswith("_")}
    assert told <= vars(LedgerObservers).keys()
    of_the_device = {"request_admitted", "blocks_touched", "blocks_taken", "check"}
    assert told - of_the_device == {name for name in vars(CacheObserver) if not name.startswith("_")}
