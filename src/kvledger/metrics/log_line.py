"""IntervalLog: the line that an engine prints every few seconds, in vLLM's words: what reads its logs reads this.

log = IntervalLog(scheduler, interval=10.0, clock=time.monotonic)
line = log.step_output(output, num_generation_tokens)     # once a step; a line when one is due
if line is not None:
    logger.info(line)
line = log.flush()                                        # at the end: what the last interval has so far
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from kvledger.errors import wrong_value
from kvledger.scheduler import Scheduler, SchedulerOutput, WaitReason

# Hit rates are those of about so many requests, the last ones.
_NUM_RECENT_REQUESTS: Final = 1000


class _RecentLookups:
    """A hit rate over the last lookups, from totals that only grow."""

    def __init__(self) -> None:
        # (requests, queries, hits) from one observation to the next, and the totals at the last of them.
        self._gains: Final[deque[tuple[int, int, int]]] = deque()
        self._totals: tuple[int, int, int] = (0, 0, 0)
        self._num_requests: int = 0

    def observe(self, num_requests: int, num_queries: int, num_hits: int) -> None:
        before = self._totals
        if num_requests == before[0]:
            return
        self._totals = (num_requests, num_queries, num_hits)
        self._gains.append((num_requests - before[0], num_queries - before[1], num_hits - before[2]))
        self._num_requests += num_requests - before[0]
        while len(self._gains) > 1 and self._num_requests > _NUM_RECENT_REQUESTS:
            self._num_requests -= self._gains.popleft()[0]

    def hit_rate(self) -> float | None:
        """None without a lookup."""
        num_queries = sum(gain[1] for gain in self._gains)
        return sum(gain[2] for gain in self._gains) / num_queries if num_queries > 0 else None


class IntervalLog:
    """Writes nothing itself: step() returns the line. `name`: of the engine; `device`: whose memory the pool is."""

    def __init__(
        self,
        scheduler: Scheduler,
        interval: float,
        clock: Callable[[], float],
        *,
        name: str = "Engine 000",
        device: str = "GPU",
    ) -> None:
        # Written so that a NaN is refused as well.
        if not interval > 0.0:
            raise wrong_value("interval", interval, "no time passes between two lines", "give seconds above 0")
        self._scheduler: Final = scheduler
        self._interval: Final = interval
        self._clock: Final = clock
        self._name: Final = name
        self._device: Final = device
        self._local: Final = _RecentLookups()
        self._external: Final = _RecentLookups()
        self._num_prompt_tokens: int = 0
        self._num_generation_tokens: int = 0
        self._num_preemptions: int = scheduler.num_preemptions
        self._last_time: float = clock()
        self._was_idle: bool = False

    def step_output(self, output: SchedulerOutput, num_generation_tokens: int, num_held_back: int = 0) -> str | None:
        """step(), which counts the prompt tokens of this step itself."""
        return self.step(output.count_prompt_tokens(), num_generation_tokens, num_held_back)

    def step(self, num_prompt_tokens: int, num_generation_tokens: int, num_held_back: int = 0) -> str | None:
        """A step computed so many tokens of prompts and generated so many. The line that is due, if one is.

        `num_held_back`: requests that wait in front of the scheduler. An idle engine says so once, and then nothing
        until there is work again.
        """
        self._num_prompt_tokens += num_prompt_tokens
        self._num_generation_tokens += num_generation_tokens
        totals = self._scheduler.manager.prefix_cache_totals()
        self._local.observe(totals.requests, totals.queries, totals.hits)
        self._external.observe(totals.external_requests, totals.external_queries, totals.external_hits)
        if self._clock() - self._last_time < self._interval:
            return None
        is_idle = self._is_empty()
        is_news = not (is_idle and self._was_idle)
        line = self._close_interval(num_held_back)
        self._was_idle = is_idle
        return line if is_news else None

    def flush(self, num_held_back: int = 0) -> str | None:
        """The line of the interval that is not over yet, at the end; None if nothing was computed in it, or no time has
        passed."""
        if self._is_empty() or self._clock() <= self._last_time:
            return None
        return self._close_interval(num_held_back)

    def _is_empty(self) -> bool:
        return self._num_prompt_tokens == 0 and self._num_generation_tokens == 0

    def _close_interval(self, num_held_back: int) -> str:
        now = self._clock()
        line = self._line(now - self._last_time, num_held_back)
        self._last_time = now
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_preemptions = self._scheduler.num_preemptions
        return line

    def _line(self, seconds: float, num_held_back: int) -> str:
        scheduler = self._scheduler
        waits = scheduler.wait_counts()
        num_deferred = waits.get(WaitReason.EXTERNAL_LOAD, 0) + waits.get(WaitReason.EXTERNAL_LOOKUP, 0)
        num_preemptions = scheduler.num_preemptions - self._num_preemptions
        local, external = self._local.hit_rate(), self._external.hit_rate()
        parts = [
            f"Avg prompt throughput: {self._num_prompt_tokens / seconds:.1f} tokens/s",
            f"Avg generation throughput: {self._num_generation_tokens / seconds:.1f} tokens/s",
            f"Running: {scheduler.num_running} reqs",
            f"Waiting: {scheduler.num_waiting + num_held_back} reqs",
        ]
        if num_deferred > 0:
            parts.append(f"Deferred: {num_deferred} reqs")
        if num_preemptions > 0:
            parts.append(f"Preemptions: {num_preemptions}")
        parts.append(f"{self._device} KV cache usage: {scheduler.manager.usage * 100:.1f}%")
        if local is not None:
            parts.append(f"Prefix cache hit rate: {local * 100:.1f}%")
        if external is not None:
            parts.append(f"External prefix cache hit rate: {external * 100:.1f}%")
        if num_preemptions > 0:
            parts += self._growth_warning()
        return f"{self._name}: " + ", ".join(parts)

    def _growth_warning(self) -> list[str]:
        """Why there are preemptions, if all that runs, or did, asks for more than the pool has. O(requests)."""
        manager = self._scheduler.manager
        started = self._scheduler.running_requests()
        started += [request for request in self._scheduler.waiting_requests() if request.num_preemptions > 0]
        num_blocks = 0
        for request in started:
            num_tokens = min(request.num_prompt_tokens + request.max_tokens, manager.max_model_len)
            num_blocks += manager.num_blocks_for(num_tokens, request.num_encoder_tokens)
        share = num_blocks / manager.num_usable_blocks
        if share <= 1.0:
            return []
        growth = f"{len(started)} started requests may grow to {num_blocks:,} blocks, {share:.1f}x the pool"
        return [f"{growth} (lower max_tokens or max_num_seqs)"]
