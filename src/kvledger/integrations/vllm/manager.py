"""VllmKVCacheManager: vLLM's KVCacheManager with the ledger inside.

vLLM keeps its own Request, which the ledger knows nothing of: for each of them there is one of ours with the same id,
brought up to date before a call that needs it. Most calls need none. A decode step nearly always stays within the
request's blocks, fills none and leaves none behind; up to which token that holds stands in our request (quiet_end), so
that such a call costs one look into a dictionary and never enters the ledger.
"""

from inspect import signature
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    MambaSpec,
    get_kv_cache_spec_kind,
)
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from kvledger.core.blocks.kv_cache_blocks import AdmissionRule, KVCacheBlocks, PrefixHit
from kvledger.core.groups.decisions import Decisions, decisions_of
from kvledger.core.groups.policy import DraftRule
from kvledger.core.groups.state_offers import StateOffer
from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.core.requests.block_hash import GivenBlockHasher
from kvledger.core.requests.request import Request
from kvledger.core.units import cdiv
from kvledger.errors import KVLedgerError
from kvledger.integrations.vllm.blocks import BlockView, LedgerBlocks, NoBlocks
from kvledger.integrations.vllm.coordinator import CoordinatorView
from kvledger.integrations.vllm.events import EventLog
from kvledger.integrations.vllm.pool import PoolView
from kvledger.integrations.vllm.residency import Residency
from kvledger.integrations.vllm.served import NotServedError, as_not_served, nearest_release
from kvledger.integrations.vllm.specs import our_config
from kvledger.integrations.vllm.watch import BlockZeroing, CallWatch

logger = init_logger("vllm.plugins.kvledger")

# A request of ours starts with a prompt. Its tokens are never read, since vLLM hashes them; only their number is.
_ANY_PROMPT = bytes(4)


