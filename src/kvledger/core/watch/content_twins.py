"""ContentTwins: recent prompts by content alone, to notice that the same tokens are cached for somebody else.

Block hashes cover the salt, the adapter, the epoch and what stands behind multimodal placeholders, so equal tokens of
two identities meet nowhere in the prefix cache. Here a prompt is found by the tokens of its first block and compared
token by token: where tokens are equal and block hashes are not, the identity is what differs.

While all requests are one identity without multimodal items, they are only put on a list, and sorted in when the first
other one comes. Nothing is hashed anew and tokens are shared with their requests. What is kept is bounded: `max_tokens`
tokens of prompts in all (about 10 bytes each with the hashes, and about 1 KB a request), and the last MAX_ALIKE prompts
that begin with the same block.
"""

from enum import Enum
from typing import Final

from kvledger.core.blocks.prefix_index import PrefixIndex
from kvledger.core.requests.request import Adapter, Request
from kvledger.core.requests.tokens import TOKEN_BYTES

MAX_ALIKE: Final = 16
# Forgotten prompts leave the list of prompts so many at a time, with their tokens.
_FORGOTTEN_AT_ONCE: Final = 64
# Blocks that are compared at once.
_STRIDE: Final = 64


class Identity(Enum):
    """In what two requests differ whose tokens are equal. The first of them counts."""

    SALT = "cache salt"
    ADAPTER = "adapter"
    EPOCH = "epoch"
    CONTENT = "multimodal content"


class Twin:
    """Tokens of the same content that are cached for another identity, up to token `end`."""

    def __init__(self, end: int, identity: Identity) -> None:
        self.end: Final = end
        self.identity: Final = identity


class KnownPrompt:
    """What a prompt was when it was admitted."""

    def __init__(self, request: Request, packed: bytes, key: bytes) -> None:
        self.packed: Final = packed
        self.key: Final = key
        self.block_hashes: Final = request.block_hashes
        self.num_hashes: Final = len(request.block_hashes)
        self.salt: Final = request.cache_salt
        self.adapter: Final = request.adapter
        self.epoch: Final = request.hash_epoch
        self.has_items: Final = len(request.multimodal) > 0

    def differs(self, request: Request) -> Identity | None:
        """In what the request differs; None when they would share every block of equal tokens."""
        if self.salt != request.cache_salt:
            return Identity.SALT
        if not _is_same(self.adapter, request.adapter):
            return Identity.ADAPTER
        if self.epoch != request.hash_epoch:
            return Identity.EPOCH
        return Identity.CONTENT if self.has_items or request.multimodal else None


