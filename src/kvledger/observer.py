"""What the ledger tells whoever watches it. No observer, no cost: the ledger asks once per batch whether there is one.

Subclass and override what you need; every method does nothing by default. An observer must not call back into the
ledger, and what it is given is only valid during the call.
"""

from enum import Enum
from typing import Final

from mypy_extensions import mypyc_attr

from kvledger.block import KVCacheBlock
from kvledger.request import Request


class EvictionCause(Enum):
    REUSED = "a new block was needed"
    EVICTED = "evict_blocks"
    RESET = "reset_prefix_cache"
    PROMOTED = "the block answers for a longer prefix now"


@mypyc_attr(allow_interpreted_subclasses=True)
class LedgerObserver:
    """Base of every observer. Interpreted subclasses are fine."""

    def blocks_cached(self, request: Request, group_id: int, blocks: list[KVCacheBlock]) -> None:
        """These blocks of the request became hits for others. In the order of the sequence, without null blocks."""

    def blocks_evicted(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> None:
        """These blocks are about to lose their hashes, which they still carry. In the order in which they lose them."""

    def prefix_cache_reset(self) -> None:
        """Every hash is gone (after blocks_evicted with all of them)."""

    def prefix_cache_reset_refused(self, num_held_blocks: int) -> None:
        """Warning: reset_prefix_cache did nothing, because blocks are in use."""


class LedgerObservers(LedgerObserver):
    """Several observers as one; each is told in the order given."""

    def __init__(self, observers: list[LedgerObserver]) -> None:
        self._observers: Final = observers

    def blocks_cached(self, request: Request, group_id: int, blocks: list[KVCacheBlock]) -> None:
        for observer in self._observers:
            observer.blocks_cached(request, group_id, blocks)

    def blocks_evicted(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> None:
        for observer in self._observers:
            observer.blocks_evicted(blocks, cause)

    def prefix_cache_reset(self) -> None:
        for observer in self._observers:
            observer.prefix_cache_reset()

    def prefix_cache_reset_refused(self, num_held_blocks: int) -> None:
        for observer in self._observers:
            observer.prefix_cache_reset_refused(num_held_blocks)
