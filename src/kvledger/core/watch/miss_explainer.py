"""MissExplainer: an observer that says why a prompt was not a hit, to the token, at the moment of its admission.

    manager = KVCacheManager(config, max_model_len)
    misses = MissExplainer(manager, MissConfig())
    ...
    misses.new.split.as_dict(), misses.recent()

It reads along the prompt with a cursor; each step charges the tokens up to some position to one cause, so that every
token is charged once. Positions are rounded down to where hits can end: a token counts as evicted when, had nothing
been evicted, a hit would have covered it.

Only groups whose hits can be cut to any length (full attention) tell what was seen: they cache every block. What other
groups lack stands under limited_by_group. In a ledger without such a group, the first that is looked up tells.
"""

from typing import Final

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.blocks.kv_cache_blocks import PrefixHit
from kvledger.core.blocks.observer import EvictionCause, LedgerObserver
from kvledger.core.groups.base import SingleTypeKVCacheManager
from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.core.requests.request import Request
from kvledger.core.units import round_down
from kvledger.core.watch.content_twins import ContentTwins, Identity
from kvledger.core.watch.ghost_index import GhostIndex, GhostTrace
from kvledger.core.watch.miss_charges import charge_cause, charge_rest, charge_traces, curve_point
from kvledger.core.watch.prompt_split import MissConfig, MissTotals, PromptAccount, PromptSplit
from kvledger.errors import wrong_value

_REUSED: Final = EvictionCause.REUSED


