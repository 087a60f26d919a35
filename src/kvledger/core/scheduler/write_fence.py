"""WriteFence: what steps in flight may still write is not handed out until they are back.

Steps run one after the other, so a block may go from one request to the next while a step that writes it is out: the
step that writes it next comes later. An external source that fills blocks on its own waits for no step. Its load could
get the block of a request that has just ended, and be overwritten by that request's last step. So the blocks of a
request that ends, or is preempted, while a step with it is out are held until all steps scheduled so far are back.
Where no source is, or one step at a time is out, there is no fence.
"""

from collections import deque
from typing import Final

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.core.requests.request import Request
from kvledger.errors import require


class WriteFence:
    """Blocks that belong to nobody any more, in the order in which their requests gave them up."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager: Final = manager
        # (the last step that may write them, blocks in the order of the tables)
        self._held: Final[deque[tuple[int, list[KVCacheBlock]]]] = deque()
        # The last step that computes anything, and the last one of these that is back.
        self._last_sent: int = 0
        self._last_back: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that are held. O(requests that gave them up)."""
        return sum([len(blocks) for _, blocks in self._held])

    def must_wait(self, request: Request) -> bool:
        """Whether a step in flight may still write blocks of that request."""
        return request.num_in_flight_tokens > 0

    def hold(self, request: Request) -> None:
        """Takes over the blocks of a request that gives them up."""
        self._held.append((self._last_sent, self._manager.detach(request)))

    def sent(self, step: int) -> None:
        """A step that computes something goes out."""
        self._last_sent = step

    def back(self, step: int) -> None:
        """That step is done, and so are all before it."""
        self._last_back = step
        while self._held and self._held[0][0] <= step:
            _, blocks = self._held.popleft()
            self._manager.release_detached(blocks)

    def check(self) -> None:
        """Proves that nothing is held longer than needed."""
        for step, _ in self._held:
            require(step > self._last_back, f"blocks are held for step {step}, which is back")
