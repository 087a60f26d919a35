"""HashDoor: a ledger's hasher, whose work is looked at before anything is changed.

Hashers are the caller's as much as ours, and so are digests: one may raise, append too few hashes or what is no hash,
or be none at all where hashes are given. What is wrong with them is an error of that request.
"""

from collections.abc import Sequence
from typing import Final

from kvledger.core.requests.block_hash import BlockHasher, Sha256BlockHasher, SipHashBlockHasher
from kvledger.core.requests.request import Request
from kvledger.errors import KVLedgerError, RequestError


class HashDoor:
    """Keeps requests' hashes current. RequestError, naming the request, where the hasher fails."""

    def __init__(self, hasher: BlockHasher) -> None:
        self.hasher: Final = hasher
        self.block_size: Final = hasher.block_size
        # What these append needs no second look.
        self._is_own: Final = type(hasher) in (Sha256BlockHasher, SipHashBlockHasher)

    def require(self, request: Request, num_tokens: int) -> None:
        """Hashes what is full at num_tokens tokens."""
        if self._num_named(request, num_tokens) > len(request.block_hashes):
            self._run(request, refreshes=False)
        elif not self._is_own:
            self._require_sound(request, num_tokens)

    def refresh(self, request: Request) -> None:
        """Hashes all that is full, in the hasher's present epoch. For a request that holds no blocks."""
        if self._is_own:
            self.hasher.refresh(request)
        else:
            self._run(request, refreshes=True)

    def _num_named(self, request: Request, num_tokens: int) -> int:
        """Blocks that are full at num_tokens tokens and whose hash can be known: the tokens behind them that it covers
        as well are there."""
        return max(0, min(num_tokens, request.num_tokens - self.hasher.num_lookahead_tokens)) // self.block_size

    def _run(self, request: Request, refreshes: bool) -> None:
        try:
            if refreshes:
                self.hasher.refresh(request)
            else:
                self.hasher.extend(request)
        except KVLedgerError:
            raise
        except Exception as error:
            failed = RequestError(f"request {request.request_id!r}: the hasher failed with {error!r}")
            failed.__cause__ = error
            raise failed
        if not self._is_own:
            self._require_sound(request, request.num_tokens)

    def _require_sound(self, request: Request, num_tokens: int) -> None:
        hashes = request.block_hashes
        needed = self._num_named(request, num_tokens)
        if len(hashes) < needed:
            raise RequestError(
                f"request {request.request_id!r}: {len(hashes)} block hashes for {needed} full blocks of "
                f"{self.block_size} tokens; the hasher must append one for each"
            )
        # Each is looked at once: a list of hashes only grows.
        start = request.num_checked_hashes if request.checked_hashes is hashes else 0
        if len(hashes) > start:
            _require_bytes(request, hashes, start)
            request.checked_hashes = hashes
            request.num_checked_hashes = len(hashes)


def _require_bytes(request: Request, hashes: Sequence[object], start: int) -> None:
    for index in range(start, len(hashes)):
        block_hash = hashes[index]
        if not isinstance(block_hash, bytes) or len(block_hash) == 0:
            raise RequestError(
                f"request {request.request_id!r}: block_hashes[{index}]={block_hash!r}: not a hash; hashes are bytes, "
                "and not empty"
            )
