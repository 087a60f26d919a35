"""What of vLLM's code the steps in one pass say in their own words, release by release.

A vLLM in which any of it reads differently takes every step itself. Compared is the text without comments and blanks,
which no version of Python changes.

    python -m kvledger.integrations.vllm.restated     the digests of the vLLM that is installed
"""

import hashlib
import inspect
from importlib import import_module
from typing import Any, Final

from kvledger.integrations.vllm.served import parsed_version

RESTATED: Final = (
    "v1.core.sched.scheduler:Scheduler.schedule",
    "v1.core.sched.scheduler:Scheduler.update_from_output",
    "v1.core.sched.scheduler:Scheduler._update_after_schedule",
    "v1.core.sched.scheduler:Scheduler._make_cached_request_data",
    "v1.core.sched.scheduler:Scheduler._update_request_with_output",
    "v1.core.sched.scheduler:Scheduler._handle_stopped_request",
    "v1.core.sched.scheduler:Scheduler.make_stats",
    "v1.core.sched.async_scheduler:AsyncScheduler.__init__",
    "v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",
    "v1.core.sched.async_scheduler:AsyncScheduler._update_request_with_output",
    "v1.core.sched.utils:check_stop",
    "v1.core.sched.utils:remove_all",
    "v1.core.sched.output:SchedulerOutput",
    "v1.core.sched.output:CachedRequestData",
    "v1.core.kv_cache_utils:get_request_block_hasher",
    "v1.engine:EngineCoreOutput",
    "v1.engine:EngineCoreOutputs",
    "v1.outputs:ModelRunnerOutput",
    "v1.request:Request",
    "v1.request:Request.append_output_token_ids",
    "v1.request:Request.update_block_hashes",
    "v1.request:Request.take_events",
    "v1.request:RequestStatus",
    "v1.structured_output:StructuredOutputManager.accept_tokens",
)
# Methods of a scheduler that a step in one pass does not call.
PASSED_OVER: Final = (
    "_update_after_schedule",
    "_make_cached_request_data",
    "_update_request_with_output",
    "_handle_stopped_request",
)
# By release.
DIGESTS: Final = {
    "0.32": {
        "v1.core.sched.scheduler:Scheduler.schedule": "7c9dcab5545e728a",
        "v1.core.sched.scheduler:Scheduler.update_from_output": "83f03f419483a1a0",
        "v1.core.sched.scheduler:Scheduler._update_after_schedule": "868f7779b7ae37ce",
        "v1.core.sched.scheduler:Scheduler._make_cached_request_data": "d8bca96174dac46c",
        "v1.core.sched.scheduler:Scheduler._update_request_with_output": "6504369288a910b6",
        "v1.core.sched.scheduler:Scheduler._handle_stopped_request": "ecd5e2257328c95d",
        "v1.core.sched.scheduler:Scheduler.make_stats": "6a6136473e208053",
        "v1.core.sched.async_scheduler:AsyncScheduler.__init__": "10f506f5cd568dbc",
        "v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule": "131e68f61c31398d",
        "v1.core.sched.async_scheduler:AsyncScheduler._update_request_with_output": "77c3a301776f6772",
        "v1.core.sched.utils:check_stop": "4f5dc90bf8882eae",
        "v1.core.sched.utils:remove_all": "be420595d8a71456",
        "v1.core.sched.output:SchedulerOutput": "25f02a41fdf5509d",
        "v1.core.sched.output:CachedRequestData": "7f28d725baed8c0f",
        "v1.core.kv_cache_utils:get_request_block_hasher": "af2a16dee0fc3135",
        "v1.engine:EngineCoreOutput": "664af6fa3826108c",
        "v1.engine:EngineCoreOutputs": "8154ffa81cec2843",
        "v1.outputs:ModelRunnerOutput": "64b2d7fb7d1f193d",
        "v1.request:Request": "4e5c31a67b61c4f9",
        "v1.request:Request.append_output_token_ids": "d39732d9c7cdef5a",
        "v1.request:Request.update_block_hashes": "cc60dbdc6cb0ee35",
        "v1.request:Request.take_events": "7b82aae178996589",
        "v1.request:RequestStatus": "383bc5ec728e05da",
        "v1.structured_output:StructuredOutputManager.accept_tokens": "eae40243f2ed6d01",
    },
    "0.33": {
        "v1.core.sched.scheduler:Scheduler.schedule": "c6b42d105e076ddc",
        "v1.core.sched.scheduler:Scheduler.update_from_output": "5892e4028db05528",
        "v1.core.sched.scheduler:Scheduler._update_after_schedule": "868f7779b7ae37ce",
        "v1.core.sched.scheduler:Scheduler._make_cached_request_data": "d8bca96174dac46c",
        "v1.core.sched.scheduler:Scheduler._update_request_with_output": "85fcf12667e96748",
        "v1.core.sched.scheduler:Scheduler._handle_stopped_request": "90b8f602045fafce",
        "v1.core.sched.scheduler:Scheduler.make_stats": "6a6136473e208053",
        "v1.core.sched.async_scheduler:AsyncScheduler.__init__": "10f506f5cd568dbc",
        "v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule": "131e68f61c31398d",
        "v1.core.sched.async_scheduler:AsyncScheduler._update_request_with_output": "85fcf12667e96748",
        "v1.core.sched.utils:check_stop": "4f5dc90bf8882eae",
        "v1.core.sched.utils:remove_all": "be420595d8a71456",
        "v1.core.sched.output:SchedulerOutput": "da6c3fc0a2fd0f4b",
        "v1.core.sched.output:CachedRequestData": "7f28d725baed8c0f",
        "v1.core.kv_cache_utils:get_request_block_hasher": "4081954d540e78b7",
        "v1.engine:EngineCoreOutput": "85b1c00c7ead27d7",
        "v1.engine:EngineCoreOutputs": "8154ffa81cec2843",
        "v1.outputs:ModelRunnerOutput": "64b2d7fb7d1f193d",
        "v1.request:Request": "4e5c31a67b61c4f9",
        "v1.request:Request.append_output_token_ids": "d39732d9c7cdef5a",
        "v1.request:Request.update_block_hashes": "cc60dbdc6cb0ee35",
        "v1.request:Request.take_events": "7b82aae178996589",
        "v1.request:RequestStatus": "383bc5ec728e05da",
        "v1.structured_output:StructuredOutputManager.accept_tokens": "eae40243f2ed6d01",
    },
}


