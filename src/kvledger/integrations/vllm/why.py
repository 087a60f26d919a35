"""Why prompts missed and requests waited, on a running server: `KVLEDGER_VLLM=1 KVLEDGER_WHY=1 vllm serve ...`

The engine core is a process of its own, behind the API server. What is known is known here, so here it is shown: as
Prometheus series on a loopback port, and in a line of the log as often as vLLM logs its own. Both are read from one
snapshot a second, and one when the last request has ended.
"""

import logging
import os
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, Final

from kvledger.core.blocks.kv_cache_blocks import PrefixHit
from kvledger.core.blocks.observer import LedgerObserver
from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.core.requests.request import Request
from kvledger.core.watch.miss_explainer import MissExplainer
from kvledger.integrations.vllm.hooks import Hooks, on_every_scheduler
from kvledger.integrations.vllm.manager import VllmKVCacheManager
from kvledger.integrations.vllm.plugin import WHY
from kvledger.metrics.prometheus import MetricsTarget, SchedulerMetrics, serve_metrics
from kvledger.scheduler import WaitReason

DEFAULT_ADDRESS: Final = "127.0.0.1:9478"
_logger = logging.getLogger("vllm.plugins.kvledger")


def install_why() -> None:
    """Every scheduler that is made from now on and has the ledger says why."""
    on_every_scheduler(WHY, tell_why)


class _Lookups(LedgerObserver):
    """Counts hits where requests are admitted, as the ledger's own scheduler does."""

    def __init__(self, ledger: KVCacheManager) -> None:
        self._ledger: Final = ledger

    def request_admitted(self, request: Request, hit: PrefixHit, num_external_tokens: int) -> None:
        self._ledger.record_prefix_lookup(request, hit.num_tokens, hit)
        if num_external_tokens > 0:
            self._ledger.record_external_lookup(request, hit.num_tokens, num_external_tokens)


class WatchedEngine:
    """vLLM's scheduler over the ledger, as metrics look at one (metrics.snapshot.WatchedScheduler)."""

    def __init__(self, scheduler: Any, ledger: KVCacheManager) -> None:
        self._scheduler: Final = scheduler
        self.manager: Final = ledger
        self.num_steps: int = 0
        self.num_preemptions: int = 0
        # Of the last step.
        self._has_preempted: bool = False
        self._is_budget_spent: bool = False

    def note_step(self, output: Any) -> None:
        self.num_steps += 1
        self._is_budget_spent = output.total_num_scheduled_tokens >= self._scheduler.max_num_scheduled_tokens
        preempted = output.preempted_req_ids
        self._has_preempted = bool(preempted)
        if preempted:
            self.num_preemptions += len(preempted)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        num_waiting: int = self._scheduler.get_request_counts()[1]
        return num_waiting

    @property
    def num_blocks_held_by_waiting(self) -> int:
        held = [self.manager.coordinator.get(request.request_id) for request in self._scheduler.kv_holding_waiting]
        return sum(self.manager.coordinator.num_blocks_held(each) for each in held if each is not None)

    @property
    def num_blocks_held_by_orphans(self) -> int:
        return 0

    def wait_counts(self) -> dict[WaitReason, int]:
        """Requests that wait, by what ended the last step's admissions. What waits for a grammar, or for more of its
        input, counts as not considered."""
        counts: dict[WaitReason, int] = {}
        deferred = self._scheduler.deferred_waiting
        for request in deferred:
            is_load = request.status.name == "WAITING_FOR_REMOTE_KVS"
            reason = WaitReason.EXTERNAL_LOAD if is_load else WaitReason.NOT_CONSIDERED
            counts[reason] = counts.get(reason, 0) + 1
        num_waiting = self.num_waiting - len(deferred)
        if num_waiting > 0:
            reason = self._ended_by()
            if reason is WaitReason.BLOCKS:
                counts[reason] = 1
                reason, num_waiting = WaitReason.BEHIND, num_waiting - 1
            if num_waiting > 0:
                counts[reason] = counts.get(reason, 0) + num_waiting
        return counts

    def _ended_by(self) -> WaitReason:
        if self._has_preempted:
            return WaitReason.STEP_PREEMPTED
        if len(self._scheduler.running) >= self._scheduler.max_num_running_reqs:
            return WaitReason.MAX_NUM_SEQS
        if self.manager.shortage is not None:
            return WaitReason.BLOCKS
        return WaitReason.TOKEN_BUDGET if self._is_budget_spent else WaitReason.NOT_CONSIDERED


def tell_why(scheduler: Any, vllm_config: Any) -> "Why | None":
    """From now on that scheduler says why. None, with a line in the log, where it has no ledger."""
    manager = scheduler.kv_cache_manager
    if not isinstance(manager, VllmKVCacheManager):
        _logger.warning("%s: vLLM's own KVCacheManager cannot say why; KVLEDGER_VLLM=1 puts the ledger there", WHY)
        return None
    why = Why(scheduler, manager.ledger, vllm_config)
    why.attach()
    return why


