"""The three ways to search a hit, each a coordinator, and make_coordinator, which chooses among them.

KVCacheCoordinatorNoPrefixCache searches nothing, UnitaryKVCacheCoordinator asks its one group, and
HybridKVCacheCoordinator makes several groups agree.

Each kind of group says how long a prefix it can start from, given a candidate length; the candidate only ever shrinks,
so asking round by round until nobody shrinks it any more ends at the longest length that suits all. Which group is to
blame that it is not longer does not depend on the order in which they are asked.
"""

from typing import Final

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.kv_cache_blocks import KVCacheBlocks, PrefixHit
from kvledger.core.groups.base import GroupHit, SingleTypeKVCacheManager, cached_in_all
from kvledger.core.groups.spec import KVCacheConfig
from kvledger.core.ledger.coordinator import KVCacheCoordinator
from kvledger.core.ledger.ledger_rules import LedgerRules
from kvledger.core.units import cdiv
from kvledger.errors import wrong_value

_GROUP_0: Final = [0]


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Any number of groups; nothing is hashed, looked up or cached."""

    def find_longest_hit(self, block_hashes: list[bytes], max_tokens: int) -> PrefixHit:
        return self.no_hit


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group with prefix caching: its manager's hit is the hit."""

    def find_longest_hit(self, block_hashes: list[bytes], max_tokens: int) -> PrefixHit:
        manager = self.managers[0]
        hit = manager.find_longest_hit(block_hashes, max_tokens, _GROUP_0, manager.policy.is_draft)
        limiting_group = 0 if hit.num_tokens + manager.block_size <= max_tokens else -1
        if hit.num_tokens == 0:
            return PrefixHit(self.no_blocks, 0, limiting_group)
        return PrefixHit(KVCacheBlocks(hit.blocks), hit.num_tokens, limiting_group, age=self.age(), hashes=block_hashes)