class MissExplainer(LedgerObserver):
    """`ledger`: whose requests. `new`: those admitted for the first time; `resumed`: after a preemption, as vLLM counts
    them apart."""

    def __init__(self, ledger: KVCacheManager, config: MissConfig | None = None) -> None:
        """Begins to listen to that ledger, which has served nobody yet; ConfigError if it has. `config`: bounds of what
        is remembered."""
        if ledger.occupancy().unused < ledger.num_usable_blocks:
            problem = "it holds or caches blocks that this has not seen come"
            raise wrong_value("ledger", ledger, problem, "make the explainer before the first request")
        if config is None:
            config = MissConfig()
        # Compiled, the parameter's type has refused anything else already, with a TypeError.
        if not isinstance(config, MissConfig):
            raise wrong_value("config", config, "no bounds to remember in", "give MissConfig()")
        coordinator = ledger.coordinator
        enabled = ledger.enable_caching
        ghosts = GhostIndex(coordinator.num_groups, config.max_evicted_blocks)
        self.ledger: Final = ledger
        self.new: Final = MissTotals(coordinator.num_groups)
        self.resumed: Final = MissTotals(coordinator.num_groups)
        self._ghosts: Final = ghosts
        # The newest one stands before _next, which goes round.
        self._recent: Final[list[PromptAccount]] = []
        self._next: int = 0
        self._max_recent: Final = config.max_accounts
        cacheable: list[SingleTypeKVCacheManager] = []
        for manager in coordinator.managers:
            if manager.pool is not coordinator.pool:
                ghosts.ignore(manager.group_id)
            elif enabled and manager.spec.prefix_cacheable:
                cacheable.append(manager)
        chains = [manager for manager in cacheable if manager.is_prefix_closed()]
        self._is_chain: Final = len(chains) > 0
        self._tellers: Final = chains if chains else cacheable[:1]
        for manager in self._tellers:
            ghosts.follow(
                manager.group_id, coordinator.pool.indexes[manager.group_id], manager.block_size, self._is_chain
            )
        self._is_on: Final = len(self._tellers) > 0
        # Hits end at its multiples.
        self._step: Final = max([manager.policy.hit_alignment for manager in cacheable]) if cacheable else 1
        self._any_draft: Final = any(manager.policy.any_draft for manager in cacheable)
        self._twins: Final[ContentTwins | None] = self._make_twins(config) if self._is_on else None
        ledger.observe(self)

    @property
    def num_forgotten(self) -> int:
        """Evictions too long ago to be known: above 0, some tokens counted as never seen may have been evicted."""
        return self._ghosts.num_forgotten

    @property
    def num_runs(self) -> int:
        """Runs of blocks, each evicted from a sequence's end, that the remembered evictions are kept in."""
        return self._ghosts.num_runs

    @property
    def num_evictions(self) -> int:
        """Cached blocks that gave way to new ones."""
        return self._ghosts.num_evictions

    def recent(self) -> list[PromptAccount]:
        """The last admitted requests, the newest last."""
        return self._recent[self._next :] + self._recent[: self._next]

    # What the ledger tells

    def request_admitted(self, request: Request, hit: PrefixHit, num_external_tokens: int) -> None:
        """Explains it."""
        is_resumed = request.num_preemptions > 0
        account = PromptAccount(request.request_id, request.num_tokens, is_resumed)
        split = account.split
        split.hit = hit.num_tokens
        split.external = min(num_external_tokens, request.num_tokens - hit.num_tokens)
        if not self._is_on or request.skip_prefix_lookup:
            split.lookup_off = request.num_tokens - split.hit - split.external
        else:
            self._charge(account, request, hit)
        self._totals(account).add(account)
        if len(self._recent) < self._max_recent:
            self._recent.append(account)
            return
        self._recent[self._next] = account
        self._next = (self._next + 1) % self._max_recent

    def blocks_cached(self, request: Request, group_id: int, blocks: list[KVCacheBlock]) -> None:
        self._ghosts.blocks_cached(request, group_id, blocks)

    def blocks_evicted(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> None:
        self._ghosts.blocks_evicted(blocks, cause)

    def prefix_cache_reset(self) -> None:
        self._ghosts.prefix_cache_reset()

    def check(self) -> None:
        self._ghosts.check()

    def _totals(self, account: PromptAccount) -> MissTotals:
        return self.resumed if account.is_resumed else self.new

    # Along the prompt

    def _charge(self, account: PromptAccount, request: Request, hit: PrefixHit) -> None:
        split = account.split
        step = self._step
        num_tokens = request.num_tokens
        hashes = request.block_hashes
        # Where a hit can end at most.
        limit = round_down(num_tokens - 1, step)
        start = hit.num_tokens
        position = start + split.external
        if hit.limited_end > start and hit.limiting_group >= 0:
            start = min(hit.limited_end, limit)
            account.limiting_group = hit.limiting_group
            split.limited_by_group = max(0, start - position)
            position = max(position, start)
        cached_end = min(self._cached_end(hashes, start), limit)
        if round_down(cached_end, self._tellers[0].block_size) <= position < cached_end == limit < num_tokens:
            # The block is cached whole, with the prompt's last token; what comes before that has no hash of its own.
            limit = position
        elif cached_end > position:
            if self._any_draft:
                split.draft_rule = cached_end - position
            else:
                split.lookup_off = cached_end - position  # a caller that did not look
            position = cached_end
        start = max(start, cached_end)
        if start < limit:
            position = self._charge_evicted(account, hashes, start, max(position, start))
        twins = self._twins
        if twins is not None:
            twin = twins.meet(request, round_down(position, self._tellers[0].block_size))
            if twin is not None:
                end = min(round_down(twin.end, step), limit)
                if end > position:
                    _charge_identity(split, twin.identity, end - position)
                    position = end
        charge_rest(split, num_tokens, position, limit, step)

    def _cached_end(self, hashes: list[bytes], start: int) -> int:
        """Where the tokens end that every telling group has cached, read on from `start`, rounded down."""
        end = len(hashes) * self._tellers[0].policy.hash_block_size
        for manager in self._tellers:
            index = manager.pool.indexes[manager.group_id]
            block_size = manager.block_size
            per_block = manager.hashes_per_block
            block = start // block_size
            last = end // block_size
            while block < last and index.get(hashes[(block + 1) * per_block - 1]) is not None:
                block += 1
            if block * block_size < end:
                end = max(start, block * block_size)
        return max(start, round_down(end, self._step))

    def _charge_evicted(self, account: PromptAccount, hashes: list[bytes], start: int, position: int) -> int:
        """Charges from `position` on what was cached once. `start`: where the cached prefix ends. Returns where what
        was cached ends."""
        limit = round_down(account.num_tokens - 1, self._step)
        if not self._is_chain:
            return self._charge_evicted_run(account, hashes, position, limit)
        end = limit
        traces: list[GhostTrace] = []
        for manager in self._tellers:
            block = start // manager.block_size
            per_block = manager.hashes_per_block
            if len(self._tellers) == 1 and (
                (block + 1) * per_block > len(hashes)
                or not self._ghosts.has_top(manager.group_id, hashes[(block + 1) * per_block - 1])
            ):
                end = start  # most prompts that miss are new
                break
            trace = self._ghosts.trace(manager.group_id, hashes, per_block, block)
            end = min(end, trace.end)
            traces.append(trace)
        if round_down(end, self._step) > position:
            curve = self._totals(account).tokens_kept_by
            position = charge_traces(account, curve, traces, self._step, position, round_down(end, self._step))
        first = self._tellers[0]
        if self._step < first.block_size and len(self._tellers) == 1:
            position = self._charge_evicted_unit(account, hashes, position, min(limit, position + first.block_size))
        return position

    def _charge_evicted_unit(self, account: PromptAccount, hashes: list[bytes], position: int, limit: int) -> int:
        """The same for a prefix that ends inside the block at `position`, where hits can end there: the longest."""
        manager = self._tellers[0]
        unit = manager.policy.hash_block_size
        # Of the last tokens there may be no hash yet: a draft's looks ahead.
        end = min(limit, round_down(position, manager.block_size) + manager.block_size - unit, len(hashes) * unit)
        while end > position:
            part = self._ghosts.find(manager.group_id, hashes[end // unit - 1])
            if part is not None:
                num_tokens = end - position
                if part.cause is _REUSED:
                    account.num_blocks_short = max(account.num_blocks_short, part.num_short)
                    account.split.evicted += num_tokens
                    self._totals(account).tokens_kept_by[curve_point(account.num_blocks_short)] += num_tokens
                else:
                    charge_cause(account.split, part.cause, num_tokens)
                return end
            end -= unit
        return position

    def _charge_evicted_run(self, account: PromptAccount, hashes: list[bytes], position: int, limit: int) -> int:
        """The same where a hit needs only the last blocks before its end: all of it is kept by the same pool."""
        manager = self._tellers[0]
        block_size = manager.block_size
        end = min(limit, round_down(len(hashes) * manager.policy.hash_block_size, self._step))
        while end > position:
            # Blocks that a hit of that length reads.
            first = max(0, manager.num_skipped_tokens(end)) // block_size
            num_short = 0
            cause = _REUSED
            block = end // block_size - 1
            while block >= first:
                block_hash = hashes[(block + 1) * manager.hashes_per_block - 1]
                if manager.pool.indexes[manager.group_id].get(block_hash) is None:
                    part = self._ghosts.find(manager.group_id, block_hash)
                    if part is None:
                        break
                    if part.cause is _REUSED:
                        num_short = max(num_short, part.num_short)
                    else:
                        cause = part.cause
                block -= 1
            if block < first:
                if cause is _REUSED:
                    account.num_blocks_short = num_short
                    account.split.evicted += end - position
                    self._totals(account).tokens_kept_by[curve_point(num_short)] += end - position
                else:
                    charge_cause(account.split, cause, end - position)
                return end
            # No hit can end where it would read that block.
            end = round_down(block * block_size, self._step)
        return position

    def _make_twins(self, config: MissConfig) -> ContentTwins:
        first = self._tellers[0]
        indexes = [
            manager.pool.indexes[manager.group_id]
            for manager in self._tellers
            if manager.block_size == first.block_size
        ]
        return ContentTwins(indexes, first.block_size, first.hashes_per_block, config.max_compared_tokens)


def _charge_identity(split: PromptSplit, identity: Identity, num_tokens: int) -> None:
    if identity is Identity.SALT:
        split.other_salt += num_tokens
    elif identity is Identity.ADAPTER:
        split.other_adapter += num_tokens
    elif identity is Identity.EPOCH:
        split.other_epoch += num_tokens
    else:
        split.other_content += num_tokens
