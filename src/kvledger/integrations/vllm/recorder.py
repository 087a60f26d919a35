"""TrafficRecorder: what requests vLLM's scheduler had, for a replay. `KVLEDGER_RECORD=traffic.jsonl.gz vllm serve ...`

Neither texts nor token ids are kept: lengths, times, and numbers in the place of block hashes (docs/record.md). It
works with vLLM's own manager as well as with the ledger, and hangs on the scheduler's calls: who comes, who was
admitted, who has a first token, who ends. Nothing here may disturb the engine: what goes wrong is said once.
"""

import atexit
import logging
import os
from collections import deque
from time import monotonic
from typing import Any, Final

from kvledger.integrations.vllm.hooks import Hooks, on_every_scheduler
from kvledger.integrations.vllm.plugin import RECORD
from kvledger.traces.recording import TimedStep
from kvledger.traces.recording_log import Ended, Numbering, RecordingLog, marked

# A secret: servers that share it give equal blocks equal numbers.
RECORD_KEY: Final = "KVLEDGER_RECORD_KEY"
# Whether to record at which of the scheduler's steps each request came, and how long steps take.
RECORD_STEPS: Final = "KVLEDGER_RECORD_STEPS"
# Megabytes of a file before the next one is begun.
RECORD_MAX_MB: Final = "KVLEDGER_RECORD_MAX_MB"
_DEFAULT_MAX_MB: Final = 1024
# Of steps without a prompt, one in so many is measured.
_DECODES_PER_SAMPLE: Final = 16
_OFF: Final = ("", "0", "false", "no", "off")
_logger = logging.getLogger("vllm.plugins.kvledger")
# Requests come one after another, however fine the clock is.
_TICK: Final = 1e-6


def install_recorder() -> None:
    """Every scheduler that is made from now on is recorded."""
    on_every_scheduler(RECORD, lambda scheduler, vllm_config: TrafficRecorder(scheduler, vllm_config).attach())


class Live:
    """A request from its arrival to its end."""

    __slots__ = ("arrival", "first_token", "num_hit", "step")

    def __init__(self, arrival: float, step: int) -> None:
        self.arrival: Final = arrival
        self.step: Final = step
        self.first_token: float | None = None
        self.num_hit: int | None = None