class LookupGroup:
    """Groups of one spec: one lookup serves them all."""

    def __init__(self, manager: SingleTypeKVCacheManager) -> None:
        self.manager: Final = manager
        self.group_ids: list[int] = [manager.group_id]
        self.is_draft: Final = manager.policy.is_draft
        self.is_prefix_closed: Final = manager.is_prefix_closed()

    def takes(self, manager: SingleTypeKVCacheManager) -> bool:
        mine = self.manager
        return mine.spec == manager.spec and type(mine) is type(manager) and mine.pool is manager.pool

    def cached_end(self, block_hashes: list[bytes], start: int, max_tokens: int) -> int:
        """Where the whole blocks end that all these groups have cached, of their own size and read on from `start`.
        REQUIRES a prefix-closed kind that has everything before `start`. O(blocks behind it).
        """
        manager = self.manager
        indexes = [manager.pool.indexes[group_id] for group_id in self.group_ids]
        found: list[KVCacheBlock] = []
        per_block = manager.hashes_per_block
        block = start // manager.block_size
        most = min(max_tokens // manager.block_size, len(block_hashes) // per_block)
        while block < most and cached_in_all(indexes, block_hashes[(block + 1) * per_block - 1], found):
            block += 1
        return max(start, block * manager.block_size)


class HitLimit:
    """Why a hit is not longer: that group has not what others have cached up to token `end`. -1 and 0: no group's
    fault."""

    def __init__(self, group_id: int, end: int) -> None:
        self.group_id: Final = group_id
        self.end: Final = end


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups with prefix caching."""

    def __init__(self, config: KVCacheConfig, rules: LedgerRules) -> None:
        super().__init__(config, rules)
        groups: list[LookupGroup] = []
        for manager in self.managers:
            if not manager.spec.prefix_cacheable:
                continue
            for group in groups:
                if group.takes(manager):
                    group.group_ids.append(manager.group_id)
                    break
            else:
                groups.append(LookupGroup(manager))
        if not groups:
            raise wrong_value("groups", len(config.groups), "none can be cached", "give enable_caching=False")
        # First those whose hits can be cut to any length: one scan sets a tight bound and they are never asked again.
        self._lookup_groups: Final = [g for g in groups if g.is_prefix_closed] + [
            g for g in groups if not g.is_prefix_closed
        ]
        # One closed kind and one other: the closed one accepts whatever the other shrinks the hit to.
        self._one_round_suffices: Final = len(groups) == 2 and self._lookup_groups[0].is_prefix_closed
        self._alignment: Final = groups[0].manager.policy.hit_alignment
        # Kinds whose cached tokens go on behind a hit that ends at a multiple of larger blocks than theirs, or may be
        # cut to what another one has. One kind with blocks of that very size tells all by its own hit.
        closed = [group for group in self._lookup_groups if group.is_prefix_closed]
        compares = len(closed) > 1 or any(group.manager.block_size < self._alignment for group in closed)
        self._compared: Final = closed if compares else []

    def find_longest_hit(self, block_hashes: list[bytes], max_tokens: int) -> PrefixHit:
        num_hashed = len(block_hashes) * self._lookup_groups[0].manager.policy.hash_block_size
        hits: list[GroupHit | None] = [None for _ in self._lookup_groups]
        # Kinds whose draft margin was looked up and dropped at the candidate length: once per length, or the hit would
        # shrink by a block a round (vllm-project/vllm#32802).
        dropped: set[int] = set()
        candidate = max_tokens
        longest = 0
        limiting: LookupGroup | None = None
        while True:
            length = candidate
            for position, group in enumerate(self._lookup_groups):
                known = hits[position]
                if group.is_prefix_closed and known is not None:
                    length = min(length, known.num_tokens)
                    continue
                drops_last = group.is_draft and position not in dropped
                limit = length
                margin = group.manager.draft_margin() if drops_last else 0
                if margin > 0:
                    limit = min(length + margin, num_hashed)
                hit = group.manager.find_longest_hit(block_hashes, limit, group.group_ids, drops_last)
                if drops_last:
                    dropped.add(position)
                elif hit.num_tokens < length:
                    dropped.clear()
                # What a draft gives up is cached.
                if hit.num_tokens + margin + self._alignment <= length:
                    limiting = group
                hits[position] = hit
                length = hit.num_tokens
                longest = max(longest, length)
            if length >= candidate:
                break
            candidate = length
            if self._one_round_suffices:
                break
        boundary = longest if longest > candidate else 0
        blame = HitLimit(-1, 0)
        if limiting is not None:
            blame = HitLimit(limiting.manager.group_id, boundary)
            if limiting.is_prefix_closed and self._compared and candidate + self._alignment <= max_tokens:
                blame = self._compare(block_hashes, candidate, max_tokens, blame)
        return self._agreed(hits, candidate, boundary, blame, block_hashes)

    def find_hit_of_each_group(self, block_hashes: list[bytes], max_tokens: int) -> list[GroupHit]:
        num_hashed = len(block_hashes) * self._lookup_groups[0].manager.policy.hash_block_size
        hits = [GroupHit([[]], 0) for _ in self.managers]
        for group in self._lookup_groups:
            margin = group.manager.draft_margin() if group.is_draft else 0
            limit = min(max_tokens + margin, num_hashed) if margin > 0 else max_tokens
            found = group.manager.find_longest_hit(block_hashes, limit, group.group_ids, group.is_draft)
            for index, group_id in enumerate(group.group_ids):
                hits[group_id] = GroupHit([found.blocks[index]], found.num_tokens)
        return hits

    def _compare(self, block_hashes: list[bytes], num_tokens: int, max_tokens: int, limit: HitLimit) -> HitLimit:
        """Who is to blame where a kind that is asked early had to shrink the hit: another one may have less, or only
        larger blocks."""
        least: LookupGroup | None = None
        end = least_end = 0
        for group in self._compared:
            group_end = group.cached_end(block_hashes, num_tokens, max_tokens)
            end = max(end, group_end)
            if least is None or group_end < least_end:
                least, least_end = group, group_end
        if least is None or end == num_tokens:
            return limit
        if least_end < end:
            return HitLimit(least.manager.group_id, end)
        if end % self._alignment == 0:
            return HitLimit(-1, 0)  # all have it, and a draft gives it up
        # All end in the middle of some other group's block.
        blocks = [group.manager.block_size for group in self._lookup_groups]
        largest = self._lookup_groups[blocks.index(max(blocks))]
        return HitLimit(largest.manager.group_id, end)

    def _agreed(
        self,
        hits: list[GroupHit | None],
        num_tokens: int,
        boundary: int,
        limit: HitLimit,
        block_hashes: list[bytes],
    ) -> PrefixHit:
        """The hit in all groups, cut to the length that they agree on."""
        blocks: list[list[KVCacheBlock]] = [[] for _ in self.managers]
        for position, group in enumerate(self._lookup_groups):
            hit = hits[position]
            if hit is None:
                continue
            num_blocks = cdiv(num_tokens, group.manager.block_size)
            for index, group_id in enumerate(group.group_ids):
                own = hit.blocks[index]
                if group.is_prefix_closed and not group.manager.keeps_longer_hit():
                    del own[num_blocks:]
                blocks[group_id] = own
        return PrefixHit(
            KVCacheBlocks(blocks), num_tokens, limit.group_id, boundary, limit.end, self.age(), block_hashes
        )


def make_coordinator(config: KVCacheConfig, rules: LedgerRules) -> KVCacheCoordinator:
    """The coordinator for that configuration."""
    if not rules.enable_caching:
        return KVCacheCoordinatorNoPrefixCache(config, rules)
    if len(config.groups) == 1:
        return UnitaryKVCacheCoordinator(config, rules)
    return HybridKVCacheCoordinator(config, rules)