def changed_code(version: str) -> list[str]:
    """Names in the installed vLLM, of that version, whose code is not as it was when it was read here."""
    release = ".".join(map(str, parsed_version(version)))
    known = DIGESTS.get(release)
    if known is None:
        return ["everything, in a release that nobody here has read"]
    return [name for name in RESTATED if digest(name) != known[name]]


def digest(name: str) -> str:
    """Of "v1.request:Request" in the installed vLLM; empty if it is gone or has no source."""
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(f"vllm.{module}")
        for part in path.split("."):
            found = getattr(found, part)
        # By its code, since a function around another one would show the other's text.
        lines = inspect.getsource(getattr(found, "__code__", found)).splitlines()
    except (ImportError, AttributeError, OSError, TypeError):
        return ""
    text = "".join("".join(line.split()) for line in lines if not line.lstrip().startswith("#"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def replaced_methods(scheduler: Any) -> list[str]:
    """Methods that a step in one pass does not call, and that are not vLLM's own on this scheduler."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    theirs = AsyncScheduler if isinstance(scheduler, AsyncScheduler) else Scheduler
    return [
        name for name in PASSED_OVER if getattr(getattr(scheduler, name), "__func__", None) is not getattr(theirs, name)
    ]


if __name__ == "__main__":
    for restated in RESTATED:
        print(f'        "{restated}": "{digest(restated)}",')
