"""What was announced and is still cached: the consumers' knowledge, kept by the publisher for snapshots.

An entry takes about 300 bytes and its tokens, 4 bytes each.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from kvledger.core.requests.tokens import TOKEN_BYTES


class EventAdapter(NamedTuple):
    """The adapter, as events name it."""

    lora_id: int | None
    lora_name: str | None


class AnnouncedBlock(NamedTuple):
    """A hash's meaning: what it follows, its tokens (packed), what it covers beside them, and the tokens behind them
    that it covers too (packed; with a draft)."""

    parent: bytes | None
    tokens: bytes
    extra_key: tuple[Any, ...] | None
    adapter: EventAdapter
    lookahead: bytes = b""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class AnnouncedBlocks:
    """(group id, hash) -> block, and how many blocks carry that hash."""

    def __init__(self) -> None:
        self._blocks: Final[dict[tuple[int, bytes], AnnouncedBlock]] = {}
        # Carriers beyond the first.
        self._more_carriers: Final[dict[tuple[int, bytes], int]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, group_id: int, block_hash: bytes, block: AnnouncedBlock) -> bool:
        """One more block carries that hash. True for the first."""
        key = (group_id, block_hash)
        if key not in self._blocks:
            self._blocks[key] = block
            return True
        self._more_carriers[key] = self._more_carriers.get(key, 0) + 1
        return False

    def remove(self, group_id: int, block_hash: bytes) -> bool:
        """One block carries that hash no more. True for the last; a hash that is unknown has none."""
        key = (group_id, block_hash)
        num_more = self._more_carriers.get(key, 0)
        if num_more == 0:
            return self._blocks.pop(key, None) is not None
        if num_more == 1:
            del self._more_carriers[key]
        else:
            self._more_carriers[key] = num_more - 1
        return False

    def clear(self) -> None:
        self._blocks.clear()
        self._more_carriers.clear()

    def chains(self) -> Iterator[tuple[int, list[tuple[bytes, AnnouncedBlock]]]]:
        """Everything, as (group id, blocks that follow each other): parents always before their children.

        Blocks of a chain have one size.
        """
        children: dict[tuple[int, bytes], list[bytes]] = {}
        stack: list[tuple[int, bytes]] = []
        for key, block in self._blocks.items():
            parent = None if block.parent is None else (key[0], block.parent)
            if parent is not None and parent in self._blocks:
                children.setdefault(parent, []).append(key[1])
            else:
                stack.append(key)
        stack.reverse()
        group_id = -1
        chain: list[tuple[bytes, AnnouncedBlock]] = []
        while stack:
            key = stack.pop()
            block = self._blocks[key]
            if not chain or group_id != key[0] or not _follows(block, chain[-1]):
                if chain:
                    yield group_id, chain
                group_id, chain = key[0], []
            chain.append((key[1], block))
            stack += [(key[0], child) for child in reversed(children.get(key, ()))]
        if chain:
            yield group_id, chain


def _follows(block: AnnouncedBlock, before: tuple[bytes, AnnouncedBlock]) -> bool:
    return block.parent == before[0] and len(block.tokens) == len(before[1].tokens)
