"""HybridKVCacheCoordinator: several KV cache groups that must agree on one hit.

Each kind of group says how long a prefix it can start from, given a candidate length; the candidate only ever shrinks,
so asking round by round until nobody shrinks it any more ends at the longest length that suits all.
"""

from typing import Final

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.kv_cache_blocks import KVCacheBlocks, PrefixHit
from kvledger.core.groups.base import GroupHit, SingleTypeKVCacheManager
from kvledger.core.groups.spec import KVCacheConfig
from kvledger.core.ledger.coordinator import KVCacheCoordinator, UnitaryKVCacheCoordinator
from kvledger.core.ledger.coordinator import KVCacheCoordinatorNoPrefixCache as NoPrefixCache
from kvledger.core.ledger.ledger_rules import LedgerRules
from kvledger.core.units import cdiv
from kvledger.errors import wrong_value


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

    def find_longest_hit(self, block_hashes: list[bytes], max_tokens: int) -> PrefixHit:
        num_hashed = len(block_hashes) * self._lookup_groups[0].manager.policy.hash_block_size
        hits: list[GroupHit | None] = [None for _ in self._lookup_groups]
        # Kinds whose draft margin was looked up and dropped at the candidate length: once per length, or the hit would
        # shrink by a block a round (vllm-project/vllm#32802).
        dropped: set[int] = set()
        candidate = max_tokens
        longest = 0
        limiting_group = -1
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
                if hit.num_tokens + group.manager.policy.hit_alignment <= length:
                    limiting_group = group.manager.group_id
                hits[position] = hit
                length = hit.num_tokens
                longest = max(longest, length)
            if length >= candidate:
                break
            candidate = length
            if self._one_round_suffices:
                break
        return self._agreed(hits, candidate, longest, limiting_group)

    def _agreed(self, hits: list[GroupHit | None], num_tokens: int, longest: int, limiting_group: int) -> PrefixHit:
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
        boundary = longest if longest > num_tokens else 0
        return PrefixHit(KVCacheBlocks(blocks), num_tokens, limiting_group, boundary)


def make_coordinator(config: KVCacheConfig, rules: LedgerRules) -> KVCacheCoordinator:
    """The coordinator for that configuration."""
    if not rules.enable_caching:
        return NoPrefixCache(config, rules)
    if len(config.groups) == 1:
        return UnitaryKVCacheCoordinator(config, rules)
    return HybridKVCacheCoordinator(config, rules)
