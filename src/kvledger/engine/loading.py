"""From a model's files to an engine: weights and tokenizer through transformers, blocks from the ledger's layout.

engine   Engine(scheduler, worker, drafter)
worker   TorchWorker(TransformersModel, KVCacheConfig)      the same groups on both sides
ledger   KVCacheManager(KVCacheConfig)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvledger.core.groups.spec import KVCacheConfig
from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.engine.engine import Engine
from kvledger.engine.load_options import LoadOptions
from kvledger.engine.measured_pool import make_profiler, measure_pool, memory_device
from kvledger.engine.model_files import ModelFiles, find_model
from kvledger.engine.ngram_drafter import NgramDrafter
from kvledger.engine.sampler import Sampler
from kvledger.engine.transformers_model import TransformersModel, facts_of, kv_cache_layout
from kvledger.engine.worker import TorchWorker
from kvledger.errors import ConfigError, KVLedgerError, wrong_value
from kvledger.plan.pool import RequestLimits
from kvledger.scheduler import RequestAccounting, Scheduler, SchedulerConfig


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory and its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, as the model's generation config and the tokenizer say."""
        named = self.model.generation_config.eos_token_id if self.model.generation_config else None
        ids = [*named] if isinstance(named, list) else [named]
        return tuple(dict.fromkeys(one for one in (*ids, self.tokenizer.eos_token_id) if one is not None))


def load_engine(options: LoadOptions, report: Callable[[str], None] = lambda line: None) -> tuple[Engine, LoadedModel]:
    """An engine for the model of these options, and the model with its tokenizer. `report` gets the start-up lines."""
    device = memory_device(options.device)
    profiler = make_profiler(device, options) if options.num_blocks is None else None
    loaded = load_model(find_model(options.model), options.dtype, options.device)
    if profiler is None:
        return make_engine(loaded, options), loaded
    profiler.weights_loaded()
    num_blocks = measure_pool(profiler, loaded.model, limits_of(loaded, options), options, report)
    measured = replace(options, num_blocks=num_blocks, kv_cache_memory_bytes=None, gpu_memory_utilization=None)
    return make_engine(loaded, measured), loaded


def load_model(files: ModelFiles, dtype: str = "float32", device: str = "cpu") -> LoadedModel:
    """Reads weights and tokenizer. ConfigError for a missing package, KVLedgerError for what transformers refuses."""
    if files.gguf_file is not None and not (find_spec("gguf") and find_spec("accelerate")):
        raise ConfigError(f"model={files.gguf_file!r}: GGUF files need the demo extra: pip install 'kvledger[demo]'")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            files.directory, gguf_file=files.gguf_file, dtype=getattr(torch, dtype), local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(files.directory, gguf_file=files.gguf_file, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as failed:
        place = files.directory / (files.gguf_file or "")
        raise KVLedgerError(f"{place}: transformers cannot load it: {failed}") from failed
    return LoadedModel(model.to(device), tokenizer)


def make_engine(loaded: LoadedModel, options: LoadOptions) -> Engine:
    """An engine around a model that is in memory. Its attention is the ledger's from now on.

    REQUIRES options.num_blocks.
    """
    if options.num_blocks is None:
        raise wrong_value("num_blocks", None, "an engine needs blocks", "give a number, or use load_engine")
    layout = kv_cache_layout(loaded.model.config, block_size=options.block_size, dtype=options.dtype)
    config = KVCacheConfig(options.num_blocks, layout.groups)
    limits = limits_of(loaded, options)
    manager = KVCacheManager(
        config,
        limits.max_model_len,
        enable_caching=options.enable_prefix_caching,
        max_in_flight_tokens=limits.max_in_flight_tokens,
    )
    scheduler_config = SchedulerConfig(
        max_num_seqs=options.num_seats,
        max_num_batched_tokens=options.max_num_batched_tokens,
        num_speculative_tokens=options.num_speculative_tokens,
    )
    worker = TorchWorker(
        TransformersModel(loaded.model),
        config,
        max_num_reqs=options.num_seats,
        max_model_len=limits.max_model_len,
        sampler=Sampler(options.seed),
    )
    return Engine(
        Scheduler(manager, scheduler_config, accounting=RequestAccounting(manager)),
        worker,
        drafter=make_drafter(options),
        eos_token_ids=loaded.eos_token_ids,
    )


def limits_of(loaded: LoadedModel, options: LoadOptions) -> RequestLimits:
    """ConfigError for requests that are longer than the model's positions reach."""
    context = facts_of(loaded.model.config).context
    max_model_len = options.max_model_len or context.default
    if max_model_len > context.longest:
        problem = f"the model's {context.field} is {context.longest}"
        raise wrong_value("max_model_len", max_model_len, problem, "give at most that")
    return RequestLimits(max_model_len, options.max_num_batched_tokens)


def make_drafter(options: LoadOptions) -> NgramDrafter | None:
    if options.num_speculative_tokens == 0:
        return None
    return NgramDrafter(options.num_speculative_tokens, options.prompt_lookup_min, options.prompt_lookup_max)
