"""vLLM's recorded plans, ours for the same question, and the first difference in words."""

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from kvledger.core.groups.spec import AttentionSpec, KVCacheSpec, MambaSpec
from kvledger.models.facts import model_facts
from kvledger.models.sources import find_in_catalogue, from_catalogue
from kvledger.plan.gpus import find_gpu
from kvledger.plan.options import EngineOptions
from kvledger.plan.plan import Plan, PlanRequest
from kvledger.plan.refusal import HEADS, NO_BACKEND, NO_PROMOTION, TOO_LONG
from kvledger.plan.versions import version_rules

DATA = Path(__file__).parent / "data"
Record = dict[str, Any]

# vLLM's own refusals, by a part of their text; every other error is the recorder's.
REFUSALS = {
    "must be divisible by tensor parallel": HEADS,
    "Failed to promote": NO_PROMOTION,
    "No valid attention backend": NO_BACKEND,
    "greater than the derived max_model_len": TOO_LONG,
}
RUN_OPTIONS: dict[str, dict[str, Any]] = {
    "h100_tp1_32k": {"max_model_len": 32768},
    "h100_fp8kv": {"kv_cache_dtype": "fp8"},
    "h100_nopc": {"enable_prefix_caching": False},
    "h100_bs32": {"block_size": 32},
    "h100_nohybrid": {"disable_hybrid_kv_cache_manager": True},
}
# The recorder's copies of these side files named no producer, so the recorded engine ignored them.
TRIMMED_SIDE_FILES = (
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4",
)
NUMBERS = ("block_size", "bytes_per_block", "kv_cache_tokens", "max_concurrency", "auto_max_model_len",
           "fits_max_model_len", "max_request_bytes")  # fmt: skip


@cache
def records(version: str) -> tuple[Record, ...]:
    lines = gzip.decompress((DATA / f"vllm-{version}-plans.jsonl.gz").read_bytes()).splitlines()
    return tuple(json.loads(line) for line in lines)


def refusal_kind(record: Record) -> str | None:
    """The kind of vLLM's refusal; "" for the recorder's own failure; None for a plan."""
    if record["ok"]:
        return None
    return next((kind for text, kind in REFUSALS.items() if text in record["error"]), "")


def is_doubtful(record: Record) -> bool:
    off_hopper = record["device"] != "h100" and "DeepSeek-V4" in record["model"]
    return record["device"] == "b200" or off_hopper or refusal_kind(record) == ""


def comparable(version: str) -> list[Record]:
    return [record for record in records(version) if not is_doubtful(record)]


def request_of(record: Record, version: str) -> PlanRequest:
    row = find_in_catalogue(record["model"])
    assert row is not None, record["model"]
    config = from_catalogue(row)
    if not record["run"].endswith("_quant"):
        config.hf_quant = None
        for where in (config.root, config.text):
            assert isinstance(where, dict)
            where.pop("quantization_config", None)
    elif record["model"] in TRIMMED_SIDE_FILES:
        config.hf_quant = None
    options = EngineOptions(
        kv_cache_memory_bytes=record["available_memory"],
        tensor_parallel_size=record["tp"],
        entry_point=record["usage"],
        **RUN_OPTIONS.get(record["run"], {}),
    )
    return PlanRequest(model_facts(config), options, (find_gpu(record["device"]),), version_rules(version))


def our_spec(spec: KVCacheSpec) -> str:
    """One of our specs in the words of a record."""
    words: Record = {
        "type": type(spec).__name__,
        "block_size": spec.block_size,
        "page_size_bytes": spec.page_size_bytes,
    }
    if isinstance(spec, MambaSpec):
        words |= {"shapes": [list(shape) for shape in spec.shapes], "dtypes": list(spec.dtypes)}
        words |= {
            "checkpoint_step": spec.prefill_checkpoint_alignment,
            "checkpoints": spec.num_prefill_checkpoint_blocks,
            "mode": spec.mamba_cache_mode,
        }
        return json.dumps(words, sort_keys=True)
    words |= {"dtype": "uint8" if spec.dtype == "fp8" else spec.dtype, "head_size": spec.head_size}  # type: ignore[attr-defined]
    if isinstance(spec, AttentionSpec):
        words |= {"num_kv_heads": spec.num_kv_heads, "head_size_v": spec.head_size_v or spec.head_size}
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, name, 0):
            words[name] = getattr(spec, name)
    if getattr(spec, "tokens_per_state", 1) > 1:
        words["tokens_per_state"] = spec.tokens_per_state  # type: ignore[attr-defined]
    return json.dumps(words, sort_keys=True)


