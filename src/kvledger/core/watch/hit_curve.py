"""HitCurve: the hit tokens of every pool size at once, from one pass over requests that come one after another.

A request frees its blocks last first, so the free queue is ordered by (last user, deeper first). A block is never used
without the blocks before it, so for every pool size the cache is a beginning of one list of blocks by recency, which is
Mattson's stack ("Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970) over chains of blocks
instead of single ones. The list is made of segments, one a past request: of the blocks that request r used, the later
ones took the first, so what r still owns is one range of depths, and it lies in order of depth.

    newest request | ... | r: depth lo, lo + 1, ..., last | r - 1: ... | oldest
                           a hit on depth d needs room for all that is newer, and for d - lo + 1 blocks of r

Exact for a whole-block prefix cache of one full-attention group, but for duplicates: a prompt whose full blocks are all
cached computes its last one again (its logits are needed), and while both copies stay, the pool has one block less for
others. They are counted.
"""

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i64

from kvledger.core.units import require_positive
from kvledger.errors import RequestError, require

# Where a chunk's id and the node before it share one key. Ids are numbered in the order in which they come.
_NODE_STEP: Final[i64] = 1 << 31


class HitCurve:
    """Fed with requests in the order in which they are served, one after another.

    A request is a chain of chunks of `chunk_size` tokens, named by ids: equal ids after equal beginnings are equal
    content, as in a trace (or block hashes, with chunks of one block). `block_size`: tokens of a block of the pool.
    add() is O((chunks + segments) * log requests); memory grows with distinct chunks and requests, not with blocks.
    """

    def __init__(self, block_size: int, chunk_size: int | None = None) -> None:
        require_positive("block_size", block_size)
        self.block_size: Final = block_size
        self.chunk_size: Final = block_size if chunk_size is None else chunk_size
        require_positive("chunk_size", self.chunk_size)
        self.num_requests: int = 0
        self.num_prompt_tokens: int = 0
        # Prompts whose every full block was in the cache of an endless pool, so that the last one was computed again.
        self.num_duplicates: int = 0
        # Blocks of the longest request: a smaller pool refuses it, and the curve holds from one block more on.
        self.num_blocks_of_longest: int = 0
        self._num_owned: i64 = 0
        # Of the request before: it left one block without a hash, which is taken before any cached one.
        self._left_partial: i64 = 0
        self._ids: Final[dict[int, int]] = {}
        # (node before, id) -> node. Node 0 is the beginning of scope 0; other scopes begin in nodes of their own.
        self._nodes: Final[dict[int, int]] = {}
        self._scopes: Final[dict[int, int]] = {0: 0}
        # Node -> who owns its blocks: pairs (depth of the last block, request), by depth. Depths count from 1.
        self._owners: Final[list[list[int]]] = [[]]
        # Request -> the first depth that it still owns; and a Fenwick tree over what each request owns.
        self._first_owned: vec[i64] = vec[i64]()
        self._tree: vec[i64] = vec[i64]([0])
        # Hit blocks gained at that many cached blocks, less those gained at fewer: the curve's second difference.
        self._steps: vec[i64] = vec[i64]()

    @property
    def num_distinct_blocks(self) -> int:
        """Full blocks of different content: a pool of so many never evicts."""
        return self._num_owned

    def add(self, num_tokens: int, chunk_ids: list[int], scope: int = 0) -> None:
        """One request: its prompt is len(chunk_ids) chunks cut to num_tokens tokens; tokens beyond the last chunk are
        its own alone. Equal ids within one scope are equal content. RequestError for a prompt without tokens.
        """
        if num_tokens < 1:
            raise RequestError(f"num_tokens={num_tokens}: a prompt has at least one token")
        block_size: i64 = self.block_size
        num_full: i64 = i64(num_tokens) // block_size
        most_hit: i64 = (i64(num_tokens) - 1) // block_size
        number: i64 = self.num_requests
        segments = vec[i64]()
        touched = vec[i64]()
        depth: i64 = 0
        node: i64 = self._scope_node(scope)
        chunk_end: i64 = 0
        chunk_size: i64 = self.chunk_size
        for chunk_id in chunk_ids:
            node = self._next_node(node, chunk_id)
            chunk_end += chunk_size
            end: i64 = chunk_end // block_size
            if end > num_full:
                end = num_full
            if end > depth:
                segments = self._take_segments(node, depth, end, segments)
                depth = end
                touched = append(append(touched, node), end)
            if end == num_full:
                break
        # Before the lists change: where each block lies in the order of recency.
        k: i64 = 0
        seen: i64 = 0
        while k < len(segments):
            owner: i64 = segments[k]
            first: i64 = segments[k + 1]
            last: i64 = segments[k + 2]
            seen = last
            usable: i64 = last if last < most_hit else most_hit
            if usable >= first:
                place: i64 = self._num_owned - self._owned_up_to(owner) + first - self._first_owned[owner] + 1
                self._count(place + self._left_partial, usable - first + 1)
            k += 3
        if seen == num_full and num_full > most_hit:
            self.num_duplicates += 1
        k = 0
        while k < len(segments):
            self._own(segments[k], segments[k + 1] - segments[k + 2] - 1)
            self._first_owned[segments[k]] = segments[k + 2] + 1
            k += 3
        self._first_owned = append(self._first_owned, i64(1))
        self.num_requests += 1
        self._own(number, num_full)
        k = 0
        while k < len(touched):
            self._give(touched[k], touched[k + 1], number)
            k += 2
        self.num_prompt_tokens += num_tokens
        self._left_partial = 1 if num_tokens % block_size != 0 else 0
        self.num_blocks_of_longest = max(self.num_blocks_of_longest, int(num_full + self._left_partial))

    def num_hit_tokens(self, num_blocks: int) -> int:
        """Tokens that a pool of num_blocks blocks (the null block among them) would have hit."""
        return self.hit_tokens_at([num_blocks])[0]

    def hit_tokens_at(self, pool_sizes: list[int]) -> list[int]:
        """num_hit_tokens of several sizes, in the order given. O(largest size that still gains)."""
        order = sorted(range(len(pool_sizes)), key=pool_sizes.__getitem__)
        hits = [0] * len(pool_sizes)
        blocks: i64 = 0
        gain: i64 = 0
        at: i64 = 0
        for index in order:
            num_cached: i64 = pool_sizes[index] - 1
            while at <= num_cached and at < len(self._steps):
                gain += self._steps[at]
                blocks += gain
                at += 1
            hits[index] = int(blocks) * self.block_size
        return hits

    def smallest_pool(self, share: float) -> int:
        """Fewest blocks (the null block among them) that hit at least that share of what an endless pool hits."""
        if not 0.0 < share <= 1.0:
            raise RequestError(f"share={share}: give a share of the ceiling, above 0.0 and at most 1.0")
        wanted = share * self.num_hit_tokens(len(self._steps) + 1)
        blocks: i64 = 0
        gain: i64 = 0
        at: i64 = 0
        while at < len(self._steps):
            gain += self._steps[at]
            blocks += gain
            if int(blocks) * self.block_size >= wanted:
                return int(at) + 1
            at += 1
        return int(at) + 1

    @property
    def num_blocks_of_ceiling(self) -> int:
        """Fewest blocks (the null block among them) that hit all that an endless pool hits."""
        return self.smallest_pool(1.0)

    def check(self) -> None:
        """Proves that each block has one owner and that the counts of owners agree with the lists. O(everything)."""
        total: i64 = 0
        number: i64 = 0
        while number < self.num_requests:
            total += self._owned_up_to(number) - (self._owned_up_to(number - 1) if number > 0 else 0)
            require(self._first_owned[number] >= 1, f"request {number} owns from depth {self._first_owned[number]} on")
            number += 1
        require(total == self._num_owned, f"requests own {total} blocks, counted {self._num_owned}")
        for node, owners in enumerate(self._owners):
            ends = owners[0::2]
            require(ends == sorted(set(ends)), f"node {node}: owners are not in the order of depth")
            require(owners[1::2] == sorted(owners[1::2], reverse=True), f"node {node}: an older request owns a start")

    def _scope_node(self, scope: int) -> int:
        node = self._scopes.get(scope)
        if node is None:
            node = len(self._owners)
            self._owners.append([])
            self._scopes[scope] = node
        return node

    def _next_node(self, node: i64, chunk_id: int) -> i64:
        number = self._ids.setdefault(chunk_id, len(self._ids))
        key = int(node * _NODE_STEP + i64(number))
        found = self._nodes.get(key)
        if found is None:
            found = len(self._owners)
            self._owners.append([])
            self._nodes[key] = found
        return found

    def _take_segments(self, node: i64, depth: i64, end: i64, segments: "vec[i64]") -> "vec[i64]":
        """Adds who owns the node's blocks behind depth, up to end: triples (owner, first depth, last depth), the first
        one joined to the last of before where it goes on. Blocks that nobody owns are new.
        """
        owners = self._owners[node]
        k: i64 = 0
        while k < len(owners) and depth < end:
            owned_end: i64 = owners[k]
            owner: i64 = owners[k + 1]
            k += 2
            if owned_end <= depth:
                continue
            last: i64 = owned_end if owned_end < end else end
            size: i64 = len(segments)
            if size > 0 and segments[size - 3] == owner and segments[size - 1] == depth:
                segments[size - 1] = last
            else:
                segments = append(append(append(segments, owner), depth + 1), last)
            depth = last
        return segments

    def _give(self, node: i64, end: i64, number: i64) -> None:
        """The node's blocks up to depth end belong to that request now."""
        owners = self._owners[node]
        kept = [int(end), int(number)]
        k: i64 = 0
        while k < len(owners):
            if owners[k] > end:
                kept.append(owners[k])
                kept.append(owners[k + 1])
            k += 2
        self._owners[node] = kept

    def _own(self, number: i64, num_more: i64) -> None:
        """That request owns so many blocks more, or fewer."""
        size: i64 = len(self._tree)
        if number + 1 >= size:
            # A tree of twice the size has the old one as its left half, whose sum is the one new node's.
            tree = self._tree
            while len(tree) < 2 * size:
                tree = append(tree, i64(0))
            tree[size] = self._num_owned
            self._tree = tree
            size += size
        self._num_owned += num_more
        index: i64 = number + 1
        while index < size:
            self._tree[index] += num_more
            index += index & -index

    def _owned_up_to(self, number: i64) -> i64:
        """Blocks that requests 0 .. number own."""
        total: i64 = 0
        index: i64 = number + 1
        while index > 0:
            total += self._tree[index]
            index -= index & -index
        return total

    def _count(self, place: i64, num_blocks: i64) -> None:
        """Blocks at places place, place + 1, ... are hits for every pool that reaches so far."""
        steps = self._steps
        while len(steps) <= place + num_blocks:
            steps = append(steps, i64(0))
        steps[place] += 1
        steps[place + num_blocks] -= 1
        self._steps = steps
