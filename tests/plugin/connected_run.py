"""vLLM's scheduler with a connector of vLLM's, with or without the ledger; the workers' half is a list of jobs.

A connector decides by what it sees of the manager: hits of each group, states that are offered, blocks that it holds
and looks up. So what it tells the workers in each step says whether all of that is the same.
"""

import random
from pathlib import Path
from typing import Any

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata
from vllm.v1.structured_output import StructuredOutputManager

from kvledger.integrations.vllm.plugin import ledger_in_place
from tests.plugin.engine_run import describe_step
from tests.side_by_side.external_pair import SchedulerHalf, count_external_states
from tests.side_by_side.layouts import Layout
from tests.side_by_side.reference import RequestFactory, write_model_config

MAX_MODEL_LEN = 160


class PrefillNode(SchedulerHalf):
    """Another engine that has computed some prompts, as with NixlConnector: it brings states whatever is here.

    Which prompts, and how far, is a matter of their tokens, so that every run hears the same.
    """

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return True

    def __init__(self, vllm_config: VllmConfig, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self._unit = max(sizes)
        self.calls: list[Any] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        prompt = request.prompt_token_ids
        most = (request.num_tokens - 1 - num_computed_tokens) // self._unit
        if most < 1 or sum(prompt) % 3 != 0 or request.num_preemptions > 0:
            return 0, False
        return (1 + sum(prompt) % most) * self._unit, sum(prompt) % 2 == 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.calls.append((request.request_id, blocks.get_block_ids(), num_external_tokens, request.status))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Fetches(self.take_fetches())

    def take_fetches(self) -> list[Any]:
        calls = self.calls
        self.calls = []
        return calls

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self.calls.append((request.request_id, block_ids, -1, request.status))
        return False, None


class Fetches(KVConnectorMetadata):  # type: ignore[misc]
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __repr__(self) -> str:
        return f"Fetches({self.calls})"


class Worker:
    """Does what it is told, now or some steps later."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        # Request id -> its job ids; "" for stores.
        self._offloads: dict[int, str] = {}
        self._simple_loads: dict[int, list[str]] = {}
        self._simple_stores: list[int] = []
        self._fetches: list[str] = []
        self.num_stores = self.num_loads = 0

    def start(self, metadata: Any, waiting: set[str]) -> None:
        """`waiting`: requests whose tokens come later."""
        if isinstance(metadata, MultiKVConnectorMetadata):
            for each in metadata.metadata:
                self.start(each, waiting)
        elif isinstance(metadata, OffloadingConnectorMetadata):
            self._offloads |= {job_id: job.req_id for job_id, job in metadata.load_jobs.items()}
            self._offloads |= dict.fromkeys(metadata.store_jobs, "")
            self.num_stores += len(metadata.store_jobs)
            self.num_loads += len(metadata.load_jobs)
        elif isinstance(metadata, SimpleCPUOffloadMetadata):
            self._simple_loads |= metadata.load_event_to_reqs
            self.num_loads += len(metadata.load_gpu_blocks)
            if metadata.store_event >= 0:
                self._simple_stores.append(metadata.store_event)
                self.num_stores += len(metadata.store_gpu_blocks)
        else:
            loads = [call for call in metadata.calls if call[2] > 0]
            self.num_loads += len(loads)
            self._fetches += [call[0] for call in loads if call[0] in waiting]

    def report(self, metadata: Any) -> KVConnectorOutput | None:
        """What is done by now, and what must be done before the step."""
        if isinstance(metadata, MultiKVConnectorMetadata):
            # The one that offloads comes first, and only it has something to say but for loads that are done.
            told = self.report(metadata.metadata[0])
            if told is not None and told.kv_connector_worker_meta is not None:
                told.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata((told.kv_connector_worker_meta, None))
            return told
        told = KVConnectorOutput(finished_recving=set())
        at_once = getattr(metadata, "jobs_to_flush", None) or set()
        offloads = [job for job in self._offloads if job in at_once or self._is_done()]
        for job in offloads:
            told.finished_recving |= {self._offloads.pop(job)} - {""}
        if offloads:
            told.kv_connector_worker_meta = OffloadingWorkerMetadata(dict.fromkeys(offloads, 1))
        for event in [event for event in self._simple_loads if self._is_done()]:
            told.finished_recving |= set(self._simple_loads.pop(event))
        stores = [event for event in self._simple_stores if self._is_done()]
        if stores:
            self._simple_stores = [event for event in self._simple_stores if event not in stores]
            told.kv_connector_worker_meta = SimpleCPUOffloadWorkerMetadata(dict.fromkeys(stores, 1))
        fetched = [request_id for request_id in self._fetches if self._is_done()]
        self._fetches = [request_id for request_id in self._fetches if request_id not in fetched]
        told.finished_recving |= set(fetched)
        return None if told.is_empty() else told

    def _is_done(self) -> bool:
        return self._rng.random() < 0.4


class ConnectedRun:
    """A scheduler, its workers and the record of both."""

    def __init__(
        self, layout: Layout, transfer: KVTransferConfig, directory: Path, seed: int, with_ledger: bool
    ) -> None:
        self.rng = random.Random(seed)
        num_blocks = self.rng.choice([30, 40, 60]) * len(layout.groups)
        if with_ledger:
            with ledger_in_place():
                self.scheduler = _make_scheduler(layout, transfer, directory, num_blocks)
        else:
            self.scheduler = _make_scheduler(layout, transfer, directory, num_blocks)
            # What ours does otherwise on purpose (docs/differences.md).
            count_external_states(self.scheduler)
            start_outside_written_blocks(self.scheduler.kv_cache_manager)
        self.layout = layout
        self.manager = self.scheduler.kv_cache_manager
        self.worker = Worker(self.rng)
        self.factory = RequestFactory(layout)
        self.texts = [[self.rng.randrange(50) for _ in range(80)] for _ in range(6)]
        self.steps: list[Any] = []
        self.num_made = 0

    def add(self) -> None:
        self.num_made += 1
        prompt = self.rng.choice(self.texts)[: self.rng.randint(1, 70)]
        prompt = prompt + [self.rng.randrange(50) for _ in range(self.rng.randint(0, 8))]
        self.scheduler.add_request(self.factory.make(f"r{self.num_made}", prompt, self.rng.randint(1, 20)))

    def abort(self) -> None:
        requests = list(self.scheduler.requests)
        if requests:
            self.scheduler.finish_requests(self.rng.choice(requests), RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        self.steps.append((describe_step(output), repr(metadata)))
        waiting = {
            request_id
            for request_id, request in self.scheduler.requests.items()
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        }
        self.worker.start(metadata, waiting)
        request_ids = list(output.num_scheduled_tokens)
        sampled = [
            [self.rng.randrange(50)]
            if self.scheduler.requests[each].num_computed_tokens >= self.scheduler.requests[each].num_tokens
            else []
            for each in request_ids
        ]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
                sampled_token_ids=sampled,
                kv_connector_output=self.worker.report(metadata),
            ),
        )
        pool = self.manager.block_pool
        self.steps.append([block.block_id for block in pool.free_block_queue.get_all_free_blocks()])

    def live(self, num_steps: int) -> None:
        for _ in range(num_steps):
            while self.rng.random() < 0.3:
                self.add()
            if self.rng.random() < 0.04:
                self.abort()
            self.step()
        for _ in range(500):
            if self.scheduler.has_unfinished_requests():
                self.step()
        assert not self.scheduler.has_unfinished_requests()


def start_outside_written_blocks(manager: Any) -> None:
    """No request starts in a block of attention behind what the same step writes there: the copy is made before it."""
    coordinator = manager.coordinator
    allocate, start, cache = manager.allocate_slots, manager.new_step_starts, coordinator.cache_blocks
    attention = [g for g in coordinator.single_type_managers if isinstance(g.kv_cache_spec, FullAttentionSpec)]
    # {block that got a name in this step: from which token on the step writes}.
    written_from: dict[int, int] = {}

    def new_step_starts() -> None:
        written_from.clear()
        start()

    def cache_blocks(request: Any, num_tokens: int) -> None:
        blocks = [block for group in attention for block in group.req_to_blocks.get(request.request_id, ())]
        names = [block.block_hash for block in blocks]
        cache(request, num_tokens)
        for block, name in zip(blocks, names, strict=True):
            if block.block_hash != name:
                written_from[block.block_id] = request.num_computed_tokens

    def allocate_slots(request: Any, num_new_tokens: int, **options: Any) -> Any:
        hit, num_hit = options.get("new_computed_blocks"), options.get("num_new_computed_tokens", 0)
        for group in attention if hit is not None else ():
            blocks = hit.blocks[group.kv_cache_group_id]
            is_inside = bool(blocks) and num_hit % group.block_size != 0
            if is_inside and written_from.get(blocks[-1].block_id, num_hit) < num_hit:
                return None
        return allocate(request, num_new_tokens, **options)

    manager.new_step_starts, manager.allocate_slots = new_step_starts, allocate_slots
    coordinator.cache_blocks = cache_blocks


def _make_scheduler(layout: Layout, transfer: KVTransferConfig, directory: Path, num_blocks: int) -> Scheduler:
    write_model_config(directory, MAX_MODEL_LEN)
    model = ModelConfig(
        model=str(directory), skip_tokenizer_init=True, dtype="float16", seed=0, max_model_len=MAX_MODEL_LEN
    )
    limits = SchedulerConfig(
        max_num_seqs=6,
        max_num_batched_tokens=64,
        max_model_len=MAX_MODEL_LEN,
        is_encoder_decoder=False,
    )
    cache = CacheConfig(block_size=layout.base_block_size, enable_prefix_caching=True, gpu_memory_utilization=0.9)
    config = VllmConfig(
        model_config=model,
        scheduler_config=limits,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )
    states = [group.block_size for group in layout.groups if group.kind == "mamba_align"]
    cache.block_size = max(states, default=layout.base_block_size)
    cache.hash_block_size = layout.unit
    cache.num_gpu_blocks = num_blocks
    cache.mamba_cache_mode = "align" if states else "none"
    groups = layout.their_config(num_blocks)
    page = max(group.kv_cache_spec.page_size_bytes for group in groups.kv_cache_groups)
    names = [name for group in groups.kv_cache_groups for name in group.layer_names]
    groups.kv_cache_tensors = [
        KVCacheTensor(page * num_blocks * len(names), names, layer_stride=page * num_blocks, block_stride=page)
    ]
    return Scheduler(
        vllm_config=config,
        kv_cache_config=groups,
        structured_output_manager=StructuredOutputManager(config),
        block_size=layout.base_block_size,
        hash_block_size=layout.unit,
        log_stats=True,
    )
