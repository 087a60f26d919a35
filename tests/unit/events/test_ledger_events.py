"""LedgerEvents: a thread between the ledger and the sink, that is never waited for and never lies."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvledger import KVCacheManager
from kvledger.errors import ConfigError
from kvledger.events import (
    AllBlocksCleared,
    BlockStored,
    CacheView,
    EventError,
    EventSink,
    FileSink,
    KVEventBatch,
    LedgerEvents,
    NullSink,
    read_events,
)
from tests.helpers import admitted, kv_config, leave, ledger, other


class ListSink(EventSink):
    """Keeps what it is sent; `gate` closed, it lets nothing through."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, KVEventBatch]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Event()
        self.is_closed = False

    def send(self, seq: int, batch: KVEventBatch) -> None:
        self.arrived.set()
        assert self.gate.wait(10)
        self.batches.append((seq, batch))

    def close(self) -> None:
        self.is_closed = True


class BrokenSink(EventSink):
    def send(self, seq: int, batch: KVEventBatch) -> None:
        raise OSError("no space left")


def published(usable: int, sink: EventSink, **options: int | bool) -> tuple[KVCacheManager, LedgerEvents]:
    events = LedgerEvents(kv_config(usable), sink, **options)
    return ledger(usable, observer=events.observer), events


def wait_until_sent(events: LedgerEvents) -> None:
    while events.num_pending_changes > 0:
        time.sleep(0.001)


def test_a_batch_a_step_in_order_numbered_from_0() -> None:
    sink = ListSink()
    manager, events = published(8, sink)
    admitted(manager, "a", 8)
    events.end_step(1.0)
    events.end_step(2.0)  # nothing happened
    admitted(manager, "b", other(4, 1))
    admitted(manager, "c", other(4, 2))
    events.end_step(3.0)
    events.close()
    assert [(seq, batch.ts, len(batch.events), batch.data_parallel_rank) for seq, batch in sink.batches] == [
        (0, 1.0, 1, 0),
        (1, 3.0, 2, 0),
    ]
    assert (events.num_batches, events.num_dropped_changes, sink.is_closed) == (2, 0, True)


def test_the_rank_stands_in_every_batch() -> None:
    sink = ListSink()
    manager, events = published(8, sink, data_parallel_rank=3)
    admitted(manager, "a", 4)
    events.end_step(1.0)
    events.close()
    assert sink.batches[0][1].data_parallel_rank == 3


def test_the_rank_is_the_sinks_unless_given() -> None:
    sink = ListSink()
    sink.data_parallel_rank = 2
    manager, events = published(8, sink)
    leave(manager, admitted(manager, "a", 4))
    events.end_step(0.0)
    events.close()
    assert sink.batches[0][1].data_parallel_rank == 2


@pytest.mark.parametrize("waits", [False, True])
def test_what_happens_after_the_end_is_counted_as_dropped(waits: bool) -> None:
    manager, events = published(8, NullSink(), waits_when_full=waits, max_pending_changes=1)
    events.close()
    for number in range(3):
        leave(manager, admitted(manager, str(number), other(4, number)))
        events.end_step(0.0)
    assert (events.num_dropped_changes, events.num_pending_changes) == (3, 0)


def test_too_far_behind_it_drops_counts_and_says_so() -> None:
    sink = ListSink()
    sink.gate.clear()
    manager, events = published(8, sink, max_pending_changes=2)
    for family, name in enumerate("abcd"):
        admitted(manager, name, other(4, family))
        events.end_step(float(family))
        assert sink.arrived.wait(10)
    # a is stuck in the sink and b waits; c and d would be too many.
    assert events.num_dropped_changes == 2
    sink.gate.set()
    wait_until_sent(events)
    admitted(manager, "e", other(4, 4))
    events.end_step(4.0)
    events.close()
    kinds = [[type(event) for event in batch.events] for _, batch in sink.batches]
    assert kinds == [[BlockStored], [BlockStored], [AllBlocksCleared, BlockStored]]
    view = CacheView()
    for _, batch in sink.batches:
        view.apply(batch.events)
    assert len(view.blocks) == 1  # of 5 that are cached: less than there is, never more


