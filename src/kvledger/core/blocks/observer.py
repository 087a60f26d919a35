"""What the ledger tells whoever watches it: the one way to listen. No observer, no cost: the ledger asks once a batch
whether there is one.

    request_admitted        a request is about to get its first blocks: what was found for it, before anything changes
    blocks_touched          hits, forks and pins: these blocks have one holder more
    blocks_taken            these blocks are new for somebody, after blocks_evicted with those that were cached
    blocks_filled, ...      what becomes a hit, and what is no more

Subclass and override what you need. blocks_filled and prefix_cached are for observers that want positions; left alone
they tell blocks_cached, and all the rest does nothing. What an observer is given is only valid during the call, and
reading the ledger is all that it may do then: to change it is refused (UnfinishedChangeError). Its exceptions surface
from the call that it was told within, once that is complete: nothing is undone by them, and other observers are told.
"""

from enum import Enum
from typing import Final

from mypy_extensions import mypyc_attr

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.kv_cache_blocks import PrefixHit
from kvledger.core.requests.request import Request


class EvictionCause(Enum):
    REUSED = "a new block was needed"
    EVICTED = "evict_blocks"
    RESET = "reset_prefix_cache"
    PROMOTED = "the block answers for a longer prefix now"


class GroupSizes:
    """Of one group: tokens in a block (over all context-parallel ranks), tokens that one of a request's hashes names,
    and tokens behind those that it covers as well."""

    def __init__(self, block_size: int, hash_block_size: int, num_hash_lookahead: int = 0) -> None:
        self.block_size: Final = block_size
        self.hash_block_size: Final = hash_block_size
        self.num_hash_lookahead: Final = num_hash_lookahead


@mypyc_attr(allow_interpreted_subclasses=True)
class LedgerObserver:
    """Base of every observer. Interpreted subclasses are fine."""

    def request_admitted(self, request: Request, hit: PrefixHit, num_external_tokens: int) -> None:
        """allocate_slots is going to give the request its hit, blocks for so many external tokens, and its first new
        ones; they are free. Everything is as the lookup saw it."""

    def blocks_touched(self, blocks: list[KVCacheBlock]) -> None:
        """Each got a holder more: it was a hit, is shared by a fork, copied, or pinned from outside. Null blocks, which
        nobody holds, may stand among them."""

    def blocks_taken(self, group_id: int, blocks: list[KVCacheBlock]) -> None:
        """These blocks came from the front of the free queue, for that group. They carry no hash (any more)."""

    def blocks_cached(self, request: Request, group_id: int, blocks: list[KVCacheBlock]) -> None:
        """These blocks of the request became hits for others. In the order of the sequence, without null blocks."""

    def blocks_filled(
        self, request: Request, group_id: int, blocks: list[KVCacheBlock], start: int, end: int, sizes: GroupSizes
    ) -> None:
        """The request's tokens [start, end) are whole blocks of the group, and `blocks` of them became hits.

        Possibly none: blocks that no hit can use are passed over, as are null blocks.
        """
        if blocks:
            self.blocks_cached(request, group_id, blocks)

    def prefix_cached(
        self, request: Request, group_id: int, block: KVCacheBlock, num_tokens: int, sizes: GroupSizes
    ) -> None:
        """The block answers for the request's first num_tokens tokens, which end in it, beside any longer prefix."""
        if block.num_hash_tokens == num_tokens:
            self.blocks_cached(request, group_id, [block])

    def hashes_moved(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        """`target` answers for everything that `source` answered for until now. Nothing else has changed."""

    def blocks_evicted(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> None:
        """These blocks are about to lose their hashes, which they still carry. In the order in which they lose them."""

    def prefix_cache_reset(self) -> None:
        """Every hash is gone (after blocks_evicted with all of them)."""

    def prefix_cache_reset_refused(self, num_held_blocks: int) -> None:
        """Warning: reset_prefix_cache did nothing, because blocks are in use."""

    def check(self) -> None:
        """Proves the observer's own invariants, whenever the ledger proves its own."""


class LedgerObservers(LedgerObserver):
    """Several observers as one; each is told in the order given."""

    def __init__(self, observers: list[LedgerObserver]) -> None:
        self.observers: Final = observers

    def request_admitted(self, request: Request, hit: PrefixHit, num_external_tokens: int) -> None:
        for observer in self.observers:
            observer.request_admitted(request, hit, num_external_tokens)

    def blocks_touched(self, blocks: list[KVCacheBlock]) -> None:
        for observer in self.observers:
            observer.blocks_touched(blocks)

    def blocks_taken(self, group_id: int, blocks: list[KVCacheBlock]) -> None:
        for observer in self.observers:
            observer.blocks_taken(group_id, blocks)

    def blocks_cached(self, request: Request, group_id: int, blocks: list[KVCacheBlock]) -> None:
        for observer in self.observers:
            observer.blocks_cached(request, group_id, blocks)

    def blocks_filled(
        self, request: Request, group_id: int, blocks: list[KVCacheBlock], start: int, end: int, sizes: GroupSizes
    ) -> None:
        for observer in self.observers:
            observer.blocks_filled(request, group_id, blocks, start, end, sizes)

    def prefix_cached(
        self, request: Request, group_id: int, block: KVCacheBlock, num_tokens: int, sizes: GroupSizes
    ) -> None:
        for observer in self.observers:
            observer.prefix_cached(request, group_id, block, num_tokens, sizes)

    def hashes_moved(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        for observer in self.observers:
            observer.hashes_moved(source, target)

    def blocks_evicted(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> None:
        for observer in self.observers:
            observer.blocks_evicted(blocks, cause)

    def prefix_cache_reset(self) -> None:
        for observer in self.observers:
            observer.prefix_cache_reset()

    def prefix_cache_reset_refused(self, num_held_blocks: int) -> None:
        for observer in self.observers:
            observer.prefix_cache_reset_refused(num_held_blocks)

    def check(self) -> None:
        for observer in self.observers:
            observer.check()


class CacheObserver(LedgerObserver):
    """Tells another observer only what becomes a hit and what is no more, of blocks in a pool of their own: their ids
    are those of other blocks in the ledger's pool."""

    def __init__(self, observer: LedgerObserver) -> None:
        self._observer: Final = observer

    def blocks_cached(self, request: Request, group_id: int, blocks: list[KVCacheBlock]) -> None:
        self._observer.blocks_cached(request, group_id, blocks)

    def blocks_filled(
        self, request: Request, group_id: int, blocks: list[KVCacheBlock], start: int, end: int, sizes: GroupSizes
    ) -> None:
        self._observer.blocks_filled(request, group_id, blocks, start, end, sizes)

    def prefix_cached(
        self, request: Request, group_id: int, block: KVCacheBlock, num_tokens: int, sizes: GroupSizes
    ) -> None:
        self._observer.prefix_cached(request, group_id, block, num_tokens, sizes)

    def hashes_moved(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        self._observer.hashes_moved(source, target)

    def blocks_evicted(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> None:
        self._observer.blocks_evicted(blocks, cause)

    def prefix_cache_reset(self) -> None:
        self._observer.prefix_cache_reset()

    def prefix_cache_reset_refused(self, num_held_blocks: int) -> None:
        self._observer.prefix_cache_reset_refused(num_held_blocks)
