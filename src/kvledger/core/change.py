"""Change: whether one is under way in a ledger or a scheduler.

A call validates and counts first, and raises then; what it does afterwards is its change. MemoryError and, interpreted,
KeyboardInterrupt can come in the midst of that. Whoever is half changed could give a request blocks that another one
holds, so it answers nobody any more: check() names the change, and every further call is refused. Nor may a call come
out of an observer while the change that it is told of goes on. Marking costs a store of a number.
"""

from typing import Final

from mypy_extensions import i64

from kvledger.errors import UnfinishedChangeError, require

# What may be under way; indexes into the names.
AT_REST: Final[i64] = 0
ADMITTING: Final[i64] = 1
CACHING: Final[i64] = 2
FREEING: Final[i64] = 3
FORKING: Final[i64] = 4
COPYING: Final[i64] = 5
EVICTING: Final[i64] = 6
RESETTING: Final[i64] = 7
SCHEDULING: Final[i64] = 8
UPDATING: Final[i64] = 9
FAILING: Final[i64] = 10
ADDING: Final[i64] = 11
ENDING: Final[i64] = 12
LOADING: Final[i64] = 13
_NAMES: Final = (
    "nothing",
    "an allocation",
    "cache_blocks",
    "the freeing of blocks",
    "fork",
    "the release of block copies",
    "an eviction",
    "reset_prefix_cache",
    "schedule",
    "an update with sampled tokens",
    "fail_step",
    "add_request",
    "abort",
    "the end of an external load",
)


class Change:
    """Of one object. `under_way`: AT_REST, or what is being done."""

    def __init__(self, owner: str) -> None:
        self.under_way: i64 = AT_REST
        self._owner: Final = owner

    def begin(self, what: i64) -> None:
        """UnfinishedChangeError unless nothing is under way."""
        if self.under_way != AT_REST:
            raise self.refusal()
        self.under_way = what

    def require_at_rest(self) -> None:
        """UnfinishedChangeError unless nothing is under way."""
        if self.under_way != AT_REST:
            raise self.refusal()

    def refusal(self) -> UnfinishedChangeError:
        return UnfinishedChangeError(
            f"{_NAMES[self.under_way]} is not complete in this {self._owner}. If an observer or another callback calls "
            "from within it: note down what happens, and act when the call has returned. Otherwise an exception "
            f"interrupted it, and the {self._owner} is half changed: make a new one, and start its requests over"
        )

    def check(self) -> None:
        """Proves that no change was interrupted."""
        require(
            self.under_way == AT_REST,
            f"{_NAMES[self.under_way]} was interrupted by an exception, so this {self._owner} is half changed: blocks "
            "may be lost, or be hits that nobody has computed",
        )
