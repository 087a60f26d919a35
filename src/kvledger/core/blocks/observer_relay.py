"""ObserverRelay: tells observers what happens, and keeps what they raise until the ledger's change is complete."""

from typing import Final

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.kv_cache_blocks import PrefixHit
from kvledger.core.blocks.observer import EvictionCause, GroupSizes, LedgerObserver, LedgerObservers
from kvledger.core.requests.request import Request


class ObserverRelay(LedgerObserver):
    """Stands between a ledger and its observers, which are told in the order given.

    An exception of one keeps neither the others nor the ledger from going on; surface() raises it when all is done.
    """

    def __init__(self, observers: list[LedgerObserver]) -> None:
        self._observers: Final[list[LedgerObserver]] = []
        for observer in observers:
            self.add(observer)
        self._errors: list[BaseException] = []
        # What goes on is part of a larger change: surface() waits for its end.
        self.is_held: bool = False

    def add(self, observer: LedgerObserver) -> None:
        """One more, behind those that are there."""
        if isinstance(observer, LedgerObservers):
            self._observers.extend(observer.observers)
        else:
            self._observers.append(observer)

    def surface(self) -> None:
        """Raises the first exception since the last call, unless they are held. Others are named in its notes."""
        if not self._errors or self.is_held:
            return
        errors = self._errors
        self._errors = []
        for other in errors[1:]:
            errors[0].add_note(f"then, within the same call: {other!r}")
        raise errors[0]

    def request_admitted(self, request: Request, hit: PrefixHit, num_external_tokens: int) -> None:
        for observer in self._observers:
            try:
                observer.request_admitted(request, hit, num_external_tokens)
            except BaseException as error:
                self._errors.append(error)

    def blocks_touched(self, blocks: list[KVCacheBlock]) -> None:
        for observer in self._observers:
            try:
                observer.blocks_touched(blocks)
            except BaseException as error:
                self._errors.append(error)

    def blocks_taken(self, group_id: int, blocks: list[KVCacheBlock]) -> None:
        for observer in self._observers:
            try:
                observer.blocks_taken(group_id, blocks)
            except BaseException as error:
                self._errors.append(error)

    def blocks_cached(self, request: Request, group_id: int, blocks: list[KVCacheBlock]) -> None:
        for observer in self._observers:
            try:
                observer.blocks_cached(request, group_id, blocks)
            except BaseException as error:
                self._errors.append(error)

    def blocks_filled(
        self, request: Request, group_id: int, blocks: list[KVCacheBlock], start: int, end: int, sizes: GroupSizes
    ) -> None:
        for observer in self._observers:
            try:
                observer.blocks_filled(request, group_id, blocks, start, end, sizes)
            except BaseException as error:
                self._errors.append(error)

    def prefix_cached(
        self, request: Request, group_id: int, block: KVCacheBlock, num_tokens: int, sizes: GroupSizes
    ) -> None:
        for observer in self._observers:
            try:
                observer.prefix_cached(request, group_id, block, num_tokens, sizes)
            except BaseException as error:
                self._errors.append(error)

    def hashes_moved(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        for observer in self._observers:
            try:
                observer.hashes_moved(source, target)
            except BaseException as error:
                self._errors.append(error)

    def blocks_evicted(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> None:
        for observer in self._observers:
            try:
                observer.blocks_evicted(blocks, cause)
            except BaseException as error:
                self._errors.append(error)

    def prefix_cache_reset(self) -> None:
        for observer in self._observers:
            try:
                observer.prefix_cache_reset()
            except BaseException as error:
                self._errors.append(error)

    def prefix_cache_reset_refused(self, num_held_blocks: int) -> None:
        for observer in self._observers:
            try:
                observer.prefix_cache_reset_refused(num_held_blocks)
            except BaseException as error:
                self._errors.append(error)

    def check(self) -> None:
        for observer in self._observers:
            observer.check()