def their_spec(spec: Record) -> str:
    words: Record = {name: spec[name] for name in ("type", "block_size", "page_size_bytes")}
    if spec["type"] == "MambaSpec":
        words |= {"shapes": spec["shapes"], "dtypes": spec["dtypes"]}
        words |= {
            "checkpoint_step": spec.get("prefill_checkpoint_alignment", 0),
            "checkpoints": spec.get("num_prefill_checkpoint_blocks", 0),
            "mode": spec.get("mamba_cache_mode", "none"),
        }
        return json.dumps(words, sort_keys=True)
    words |= {"dtype": spec["dtype"], "head_size": spec["head_size"]}
    if "MLA" not in spec["type"]:
        words |= {"num_kv_heads": spec["num_kv_heads"], "head_size_v": spec.get("head_size_v", spec["head_size"])}
    for name in ("sliding_window", "attention_chunk_size"):
        if spec.get(name):
            words[name] = spec[name]
    if spec.get("tokens_per_state", 1) > 1:
        words["tokens_per_state"] = spec["tokens_per_state"]
    return json.dumps(words, sort_keys=True)


def counted(listed: list[Record]) -> Counter[str]:
    total: Counter[str] = Counter()
    for entry in listed:
        total[their_spec(entry["spec"])] += entry["n"]
    return total


def their_group(group: Record) -> Counter[str]:
    members = group["spec"].get("members")
    return counted(members) if members else Counter({their_spec(group["spec"]): group["n"]})


def differences(plan: Plan, record: Record) -> Iterator[str]:
    """Each difference as one line: what, vLLM's value, ours. The first is the cause of most of the others."""
    settings = plan.settings
    ours = {
        "max_model_len": settings.max_model_len,
        "dtype": f"torch.{settings.dtype}",
        "cache_dtype": settings.cache_dtype,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "max_in_flight_tokens": settings.max_in_flight_tokens,
        "prefix_caching": settings.prefix_caching,
        "mamba_cache_mode": settings.cache.cache_mode,
    }
    for name, value in ours.items():
        if record["engine"][name] != value:
            yield f"{name}: vLLM {record['engine'][name]}, ours {value}"
    specs = Counter(our_spec(layer.cache.spec(settings.cache)) for layer in plan.facts.layers)
    theirs = counted(record["specs"])
    if specs != theirs:
        yield f"specs: only vLLM has {dict(theirs - specs)}, only we have {dict(specs - theirs)}"
    groups = [
        Counter(map(our_spec, group.layer_specs))
        if group.layer_specs
        else Counter({our_spec(group.spec): len(group.layer_names)})
        for group in plan.layout.groups
    ]
    for index, (our, their) in enumerate(zip(groups, map(their_group, record["groups"]), strict=False)):
        if our != their:
            yield f"group {index}: vLLM {dict(their)}, ours {dict(our)}"
    if len(groups) != len(record["groups"]):
        yield f"number of groups: vLLM {len(record['groups'])}, ours {len(groups)}"
    yield from number_differences(plan, record)


def number_differences(plan: Plan, record: Record) -> Iterator[str]:
    if plan.num_blocks != record["num_blocks"]:
        yield f"num_blocks: vLLM {record['num_blocks']:,}, ours {plan.num_blocks:,}"
    if not plan.layout.groups:
        return
    ours = {
        "block_size": plan.block_size,
        "bytes_per_block": plan.bytes_per_block,
        "kv_cache_tokens": plan.kv_cache_tokens,
        "max_concurrency": plan.max_concurrency,
        "auto_max_model_len": plan.estimated_max_len,
        "fits_max_model_len": plan.error is None,
        "max_request_bytes": plan.blocks_per_request * plan.bytes_per_block,
    }
    for name in NUMBERS:
        if record[name] != ours[name]:
            yield f"{name}: vLLM {record[name]}, ours {ours[name]}"
