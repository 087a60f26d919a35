"""External hits and the bookkeeping of asynchronous loads."""

import pytest

from kvledger.core.scheduler.external import ExternalLoads
from kvledger.errors import RequestError
from kvledger.scheduler import ExternalHit
from tests.helpers import request


def test_a_hit_is_not_negative_and_nothing_arrives_at_once() -> None:
    with pytest.raises(RequestError, match="num_tokens=-1: an external hit cannot be negative"):
        ExternalHit(-1)
    assert ExternalHit(4, asynchronous=True).asynchronous
    assert not ExternalHit(0, asynchronous=True).asynchronous


def test_a_load_arrives_once() -> None:
    loads, a = ExternalLoads(0), request("a", 9)
    loads.start(a, 1, 0)
    assert loads.take_arrival(a) is None
    assert loads.finish("a", 8) is None
    assert not loads.is_awaited("a")
    assert loads.take_arrival(a) == 8
    assert loads.loading == {}
    assert not loads.is_awaited("a")


def test_an_orphan_is_kept_until_its_load_reports() -> None:
    loads, a = ExternalLoads(0), request("a", 9)
    assert not loads.orphan(a, step=1)
    loads.start(a, 1, 0)
    assert loads.orphan(a, step=1)
    assert loads.take_expired(1_000_000) == []
    assert loads.finish("a", 8) is a
    assert loads.orphans == {}


def test_a_load_that_arrived_leaves_no_orphan() -> None:
    loads, a = ExternalLoads(0), request("a", 9)
    loads.start(a, 1, 0)
    loads.finish("a", 8)
    assert not loads.orphan(a, step=1)
    assert loads.take_arrival(a) is None


def test_a_lease_ends_after_its_steps() -> None:
    loads, a, b = ExternalLoads(3), request("a", 9), request("b", 9)
    for each, step in ((a, 5), (b, 6)):
        loads.start(each, 1, 0)
        loads.orphan(each, step)
    assert loads.take_expired(7) == []
    assert loads.take_expired(8) == [a]
    assert loads.take_expired(9) == [b]
    assert loads.take_expired(99) == []
