"""What the adapter relies on in vLLM, compared with the vLLM that is installed.

    python -m kvledger.integrations.vllm.surface     names what changed; exit status 1 if anything did

What vLLM calls must exist on our side: read from the sources of its schedulers, its engine core and its connectors.
What we use of vLLM must look as it did when it was last read: the tables below, by version.
"""

import inspect
import re
import sys
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from kvledger.integrations.vllm.restated import changed_code
from kvledger.integrations.vllm.served import parsed_version

# Parameters after self, in order. A name behind "0.33:" is new there.
SIGNATURES: Final = {
    "v1.core.kv_cache_manager:KVCacheManager.__init__": (
        "kv_cache_config max_model_len scheduler_block_size hash_block_size max_in_flight_tokens enable_caching "
        "use_eagle 0.33:num_hash_lookahead_tokens num_prefill_lookahead log_stats enable_kv_cache_events "
        "dcp_world_size pcp_world_size metrics_collector watermark enable_mamba_shared_prefix_checkpoint"
    ),
    "v1.core.kv_cache_manager:KVCacheManager.allocate_slots": (
        "request num_new_tokens num_new_computed_tokens new_computed_blocks num_lookahead_tokens "
        "num_external_computed_tokens delay_cache_blocks num_encoder_tokens full_sequence_must_fit reserved_blocks "
        "has_scheduled_reqs skip_zeroing_group_ids"
    ),
    "v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks": "request 0.33:max_cache_hit_length",
    "v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks_for_connector": "request 0.33:max_cache_hit_length",
    "v1.core.kv_cache_manager:KVCacheManager.truncate_computed_blocks": "blocks num_computed_tokens",
    "v1.core.kv_cache_manager:KVCacheManager.record_prefix_cache_stats": "request num_hits",
    "v1.core.kv_cache_manager:KVCacheManager.cache_blocks": "request num_computed_tokens",
    "v1.core.kv_cache_manager:KVCacheManager.free": "request",
    "v1.core.kv_cache_manager:KVCacheManager.pop_blocks_for_free": "request",
    "v1.core.kv_cache_manager:KVCacheManager.remove_skipped_blocks": (
        "request_id processed_computed_tokens num_prompt_tokens"
    ),
    "v1.core.kv_cache_manager:KVCacheManager.finalize_partial_tail_offloads": "request",
    "v1.core.kv_cache_manager:KVCacheManager.record_blocks_for_zeroing": "request_id start_token",
    "v1.core.kv_cache_manager:KVCacheManager.get_blocks": "request_id",
    "v1.core.kv_cache_manager:KVCacheManager.get_block_ids": "request_id",
    "v1.core.kv_cache_manager:KVCacheManager.get_block_ids_for_computed_tokens": "request_id num_computed_tokens",
    "v1.core.kv_cache_manager:KVCacheManager.estimate_cached_tokens": "request",
    "v1.core.kv_cache_manager:KVCacheManager.evict_blocks": "block_ids",
    "v1.core.kv_cache_manager:KVCacheManager.reset_prefix_cache": "",
    "v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids": "allow_none group_ids",
    "v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate": (
        "request_id num_tokens new_computed_blocks num_encoder_tokens total_computed_tokens num_local_computed_tokens "
        "num_tokens_main_model apply_admission_cap prefill_end"
    ),
    "v1.core.kv_cache_manager:KVCacheManager.take_boundary_state_offloads": "",
    "v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit_per_group": (
        "block_hashes max_cache_hit_length"
    ),
    "v1.core.block_pool:BlockPool.touch": "blocks",
    "v1.core.block_pool:BlockPool.free_blocks": "ordered_blocks",
    "v1.core.block_pool:BlockPool.get_cached_block": "block_hash kv_cache_group_ids",
    "v1.core.block_pool:BlockPool.evict_blocks": "block_ids",
    "v1.core.kv_cache_utils:FreeKVCacheBlockQueue.iter_blocks_after": "cursor",
    "v1.core.kv_cache_metrics:KVCacheMetricsCollector.on_block_allocated": "block",
    "v1.core.kv_cache_metrics:KVCacheMetricsCollector.on_block_accessed": "block",
    "v1.core.kv_cache_metrics:KVCacheMetricsCollector.on_block_evicted": "block",
    "v1.core.kv_cache_metrics:KVCacheMetricsCollector.reset": "",
    "v1.metrics.stats:PrefixCacheStats.record": "num_tokens num_hits preempted hits_by_source",
    "v1.core.sched.scheduler:Scheduler.__init__": (
        "vllm_config kv_cache_config structured_output_manager block_size hash_block_size mm_registry "
        "include_finished_set log_stats"
    ),
}

# Fields of the records that we make or read.
FIELDS: Final = {
    "v1.core.kv_cache_manager:KVCacheBlocks": "blocks",
    "v1.core.kv_cache_utils:KVCacheBlock": (
        "block_id ref_cnt pool _block_hash _block_hash_num_tokens prev_free_block next_free_block is_null"
    ),
    "v1.core.kv_cache_utils:KVCacheBlockCopy": "src_block_id dst_block_id",
    "v1.metrics.stats:PrefixCacheStats": (
        "reset requests queries hits preempted_requests preempted_queries preempted_hits hits_by_source"
    ),
    "v1.kv_cache_interface:KVCacheGroupSpec": (
        "layer_names kv_cache_spec is_eagle_group host_resident enable_kv_transfer role"
    ),
    "distributed.kv_events:BlockStored": (
        "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx "
        "kv_cache_spec_kind kv_cache_spec_sliding_window locality ownership session_id 0.33:lookahead_token_ids"
    ),
    "distributed.kv_events:BlockRemoved": "block_hashes medium group_idx locality ownership",
}

