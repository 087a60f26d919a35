"""EventSink: where batches of events go. A sink belongs to the thread that sends; only its making is elsewhere."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from kvledger.errors import KVLedgerError
from kvledger.events.event_types import AnyEvent, KVEventBatch

# Everything that is cached, in parts: AllBlocksCleared first, parents before children.
Snapshot = Callable[[], Iterator[list[AnyEvent]]]


class EventError(KVLedgerError):
    """Events could not be delivered, or a recording of them is broken."""


class EventSink(ABC):
    """Takes numbered batches, in order. `data_parallel_rank`: of the engine that they are of."""

    data_parallel_rank: int = 0

    @abstractmethod
    def send(self, seq: int, batch: KVEventBatch) -> None:
        """Sends batch number `seq`. May raise OSError or the transport's own errors; then nothing more is sent."""

    def serve(self, snapshot: Snapshot) -> None:
        """Answers consumers that ask for something, without waiting for them. Called many times a second."""

    def close(self) -> None:
        """Lets go of files and sockets."""


class NullSink(EventSink):
    """Sends nothing: for measuring what making events costs."""

    def send(self, seq: int, batch: KVEventBatch) -> None:
        """Nothing to do."""
