"""SpoiledBlocks: blocks that hold no values, or values that were computed from such, found by following hits."""

from typing import Final

from kvledger.core.ledger.coordinator import KVCacheCoordinator


class SpoiledBlocks:
    """(group, entry of the table, block id): a prefix that is shared stands at the same place of every table."""

    def __init__(self, coordinator: KVCacheCoordinator) -> None:
        self._managers: Final = coordinator.managers
        self._entries: Final[set[tuple[int, int, int]]] = set()

    def add_table(self, block_ids: tuple[list[int], ...], num_valid_tokens: int) -> None:
        """Of a request's table all that stands for more than its first num_valid_tokens tokens."""
        for group_id, manager in enumerate(self._managers):
            table = block_ids[group_id]
            for index in range(num_valid_tokens // manager.block_size, len(table)):
                self.add(group_id, index, table[index])

    def add(self, group_id: int, index: int, block_id: int) -> None:
        if block_id != 0:
            self._entries.add((group_id, index, block_id))

    def num_valid_tokens(self, block_ids: tuple[list[int], ...]) -> int:
        """Tokens before the first such block in that table; -1 when it has none."""
        num_valid = -1
        for group_id, manager in enumerate(self._managers):
            for index, block_id in enumerate(block_ids[group_id]):
                if (group_id, index, block_id) in self._entries:
                    start = index * manager.block_size
                    num_valid = start if num_valid < 0 else min(num_valid, start)
                    break
        return num_valid

    def evict(self) -> None:
        """Takes their hashes: nobody hits them any more."""
        for group_id, manager in enumerate(self._managers):
            manager.pool.evict_blocks([block_id for group, _, block_id in self._entries if group == group_id])
