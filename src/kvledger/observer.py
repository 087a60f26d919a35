"""What the ledger tells whoever watches it. No observer, no cost: the ledger asks once per batch whether there is one.

Subclass and override what you need; every method does nothing by default. An observer must not call back into the
ledger, and what it is given is only valid during the call.
"""

from enum import Enum

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

    def block_evicted(self, block: KVCacheBlock, cause: EvictionCause) -> None:
        """This block is about to lose its hash, which it still carries."""

    def prefix_cache_reset(self) -> None:
        """Every hash is gone (after block_evicted for each of them)."""

    def prefix_cache_reset_refused(self, num_held_blocks: int) -> None:
        """Warning: reset_prefix_cache did nothing, because blocks are in use."""
