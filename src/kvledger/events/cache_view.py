"""CacheView: what a consumer knows of a cache from its events. For consumers in Python, and for checking streams."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvledger.events.event_types import AllBlocksCleared, AnyEvent, BlockRemoved, BlockStored, WireHash


@dataclass(frozen=True)
class ViewedBlock:
    """A cached block as announced. `tokens`: its own; `parent`: the hash before it, None at the start."""

    parent: WireHash | None
    tokens: tuple[int, ...]
    lora_name: str | None
    kind: str | None


class CacheView:
    """(group id, hash) -> block. Counts, so that it follows vLLM's own stream too, where each carrier is told of.

    vLLM's spans with null blocks do not say which tokens belong to which hash; such blocks have no tokens here.
    """

    def __init__(self) -> None:
        self.blocks: Final[dict[tuple[int, WireHash], ViewedBlock]] = {}
        self._carriers: Final[Counter[tuple[int, WireHash]]] = Counter()

    def apply(self, events: Iterable[AnyEvent]) -> None:
        """Takes in the events of a batch. Removing what is not known changes nothing."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                self._carriers.clear()

    def num_cached_tokens(self, group_id: int, hashes: Iterable[WireHash]) -> int:
        """Tokens of the leading hashes that are cached in that group: what a router asks."""
        num_tokens = 0
        for block_hash in hashes:
            block = self.blocks.get((group_id, block_hash))
            if block is None:
                break
            num_tokens += len(block.tokens)
        return num_tokens

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        group_id = event.group_idx or 0
        is_aligned = len(event.token_ids) == size * len(event.block_hashes)
        parent = event.parent_block_hash
        for index, block_hash in enumerate(event.block_hashes):
            key = (group_id, block_hash)
            tokens = tuple(event.token_ids[index * size : (index + 1) * size]) if is_aligned else ()
            self.blocks[key] = ViewedBlock(parent, tokens, event.lora_name, event.kv_cache_spec_kind)
            self._carriers[key] += 1
            parent = block_hash

    def _remove(self, event: BlockRemoved) -> None:
        for block_hash in event.block_hashes:
            key = (event.group_idx or 0, block_hash)
            self._carriers[key] -= 1
            if self._carriers[key] <= 0:
                del self._carriers[key]
                self.blocks.pop(key, None)
