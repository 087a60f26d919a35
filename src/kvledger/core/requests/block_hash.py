"""Block hashes: the name of a block's content together with everything before it.

Two requests share a block exactly when its hash is equal, so the hash covers whatever the KV values depend on. Byte by
byte, with H the hash function, all integers little-endian, tokens 4 bytes each:

    root    = H("kvledger-block-hash-1" | u32 block size | u64 epoch | seed)
    hash[i] = H(parent | tokens of block i | extra keys of block i)        parent = hash[i - 1], or root for block 0
    extra   = one entry a key: u8 tag | u32 length | payload
        tag 1, block 0 only: adapter      u64 adapter_id | u64 generation | name in UTF-8
        tag 2, block 0 only: cache salt   UTF-8
        tag 3, each block that the item overlaps: multimodal   i64 item start - block start | content hash in UTF-8
        tag 4, with a lookahead of L: the tokens behind the block    L tokens

Parent and tokens have fixed lengths and extra keys are tagged and length-delimited, so no two different inputs give the
same bytes: an adapter named like somebody's salt cannot meet it. Adapter and salt stand in block 0 only, because every
later hash contains block 0's. The same inputs give the same hashes in every process and on every machine; a secret seed
keeps outsiders from predicting them.

sha256 is the default: with a hash that can be forged, a tenant could craft a prompt that is served another's KV values
(vLLM advisory GHSA-rm76-4mrf-v9r8). SipHash-2-4-128 under a secret key is several times cheaper, and as safe for an
engine that shares no hashes with others: all who compare names must have the key. xxh3-128 is cheap too, and safe among
trusted users only. VerifiedBlockHasher makes any hash function safe, for memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from mypy_extensions import mypyc_attr

from kvledger.core.requests.request import MultiModalItem, Request
from kvledger.core.requests.siphash import SipHash
from kvledger.core.units import MAX_COUNT, require_positive
from kvledger.errors import RequestError, wrong_value

_DOMAIN: Final = b"kvledger-block-hash-1"
_TAG_ADAPTER: Final = b"\x01"
_TAG_SALT: Final = b"\x02"
_TAG_MULTIMODAL: Final = b"\x03"
_TAG_LOOKAHEAD: Final = b"\x04"


def _entry(tag: bytes, payload: bytes) -> bytes:
    return tag + len(payload).to_bytes(4, "little") + payload


def _identity_keys(request: Request) -> bytes:
    """Extra keys of block 0: who may share this request's blocks at all."""
    keys = b""
    adapter = request.adapter
    if adapter is not None:
        numbers = adapter.adapter_id.to_bytes(8, "little") + adapter.generation.to_bytes(8, "little")
        keys += _entry(_TAG_ADAPTER, numbers + adapter.name.encode())
    if request.cache_salt:
        keys += _entry(_TAG_SALT, request.cache_salt.encode())
    return keys


def _multimodal_keys(items: tuple[MultiModalItem, ...], start: int, end: int) -> bytes:
    """Extra keys of the block over tokens [start, end): the items that it shows a part of."""
    keys = b""
    for item in items:
        if item.start < end and start < item.end:
            offset = (item.start - start).to_bytes(8, "little", signed=True)
            keys += _entry(_TAG_MULTIMODAL, offset + item.content_hash.encode())
    return keys


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockHasher(ABC):
    """Keeps a request's block_hashes current. `block_size`: tokens that one hash names."""

    def __init__(self, block_size: int) -> None:
        require_positive("hash_block_size", block_size, MAX_COUNT)
        self.block_size: Final = block_size
        self.epoch: int = 0
        # Tokens behind a block that its hash covers as well: a draft's values in the block depend on them.
        self.num_lookahead_tokens: int = 0
        self._serves: bool = False

    @abstractmethod
    def extend(self, request: Request) -> None:
        """Appends the hashes of blocks that became full since the last call: one for every full block afterwards whose
        num_lookahead_tokens tokens behind it are known."""

    def serve(self, num_lookahead_tokens: int) -> None:
        """Called by a ledger that takes its names from here: its rules say how far behind a block a hash looks.

        ConfigError when another ledger takes names from here that look less or more far: their requests would mix them.
        """
        if self._serves and num_lookahead_tokens != self.num_lookahead_tokens:
            raise wrong_value(
                "hasher", type(self).__name__, "it hashes for a ledger with other drafts", "give each ledger its own"
            )
        self._serves = True
        self.num_lookahead_tokens = num_lookahead_tokens

    def start_epoch(self) -> None:
        """Makes all new hashes differ from all earlier ones, as when the model's weights changed."""
        self.epoch += 1

    def refresh(self, request: Request) -> None:
        """extend(), after dropping hashes of an earlier epoch. For a request that holds no blocks."""
        if request.hash_epoch != self.epoch:
            request.block_hashes = []
            request.hash_epoch = self.epoch
        self.extend(request)