def test_blocks_that_were_never_told_of_go_without_a_word() -> None:
    sink = ListSink()
    sink.gate.clear()
    manager, events = published(2, sink, max_pending_changes=1)
    a = admitted(manager, "a", other(4, 0))
    events.end_step(0.0)
    b = admitted(manager, "b", other(4, 1))
    events.end_step(1.0)
    assert events.num_dropped_changes == 1
    sink.gate.set()
    wait_until_sent(events)
    leave(manager, a)
    leave(manager, b)
    admitted(manager, "c", other(8, 2))  # takes both blocks: a's was forgotten with the gap, b's was never known
    events.end_step(2.0)
    events.close()
    assert [type(event) for event in sink.batches[-1][1].events] == [AllBlocksCleared, BlockStored]


def test_a_recording_waits_instead() -> None:
    sink = ListSink()
    manager, events = published(30, sink, max_pending_changes=1, waits_when_full=True)
    for family in range(20):
        admitted(manager, str(family), other(4, family))
        events.end_step(float(family))
    events.close()
    assert [seq for seq, _ in sink.batches] == [*range(20)]
    assert events.num_dropped_changes == 0


def test_an_error_of_the_sink_is_raised_at_the_end_and_the_ledger_goes_on() -> None:
    manager, events = published(8, BrokenSink())
    admitted(manager, "a", 4)
    events.end_step(0.0)
    events._thread.join(10)
    admitted(manager, "b", other(4))
    events.end_step(1.0)
    with pytest.raises(EventError, match=r"no space left.*1 changes were not told of"):
        events.close()


def test_a_sink_that_hangs_is_given_up_on() -> None:
    sink = ListSink()
    sink.gate.clear()
    manager, events = published(8, sink)
    admitted(manager, "a", 4)
    events.end_step(0.0)
    with pytest.raises(EventError, match=r"1 changes were still to be sent after 0.05 s"):
        events.close(timeout=0.05)
    sink.gate.set()
    events.close()


def test_without_a_consumer() -> None:
    manager, events = published(8, NullSink())
    admitted(manager, "a", 4)
    events.end_step(0.0)
    events.close()
    assert events.num_batches == 1


@pytest.mark.parametrize("name", ["events.jsonl", "events.msgpack"])
def test_a_file_gives_back_what_was_sent(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / name)
    manager, events = published(2, FileSink(path))
    a = admitted(manager, "a", 8)
    events.end_step(0.5)
    leave(manager, a)
    b = admitted(manager, "b", other(4))
    events.end_step(1.5)
    leave(manager, b)
    manager.reset_prefix_cache()
    events.end_step(2.5)
    events.close()
    sent = [*read_events(path)]
    assert [(seq, batch.ts, [type(event).__name__ for event in batch.events]) for seq, batch in sent] == [
        (0, 0.5, ["BlockStored"]),
        (1, 1.5, ["BlockRemoved", "BlockStored"]),
        (2, 2.5, ["AllBlocksCleared"]),
    ]
    stored = sent[0][1].events[0]
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FileSink("events.txt"), r"events='events.txt': neither a socket nor a known kind of file; end it in"),
        (lambda: FileSink("/nowhere/events.jsonl"), r"events='/nowhere/events.jsonl': cannot be written \(No such"),
        (lambda: [*read_events("/nowhere/events.jsonl")], r"events='/nowhere/events.jsonl': cannot be read \(No such"),
        (lambda: LedgerEvents(kv_config(2), NullSink(), max_pending_changes=0), r"max_pending_changes=0: "),
        (lambda: LedgerEvents(kv_config(2), NullSink(), data_parallel_rank=-1), r"data_parallel_rank=-1: "),
    ],
)
def test_wrong_values_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
