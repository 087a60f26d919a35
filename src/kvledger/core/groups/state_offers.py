"""States that others can start from, each with the block that holds it now, for whoever stores states elsewhere.

A table of states tells neither by itself: its blocks move, are written over and are given back long before the request
ends. So managers that were asked to say of each state, once, when it becomes a hit, where it lies.
"""

from typing import Final

from mypy_extensions import mypyc_attr

from kvledger.core.blocks.block import KVCacheBlock


@mypyc_attr(acyclic=True)
class StateOffer:
    """The state after num_tokens tokens of a request, in that block of that group. True for the step in which it is
    taken; who reads the block later holds it (OutsideHolds.add)."""

    def __init__(self, request_id: str, group_id: int, block: KVCacheBlock, num_tokens: int) -> None:
        self.request_id: Final = request_id
        self.group_id: Final = group_id
        self.block: Final = block
        self.num_tokens: Final = num_tokens


class StateOffers:
    """Of all groups, since they were last taken."""

    def __init__(self) -> None:
        self._offers: list[StateOffer] = []

    def add(self, offer: StateOffer) -> None:
        self._offers.append(offer)

    def withdraw(self, request_id: str) -> None:
        """The request gives its blocks back: what they hold may be written over before anybody reads it."""
        if self._offers:
            self._offers = [offer for offer in self._offers if offer.request_id != request_id]

    def take(self) -> list[StateOffer]:
        """Group by group, each in the order in which they were made."""
        offers = self._offers
        self._offers = []
        if len(offers) > 1:
            offers.sort(key=_group_of)
        return offers


def _group_of(offer: StateOffer) -> int:
    return offer.group_id