class ChainedBlockHasher(BlockHasher):
    """The chain of the module docstring over any hash function of bytes."""

    def __init__(self, block_size: int, digest: Callable[[bytes], bytes], seed: bytes = b"") -> None:
        super().__init__(block_size)
        self._digest: Final = digest
        self._seed: Final = seed
        self._roots: dict[int, bytes] = {}

    def digest(self, data: bytes) -> bytes:
        return self._digest(data)

    def root(self, epoch: int) -> bytes:
        """Parent of every block 0 of that epoch."""
        root = self._roots.get(epoch)
        if root is None:
            numbers = self.block_size.to_bytes(4, "little") + epoch.to_bytes(8, "little")
            root = self.digest(_DOMAIN + numbers + self._seed)
            self._roots[epoch] = root
        return root

    def extend(self, request: Request) -> None:
        block_size = self.block_size
        hashes = request.block_hashes
        request.hash_block_size = block_size
        request.hash_lookahead = self.num_lookahead_tokens
        start = len(hashes) * block_size
        end = start + block_size
        num_ahead = self.num_lookahead_tokens
        num_tokens = request.num_tokens - num_ahead
        if end > num_tokens:
            return
        parent = hashes[-1] if hashes else self.root(request.hash_epoch)
        tokens = request.tokens
        while end <= num_tokens:
            data = tokens.pack_behind(parent, start, end)
            if start == 0:
                data += _identity_keys(request)
            if request.multimodal:
                data += _multimodal_keys(request.multimodal, start, end + num_ahead)
            if num_ahead > 0:
                data += _entry(_TAG_LOOKAHEAD, tokens.pack(end, end + num_ahead))
            parent = self.digest(data)
            hashes.append(parent)
            start = end
            end += block_size


def _sha256_digest(data: bytes) -> bytes:
    return sha256(data).digest()


class Sha256BlockHasher(ChainedBlockHasher):
    """The chain over sha256. Its digest is called directly, not through a function object."""

    def __init__(self, block_size: int, seed: bytes = b"") -> None:
        super().__init__(block_size, _sha256_digest, seed)

    def digest(self, data: bytes) -> bytes:
        return sha256(data).digest()


class SipHashBlockHasher(ChainedBlockHasher):
    """The chain over SipHash-2-4-128. `key`: 16 secret random bytes; engines with one key give the same hashes."""

    def __init__(self, block_size: int, key: bytes) -> None:
        siphash = SipHash(key)
        super().__init__(block_size, siphash.digest)
        self._siphash: Final = siphash

    def digest(self, data: bytes) -> bytes:
        return self._siphash.digest(data)


class VerifiedBlockHasher(ChainedBlockHasher):
    """The chain over a hash function that need not be trusted: equal hashes of different content are told apart.

    It remembers what every hash was computed of, about 4 * block_size + 100 bytes a distinct block, for as long as it
    lives. A digest that comes again for other content gets that content's number appended (u32).
    """

    def __init__(self, block_size: int, digest: Callable[[bytes], bytes], seed: bytes = b"") -> None:
        super().__init__(block_size, digest, seed)
        self._contents: dict[bytes, list[bytes]] = {}

    def digest(self, data: bytes) -> bytes:
        name = super().digest(data)
        contents = self._contents.setdefault(name, [])
        if data not in contents:
            contents.append(data)
        number = contents.index(data)
        return name if number == 0 else name + number.to_bytes(4, "little")


class GivenBlockHasher(BlockHasher):
    """For engines that hash on their own: block_hashes come with the request and are used as they are."""

    def extend(self, request: Request) -> None:
        needed = max(0, request.num_tokens - self.num_lookahead_tokens) // self.block_size
        if len(request.block_hashes) < needed:
            raise RequestError(
                f"request {request.request_id!r}: {len(request.block_hashes)} block hashes for {needed} full blocks of "
                f"{self.block_size} tokens; append the missing hashes before this call"
            )

    def start_epoch(self) -> None:
        raise RequestError("start_epoch: the hashes are given by the caller, so a new epoch must come with them")


HASH_NAMES: Final = ("sha256", "siphash", "xxh3")


def make_block_hasher(hash_name: str, block_size: int, seed: bytes = b"") -> BlockHasher:
    """The hasher of that name: "sha256", "siphash" (its seed is the key, 16 secret random bytes), or "xxh3" (xxh3-128;
    needs the `hash` extra). ConfigError for another name, a missing key, or a missing package."""
    if hash_name == "sha256":
        return Sha256BlockHasher(block_size, seed)
    if hash_name == "siphash":
        return SipHashBlockHasher(block_size, seed)
    if hash_name != "xxh3":
        raise wrong_value("hash", hash_name, "unknown hash function", "use one of " + ", ".join(HASH_NAMES))
    if find_spec("xxhash") is None:
        raise wrong_value("hash", hash_name, "the xxhash package is missing", "pip install 'kvledger[hash]'")
    digest: Callable[[bytes], bytes] = import_module("xxhash").xxh3_128_digest
    return ChainedBlockHasher(block_size, digest, seed)
