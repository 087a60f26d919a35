"""ReplayBuffer: the last batches that were sent, for consumers that lost some. Bounded in batches and in bytes."""

from collections import deque
from typing import Final

from kvledger.errors import require


class ReplayBuffer:
    """Payloads by number; numbers follow each other. The last batch is kept whatever its size."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches: Final = max_batches
        self._max_bytes: Final = max_bytes
        self._payloads: Final[deque[bytes]] = deque()
        self._next_seq: int = 0
        self._num_bytes: int = 0

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def first_seq(self) -> int:
        """Number of the oldest batch that is kept; next_seq when there is none."""
        return self._next_seq - len(self._payloads)

    @property
    def next_seq(self) -> int:
        """Number behind the last batch."""
        return self._next_seq

    def append(self, seq: int, payload: bytes) -> None:
        """REQUIRES the number behind the last one; another one starts anew."""
        if seq != self._next_seq:
            self._payloads.clear()
            self._num_bytes = 0
        self._payloads.append(payload)
        self._next_seq = seq + 1
        self._num_bytes += len(payload)
        while len(self._payloads) > self._max_batches or (
            self._num_bytes > self._max_bytes and len(self._payloads) > 1
        ):
            self._num_bytes -= len(self._payloads.popleft())

    def get(self, seq: int) -> bytes | None:
        """The batch of that number, or None when it is not kept."""
        index = seq - self.first_seq
        return self._payloads[index] if 0 <= index < len(self._payloads) else None

    def check(self) -> None:
        """Proves the bounds and the count of bytes. O(batches)."""
        require(len(self._payloads) <= self._max_batches, "replay buffer: more batches than its limit")
        require(sum(map(len, self._payloads)) == self._num_bytes, "replay buffer: wrong number of bytes")
        require(
            self._num_bytes <= self._max_bytes or len(self._payloads) == 1, "replay buffer: more bytes than allowed"
        )