# Where vLLM uses a manager, and by which names.
USERS: Final = ("v1.core.sched.scheduler", "v1.core.sched.async_scheduler", "v1.engine.core")
# Connectors, whose packages need not be installed: their folders, and by which names they call the pool.
CONNECTORS: Final = ("distributed/kv_transfer", "distributed/aux_output_connector", "v1/simple_kv_offload")
POOL_NAMES: Final = r"(?:self\._gpu_block_pool|gpu_block_pool|gpu_pool)"
REQUEST_ATTRIBUTES: Final = (
    "request_id num_prompt_tokens num_tokens num_computed_tokens num_in_flight_tokens num_preemptions status "
    "block_hashes skip_reading_prefix_cache shared_prefix_boundary lora_request all_token_ids session_id"
)


def drift(version: str) -> list[str]:
    """One line for everything in the installed vLLM, of that version, that is not as we know it."""
    found: list[str] = []
    for name, known in SIGNATURES.items():
        found += _compare(name, _expected(known, version), _parameters(name))
    for name, known in FIELDS.items():
        found += _compare(name, _expected(known, version), _fields(name))
    try:
        found += _missing_on_our_side() + _missing_for_connectors()
    except ImportError as error:
        found.append(f"the adapter cannot be imported: {str(error).partition(' (')[0]}")
    return found + _missing_on_requests()


def _expected(known: str, version: str) -> list[str]:
    names: list[str] = []
    for word in known.split():
        since, _, name = word.rpartition(":")
        if not since or parsed_version(since) <= parsed_version(version):
            names.append(name)
    return names


def _compare(name: str, expected: list[str], found: list[str] | None) -> list[str]:
    if found is None:
        return [f"{name} is gone"]
    lines = [f"{name}: {word!r} is gone" for word in expected if word not in found]
    lines += [f"{name}: {word!r} is new" for word in found if word not in expected]
    if not lines and found != expected:
        lines.append(f"{name}: the order is {' '.join(found)}")
    return lines


def _find(name: str) -> Any:
    """ "v1.request:Request.free" -> the object, or None."""
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(f"vllm.{module}")
    except ImportError:
        return None
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _parameters(name: str) -> list[str] | None:
    function = _find(name)
    return None if function is None else list(inspect.signature(function).parameters)[1:]


def _fields(name: str) -> list[str] | None:
    record = _find(name)
    if record is None:
        return None
    if is_dataclass(record):
        return [field.name for field in fields(record)]
    return list(getattr(record, "__struct_fields__", getattr(record, "_fields", ())))


def touched(module: ModuleType, owner: str) -> set[str]:
    """Attributes that the module's source takes from what it calls `owner`."""
    return set(re.findall(rf"\b{owner}\s*\.\s*(\w+)", inspect.getsource(module)))


def _missing_on_our_side() -> list[str]:
    """What vLLM takes from a manager, its pool or its coordinator and ours does not have."""
    from kvledger.integrations.vllm.coordinator import CoordinatorView
    from kvledger.integrations.vllm.manager import VllmKVCacheManager
    from kvledger.integrations.vllm.pool import PoolView

    owners = {"kv_cache_manager": VllmKVCacheManager, "coordinator": CoordinatorView, "block_pool": PoolView}
    lines: list[str] = []
    for user in USERS:
        module = import_module(f"vllm.{user}")
        for owner, ours in owners.items():
            own = _own(ours)
            if owner == "coordinator":
                names = touched(module, r"kv_cache_manager\.coordinator") | touched(
                    module, r"cache_manager\.coordinator"
                )
            elif owner == "block_pool":
                names = touched(module, r"kv_cache_manager\.block_pool")
            else:
                names = touched(module, r"(?<!_)kv_cache_manager")
            lines += [f"{user} uses {owner}.{name}, which ours lacks" for name in sorted(names - own)]
    return lines


def _missing_for_connectors() -> list[str]:
    """What vLLM's connectors take from the block pool and from managers of groups, and ours does not have."""
    from kvledger.integrations.vllm.coordinator import CoordinatorView
    from kvledger.integrations.vllm.pool import PoolView

    owners = {POOL_NAMES: PoolView, r"(?<!cpu_)(?<!lookup_)\bcoordinator": CoordinatorView}
    import vllm

    root = Path(vllm.__file__).parent
    lines: list[str] = []
    for path in sorted(path for folder in CONNECTORS for path in (root / folder).rglob("*.py")):
        source = path.read_text()
        for owner, ours in owners.items():
            if ours is CoordinatorView and "kv_cache_manager.coordinator" not in source:
                continue  # a coordinator of its own
            names = set(re.findall(rf"{owner}\.(\w+)", source))
            lines += [f"{path.relative_to(root)} uses {ours.__name__}.{name}" for name in sorted(names - _own(ours))]
    return lines


def _own(ours: type) -> set[str]:
    """Attributes that objects of that class have."""
    return set(dir(ours)) | set(re.findall(r"self\.(\w+)\b", inspect.getsource(vars(ours)["__init__"])))


def _missing_on_requests() -> list[str]:
    """What we read of a request and vLLM's lacks."""
    request = _find("v1.request:Request")
    own = set(dir(request)) | set(re.findall(r"self\.(\w+)\b", inspect.getsource(request.__init__)))
    return [f"v1.request:Request: {name!r} is gone" for name in REQUEST_ATTRIBUTES.split() if name not in own]


def main() -> int:
    import vllm

    lines = drift(vllm.__version__)
    lines += [f"{name} reads differently: vLLM's own code takes every step" for name in changed_code(vllm.__version__)]
    print("\n".join(lines) or f"vLLM {vllm.__version__} is as kvledger knows it")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