class ContentTwins:
    """Prompts that were admitted. `block_size` and `hashes_per_block`: of the groups in `indexes`, which must all have
    a block for it to count as cached."""

    def __init__(self, indexes: list[PrefixIndex], block_size: int, hashes_per_block: int, max_tokens: int) -> None:
        self._indexes: Final = indexes
        self._block_size: Final = block_size
        self._hashes_per_block: Final = hashes_per_block
        self._max_bytes: Final = max_tokens * TOKEN_BYTES
        # The only identity so far, as its first request; its requests from number _first on, and how many tokens they
        # were admitted with.
        self._only: Request | None = None
        self._unsorted: list[Request] = []
        self._lengths: list[int] = []
        self._is_mixed: bool = False
        self._alike: Final[dict[bytes, list[KnownPrompt]]] = {}
        # All of them from number _first on, the oldest first; those before it are forgotten.
        self._prompts: Final[list[KnownPrompt]] = []
        self._first: int = 0
        self._num_bytes: int = 0

    def meet(self, request: Request, start: int) -> Twin | None:
        """The longest cached content from token `start` on, a block boundary, that another identity has. Then the
        request is known as well. O(1) while everybody who sends that prompt is the same to the cache."""
        if request.num_tokens < self._block_size:
            return None
        if not self._is_mixed:
            if self._is_the_only_identity(request):
                self._put_aside(request)
                return None
            self._sort_in()
        packed = request.tokens.packed()
        key = packed[: self._block_size * TOKEN_BYTES]
        alike = self._alike.get(key)
        best: Twin | None = None
        if alike is None:
            alike = []
            self._alike[key] = alike
        elif start < request.num_tokens:
            for known in alike:
                identity = known.differs(request)
                if identity is None:
                    continue
                end = self._cached_end(known, request.block_hashes, packed, start)
                if end > start and (best is None or end > best.end):
                    best = Twin(end, identity)
        self._remember(KnownPrompt(request, packed, key), alike)
        return best

    def _is_the_only_identity(self, request: Request) -> bool:
        only = self._only
        if only is None:
            self._only = only = request
        return (
            len(request.multimodal) == 0
            and request.hash_epoch == only.hash_epoch
            and request.cache_salt == only.cache_salt
            and _is_same(request.adapter, only.adapter)
        )

    def _put_aside(self, request: Request) -> None:
        self._unsorted.append(request)
        self._lengths.append(request.num_tokens)
        self._num_bytes += request.num_tokens * TOKEN_BYTES
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._lengths[self._first] * TOKEN_BYTES
            self._first += 1
        if self._first >= _FORGOTTEN_AT_ONCE:
            del self._unsorted[: self._first]
            del self._lengths[: self._first]
            self._first = 0

    def _sort_in(self) -> None:
        """From now on there are several identities."""
        self._is_mixed = True
        unsorted = self._unsorted[self._first :]
        lengths = self._lengths[self._first :]
        self._unsorted = []
        self._lengths = []
        self._first = 0
        self._num_bytes = 0
        for position, request in enumerate(unsorted):
            packed = request.tokens.pack(0, min(lengths[position], request.num_tokens))
            key = packed[: self._block_size * TOKEN_BYTES]
            alike = self._alike.get(key)
            if alike is None:
                alike = []
                self._alike[key] = alike
            self._remember(KnownPrompt(request, packed, key), alike)

    def _cached_end(self, known: KnownPrompt, own_hashes: list[bytes], packed: bytes, start: int) -> int:
        """Where what is cached for the other ends. `start` when its first block is not, or belongs to both."""
        per_block = self._hashes_per_block
        num_blocks = min(known.num_hashes, len(own_hashes)) // per_block
        first = start // self._block_size
        if first >= num_blocks:
            return start
        if known.block_hashes[(first + 1) * per_block - 1] == own_hashes[(first + 1) * per_block - 1]:
            return start
        num_blocks = self._num_equal_blocks(known.packed, packed, num_blocks)
        for block in range(first, num_blocks):
            block_hash = known.block_hashes[(block + 1) * per_block - 1]
            for index in self._indexes:
                if index.get(block_hash) is None:
                    return block * self._block_size
        return max(start, num_blocks * self._block_size)

    def _num_equal_blocks(self, theirs: bytes, ours: bytes, num_blocks: int) -> int:
        """Blocks from the start, up to num_blocks, whose tokens are equal."""
        block_bytes = self._block_size * TOKEN_BYTES
        stride = block_bytes * _STRIDE
        end = num_blocks * block_bytes
        position = 0
        while position < end:
            stop = min(position + stride, end)
            if theirs[position:stop] != ours[position:stop]:
                break
            position = stop
        while position < end and theirs[position : position + block_bytes] == ours[position : position + block_bytes]:
            position += block_bytes
        return position // block_bytes

    def _remember(self, prompt: KnownPrompt, alike: list[KnownPrompt]) -> None:
        if len(alike) == MAX_ALIKE:
            alike.pop(0)  # it stays in the queue of all prompts, and counts, until its turn comes
        alike.append(prompt)
        self._prompts.append(prompt)
        self._num_bytes += len(prompt.packed)
        while self._num_bytes > self._max_bytes:
            oldest = self._prompts[self._first]
            self._first += 1
            self._num_bytes -= len(oldest.packed)
            others = self._alike.get(oldest.key)
            if others and others[0] is oldest:
                others.pop(0)
                if not others:
                    del self._alike[oldest.key]
        if self._first >= _FORGOTTEN_AT_ONCE:
            del self._prompts[: self._first]
            self._first = 0


def _is_same(one: Adapter | None, other: Adapter | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.adapter_id == other.adapter_id and one.generation == other.generation and one.name == other.name
