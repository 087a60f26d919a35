"""One external store, seen by vLLM's scheduler as its connector and by ours as its source.

What it offers for a request changes only between steps, so both sides hear the same. Both are told the same of every
load: all of it arrived, some, or nothing.
"""

import random
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.core.kv_cache_manager import KVCacheBlocks as TheirBlocks
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request as TheirRequest

from kvledger import Request
from kvledger.scheduler import ExternalHit, ExternalKVSource
from tests.side_by_side.layouts import Layout

# Kinds of which a request can take the last token again that it loaded.
STEP_BACK = ("full", "mla", "sink", "ring")


@dataclass
class Offer:
    """The first num_tokens tokens of a request are in the store. `is_known`: it can tell now."""

    num_tokens: int
    asynchronous: bool
    is_known: bool = True


class Store:
    def __init__(self, layout: Layout, rng: random.Random) -> None:
        self.layout, self.rng = layout, rng
        self.offers: dict[str, Offer] = {}
        # Who was told what, on both sides.
        self.our_calls: list[tuple[str, tuple[list[int], ...], int]] = []
        self.their_calls: list[tuple[str, tuple[list[int], ...], int]] = []
        self.loads_whole_prompts = all(group.kind in STEP_BACK for group in layout.groups)
        self.ends_anywhere = all(group.kind in ("full", "mla") for group in layout.groups)

    def change(self, request_id: str) -> None:
        """Draws a new offer."""
        rng = self.rng
        # vLLM's layouts of several groups load whole blocks.
        unit = 1 if self.ends_anywhere and rng.random() < 0.3 else self.layout.base_block_size
        num_tokens = rng.choice([0, 0, 1, 2, 3, 5, 8, 99]) * unit
        self.offers[request_id] = Offer(num_tokens, rng.random() < 0.6, rng.random() < 0.85)

    def num_offered(self, request_id: str, num_known: int, num_local: int) -> tuple[int | None, bool]:
        """(tokens beyond the local ones, whether they come later); None: it does not know."""
        offer = self.offers[request_id]
        if not offer.is_known:
            return None, False
        whole = offer.asynchronous and self.loads_whole_prompts and num_known > 1
        num_tokens = min(offer.num_tokens, num_known if whole else num_known - 1)
        num_more = max(0, num_tokens - num_local)
        if not self.ends_anywhere:
            num_more -= num_more % self.layout.base_block_size
        return num_more, offer.asynchronous and num_more > 0


class OurSource(ExternalKVSource):
    def __init__(self, store: Store) -> None:
        self.store = store

    def lookup(self, request: Request, num_local_tokens: int) -> ExternalHit | None:
        num_more, asynchronous = self.store.num_offered(request.request_id, request.num_tokens, num_local_tokens)
        return None if num_more is None else ExternalHit(num_more, asynchronous)

    def allocated(self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int) -> None:
        self.store.our_calls.append((request.request_id, block_ids, num_external_tokens))


