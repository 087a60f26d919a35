"""Builds vLLM's manager, scheduler and requests for comparison, without a model or a GPU."""

import inspect
import json
from pathlib import Path
from typing import Any

import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvledger.core.groups.decisions import LATEST_RELEASE, RELEASES, Decisions, decisions_of
from tests.side_by_side.layouts import Layout

init_none_hash(sha256)
# The release beside which this runs: "0.33". Ours decides as it does, or, where nobody has looked at it yet, as the
# newest that is known; a search for what changed sets other rules.
RELEASE = ".".join(vllm.__version__.split(".")[:2])
decisions: Decisions = decisions_of(RELEASE if RELEASE in RELEASES else LATEST_RELEASE).exact()
HAS_LOOKAHEAD = "num_hash_lookahead_tokens" in inspect.signature(KVCacheManager.__init__).parameters
HAS_PINS = "enable_mamba_shared_prefix_checkpoint" in inspect.signature(KVCacheManager.__init__).parameters


def hash_lookahead(layout: Layout) -> int:
    """Tokens behind a block that its hash covers: what vLLM's configuration makes of a draft without a connector."""
    return layout.num_draft_lookahead if layout.enable_caching and HAS_LOOKAHEAD else 0


def manager_arguments(layout: Layout, num_blocks: int, max_model_len: int, **changes: Any) -> dict[str, Any]:
    """What vLLM's scheduler gives its manager for that layout."""
    lookahead = hash_lookahead(layout)
    # Of a release that lacks one of these the rest can still be compared (search.py).
    pins = {"enable_mamba_shared_prefix_checkpoint": layout.pins_shared_prefix} if HAS_PINS else {}
    return {
        "kv_cache_config": layout.their_config(num_blocks),
        "max_model_len": max_model_len,
        "scheduler_block_size": layout.base_block_size,
        "hash_block_size": layout.unit,
        "max_in_flight_tokens": layout.max_in_flight_tokens,
        "enable_caching": layout.enable_caching,
        "use_eagle": layout.num_draft_lookahead > 0 and lookahead == 0,
        "num_prefill_lookahead": layout.num_draft_lookahead,
        "log_stats": True,
        "dcp_world_size": layout.context_parallel_size,
        **pins,
        **({"num_hash_lookahead_tokens": lookahead} if lookahead else {}),
        **changes,
    }


def make_manager(layout: Layout, num_blocks: int, max_model_len: int, watermark: float = 0.0) -> KVCacheManager:
    made = KVCacheManager(**manager_arguments(layout, num_blocks, max_model_len, watermark=watermark))
    if hash_lookahead(layout) > 0:
        end_lookups_at_known_names(made, layout.unit)
    return made


def end_lookups_at_known_names(manager: KVCacheManager, unit: int) -> None:
    """Without full attention windows are looked up beyond the names that are known, with an IndexError
    (docs/differences.md)."""
    look_up = manager.coordinator.find_longest_cache_hit

    def look_up_known(block_hashes: Any, max_cache_hit_length: int) -> Any:
        return look_up(block_hashes, min(max_cache_hit_length, len(block_hashes) * unit))

    manager.coordinator.find_longest_cache_hit = look_up_known


class RequestFactory:
    """vLLM requests whose blocks are hashed as the layout's ledger wants it."""

    def __init__(self, layout: Layout) -> None:
        lookahead = hash_lookahead(layout)
        options = {"num_hash_lookahead_tokens": lookahead} if lookahead else {}
        self._hasher = get_request_block_hasher(layout.unit, sha256, **options) if layout.enable_caching else None

    def make(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 16,
        *,
        stop_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        arrival_time: float = 0.0,
        cache_salt: str = "",
        skips_lookup: bool = False,
        lora_request: LoRARequest | None = None,
        mm_features: list[MultiModalFeatureSpec] | None = None,
    ) -> Request:
        params = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=list(stop_token_ids),
            ignore_eos=True,
            skip_reading_prefix_cache=skips_lookup,
        )
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            priority=priority,
            arrival_time=arrival_time,
            cache_salt=cache_salt or None,
            lora_request=lora_request,
            mm_features=mm_features,
            block_hasher=self._hasher,
        )


def make_scheduler(
    directory: str,
    *,
    layout: Layout,
    num_blocks: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    policy: str = "fcfs",
    enable_chunked_prefill: bool = True,
    long_prefill_token_threshold: int = 0,
    reserve_full_sequence: bool = True,
    watermark: float = 0.0,
    num_speculative_tokens: int = 0,
    async_scheduling: bool = False,
) -> Scheduler:
    """vLLM's Scheduler over a model that exists only as a config.json in `directory`."""
    write_model_config(Path(directory), max_model_len)
    model = ModelConfig(model=directory, skip_tokenizer_init=True, dtype="float16", seed=0, max_model_len=max_model_len)
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        policy=policy,
        enable_chunked_prefill=enable_chunked_prefill,
        long_prefill_token_threshold=long_prefill_token_threshold,
        scheduler_reserve_full_isl=reserve_full_sequence,
        watermark=watermark,
        async_scheduling=async_scheduling,
        is_encoder_decoder=False,
    )
    block_size = max([g.block_size for g in layout.groups if g.kind == "mamba_align"], default=layout.base_block_size)
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=layout.enable_caching, gpu_memory_utilization=0.9)
    speculative = None
    if num_speculative_tokens:
        speculative = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=num_speculative_tokens,
            prompt_lookup_max=3,
            target_model_config=model,
            target_parallel_config=ParallelConfig(),
        )
    config = VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=cache,
        speculative_config=speculative,
        device_config=DeviceConfig("cpu"),
    )
    cache.block_size = block_size
    cache.num_gpu_blocks = num_blocks
    cache.mamba_cache_mode = "align" if any(g.kind == "mamba_align" for g in layout.groups) else "none"
    kind = AsyncScheduler if async_scheduling else Scheduler
    made = kind(
        vllm_config=config,
        kv_cache_config=layout.their_config(num_blocks),
        structured_output_manager=StructuredOutputManager(config),
        block_size=layout.base_block_size,
        hash_block_size=layout.unit,
        log_stats=True,
    )
    # A draft model would have to exist on disk; the scheduler only needs to know what follows from it.
    made.kv_cache_manager = make_manager(layout, num_blocks, max_model_len, watermark)
    made.num_hash_lookahead_tokens = hash_lookahead(layout)
    made.use_eagle_block_drop = layout.num_draft_lookahead > 0 and made.num_hash_lookahead_tokens == 0
    made.num_prefill_lookahead = layout.num_draft_lookahead
    made.mamba_partial_cache_hit = (
        made.need_mamba_block_aligned_split
        and layout.unit < layout.base_block_size
        and made.kv_cache_manager.coordinator.enable_partial_hash_hits
    )
    made.mamba_shared_prefix_checkpoint = (
        made.mamba_partial_cache_hit and made.kv_cache_manager.mamba_shared_prefix_checkpoint
    )
    return made


def write_model_config(directory: Path, max_model_len: int) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 100,
        "max_position_embeddings": max_model_len,
        "torch_dtype": "float16",
    }
    (directory / "config.json").write_text(json.dumps(config))
