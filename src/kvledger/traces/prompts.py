"""From a recorded request to one that the ledger takes: tokens, or block names, that share as the trace's ids say.

A trace says which blocks are equal, not what is in them. So content is made up, such that two prompts have their first
n tokens in common exactly when their trace blocks say so:

    trace block of id x   every token is the number given to (scope, x), counting up from 0
    behind the last id    every token is a number of this request alone, counting down from 2**32 - 1
    generated tokens      as prompts, where the trace has ids of the answer; behind them, another number of this request

Trace blocks are cut into engine blocks of any size, whether or not it divides theirs. `NamedPrompts` does without
content and hashing: it names every engine block by the path of ids that leads to it, so that only the ledger is
measured; it finds the same hits, because equal names mean equal prefixes there as well.
"""

import struct
from abc import ABC, abstractmethod
from collections import defaultdict
from itertools import count
from typing import Final

from kvledger.core.requests.block_hash import BlockHasher, GivenBlockHasher, make_block_hasher
from kvledger.core.requests.request import Request
from kvledger.core.requests.tokens import TOKEN_BYTES
from kvledger.errors import wrong_value
from kvledger.traces.trace_request import TraceRequest

HASH_CHOICES: Final = ("sha256", "siphash", "xxh3", "none")
# Made-up tokens are no secret: a key that is known gives the same hashes in every run.
_REPLAY_KEY: Final = b"kvledger, replay"

_LAST_TOKEN: Final = (1 << 32) - 1
# A block name: 3 bytes of position and 5 bytes of node. Nodes of one request alone start in the upper half.
_POSITION_BYTES: Final = 3
_NODE_BYTES: Final = 5
_FIRST_OWN_NODE: Final = 1 << (8 * _NODE_BYTES - 1)


class PromptMaker(ABC):
    """Makes requests. `hasher` is the one to give to the ledger."""

    def __init__(self, hasher: BlockHasher) -> None:
        self.hasher: Final = hasher

    @abstractmethod
    def make(self, recorded: TraceRequest, serial: int) -> Request:
        """The request of that serial number; its id is the number."""

    def answer(self, recorded: TraceRequest, serial: int) -> list[int] | None:
        """The tokens that it generates, where the trace knows blocks of them and they are hashed; else output_token."""
        return None


def output_token(serial: int) -> int:
    """The token that this request generates again and again."""
    return _LAST_TOKEN - 2 * serial


def make_prompt_maker(hash_name: str, block_size: int) -> PromptMaker:
    """The prompt maker for a hash function by name, or for "none"."""
    if hash_name not in HASH_CHOICES:
        raise wrong_value("hash", hash_name, "unknown hash function", "use one of " + ", ".join(HASH_CHOICES))
    if hash_name == "none":
        return NamedPrompts(block_size)
    seed = _REPLAY_KEY if hash_name == "siphash" else b""
    return TokenPrompts(make_block_hasher(hash_name, block_size, seed))