class Why:
    """Of one scheduler whose ledger has served nobody yet."""

    def __init__(self, scheduler: Any, ledger: KVCacheManager, vllm_config: Any) -> None:
        self._scheduler: Final = scheduler
        self._misses: Final = MissExplainer(ledger)
        ledger.observe(_Lookups(ledger))
        self.engine: Final = WatchedEngine(scheduler, ledger)
        model = vllm_config.model_config
        self._rank: Final[int] = vllm_config.parallel_config.data_parallel_rank
        labels = {"model_name": str(model.served_model_name or model.model), "engine": str(self._rank)}
        self._target: Final = MetricsTarget(labels=labels)
        self.metrics: Final = SchedulerMetrics(self._target, self.engine, misses=self.misses)
        self._log: Final = WhyLog(self.engine, self.misses)

    def attach(self) -> None:
        self._serve()
        hooks = Hooks(self._scheduler, WHY)
        hooks.before("schedule", self._forget_shortage)
        hooks.after("schedule", self._note)
        hooks.after("update_from_output", self._note_idle)

    def misses(self) -> Mapping[str, int]:
        """Prompt tokens of new requests by where they came from."""
        return self._misses.new.split.as_dict()

    def _forget_shortage(self, *_: Any) -> None:
        self.engine.manager.demand.shortage = None

    def _note(self, output: Any, *_: Any) -> None:
        self.engine.note_step(output)
        is_due = self.metrics.is_due()
        self.metrics.step(output)
        if is_due:
            line = self._log.line_if_due()
            if line is not None:
                _logger.info("%s", line)

    def _note_idle(self, *_: Any) -> None:
        """No step comes after the last one, so what it leaves is shown at once."""
        if self.engine.num_running == 0 and self.engine.num_waiting == 0:
            self.metrics.update()

    def _serve(self) -> None:
        address = os.environ.get(WHY, "").strip()
        host, _, port = (address if ":" in address else DEFAULT_ADDRESS).rpartition(":")
        host = host.strip("[]")
        try:
            # Port 0, a free one, is 0 for every rank.
            page = serve_metrics(self._target.registry, int(port) + self._rank if port != "0" else 0, host)
        except (OSError, ValueError, OverflowError) as error:
            _logger.warning("%s=%s: no metrics at %s:%s (%s); the log still says why", WHY, address, host, port, error)
            return
        _logger.info("why prompts miss and requests wait: http://%s:%d/metrics", host, page.server_port)
        if host not in ("127.0.0.1", "localhost", "::1"):
            _logger.warning("%s=%s: every host that reaches this address can read the counts", WHY, address)


class WhyLog:
    """The line that is due every so many seconds, if anything was computed since the last."""

    def __init__(
        self,
        engine: WatchedEngine,
        misses: Callable[[], Mapping[str, int]],
        interval: float | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        if interval is None:
            import vllm.envs as envs

            interval = float(envs.VLLM_LOG_STATS_INTERVAL)
        self._engine: Final = engine
        self._read_misses: Final = misses
        self._interval: Final = interval
        self._clock: Final = clock
        self._last: float = clock()
        self._misses: Mapping[str, int] = dict(misses())
        self._evictions: dict[str, int] = self._read_evictions()
        self._num_steps: int = 0

    def line_if_due(self) -> str | None:
        now = self._clock()
        if now - self._last < self._interval:
            return None
        self._last = now
        if self._engine.num_steps == self._num_steps:
            return None
        self._num_steps = self._engine.num_steps
        return self._line()

    def _line(self) -> str:
        engine = self._engine
        blocks = engine.manager.occupancy()
        parts = [f"KV blocks: {blocks.live:,} live, {blocks.cached:,} cached, {blocks.unused:,} unused"]
        misses, evictions = dict(self._read_misses()), self._read_evictions()
        tokens = {reason: number - self._misses.get(reason, 0) for reason, number in misses.items()}
        total = sum(tokens.values())
        if total > 0:
            shares = [f"{reason.replace('_', ' ')} {n / total:.1%}" for reason, n in tokens.items() if n > 0]
            parts.append(f"{total:,} prompt tokens: " + ", ".join(shares))
        lost = {cause: number - self._evictions[cause] for cause, number in evictions.items()}
        told = [f"{number:,} {cause}" for cause, number in lost.items() if number > 0]
        if told:
            parts.append("evictions: " + ", ".join(told))
        self._misses, self._evictions = misses, evictions
        waits = [f"{number} {reason.name.lower().replace('_', ' ')}" for reason, number in engine.wait_counts().items()]
        if waits:
            parts.append("waiting: " + ", ".join(waits))
            if engine.manager.shortage is not None:
                parts[-1] += f" ({engine.manager.shortage})"
        return "; ".join(parts)

    def _read_evictions(self) -> dict[str, int]:
        counts = self._engine.manager.eviction_counts()
        return {cause.name.lower(): number for cause, number in counts.items()}
