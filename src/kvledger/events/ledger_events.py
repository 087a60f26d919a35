"""LedgerEvents: from a ledger to whoever listens, without the ledger's thread waiting for anything.

    events = LedgerEvents(config, ZmqSink(ZmqOptions(replay_endpoint="tcp://127.0.0.1:5558")))
    manager = KVCacheManager(config, max_model_len, observer=events.observer)
    ... each step: schedule, compute, update ...; events.end_step(time.time())
    events.close()

The ledger's thread notes down what happened (CacheChanges) and hands it over once a step. A thread of its own makes
the events, numbers the batches and sends them. What waits for that thread is bounded by max_pending_changes. Beyond it
changes are dropped, counted, and owned up to: the next batch begins with AllBlocksCleared, so that consumers know less
than is cached, never more.
"""

import logging
from collections import deque
from threading import Thread
from time import sleep
from typing import Final, NamedTuple

from kvledger.core.blocks.observer import LedgerObserver
from kvledger.core.groups.spec import KVCacheConfig
from kvledger.core.units import require_not_negative, require_positive
from kvledger.core.watch.cache_changes import CacheChanges, CacheNotes
from kvledger.events.event_builder import EventBuilder, EventStyle
from kvledger.events.event_sink import EventError, EventSink
from kvledger.events.event_types import KVEventBatch
from kvledger.events.group_labels import group_labels
from kvledger.events.salts import SaltNames, SaltRule

_LOGGER: Final = logging.getLogger("kvledger.events")
# The sender looks for work so often. It is not woken, because waking a thread can take as long as a step.
_POLL_S: Final = 0.002


class _Step(NamedTuple):
    ts: float
    notes: CacheNotes
    # Changes were dropped before these.
    is_behind_gap: bool


class LedgerEvents:
    """Publishes one ledger's events. end_step and close belong to the ledger's thread."""

    def __init__(
        self,
        config: KVCacheConfig,
        sink: EventSink,
        *,
        style: EventStyle = EventStyle.DISTINCT,
        int_hashes: bool = True,
        data_parallel_rank: int | None = None,
        max_pending_changes: int = 100_000,
        waits_when_full: bool = False,
        salts: SaltRule = SaltRule.PLAIN,
        salt_key: bytes | None = None,
    ) -> None:
        """`int_hashes`: as in EventBuilder. `data_parallel_rank`: the sink's, unless given. `waits_when_full`: end_step
        waits instead of dropping, for recordings. `salts`, `salt_key`: as in SaltNames."""
        require_positive("max_pending_changes", max_pending_changes)
        rank = sink.data_parallel_rank if data_parallel_rank is None else data_parallel_rank
        require_not_negative("data_parallel_rank", rank)
        self._changes: Final = CacheChanges()
        self._sink: Final = sink
        self._builder: Final = EventBuilder(group_labels(config), style, int_hashes, SaltNames(salts, salt_key))
        self._rank: Final = rank
        self._max_pending: Final = max_pending_changes
        self._waits: Final = waits_when_full
        # Appended to by the ledger's thread, emptied by the other.
        self._steps: Final[deque[_Step]] = deque()
        self._is_closing: bool = False
        # Changes handed over and dropped, counted by the ledger's thread; dealt with, by the other.
        self._num_given: int = 0
        self._num_dropped: int = 0
        self._num_done: int = 0
        self._num_batches: int = 0
        self._has_gap: bool = False
        self._error: Exception | None = None
        self._thread: Final = Thread(target=self._run, name="kvledger-events", daemon=True)
        self._thread.start()

    @property
    def observer(self) -> LedgerObserver:
        """To be given to the ledger. It collects until end_step is called."""
        return self._changes

    @property
    def num_dropped_changes(self) -> int:
        """Changes that no event tells of, because the sender was too far behind, has failed, or was closed before."""
        return self._num_dropped

    @property
    def num_pending_changes(self) -> int:
        """Changes handed over that no event has told of yet."""
        return self._num_given - self._num_done

    @property
    def num_batches(self) -> int:
        """Batches sent so far."""
        return self._num_batches

    def end_step(self, ts: float) -> None:
        """Hands over what happened since the last call; nothing is sent for a step in which nothing did. `ts`: s."""
        num_changes = len(self._changes)
        if num_changes == 0:
            return
        notes = self._changes.take()
        if self._waits:
            while self.num_pending_changes >= self._max_pending and self._error is None and not self._is_closing:
                sleep(_POLL_S)
        if self._is_closing or self._error is not None or self.num_pending_changes >= self._max_pending:
            self._num_dropped += num_changes
            self._has_gap = True
            return
        self._num_given += num_changes
        self._steps.append(_Step(ts, notes, self._has_gap))
        self._has_gap = False

    def close(self, timeout: float = 5.0) -> None:
        """Sends what is pending, for so many seconds at most, and closes the sink. What happened since the last
        end_step is not sent.

        EventError when sending has failed, or did not come to its end.
        """
        self._is_closing = True
        self._thread.join(timeout)
        if self._error is not None:
            raise EventError(f"events: sending failed ({self._error}); {self._num_dropped} changes were not told of")
        if self._thread.is_alive():
            num_left = self.num_pending_changes
            raise EventError(f"events: {num_left} changes were still to be sent after {timeout} s; they may be lost")

    # The other thread

    def _run(self) -> None:
        try:
            try:
                while self._steps or not self._is_closing:
                    if self._steps:
                        self._deliver(self._steps.popleft())
                    else:
                        sleep(_POLL_S)
                    self._sink.serve(self._builder.snapshot)
            finally:
                self._sink.close()
        except Exception as failed:
            self._error = failed
            _LOGGER.exception("sending KV events failed; no more are sent")

    def _deliver(self, step: _Step) -> None:
        events = [self._builder.clear()] if step.is_behind_gap else []
        events += self._builder.build(step.notes.changes())
        if events:
            self._sink.send(self._num_batches, KVEventBatch(step.ts, events, self._rank))
            self._num_batches += 1
        self._num_done += len(step.notes)