class TokenPrompts(PromptMaker):
    """Prompts with made-up tokens, hashed like real ones."""

    def __init__(self, hasher: BlockHasher) -> None:
        super().__init__(hasher)
        next_number = count().__next__
        # (scope, tokens of an id): an id of another size is other content.
        self._numbers: Final[defaultdict[tuple[int, int], defaultdict[int, int]]] = defaultdict(
            lambda: defaultdict(next_number)
        )

    def make(self, recorded: TraceRequest, serial: int) -> Request:
        num_repeats = recorded.block_size
        numbers = self._numbers[recorded.scope, num_repeats]
        # The block that the prompt begins and the answer fills has one name.
        ids = recorded.hash_ids + recorded.output_ids[:1]
        packed = b"".join([numbers[x].to_bytes(TOKEN_BYTES, "little") * num_repeats for x in ids])
        num_bytes = recorded.num_prompt_tokens * TOKEN_BYTES
        if len(packed) > num_bytes:
            packed = packed[:num_bytes]
        elif len(packed) < num_bytes:
            own_token = (_LAST_TOKEN - 2 * serial - 1).to_bytes(TOKEN_BYTES, "little")
            packed += own_token * (recorded.num_prompt_tokens - len(packed) // TOKEN_BYTES)
        return _request(recorded, serial, packed)

    def answer(self, recorded: TraceRequest, serial: int) -> list[int] | None:
        if not recorded.output_ids:
            return None
        block_size = recorded.block_size
        numbers = self._numbers[recorded.scope, block_size]
        tokens: list[int] = []
        for x in recorded.output_ids:
            tokens += [numbers[x]] * block_size
        # The first of these blocks begins in the prompt.
        del tokens[: recorded.num_prompt_tokens % block_size]
        tokens += [output_token(serial)] * (recorded.num_output_tokens - len(tokens))
        return tokens


class NamedPrompts(PromptMaker):
    """Prompts without content, whose blocks come with names.

    A node stands for one path of ids from the start of a prompt, so it identifies the prefix even in traces whose ids
    name a block's content only. An engine block is named by its position and the node that holds its last token, or the
    last one behind it that its name must cover for a draft.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__(GivenBlockHasher(block_size))
        self._block_size: Final = block_size
        # (node of the path before, id) -> node; (scope, tokens of an id) -> the node in which its paths begin.
        self._nodes: Final[defaultdict[tuple[int, int], int]] = defaultdict(count().__next__)
        self._roots: Final[defaultdict[tuple[int, int], int]] = defaultdict(count(-1, -1).__next__)
        # Trace block size -> how to name the engine blocks inside one, where they fit evenly.
        self._cuts: Final[dict[int, _EvenCut | None]] = {}

    def make(self, recorded: TraceRequest, serial: int) -> Request:
        request = _request(recorded, serial, bytes(recorded.num_prompt_tokens * TOKEN_BYTES))
        request.block_hashes = self._names(recorded, serial)
        return request

    def _names(self, recorded: TraceRequest, serial: int) -> list[bytes]:
        """Names of all blocks that the request will ever fill."""
        nodes: list[int] = []
        node = self._roots[recorded.scope, recorded.block_size]
        num_most = recorded.num_prompt_tokens
        ids = recorded.hash_ids
        if recorded.output_ids:
            num_most += recorded.num_output_tokens
            ids = ids + recorded.output_ids
        for x in ids:
            node = self._nodes[node, x]
            nodes.append(node)
        block_size = self._block_size
        num_ahead = self.hasher.num_lookahead_tokens
        num_known = min(num_most, len(nodes) * recorded.block_size)
        num_shareable = max(0, num_known - num_ahead) // block_size
        cut = self._cut(recorded.block_size) if num_ahead == 0 else None
        if cut is not None:
            names = cut.names(nodes)
            del names[num_shareable:]
        else:
            names = [
                _name(index, nodes[((index + 1) * block_size + num_ahead - 1) // recorded.block_size])
                for index in range(num_shareable)
            ]
        own_node = _FIRST_OWN_NODE + serial
        num_blocks = (recorded.num_prompt_tokens + recorded.num_output_tokens - num_ahead) // block_size
        names += [_name(index, own_node) for index in range(num_shareable, num_blocks)]
        return names

    def _cut(self, trace_block_size: int) -> "_EvenCut | None":
        if trace_block_size not in self._cuts:
            fits = trace_block_size > 0 and trace_block_size % self._block_size == 0
            self._cuts[trace_block_size] = _EvenCut(trace_block_size // self._block_size) if fits else None
        return self._cuts[trace_block_size]


class _EvenCut:
    """Names of the engine blocks of whole trace blocks, many at a time: positions joined by the node, then split."""

    def __init__(self, num_per_trace_block: int) -> None:
        positions = [index.to_bytes(_POSITION_BYTES, "little") for index in range(num_per_trace_block)]
        self._positions: Final = [*positions, b""]
        self._split: Final = struct.Struct(f"{_POSITION_BYTES + _NODE_BYTES}s" * num_per_trace_block).unpack

    def names(self, nodes: list[int]) -> list[bytes]:
        names: list[bytes] = []
        for node in nodes:
            names += self._split(node.to_bytes(_NODE_BYTES, "little").join(self._positions))
        return names


def _name(position: int, node: int) -> bytes:
    return position.to_bytes(_POSITION_BYTES, "little") + node.to_bytes(_NODE_BYTES, "little")


def _request(recorded: TraceRequest, serial: int, prompt: bytes) -> Request:
    return Request(
        str(serial),
        prompt,
        max_tokens=recorded.num_output_tokens,
        priority=recorded.priority,
        # Ties under the priority policy go to the request that arrived first; its serial number says which.
        arrival_time=float(serial),
    )