class VllmKVCacheManager:
    """vLLM's arguments and methods, of 0.32 and 0.33. NotServedError for what the ledger would serve differently.

    `ledger`: the KVCacheManager inside. One owner thread, as in vLLM.
    """

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: Any = None,
        watermark: float = 0.0,
        enable_mamba_shared_prefix_checkpoint: bool = False,
        num_hash_lookahead_tokens: int = 0,
    ) -> None:
        if pcp_world_size > 1:
            raise NotServedError("prefill context parallelism")
        has_states = kv_cache_config.has_mamba_layers
        if enable_caching and any(
            isinstance(group.kv_cache_spec, MambaSpec)
            and group.kv_cache_spec.mamba_cache_mode == "none"
            and group.kv_cache_spec.block_size < max_model_len
            for group in kv_cache_config.kv_cache_groups
        ):
            raise NotServedError("recurrent states of the mode 'none' that are cached all the same")
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.log_stats = log_stats
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.num_kv_cache_groups = len(kv_cache_config.kv_cache_groups)
        if metrics_collector is not None and any(
            isinstance(group.kv_cache_spec, MambaSpec) and group.kv_cache_spec.num_prefill_checkpoint_blocks > 0
            for group in kv_cache_config.kv_cache_groups
        ):
            raise NotServedError("block residency metrics over states that a prefill exports on its way")
        try:
            self.ledger = KVCacheManager(
                our_config(kv_cache_config, dcp_world_size),
                max_model_len,
                enable_caching=enable_caching,
                hasher=GivenBlockHasher(hash_block_size),
                watermark=watermark,
                max_in_flight_tokens=max_in_flight_tokens,
                drafts=_draft_rule(kv_cache_config, use_eagle, num_prefill_lookahead, num_hash_lookahead_tokens),
                retention_interval=kv_cache_config.prefix_cache_retention_interval,
                pins_shared_prefix=enable_mamba_shared_prefix_checkpoint,
                context_parallel_size=dcp_world_size,
                decisions=_decisions(),
            )
        except KVLedgerError as error:
            raise as_not_served(error)
        residency = None if metrics_collector is None else Residency(metrics_collector, enable_caching)
        events: EventLog | None = None
        if enable_kv_cache_events:
            events = EventLog(kv_cache_config, hash_block_size, self.ledger, num_hash_lookahead_tokens)
        self._watch = _make_watch(kv_cache_config, events, residency)
        if self._watch is not None:
            self._watch.listen_to(self.ledger)
        self.block_pool = PoolView(self.ledger, hash_block_size, residency, events)
        self.coordinator = CoordinatorView(self.ledger, kv_cache_config, self.block_pool)
        managers = self.ledger.coordinator.managers
        if managers[0].policy.base_block_size != scheduler_block_size:
            raise NotServedError(f"hits that end at multiples of {scheduler_block_size} tokens")
        self.mamba_shared_prefix_checkpoint = any(manager.policy.pins_shared_prefix for manager in managers)
        self.empty_kv_cache_blocks = NoBlocks(tuple(() for _ in managers))
        self._no_hit = self.ledger.coordinator.no_hit
        # Groups that may have less than a hit with external tokens behind it.
        self._may_lag = [manager.hit_may_lag() or not manager.spec.prefix_cacheable for manager in managers]
        # States that became hits, which a connector may store.
        self._offers = self.ledger.coordinator.offer_states() if has_states and enable_caching else None
        # Our requests by id: all that the ledger was asked about and that have not been freed.
        self.ours: dict[str, Request] = {}

    @classmethod
    def for_engine(cls, arguments: dict[str, Any]) -> "VllmKVCacheManager":
        """The manager of an engine whose scheduler gives these arguments."""
        unknown = arguments.keys() - signature(cls.__init__).parameters.keys()
        if unknown:
            raise NotServedError(f"{', '.join(sorted(unknown))}, which is new in vLLM {vllm.__version__}")
        return cls(**arguments)

    def describe_groups(self) -> str:
        """The kinds of the groups, for a log line."""
        kinds = [get_kv_cache_spec_kind(group.kv_cache_spec).value for group in self.kv_cache_config.kv_cache_groups]
        return ", ".join(
            kind if kinds.count(kind) == 1 else f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)
        )

    # What the scheduler asks in every step

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> Any:
        """Blocks that are new for the request; None when they do not fit now."""
        if new_computed_blocks is None:
            # Running: the scheduler passes none of the arguments for a start.
            held = self.ours.get(request.request_id)
            if held is not None:
                if request.num_computed_tokens + num_new_tokens + num_lookahead_tokens <= held.quiet_end:
                    return self.empty_kv_cache_blocks
                if self.ledger.holds_blocks(held):
                    return self._grow(request, num_new_tokens, num_lookahead_tokens)
        starts = has_scheduled_reqs and (
            request.status is RequestStatus.WAITING or request.status is RequestStatus.PREEMPTED
        )
        ours = self._ours(request, num_encoder_tokens)
        hit = self._hit(new_computed_blocks, num_new_computed_tokens)
        watch = self._watch
        if watch is not None:
            watch.begin(request)
        blocks = self.ledger.allocate_slots(
            ours,
            num_new_tokens,
            hit,
            num_lookahead_tokens=num_lookahead_tokens,
            num_external_computed_tokens=num_external_computed_tokens,
            delay_cache_blocks=delay_cache_blocks,
            admission=AdmissionRule(full_sequence_must_fit, reserved_blocks, starts),
        )
        if watch is not None:
            watch.end(blocks, skip_zeroing_group_ids)
        return None if blocks is None else self._theirs(blocks)

    def new_step_starts(self) -> None:
        self.ledger.start_step()

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """States that became hits since the last call: {request id: [(group, block id, tokens that it stands for)]}.

        A connector that stores them reads these blocks, and holds those that it reads later.
        """
        handed: dict[str, list[tuple[int, int, int]]] = {}
        if self._offers is not None:
            for offer in self._offers.take():
                handed.setdefault(offer.request_id, []).append(_handed(offer))
        return handed

    def take_kv_cache_block_copies(self) -> tuple[list[KVCacheBlockCopy], list[BlockView]]:
        """Copies for the step's workers to make, and their ends, which the scheduler frees once they are made."""
        copies = self.ledger.take_block_copies()
        if not copies:
            return [], []
        coordinator = self.ledger.coordinator
        ends = coordinator.copies.hand_over(copies, coordinator.outside)
        of = self.block_pool.blocks.of
        orders = [KVCacheBlockCopy(copy.source_block_id, copy.target_block_id) for copy in copies]
        return orders, [of(block) for block in ends]

    def take_new_block_ids(self) -> list[int]:
        """New blocks that the workers must zero. Only gathered where they do so."""
        return [] if self._watch is None or self._watch.zeroing is None else self._watch.zeroing.take()

    def take_events(self) -> list[Any]:
        return [] if self._watch is None or self._watch.events is None else self._watch.events.take()

    def make_prefix_cache_stats(self) -> Any:
        """The counts since the last call, in vLLM's class; None when nobody wants them."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    @property
    def usage(self) -> float:
        return self.ledger.usage

    # The life of a request

    def prefix_cache_lookup_enabled(self, request: Any) -> bool:
        return self.enable_caching and not request.skip_reading_prefix_cache

    def get_computed_blocks(self, request: Any, max_cache_hit_length: int | None = None) -> tuple[Any, int, int]:
        """The longest cached prefix: blocks, tokens, and where a longer prefix ends that is worth caching (0: none).

        `max_cache_hit_length`: most tokens that it may have; None: all but the last.
        """
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        hit = self.ledger.get_computed_blocks(self._ours(request))
        if max_cache_hit_length is not None and max_cache_hit_length < request.num_tokens - 1:
            hit = self.ledger.coordinator.find_longest_hit(request.block_hashes, max_cache_hit_length)
        events = None if self._watch is None else self._watch.events
        # Pooling requests have no report mode.
        if events is not None and hit.num_tokens > 0 and getattr(request, "kv_cache_report_mode", "") == "full":
            events.report_hit(request, hit, [group.block_size for group in self.coordinator.single_type_managers])
        return self._theirs(hit.blocks, hit), hit.num_tokens, hit.shared_prefix_boundary

    def get_computed_blocks_for_connector(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[Any, int, int, bool]:
        """The same for a connector that brings states: all that attention has, and whether some group has less.

        Then the hit can only be taken with external tokens behind it, for they bring the states.
        """
        view = self.coordinator
        group_id = view.full_attention_group_id
        if group_id is None or not self.kv_cache_config.has_mamba_layers:
            return *self.get_computed_blocks(request, max_cache_hit_length), False
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0, False
        most = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        coordinator = self.ledger.coordinator
        hits = coordinator.find_hit_of_each_group(request.block_hashes, most)
        lengths = [hit.num_tokens for hit in hits]
        num_tokens = lengths[group_id]
        read = [length for length, lags in zip(lengths, self._may_lag, strict=True) if not lags]
        if max(lengths) > num_tokens or min(read) < num_tokens:
            # Some attention has lost blocks that others still have, and nobody brings those: what all agree on.
            return *self.get_computed_blocks(request, max_cache_hit_length), False
        blocks = KVCacheBlocks([hit.blocks[0] for hit in hits])
        found = PrefixHit(blocks, num_tokens, -1, age=coordinator.age(), hashes=request.block_hashes)
        return self._theirs(blocks, found), num_tokens, 0, min(lengths) < num_tokens

    def truncate_computed_blocks(self, blocks: Any, num_computed_tokens: int) -> Any:
        """The first num_computed_tokens tokens of a lookup's result, changing nothing."""
        if not isinstance(blocks, LedgerBlocks):
            return blocks
        cut = [
            found[: num_computed_tokens // group.block_size] if group.kv_cache_spec.prefix_cacheable else []
            for found, group in zip(blocks.ours.blocks, self.coordinator.single_type_managers, strict=True)
        ]
        hit = PrefixHit(blocks.ours, num_computed_tokens, -1) if blocks.hit is None else blocks.hit
        hit = hit.with_blocks(cut, num_computed_tokens)
        return self._theirs(hit.blocks, hit)

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        if self.prefix_cache_stats is not None and self.prefix_cache_lookup_enabled(request):
            self.prefix_cache_stats.record(request.num_tokens, num_hits, request.num_preemptions > 0)

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Makes blocks full at num_computed_tokens tokens hits for others."""
        held = self.ours.get(request.request_id)
        if held is None or num_computed_tokens <= held.quiet_end or not self.enable_caching:
            return
        if not self.ledger.holds_blocks(held):
            return
        ours = self._ours(request)
        if self._watch is not None:
            self._watch.begin(request)
        # A stop inside drafted tokens leaves more computed than there are tokens.
        self.ledger.cache_blocks(ours, min(num_computed_tokens, ours.num_tokens))

    def free(self, request: Any) -> None:
        """Gives back the request's blocks, if it holds any."""
        ours = self.ours.pop(request.request_id, None)
        if ours is not None and self.ledger.holds_blocks(ours):
            self.ledger.free(ours)

    def pop_blocks_for_free(self, request: Any) -> list[BlockView]:
        """Forgets the request. Its blocks are the caller's, who frees them through block_pool, the last first."""
        ours = self.ours.pop(request.request_id, None)
        if ours is None or not self.ledger.holds_blocks(ours):
            return []
        of = self.block_pool.blocks.of
        return [of(block) for block in self.ledger.detach(ours)]

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Gives back what no token behind processed_computed_tokens reads."""
        held = self.ledger.coordinator.get(request_id)
        if held is not None:
            self.ledger.coordinator.release_skipped(held, processed_computed_tokens)

    def finalize_partial_tail_offloads(self, request: Any) -> list[tuple[int, int, int]]:
        """States inside blocks, at its prompt's end, of a request that ends before a later token is computed."""
        held = self.ledger.coordinator.get(request.request_id)
        if held is None:
            return []
        # A step in flight writes over them.
        num_tokens = request.num_computed_tokens if request.num_in_flight_tokens == 0 else -1
        return [_handed(offer) for offer in self.ledger.coordinator.last_state_offers(held, num_tokens)]

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """The request's blocks from start_token on, a block's start, must be zeroed (again)."""
        held = self.ledger.coordinator.get(request_id)
        if self._watch is not None and self._watch.zeroing is not None and held is not None:
            for group_id, group in enumerate(self.coordinator.single_type_managers):
                self._watch.zeroing.add(group_id, held.groups[group_id].blocks[start_token // group.block_size :])

    # What a request holds

    def get_blocks(self, request_id: str) -> Any:
        held = self.ledger.coordinator.get(request_id)
        return self.empty_kv_cache_blocks if held is None else self._theirs(self.ledger.coordinator.blocks_of(held))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        ids: tuple[list[int], ...] = self.get_blocks(request_id).get_block_ids()
        return ids

    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        """Ids of the blocks behind that many tokens; of encoder and state groups all."""
        clipped: list[list[int]] = []
        for group, ids in zip(self.kv_cache_config.kv_cache_groups, self.get_block_ids(request_id), strict=True):
            spec = group.kv_cache_spec
            by_token = isinstance(spec, AttentionSpec) and not isinstance(
                spec, (CrossAttentionSpec, EncoderOnlyAttentionSpec)
            )
            clipped.append(ids[: cdiv(num_computed_tokens, spec.block_size)] if by_token else ids)
        return tuple(clipped)

    def estimate_cached_tokens(self, request: Any) -> int:
        """Tokens of the request that others can hit."""
        held = self.ledger.coordinator.get(request.request_id)
        return 0 if held is None else self.ledger.coordinator.num_reusable_tokens(held)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Always 0, as in vLLM, which no longer uses it."""
        return [0] * self.num_kv_cache_groups

    # The prefix cache as a whole

    def reset_prefix_cache(self) -> bool:
        done = self.ledger.reset_prefix_cache()
        if done:
            logger.info("The prefix cache was reset")
        else:
            num_held = self.ledger.num_usable_blocks - self.ledger.num_free_blocks
            logger.warning("The prefix cache was not reset: %d blocks are in use", num_held)
        if done and self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return done

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.block_pool.evict_blocks(block_ids)

    # Between vLLM's objects and ours

    def _grow(self, request: Any, num_new_tokens: int, num_lookahead_tokens: int) -> Any:
        ours = self._ours(request)
        if self._watch is not None:
            self._watch.begin(request)
        blocks = self.ledger.allocate_slots(ours, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens)
        return None if blocks is None else self._theirs(blocks)

    def _ours(self, request: Any, num_encoder_tokens: int = 0) -> Request:
        """Our request, up to date."""
        request_id = request.request_id
        ours = self.ours.get(request_id)
        if ours is None or (num_encoder_tokens != ours.num_encoder_tokens and not self.ledger.holds_blocks(ours)):
            ours = Request(request_id, _ANY_PROMPT, num_encoder_tokens=num_encoder_tokens)
            self.ours[request_id] = ours
        ours.num_prompt_tokens = request.num_prompt_tokens
        ours.num_tokens = request.num_tokens
        ours.num_computed_tokens = request.num_computed_tokens
        ours.num_in_flight_tokens = request.num_in_flight_tokens
        ours.num_preemptions = request.num_preemptions
        ours.shared_prefix_boundary = request.shared_prefix_boundary
        ours.block_hashes = request.block_hashes
        return ours

    def _theirs(self, blocks: KVCacheBlocks, hit: PrefixHit | None = None) -> Any:
        if blocks.is_empty():
            return self.empty_kv_cache_blocks
        return LedgerBlocks(blocks, self.block_pool.blocks, hit)

    def _hit(self, found: Any, num_tokens: int) -> PrefixHit:
        """What a lookup found, with as many tokens as the scheduler counts of it."""
        if not isinstance(found, LedgerBlocks):
            return self._no_hit
        hit = found.hit
        if hit is None or hit.num_tokens != num_tokens:
            return PrefixHit(found.ours, num_tokens, -1)
        return hit


def _handed(offer: StateOffer) -> tuple[int, int, int]:
    """An offer as vLLM's connectors read it."""
    return offer.group_id, offer.block.block_id, offer.num_tokens


def _decisions() -> Decisions:
    """Those of the installed release, or for one that is forced of the nearest that is known."""
    return decisions_of(nearest_release(vllm.__version__)).exact()


def _draft_rule(
    kv_cache_config: Any, drops_last: bool, num_prefill_lookahead: int, num_hash_lookahead: int
) -> DraftRule | None:
    """vLLM's arguments about a draft model. 0.32 drops the last block of its hits, or half of it with a switch."""
    if num_hash_lookahead > 0:
        return DraftRule(num_hash_lookahead, hashes_ahead=True)
    if drops_last:
        return DraftRule(num_prefill_lookahead, hashes_ahead=False)
    marked = any(group.is_eagle_group for group in kv_cache_config.kv_cache_groups)
    if (marked or num_prefill_lookahead > 0) and not _decisions().hashes_ahead:
        raise NotServedError("a draft model whose hits keep their last block")
    return DraftRule(num_prefill_lookahead, values_depend_on_next=False) if num_prefill_lookahead > 0 else None


def _make_watch(kv_cache_config: Any, events: EventLog | None, residency: Residency | None) -> CallWatch | None:
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    zeroed = [
        group_id
        for group_id, spec in enumerate(specs)
        if isinstance(spec, AttentionSpec) and not isinstance(spec, CircularBufferSpec)
    ]
    zeroing = BlockZeroing(zeroed) if zeroed and kv_cache_config.needs_kv_cache_zeroing else None
    if events is None and residency is None and zeroing is None:
        return None
    return CallWatch(events, residency, zeroing)
