"""How long blocks stay: every time here is read off a clock that the test sets."""

import pytest

from kvledger import BlockPool, BlockResidency
from kvledger.errors import ConfigError, InvariantError
from tests.helpers import admitted, leave, ledger, other


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def stays(residency: BlockResidency) -> list[tuple[float, float, list[float]]]:
    return [(stay.lifetime, stay.idle, stay.reuse_gaps) for stay in residency.take_ends()]


def test_a_block_from_its_hand_out_to_the_next() -> None:
    clock = Clock()
    residency = BlockResidency(clock, sample_rate=1.0)
    pool = BlockPool(2, observer=residency)
    (block,) = pool.get_new_blocks(1)
    pool.cache_block(block, b"x", 0, 4)
    pool.free_blocks([block])
    for now in (3.0, 5.0, 9.0):
        clock.now = now
        pool.touch([block])
        pool.free_blocks([block])
    clock.now = 20.0
    pool.get_new_blocks(1)
    assert stays(residency) == [(20.0, 11.0, [2.0, 4.0])]
    clock.now = 50.0
    pool.free_blocks([block])
    pool.get_new_blocks(1)
    assert stays(residency) == [(30.0, 30.0, [])]
    assert residency.num_samples == 1
    residency.check()


def test_only_the_last_four_hits_are_remembered() -> None:
    clock = Clock()
    residency = BlockResidency(clock, sample_rate=1.0)
    pool = BlockPool(2, observer=residency)
    (block,) = pool.get_new_blocks(1)
    pool.cache_block(block, b"x", 0, 4)
    for now in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0):
        clock.now = now
        pool.touch([block])
    for _ in range(7):
        pool.free_blocks([block])
    pool.get_new_blocks(1)
    assert stays(residency) == [(32.0, 0.0, [4.0, 8.0, 16.0])]


def test_a_stay_ends_with_the_hash_too_and_a_reset_ends_none() -> None:
    clock = Clock()
    residency = BlockResidency(clock, sample_rate=1.0)
    manager = ledger(usable=4, observer=residency)
    a = admitted(manager, "a", 8)
    clock.now = 6.0
    leave(manager, a)
    manager.evict_blocks([1])
    assert stays(residency) == [(6.0, 6.0, [])]
    assert residency.num_samples == 1
    manager.reset_prefix_cache()
    assert (residency.num_samples, residency.take_ends()) == (0, [])


@pytest.mark.parametrize(("rate", "least", "most"), [(0.01, 850, 1150), (0.1, 9_600, 10_400), (0.5, 49_000, 51_000)])
def test_a_share_of_the_blocks_is_followed_and_no_block_more_than_another(rate: float, least: int, most: int) -> None:
    followed = [0] * 11
    for seed in range(10):
        residency = BlockResidency(Clock(), sample_rate=rate, seed=seed)
        pool = BlockPool(11, observer=residency)
        for _ in range(1000):
            blocks = pool.get_new_blocks(10)
            pool.free_blocks(blocks)
        pool.get_new_blocks(10)
        residency.check()
        followed[seed] = len(residency.take_ends())
    assert least <= sum(followed) <= most


def test_wrong_rates_are_named() -> None:
    for rate in (0.0, -0.1, 1.5):
        with pytest.raises(ConfigError, match=f"sample_rate={rate}: not a share of the blocks"):
            BlockResidency(Clock(), sample_rate=rate)


def test_ends_that_nobody_takes_do_not_pile_up() -> None:
    residency = BlockResidency(Clock(), sample_rate=1.0)
    pool = BlockPool(1001, observer=residency)
    for _ in range(102):
        pool.free_blocks(pool.get_new_blocks(1000))
    assert (len(residency.take_ends()), residency.num_dropped) == (91_000, 10_000)


def test_a_wrong_count_is_found_by_check() -> None:
    residency = BlockResidency(Clock(), sample_rate=1.0)
    manager = ledger(usable=4, observer=residency)
    admitted(manager, "a", 8)
    residency._num_samples = 3
    with pytest.raises(InvariantError, match="2 blocks are followed, 3 counted"):
        manager.check()


def test_pressure_ends_stays_in_a_ledger() -> None:
    clock = Clock()
    residency = BlockResidency(clock, sample_rate=1.0)
    manager = ledger(usable=4, observer=residency)
    for number in range(3):
        clock.now = 10.0 * number
        leave(manager, admitted(manager, str(number), other(16, number)))
    assert stays(residency) == [(10.0, 10.0, [])] * 8