class TrafficRecorder:
    """Of one scheduler."""

    def __init__(self, scheduler: Any, vllm_config: Any) -> None:
        self._scheduler: Final = scheduler
        self._keeps_steps: Final = os.environ.get(RECORD_STEPS, "").strip().lower() not in _OFF
        parallel = vllm_config.parallel_config
        path = os.environ[RECORD].strip()
        rank = parallel.data_parallel_rank if parallel.data_parallel_size > 1 else None
        self.log: Final = RecordingLog(
            path if rank is None else marked(path, f"dp{rank}"),
            scheduler.hash_block_size,
            Numbering(os.environ.get(RECORD_KEY) or None),
            source=f"vLLM, {vllm_config.model_config.served_model_name or vllm_config.model_config.model}",
            steps=self._keeps_steps,
            max_bytes=_max_bytes(),
        )
        # In the order in which they came.
        self._live: Final[dict[str, Live]] = {}
        # Those that have no token yet.
        self._silent: Final[dict[str, Any]] = {}
        self._num_steps: int = 0
        # Steps in flight: when each was put together, and what it computes if it is measured.
        self._in_flight: Final[deque[tuple[float, TimedStep | None]]] = deque()
        self._last_return: float = 0.0
        self._latest: float = 0.0

    def attach(self) -> None:
        hooks = Hooks(self._scheduler, RECORD)
        hooks.after("add_request", self._came)
        hooks.after("schedule", self._scheduled)
        hooks.after("update_from_output", self._returned)
        # Where every request goes through at its end, before it is forgotten.
        hooks.before("_free_request", self._ended)
        hooks.before("shutdown", self.close)
        atexit.register(self.close)
        _logger.info("requests are recorded (%s): no texts, no token ids", os.environ[RECORD].strip())

    def close(self, *_: Any) -> None:
        """Writes what there is, requests that have not ended too. Again is harmless."""
        atexit.unregister(self.close)
        for request_id in list(self._live):
            request = self._scheduler.requests.get(request_id)
            if request is not None:
                self._end(request, "shutdown")
        self._live.clear()
        self.log.close()

    # What the scheduler did

    def _came(self, _: Any, request: Any) -> None:
        request_id = request.request_id
        if request_id in self._live or request_id not in self._scheduler.requests:
            return  # more of a streaming session, or its end
        self._latest = max(monotonic(), self._latest + _TICK)
        self._live[request_id] = Live(self._latest, self._num_steps + 1)
        self._silent[request_id] = request

    def _scheduled(self, output: Any, *_: Any) -> None:
        self._num_steps += 1
        if self._keeps_steps:
            self._in_flight.append((monotonic(), self._measured(output)))
        for data in output.scheduled_new_reqs:
            live = self._live.get(data.req_id)
            if live is not None and live.num_hit is None:
                stats = self._scheduler.requests[data.req_id].prefill_stats
                live.num_hit = data.num_computed_tokens if stats is None else stats.num_local_cached_tokens

    def _returned(self, *_: Any) -> None:
        if self._in_flight:
            self._time_step()
        if not self._silent:
            return
        now = monotonic()
        for request_id, request in list(self._silent.items()):
            if request.num_output_tokens > 0:
                live = self._live.get(request_id)
                if live is not None:
                    live.first_token = now
                del self._silent[request_id]

    def _measured(self, output: Any) -> TimedStep | None:
        """What a step computes, if it is one that is measured: with one prompt's chunk, or one in so many without. Not
        with drafts, whose tokens are neither."""
        scheduled = output.num_scheduled_tokens
        has_chunk = len(scheduled) < output.total_num_scheduled_tokens
        if (
            not scheduled
            or output.scheduled_spec_decode_tokens
            or not (has_chunk or self._num_steps % _DECODES_PER_SAMPLE == 0)
        ):
            return None
        step = TimedStep(0, 0, 0, 0, 0.0)
        for request_id, num_tokens in scheduled.items():
            request = self._scheduler.requests[request_id]
            # The scheduler counts them as computed already.
            context = request.num_computed_tokens
            if num_tokens == 1 and context > request.num_prompt_tokens:
                step.decode_requests += 1
                step.decode_context += context
            elif step.prefill_tokens:
                return None
            else:
                step.prefill_tokens, step.prefill_computed = num_tokens, context - num_tokens
        return step

    def _time_step(self) -> None:
        """The oldest step is back. It took the time since the one before was, or since it was begun if later."""
        now = monotonic()
        begun, step = self._in_flight.popleft()
        if step is not None:
            step.seconds = now - max(begun, self._last_return)
            self.log.add_step(step)
        self._last_return = now

    def _ended(self, request: Any, *_: Any) -> None:
        self._end(request, str(request.get_finished_reason()))

    def _end(self, request: Any, finish: str) -> None:
        live = self._live.pop(request.request_id, None)
        self._silent.pop(request.request_id, None)
        if live is None:
            return
        now = monotonic()
        first_token = live.first_token
        if first_token is None and request.num_output_tokens > 0:
            first_token = now
        lora = request.lora_request
        names = [] if lora is None else [f"adapter {lora.lora_name}"]
        if request.cache_salt is not None:
            names.append(f"salt {request.cache_salt}")
        oldest = next(iter(self._live.values())).arrival if self._live else now
        self.log.add(
            Ended(
                live.arrival,
                request.num_prompt_tokens,
                request.num_output_tokens,
                list(request.block_hashes),
                scope="\0".join(names),
                session=getattr(request, "session_id", None) or "",
                priority=request.priority,
                first_token=first_token,
                end=now,
                num_hit_tokens=live.num_hit,
                num_preemptions=request.num_preemptions,
                step=live.step if self._keeps_steps else None,
                finish=finish,
            ),
            oldest,
        )


def _max_bytes() -> int:
    text = os.environ.get(RECORD_MAX_MB, "").strip()
    try:
        megabytes = float(text) if text else _DEFAULT_MAX_MB
    except ValueError:
        megabytes = 0.0
    if not 0.001 <= megabytes <= 1e9:
        _logger.warning("%s=%s: no number of megabytes; %d is used", RECORD_MAX_MB, text, _DEFAULT_MAX_MB)
        megabytes = _DEFAULT_MAX_MB
    return int(megabytes * 1e6)
