"""vLLM runs on the ledger: a plugin that puts an adapter in the place of vLLM's KVCacheManager.

    KVLEDGER_VLLM=1 vllm serve ...                                          # or, in code:
    LLM(..., scheduler_cls="kvledger.integrations.vllm.AsyncScheduler")     # Scheduler without async scheduling

    plugin.py      the entry point that vLLM calls in each of its processes; what is served and what is left to vLLM
    manager.py     the adapter: vLLM's calls and requests in, vLLM's results out
    specs.py       vLLM's KV cache groups as ours
    blocks.py      our blocks as vLLM's code sees them
    pool.py        the pool and the coordinator as connectors use them
    events.py      KV events in vLLM's classes
    schedulers.py  vLLM's schedulers around the adapter
    decode_*.py    steps in which every request decodes, in one pass
    restated.py    the code of vLLM's that they stand for, by digests
    surface.py     what of vLLM all this relies on, to compare with the vLLM that is installed

This module imports nothing of vLLM, so that an entry point can be looked up cheaply.
"""

from importlib import import_module

__all__ = ["AsyncScheduler", "Scheduler"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module("kvledger.integrations.vllm.schedulers"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
