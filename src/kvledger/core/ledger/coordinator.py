"""KVCacheCoordinator: spreads each call over the KV cache groups, and knows what every request holds in each.

All groups take their blocks from one pool, all or nothing: blocks are counted over every group before any is taken.
This is all of a coordinator but the search for a hit, which is done in one of three ways (hit_search.py).
"""

from abc import ABC, abstractmethod
from itertools import count
from typing import Final

from mypy_extensions import i32, i64

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.block_pool import BlockPool
from kvledger.core.blocks.holds import BlockCopies, OutsideHolds
from kvledger.core.blocks.kv_cache_blocks import GroupOccupancy, KVCacheBlocks, PrefixHit
from kvledger.core.blocks.new_blocks import NewBlocks
from kvledger.core.blocks.observer import LedgerObserver
from kvledger.core.groups.base import NEVER, GroupBlocks, GroupHit, ManagerContext, SingleTypeKVCacheManager
from kvledger.core.groups.slot_ranges import SlotRanges
from kvledger.core.groups.spec import KVCacheConfig
from kvledger.core.groups.state_offers import StateOffer, StateOffers
from kvledger.core.ledger.ledger_rules import LedgerRules
from kvledger.core.requests.request import Request
from kvledger.core.units import cdiv, round_down
from kvledger.errors import UnknownRequestError, require

# Ledgers made so far, so that a hit of one is none of another. Each may lose 2**40 hashes.
_LEDGERS: Final = count(1)


class RequestBlocks:
    """All that one request holds, and how far that lasts: most decode steps need nothing from the groups below."""

    def __init__(self, request: Request, groups: list[GroupBlocks]) -> None:
        self.request: Final = request
        self.groups: Final = groups
        # Until its blocks are given back.
        self.is_held: bool = True
        # Every group has a block for each of the first num_slots tokens.
        self.num_slots: i64 = 0
        # Computed tokens at which some group has something to cache.
        self.next_caching: i64 = 0
        # Processed tokens at which some group has blocks to release.
        self.next_release: i64 = 0