class SchedulerHalf(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The scheduler's half of a connector; there is no worker."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError


class TheirConnector(SchedulerHalf):
    def __init__(self, store: Store) -> None:
        self.store = store

    def get_num_new_matched_tokens(self, request: TheirRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.store.num_offered(request.request_id, request.num_tokens, num_computed_tokens)

    def update_state_after_alloc(self, request: TheirRequest, blocks: TheirBlocks, num_external_tokens: int) -> None:
        # It is told again when a request goes on after its load, ours is not.
        if request.num_computed_tokens == 0:
            self.store.their_calls.append((request.request_id, blocks.get_block_ids(), num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: TheirRequest, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def get_loaded_kv_cache_group_ids(self, request: TheirRequest) -> tuple[int, ...]:
        return ()

    def get_external_cache_hit_sources(self, request: TheirRequest, num_external_tokens: int) -> Any:
        return None


@dataclass
class Report:
    """What a load brought: the request's first num_valid tokens. 0: it failed."""

    request_id: str
    num_valid: int
    is_partial: bool


class Loads:
    """The asynchronous loads that both sides have asked for and not heard of."""

    def __init__(self, store: Store, theirs: Any) -> None:
        self.store, self.theirs = store, theirs
        self.num_noted = 0
        # Request id -> (its tokens at the load's end, those before it, its block ids).
        self.under_way: dict[str, tuple[int, int, tuple[list[int], ...]]] = {}

    def note(self, ends: dict[str, int]) -> None:
        """After a step. `ends`: request -> tokens at the load's end, of those that wait for a load now."""
        for request_id, block_ids, num_external in self.store.our_calls[self.num_noted :]:
            if num_external > 0 and request_id in ends:
                end = ends[request_id]
                self.under_way[request_id] = (end, end - num_external, block_ids)
        self.num_noted = len(self.store.our_calls)

    def draw(self, rng: random.Random, share: float) -> list[Report]:
        """Some of them report now."""
        reports: list[Report] = []
        for request_id in list(self.under_way):
            if rng.random() >= share:
                continue
            end, num_local, _ = self.under_way[request_id]
            fate = rng.random()
            num_valid, is_partial = end, False
            if fate < 0.15:
                num_valid = 0
            elif fate < 0.4 and len(self.store.layout.groups) == 1 and self.store.loads_whole_prompts:
                # vLLM hears of blocks: the first that is missing.
                size = self.store.layout.base_block_size
                first = rng.randrange(num_local // size, -(-end // size))
                num_valid, is_partial = max(first * size, num_local), True
            reports.append(Report(request_id, num_valid, is_partial))
            self.store.change(request_id)
        return reports

    def for_them(self, reports: list[Report]) -> KVConnectorOutput | None:
        """The reports in vLLM's words."""
        if not reports:
            return None
        told = KVConnectorOutput(finished_recving={report.request_id for report in reports})
        size = self.store.layout.base_block_size
        for report in reports:
            _, _, block_ids = self.under_way.pop(report.request_id)
            if report.num_valid == 0 and not report.is_partial:
                told.failed_recving.add(report.request_id)
            elif report.is_partial:
                told.invalid_block_ids |= set(block_ids[0][report.num_valid // size :])
        return told


def connect(theirs: Any, store: Store, steps_in_flight: int) -> None:
    """Gives vLLM's scheduler that store as its connector, and what follows from having one."""
    theirs.connector = TheirConnector(store)
    theirs.connector_prefix_cache_stats = PrefixCacheStats()
    theirs.defer_block_free = steps_in_flight > 1
    forget_failed_loads(theirs)
    count_external_states(theirs)
    notice_what_did_not_arrive(theirs)


def forget_failed_loads(theirs: Any) -> None:
    """A load that failed counts no longer as under way, and its request waits in its place (docs/differences.md)."""
    update, schedule = theirs._update_waiting_for_remote_kv, theirs.schedule

    def update_waiting_for_remote_kv(request: TheirRequest) -> None:
        update(request)
        if request.num_computed_tokens == 0:
            theirs._inflight_prefills.discard(request)

    def schedule_and_requeue(*args: Any, **options: Any) -> Any:
        held_blocks = set(theirs.kv_holding_waiting)
        output = schedule(*args, **options)
        misplaced = [each for each in theirs.kv_holding_waiting if not theirs._holds_kv_blocks(each)]
        if misplaced:
            # Behind those of this pass that were passed over.
            passed_over = [each for each in theirs.waiting if each in held_blocks]
            theirs.kv_holding_waiting.remove_requests(misplaced)
            theirs.waiting.remove_requests(passed_over)
            theirs.waiting.prepend_requests(reversed(passed_over + misplaced))
        return output

    theirs._update_waiting_for_remote_kv = update_waiting_for_remote_kv
    theirs.schedule = schedule_and_requeue


def notice_what_did_not_arrive(theirs: Any) -> None:
    """Of a load vLLM takes off what a step of the request's earlier life computed, and then does not see that the last
    block did not arrive (docs/differences.md)."""
    update = theirs._update_requests_with_invalid_blocks

    def update_loads_whole(requests: Any, invalid: set[int], num_scheduled: dict[str, int], evict_blocks: bool) -> Any:
        return update(requests, invalid, num_scheduled if evict_blocks else {}, evict_blocks=evict_blocks)

    theirs._update_requests_with_invalid_blocks = update_loads_whole


def count_external_states(theirs: Any) -> None:
    """A state that a connector delivers has a block of its own, and it is counted (docs/differences.md)."""
    for manager in theirs.kv_cache_manager.coordinator.single_type_managers:
        if getattr(manager, "mamba_cache_mode", "") != "align":
            continue

        def counted(
            request_id: str,
            num_tokens: int,
            new_computed_blocks: Any,
            total_computed_tokens: int,
            num_local_computed_tokens: int,
            num_tokens_main_model: int,
            *args: Any,
            manager: Any = manager,
            count: Any = manager.get_num_blocks_to_allocate,
            **options: Any,
        ) -> int:
            num_blocks: int = count(
                request_id,
                num_tokens,
                new_computed_blocks,
                total_computed_tokens,
                num_local_computed_tokens,
                num_tokens_main_model,
                *args,
                **options,
            )
            size = manager.block_size
            last_start = (-(-num_tokens_main_model // size) - 1) * size
            if num_local_computed_tokens < total_computed_tokens <= last_start:
                num_entries = -(-num_tokens_main_model // size) + manager.num_speculative_blocks
                num_missing = num_entries - len(new_computed_blocks) - len(manager.req_to_blocks[request_id])
                evictable = sum(b.ref_cnt == 0 and not b.is_null for b in new_computed_blocks)
                num_blocks += 1 if num_missing > num_blocks - evictable else 0
            return num_blocks

        manager.get_num_blocks_to_allocate = counted
