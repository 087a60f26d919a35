"""DecodeSteps: the steps of vLLM's scheduler in which every request decodes, each in one pass.

Nearly all steps of a server are such steps, and in them vLLM's loops decide nothing: each running request gets one
token to compute, and one token comes back. Whether a step is one is looked at first, and changes nothing; a step with
anything else in it is left to vLLM's own code, which finds everything as it was.

    schedule              -> decode_schedule.py, or None
    update_from_output    -> decode_return.py, or None

Each of the two decides on its own, so that a step which one of them took can be ended by vLLM, and the other way round.
"""

import logging
from functools import cache
from typing import Any, Final

import vllm

from kvledger.integrations.vllm.decode_return import DecodeReturn
from kvledger.integrations.vllm.decode_schedule import DecodeSchedule
from kvledger.integrations.vllm.decoding import Decodings
from kvledger.integrations.vllm.manager import VllmKVCacheManager
from kvledger.integrations.vllm.plugin import STEP, is_switched_off
from kvledger.integrations.vllm.restated import changed_code, replaced_methods

_logger = logging.getLogger("vllm.plugins.kvledger")


class DecodeSteps:
    """Of one scheduler that `reason_against` has nothing against."""

    def __init__(self, scheduler: Any) -> None:
        decodings = Decodings(scheduler)
        self._schedule: Final = DecodeSchedule(scheduler, decodings)
        self._return: Final = DecodeReturn(scheduler, decodings)
        # Calls that were answered here and that were left to vLLM.
        self.num_scheduled: int = 0
        self.num_returned: int = 0
        self.num_left_to_schedule: int = 0
        self.num_left_to_return: int = 0

    @classmethod
    def of(cls, scheduler: Any) -> "DecodeSteps | None":
        """None, with a line in the log, where vLLM's own code takes every step."""
        reason = reason_against(scheduler)
        if reason is not None:
            _logger.info("vLLM's own code takes every step: %s", reason)
            return None
        _logger.info("steps in which every request decodes take one pass")
        return cls(scheduler)

    def schedule(self, throttle_prefills: bool) -> Any:
        """vLLM's SchedulerOutput of a step of decodes; None, with nothing changed, for any other step."""
        output = None if throttle_prefills else self._schedule.step()
        if output is None:
            self.num_left_to_schedule += 1
            self._schedule.forget()
        else:
            self.num_scheduled += 1
        return output

    def update_from_output(self, scheduler_output: Any, runner_output: Any) -> Any:
        """vLLM's EngineCoreOutputs by client; None, with nothing changed, where more came back than one token each."""
        outputs = self._return.take(scheduler_output, runner_output)
        self._schedule.let_go()
        if outputs is None:
            self.num_left_to_return += 1
        else:
            self.num_returned += 1
        return outputs


def reason_against(scheduler: Any) -> str | None:
    """Why no step of this scheduler may take one pass; None: nothing is against it."""
    if is_switched_off(STEP):
        return f"{STEP} says so"
    if not isinstance(scheduler.kv_cache_manager, VllmKVCacheManager):
        return "it keeps the KV cache"
    changed = known_changes()
    if changed:
        return f"vLLM {vllm.__version__} has other code than is known here: {', '.join(changed)}"
    replaced = replaced_methods(scheduler)
    if replaced:
        return f"somebody has replaced {', '.join(replaced)}"
    return _feature(scheduler)


@cache
def known_changes() -> tuple[str, ...]:
    """What changed_code finds: reading vLLM's sources takes a quarter of a second, and they stay as they are."""
    return tuple(changed_code(vllm.__version__))


def _feature(scheduler: Any) -> str | None:
    """What the engine does besides decoding in each of its steps."""
    config = scheduler.vllm_config
    features = {
        "drafts": config.speculative_config is not None or scheduler.num_spec_tokens > 0,
        "a KV connector": scheduler.connector is not None,
        "an encoder cache connector": scheduler.ec_connector is not None,
        "an auxiliary output connector": scheduler.aux_output_connector is not None,
        "an encoder-decoder model": scheduler.is_encoder_decoder or scheduler.is_mm_encoder_only,
        "a model without sampling": scheduler.num_sampled_tokens_per_step != 1,
        "recurrent states": scheduler.has_mamba_layers,
        "pipeline parallelism": scheduler.use_pp,
        "sampling masks": scheduler.return_sampling_mask,
        "MFU metrics": scheduler.perf_metrics is not None,
        "details of every iteration": scheduler.observability_config.enable_logging_iteration_details,
        "prefills in intervals": getattr(scheduler, "local_prefill_interval", 1) > 1,
    }
    return ", ".join(name for name, is_on in features.items() if is_on) or None