class KVCacheCoordinator(ABC):
    """Owns the pool, one manager per group, and {request id: its blocks in each group}."""

    def __init__(self, config: KVCacheConfig, rules: LedgerRules) -> None:
        self.pool: Final = BlockPool(config.num_blocks, len(config.groups), rules.observer)
        self.copies: Final = BlockCopies(self.pool)
        self.outside: Final = OutsideHolds(self.pool)
        context = ManagerContext(self.pool, self.copies, rules.observer)
        policies = rules.policies(config)
        self.managers: Final[list[SingleTypeKVCacheManager]] = [
            rules.registry.make(group.spec, group_id, context, policies[group_id])
            for group_id, group in enumerate(config.groups)
        ]
        self.num_groups: Final = len(config.groups)
        self.groups: Final = config.groups
        self._max_model_len: Final = rules.max_model_len
        self._enable_caching: Final = rules.enable_caching
        self._last_quiet: Final[i64] = rules.max_model_len - 1
        # Shared by every call that yields no blocks; never written to.
        self.no_blocks: Final = KVCacheBlocks([[] for _ in config.groups])
        self.no_hit: Final = PrefixHit(self.no_blocks, 0, -1)
        self._chunk_clippers: Final = [manager for manager in self.managers if manager.clips_chunks()]
        # A prompt's end must not be nearer to a chunk's end than the draft modules look ahead: they would compute on
        # tokens of their own guess, and cache that.
        self._min_rest: Final = 0 if rules.drafts is None else rules.drafts.num_lookahead_tokens
        self.clips_chunks: Final = len(self._chunk_clippers) > 0 or self._min_rest > 1
        self._long_hit_groups: Final = [m.group_id for m in self.managers if m.keeps_longer_hit()]
        self.can_step_back: Final = all(m.can_step_back() for m in self.managers)
        self._base_block_size: Final = policies[0].base_block_size
        self.holds_all_blocks: Final = all(m.holds_all_blocks() for m in self.managers)
        self._held: dict[str, RequestBlocks] = {}
        # None until somebody asks for them.
        self._offers: StateOffers | None = None
        self._number: Final[i64] = next(_LEDGERS) << 40
        self._pools: Final = self._distinct_pools()

    @abstractmethod
    def find_longest_hit(self, block_hashes: list[bytes], max_tokens: int) -> PrefixHit:
        """The longest cached prefix of at most max_tokens tokens that every group can start from."""

    def find_hit_of_each_group(self, block_hashes: list[bytes], max_tokens: int) -> list[GroupHit]:
        """The longest prefix that each group could start from alone, in the order of the groups."""
        hit = self.find_longest_hit(block_hashes, max_tokens)
        return [GroupHit([blocks], hit.num_tokens) for blocks in hit.blocks.blocks]

    def cache_blocks(self, held: RequestBlocks, request: Request, num_tokens: int) -> None:
        """Makes blocks that are full at num_tokens tokens hits for others."""
        managers, groups = self.managers, held.groups
        num_groups: i64 = len(managers)
        index: i64 = 0
        while index < num_groups:
            managers[index].cache_blocks(groups[index], request, num_tokens)
            index += 1

    def age(self) -> i64:
        """A number that no other ledger has, and that changes whenever a block loses its hashes."""
        age: i64 = self._number
        for pool in self._pools:
            age += pool.num_losses
        return age

    def observe(self, observer: LedgerObserver) -> None:
        """From now on this one is told, in the place of any other."""
        self.pool.observe(observer)
        for manager in self.managers:
            manager.observe(observer)

    # Who holds what

    @property
    def num_requests(self) -> int:
        """Requests that hold blocks."""
        return len(self._held)

    def get(self, request_id: str) -> RequestBlocks | None:
        return self._held.get(request_id)

    def add(self, request: Request) -> RequestBlocks:
        held = RequestBlocks(request, [manager.make_held() for manager in self.managers])
        self._held[request.request_id] = held
        return held

    def require_held(self, request_id: str) -> RequestBlocks:
        held = self._held.get(request_id)
        if held is None:
            raise UnknownRequestError(
                f"request_id={request_id!r}: holds no blocks (never admitted, or freed already); nothing was changed"
            )
        return held

    def blocks_of(self, held: RequestBlocks) -> KVCacheBlocks:
        return KVCacheBlocks([group.blocks for group in held.groups])

    def measure(self, held: RequestBlocks, slots: bool = True, caching: bool = True, release: bool = True) -> None:
        """Brings the thresholds up to date after all changes of a call. Until then they ask too early, at worst.

        A threshold that nothing has moved can be left out, because each is a call a group. Taking blocks moves all of
        them, caching those of slots and caching, releasing its own.
        """
        num_slots: i64 = NEVER
        next_caching: i64 = NEVER
        next_release: i64 = NEVER
        managers, groups = self.managers, held.groups
        num_groups: i64 = len(managers)
        index: i64 = 0
        while index < num_groups:
            manager = managers[index]
            group = groups[index]
            index += 1
            if slots:
                num_slots = min(num_slots, manager.num_slots(group))
            if caching:
                next_caching = min(next_caching, manager.next_caching(group))
            if release:
                next_release = min(next_release, manager.next_release(group))
        if slots:
            held.num_slots = num_slots
        if caching:
            held.next_caching = next_caching
        if release:
            held.next_release = next_release
        # At max_model_len itself a step may be the one token too many: then one asks.
        quiet_end: i64 = min(held.num_slots, self._last_quiet)
        if self._enable_caching:
            quiet_end = min(quiet_end, held.next_caching - 1)
        held.request.quiet_end = min(quiet_end, held.next_release)

    # Taking and giving back

    def is_hit_in_writing(self, hit: PrefixHit) -> bool:
        """Whether this very step writes the hit, so that nobody can start from it yet."""
        for group_id, manager in enumerate(self.managers):
            if manager.is_hit_in_writing(hit.blocks.blocks[group_id], hit.num_tokens):
                return True
        return False

    def usable_hit(self, hit: PrefixHit, num_external: int) -> PrefixHit:
        """The hit without what a group has beyond the prefix that is reused in the end."""
        if not self._long_hit_groups:
            return hit
        blocks = hit.blocks.blocks.copy()
        for group_id in self._long_hit_groups:
            block_size = self.managers[group_id].block_size
            num_reused = cdiv(hit.num_tokens, block_size)
            if num_external > 0:
                # The request goes on in the block in which they end, so that one is its own.
                num_reused = (hit.num_tokens + num_external) // block_size
            blocks[group_id] = blocks[group_id][:num_reused]
        return hit.with_blocks(blocks, hit.num_tokens)

    def whole_blocks_of(self, hit: PrefixHit) -> PrefixHit:
        """The hit up to where a block of every group ends, without what it has inside the next.

        Of a state only the last one counts, so less than the whole hit leaves none: the rest must bring one.
        """
        num_tokens = round_down(hit.num_tokens, self._base_block_size)
        if num_tokens == hit.num_tokens:
            return hit
        blocks: list[list[KVCacheBlock]] = []
        for group_id, manager in enumerate(self.managers):
            blocks.append(hit.blocks.blocks[group_id][: num_tokens // manager.block_size])
        return hit.with_blocks(blocks, num_tokens)

    def num_resumable_tokens(self, held: RequestBlocks, num_valid_tokens: int, num_loaded_tokens: int) -> int:
        """Where every group can go on after a load that arrived up to num_valid_tokens tokens. 0: from the start."""
        num_tokens = num_valid_tokens
        while num_tokens > 0:
            num_agreed = num_tokens
            for group_id, manager in enumerate(self.managers):
                num_agreed = manager.num_resumable_tokens(held.groups[group_id], num_agreed, num_loaded_tokens)
            if num_agreed == num_tokens:
                break
            num_tokens = num_agreed
        return num_tokens

    def attach(self, held: RequestBlocks, hit: PrefixHit, ranges: SlotRanges) -> None:
        """Gives the request its hit, then blocks for external tokens.

        Every group's hit is touched before any group takes blocks: otherwise one group's new block could be another
        group's hit (vllm-project/vllm#33775).
        """
        hit_blocks = hit.blocks.blocks
        for group_id, manager in enumerate(self.managers):
            manager.attach_hit(held.groups[group_id], hit_blocks[group_id], ranges)
        if ranges.num_external > 0:
            for group_id, manager in enumerate(self.managers):
                manager.take_external_blocks(held.groups[group_id], ranges)

    def take_blocks(self, held: RequestBlocks, ranges: SlotRanges) -> KVCacheBlocks:
        """Takes the missing blocks of every group. What is new in the tables, a tail that was shared first."""
        new: list[list[KVCacheBlock]] = []
        for group_id, manager in enumerate(self.managers):
            group = held.groups[group_id]
            num_before = len(group.blocks)
            tail = group.shared_tail
            manager.take_blocks(group, ranges)
            taken = group.blocks[num_before:]
            if tail is not None and group.blocks[group.shared_tail_index] is not tail:
                taken.insert(0, group.blocks[group.shared_tail_index])
            new.append(taken)
        return KVCacheBlocks(new)

    def take_row(self, held: RequestBlocks, ranges: SlotRanges, row: i32, new_blocks: NewBlocks) -> None:
        """The same for a running request, whose tails are its own; what is new joins new_blocks as that row's."""
        managers, groups = self.managers, held.groups
        num_groups: i32 = len(managers)
        group_id: i32 = 0
        while group_id < num_groups:
            group = groups[group_id]
            num_before: i32 = len(group.blocks)
            managers[group_id].take_blocks(group, ranges)
            new_blocks.add(row, group_id, group.blocks, num_before)
            group_id += 1

    def release_skipped(self, held: RequestBlocks, num_processed_tokens: int) -> None:
        """Gives back what no later token reads."""
        for group_id, manager in enumerate(self.managers):
            manager.release_skipped(held.groups[group_id], num_processed_tokens)

    def uncache_beyond(self, held: RequestBlocks, num_tokens: int) -> None:
        """Takes the hashes of blocks that answer for more than the first num_tokens tokens."""
        for group_id, manager in enumerate(self.managers):
            group = held.groups[group_id]
            beyond = [int(block.block_id) for block in group.blocks if block.num_hash_tokens > num_tokens]
            manager.pool.evict_blocks(beyond)
            group.num_cached_blocks = min(group.num_cached_blocks, num_tokens // manager.block_size)
        self.measure(held)

    def free(self, held: RequestBlocks) -> None:
        """Gives back all blocks of a request."""
        for group_id, manager in enumerate(self.managers):
            manager.free(held.groups[group_id])
        self._forget(held.request)

    def detach(self, held: RequestBlocks) -> list[KVCacheBlock]:
        """Forgets the request, but not its blocks, null ones left out: they are held outside now, in this order."""
        blocks = [block for group in held.groups for block in group.blocks if block.block_id != 0]
        self.outside.adopt(blocks)
        self._forget(held.request)
        return blocks

    def _forget(self, request: Request) -> None:
        if self._offers is not None:
            self._offers.withdraw(request.request_id)
        request.quiet_end = 0
        self._held.pop(request.request_id).is_held = False

    def offer_states(self) -> StateOffers:
        """From now on states that become hits are offered there; for a caller who takes them in every step."""
        self._offers = StateOffers()
        for manager in self.managers:
            manager.offer_states(self._offers)
        return self._offers

    def last_state_offers(self, held: RequestBlocks, num_tokens: int) -> list[StateOffer]:
        """What is left to offer of a request that stops after num_tokens tokens, all of them computed."""
        offers: list[StateOffer] = []
        for group_id, manager in enumerate(self.managers):
            offer = manager.last_state_offer(held.groups[group_id], num_tokens)
            if offer is not None:
                offers.append(offer)
        return offers

    def fork(self, parent: RequestBlocks, child: Request, num_tokens: int) -> KVCacheBlocks:
        """Lets the child share the parent's blocks for the first num_tokens tokens; what is not shared is copied.

        REQUIRES that the parent has them, and num_blocks_to_fork free.
        """
        held = self.add(child)
        for group_id, manager in enumerate(self.managers):
            manager.fork(parent.groups[group_id], held.groups[group_id], num_tokens)
        self.measure(held)
        return self.blocks_of(held)

    def num_forkable_tokens(self, held: RequestBlocks) -> int:
        """The most tokens that a request has blocks for in every group, so that a fork can share them."""
        num_tokens = NEVER
        for group_id, manager in enumerate(self.managers):
            num_tokens = min(num_tokens, manager.num_forkable_tokens(held.groups[group_id]))
        return num_tokens

    def num_blocks_to_fork(self, held: RequestBlocks, num_tokens: int, num_forks: int) -> int:
        num_blocks = 0
        for group_id, manager in enumerate(self.managers):
            num_blocks += manager.num_blocks_to_fork(held.groups[group_id], num_tokens, num_forks)
        return num_blocks

    def num_covered_tokens(self, held: RequestBlocks) -> int:
        """Tokens that every group whose blocks can be cached has a table entry for."""
        num_tokens = NEVER
        for group_id, manager in enumerate(self.managers):
            if manager.spec.prefix_cacheable:
                num_tokens = min(num_tokens, len(held.groups[group_id].blocks) * manager.block_size)
        return num_tokens

    def num_reusable_tokens(self, held: RequestBlocks) -> int:
        """Tokens of the request that a later one could hit in every group, as far as its own blocks tell."""
        num_tokens = NEVER
        for group_id, manager in enumerate(self.managers):
            if manager.spec.prefix_cacheable:
                in_group = 0
                for block in held.groups[group_id].blocks:
                    in_group = max(in_group, int(block.num_hash_tokens))
                num_tokens = min(num_tokens, in_group)
        return 0 if num_tokens == NEVER else num_tokens

    def num_blocks_held(self, held: RequestBlocks) -> int:
        num_blocks = 0
        for group_id, manager in enumerate(self.managers):
            num_blocks += manager.num_blocks_held(held.groups[group_id])
        return num_blocks

    def group_occupancies(self) -> list[GroupOccupancy]:
        """What requests hold and what is cached, for each group. O(blocks held)."""
        occupancies: list[GroupOccupancy] = []
        for group_id, manager in enumerate(self.managers):
            ids: set[int] = set()
            num_null = 0
            for held in self._held.values():
                for block in held.groups[group_id].blocks:
                    block_id: int = block.block_id
                    if block_id == 0:
                        num_null += 1
                    else:
                        ids.add(block_id)
            num_cached = len(manager.pool.indexes[group_id])
            occupancies.append(GroupOccupancy(len(ids), num_null, num_cached))
        return occupancies

    # The rest

    def start_step(self) -> None:
        for manager in self.managers:
            manager.start_step()

    def clip_chunk(self, request: Request, start: int, end: int, max_chunk: int) -> int:
        """Where a prefill chunk over tokens [start, end) should end; start when it should wait."""
        clipped = self._clip_by_groups(request, start, end, max_chunk)
        rest = request.num_tokens - clipped
        if rest <= 0 or rest >= self._min_rest:
            return clipped
        far = clipped - (self._min_rest - rest)
        if far > start:
            return far
        if end >= request.num_tokens:
            # A state would be cached too near to the prompt's end. It is not, or nothing would ever be computed.
            return end
        # No larger chunk can come: one that is too near to the end, or none at all.
        return clipped if max_chunk < request.num_tokens - start else start

    def waits_for_rest(self, request: Request, start: int, end: int, max_chunk: int) -> bool:
        """Whether clip_chunk says to wait only because the chunk would end too near to the prompt's end for a draft."""
        return (
            self.clip_chunk(request, start, end, max_chunk) <= start
            and self._clip_by_groups(request, start, end, max_chunk) > start
        )

    def _clip_by_groups(self, request: Request, start: int, end: int, max_chunk: int) -> int:
        clipped = end
        # Each is asked about the chunk that the budget allows: what another one stops at is no lack of budget.
        for manager in self._chunk_clippers:
            clipped = min(clipped, manager.clip_chunk(request, start, end, max_chunk))
        return clipped

    def reset_prefix_cache(self) -> bool:
        """Takes every hash in every pool; False, changing nothing, while requests hold blocks in any of them."""
        pools = self._pools
        for pool in pools:
            if pool.num_free_blocks < pool.num_usable_blocks:
                return pool.reset_prefix_cache()
        for pool in pools:
            pool.reset_prefix_cache()
        return True

    def check(self) -> None:
        """Proves that each block's ref_cnt is the number of its holders, and every layer below. O(blocks)."""
        for pool in self._pools:
            pool.check()
            holders = self.copies.holders(pool)
            for block_id, num_outside in self.outside.holders(pool).items():
                holders[block_id] = holders.get(block_id, 0) + num_outside
            for request_id, held in self._held.items():
                for group_id, manager in enumerate(self.managers):
                    if manager.pool is pool:
                        group = held.groups[group_id]
                        _count_holders(request_id, group, manager.num_blocks_held(group), pool, holders)
            for block in pool.blocks[1:]:
                num_holders = holders.get(int(block.block_id), 0)
                require(block.ref_cnt == num_holders, f"{block!r} has {num_holders} holders")
        for request_id, held in self._held.items():
            for group_id, manager in enumerate(self.managers):
                require(
                    held.num_slots <= manager.num_slots(held.groups[group_id])
                    and held.next_caching <= manager.next_caching(held.groups[group_id])
                    and held.next_release <= manager.next_release(held.groups[group_id]),
                    f"request {request_id!r}: a threshold is out of date",
                )
            quiet_end = held.request.quiet_end
            require(
                quiet_end <= held.num_slots
                and quiet_end <= held.next_release
                and (quiet_end < held.next_caching or not self._enable_caching),
                f"request {request_id!r}: quiet_end is out of date",
            )

    def _distinct_pools(self) -> list[BlockPool]:
        pools = [self.pool]
        for manager in self.managers:
            if manager.pool not in pools:
                pools.append(manager.pool)
        return pools


def _count_holders(
    request_id: str, group: GroupBlocks, num_blocks: int, pool: BlockPool, holders: dict[int, int]
) -> None:
    require(group.num_cached_blocks <= len(group.blocks), f"request {request_id!r} caches what it lacks")
    seen: set[int] = set()
    for block in group.blocks:
        block_id = int(block.block_id)
        if block_id == 0:
            continue
        require(pool.blocks[block_id] is block, f"{block!r} is of another pool")
        require(block_id not in seen, f"request {request_id!r} holds {block!r} twice")
        seen.add(block_id)
        holders[block_id] = holders.get(block_id, 0) + 1
    require(len(seen) == num_blocks, f"request {request_id!r}: {num_blocks} blocks counted, {len(seen)} held")
