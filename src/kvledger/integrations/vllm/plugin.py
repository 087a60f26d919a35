"""The entry point that vLLM calls in each of its processes, and the switch.

The ledger gets in where a scheduler is made: meanwhile `KVCacheManager` in vLLM's scheduler module is a function that
makes the adapter, or vLLM's own manager where the ledger does not serve the engine. A scheduler of vLLM's own class
then becomes one of schedulers.py, whose steps of decodes take one pass.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final

# Unset: off, like the words below. force: on, whatever the version of vLLM. Anything else: on.
SWITCH: Final = "KVLEDGER_VLLM"
# Off: vLLM's own code takes every step; see decode_steps.py.
STEP: Final = "KVLEDGER_VLLM_STEP"
# Why prompts miss and requests wait, on a port and in the log; see why.py.
WHY: Final = "KVLEDGER_WHY"
# A file that traffic is recorded into; see recorder.py.
RECORD: Final = "KVLEDGER_RECORD"
_OFF: Final = ("", "0", "false", "no", "off")


def is_switched_off(name: str) -> bool:
    """Whether that switch, which is on where nobody sets it, says no."""
    setting = os.environ.get(name, "").strip().lower()
    return setting != "" and setting in _OFF


def register() -> None:
    """Called by vLLM for every plugin that is installed. Does nothing unless a switch is on."""
    if _setting() not in _OFF:
        install()
    if os.environ.get(RECORD, "").strip().lower() not in _OFF:
        from kvledger.integrations.vllm.recorder import install_recorder

        install_recorder()
    if os.environ.get(WHY, "").strip().lower() not in _OFF:
        from kvledger.integrations.vllm.why import install_why

        install_why()


def _setting() -> str:
    return os.environ.get(SWITCH, "").strip().lower()


def install() -> None:
    """Every scheduler that is made from now on asks the ledger. Again is harmless."""
    from vllm.v1.core.sched.scheduler import Scheduler

    make = Scheduler.__init__
    if getattr(make, "asks_kvledger", False):
        return

    @wraps(make)
    def make_with_ledger(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        from kvledger.integrations.vllm.schedulers import take_decode_steps

        with ledger_in_place():
            make(self, vllm_config, *args, **kwargs)
        take_decode_steps(self)

    make_with_ledger.asks_kvledger = True  # type: ignore[attr-defined]
    Scheduler.__init__ = make_with_ledger


@contextmanager
def ledger_in_place() -> Iterator[None]:
    """While this lasts, a scheduler that makes its KVCacheManager gets the adapter if the ledger serves the engine."""
    from vllm.v1.core.sched import scheduler

    theirs = scheduler.KVCacheManager
    # Inside another of these: the outer one asks already.
    if not getattr(theirs, "asks_kvledger", False):
        scheduler.KVCacheManager = _maker(theirs)
    try:
        yield
    finally:
        scheduler.KVCacheManager = theirs


def _maker(theirs: Any) -> Callable[..., Any]:
    """What stands for the class: makes the adapter or, where that is not served, what was there before."""
    import vllm
    from vllm.logger import init_logger

    from kvledger import build_info
    from kvledger.integrations.vllm.manager import VllmKVCacheManager
    from kvledger.integrations.vllm.served import NotServedError, require_version

    # A name below vLLM's own, so that its logging configuration shows these lines.
    logger = init_logger("vllm.plugins.kvledger")

    def make_manager(**arguments: Any) -> Any:
        try:
            require_version(vllm.__version__, force=_setting() == "force")
            manager = VllmKVCacheManager.for_engine(arguments)
        except NotServedError as reason:
            logger.warning("vLLM's own KVCacheManager is used, because kvledger does not serve %s", reason)
            return theirs(**arguments)
        logger.info(
            "%s keeps the KV cache of vLLM %s: %d blocks, %d group%s (%s)",
            build_info(),
            vllm.__version__,
            manager.block_pool.num_gpu_blocks,
            manager.num_kv_cache_groups,
            "" if manager.num_kv_cache_groups == 1 else "s",
            manager.describe_groups(),
        )
        return manager

    make_manager.asks_kvledger = True  # type: ignore[attr-defined]
    return make_manager
