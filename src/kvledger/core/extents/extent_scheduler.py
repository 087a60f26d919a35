"""ExtentScheduler: Scheduler's decisions on an ExtentPool, for what a replay of one full-attention group needs: first
come first served, chunked prefills, one step out at a time, no drafts and nothing external.

It follows running_pass.py and waiting_pass.py rule for rule, and those judge it: replays of random traces must give the
same numbers. What it adds is quiet(): steps in which everybody decodes and nobody comes or goes are taken together.
"""

from collections import deque
from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from kvledger.core.extents.admissions import ExtentAdmissions
from kvledger.core.extents.extent_request import ExtentRequest, ExtentStep, QuietSteps, StartedRequest
from kvledger.core.extents.holding import ExtentHit
from kvledger.core.extents.step_clock import StepClock
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.core.scheduler.wait_reason import WaitReason
from kvledger.core.units import blocks_for
from kvledger.errors import require


class ExtentScheduler:
    """`num_watermark`: blocks that stay free when a request starts while others run."""

    def __init__(
        self, admissions: ExtentAdmissions, config: SchedulerConfig, max_model_len: int, num_watermark: int
    ) -> None:
        self._admissions: Final = admissions
        self._pool: Final = admissions.pool
        self._block_size: Final[i64] = admissions.pool.block_size
        self._max_seqs: Final[i64] = config.max_num_seqs
        self._max_tokens: Final[i64] = config.max_num_batched_tokens
        self._max_model_len: Final[i64] = max_model_len
        self._num_watermark: Final[i64] = num_watermark
        self._running: list[ExtentRequest] = []
        self._waiting: Final[deque[ExtentRequest]] = deque()
        self._num_steps: int = 0
        self.num_preemptions: int = 0
        self._num_recomputed: i64 = 0
        # Nobody came or went since a step in which everybody who runs decoded: who waits waits on, for the same reason.
        self._is_settled: bool = False
        # Steps from now on, modulo the block size -> requests that start a block in them. 0 between two calls.
        self._starts: Final[vec[i64]] = vec[i64]([0] * admissions.pool.block_size)
        # Of the last step, as WaitLog has it.
        self._num_unreached: i64 = 0
        self._num_preempted: i64 = 0
        self._is_blocked: bool = False
        self._ended_by: WaitReason = WaitReason.MAX_NUM_SEQS
        self._num_left_waiting: i64 = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_unfinished_requests(self) -> bool:
        return len(self._running) > 0 or len(self._waiting) > 0

    @property
    def num_recomputed_tokens(self) -> int:
        """Of requests that have ended: tokens that they had had before a preemption."""
        return int(self._num_recomputed)

    def running_requests(self) -> list[ExtentRequest]:
        """In the order of scheduling, in a fresh list."""
        return self._running.copy()

    def add_request(self, request: ExtentRequest) -> None:
        self._is_settled = False
        self._waiting.append(request)

    def wait_counts(self, num_more: int = 0) -> dict[WaitReason, int]:
        """How many requests the last schedule() gave nothing, by reason; num_more stand behind all others."""
        counts: dict[WaitReason, int] = {}
        num_behind = int(self._num_left_waiting - self._num_preempted) + num_more
        if self._num_unreached > 0:
            counts[WaitReason.TOKEN_BUDGET] = int(self._num_unreached)
        if self._num_preempted > 0:
            counts[WaitReason.PREEMPTED] = int(self._num_preempted)
        if self._is_blocked:
            counts[WaitReason.BLOCKS] = 1
            num_behind -= 1
        if num_behind > 0:
            counts[self._ended_by] = counts.get(self._ended_by, 0) + num_behind
        return counts

    # One step

    def schedule(self) -> ExtentStep:
        self._num_steps += 1
        step = ExtentStep(self._num_steps)
        budget = self._schedule_running(step)
        self._num_unreached = 0
        if budget == 0:
            self._num_unreached = len(self._running) - len(step.requests)
        self._num_preempted = len(step.preempted_request_ids)
        self._is_blocked = False
        num_used = self._max_tokens - budget
        if self._num_preempted > 0:
            self._ended_by = WaitReason.STEP_PREEMPTED
            self._is_settled = False
        else:
            self._is_settled = num_used == len(self._running) == len(step.requests) and not step.outgrown_ids
            budget = self._schedule_waiting(step, budget)
        self._num_left_waiting = len(self._waiting)
        step.total_num_scheduled_tokens = int(self._max_tokens - budget)
        return step

    def update(self, step: ExtentStep) -> list[str]:
        """Every request that is through its tokens has one more. Returns who ended by that."""
        finished: list[str] = []
        for request in step.requests:
            if request.is_prefill_chunk:
                continue
            request.num_tokens += 1
            if (
                request.num_tokens >= self._max_model_len
                or request.num_tokens - request.num_prompt_tokens >= request.max_tokens
            ):
                self._finish(request)
                finished.append(request.request_id)
        if finished:
            self._running = [request for request in self._running if not request.is_finished]
        return finished

    def _schedule_running(self, step: ExtentStep) -> i64:
        """Returns the budget that is left."""
        running = self._running
        budget = self._max_tokens
        index: i64 = 0
        while index < len(running) and budget > 0:
            request = running[index]
            num_new = min(
                min(request.num_tokens - request.num_computed_tokens, budget),
                self._max_model_len - request.num_computed_tokens - 1,
            )
            end = request.num_computed_tokens + num_new
            if not self._grow(request, end):
                if self._is_too_large(end):
                    self._fail(step, request)
                    del running[index]
                    continue
                if not self._make_room(step, request, end):
                    break
            self._add(step, request, num_new)
            budget -= num_new
            index += 1
        return budget

    def _make_room(self, step: ExtentStep, request: ExtentRequest, end: i64) -> bool:
        """Preempts from the tail until a request can grow; False when it was preempted itself."""
        while True:
            victim = self._running.pop()
            self._num_recomputed += victim.num_recomputed
            self._pool.release(victim.holding)
            victim.num_computed_before = max(victim.num_computed_before, victim.num_computed_tokens)
            victim.num_computed_tokens = 0
            victim.start = 0
            victim.is_prefill_chunk = False
            victim.num_preemptions += 1
            self.num_preemptions += 1
            self._waiting.appendleft(victim)
            step.preempted_request_ids.append(victim.request_id)
            if victim is request:
                return False
            if self._grow(request, end):
                return True

    def _schedule_waiting(self, step: ExtentStep, budget: i64) -> i64:
        """Returns the budget that is left."""
        self._ended_by = WaitReason.MAX_NUM_SEQS
        while budget > 0 and len(self._running) < self._max_seqs and self._waiting:
            request = self._waiting.popleft()
            found = self._admissions.find(request.holding, request.num_tokens)
            hit = self._usable(request, found, budget)
            if hit is None:
                if self._is_too_large(request.num_tokens):
                    # It generated more than the pool takes before it was preempted: waiting cannot help.
                    self._fail(step, request)
                    continue
                self._waiting.appendleft(request)
                self._is_blocked = True
                self._ended_by = WaitReason.BEHIND
                break
            start = hit.num_blocks * self._block_size
            num_new = min(request.num_tokens - start, budget)
            self._admissions.admit(
                request.holding, request.num_tokens, found, hit, start + num_new, request.num_preemptions > 0
            )
            request.num_computed_tokens = start
            request.start = start
            self._running.append(request)
            self._is_settled = False
            step.new_requests.append(StartedRequest(request.request_id, int(start)))
            self._add(step, request, num_new)
            budget -= num_new
        if budget == 0 and not self._is_blocked:
            self._ended_by = WaitReason.TOKEN_BUDGET
        return budget

    def _usable(self, request: ExtentRequest, found: ExtentHit, budget: i64) -> ExtentHit | None:
        """What of its hit a request can start with now: all of it, where all its tokens fit; or nothing, where they
        never will beside it, but a first chunk does. None: it does not fit."""
        num_free = self._pool.num_free
        if self._running:
            num_free -= self._num_watermark
        num_blocks = blocks_for(request.num_tokens, self._block_size)
        if num_blocks - found.num_blocks + found.num_free <= num_free:
            return found
        if num_blocks <= self._pool.num_usable:
            return None
        first = blocks_for(min(request.num_tokens, budget), self._block_size)
        if first > num_free:
            return None
        return ExtentHit() if found.num_blocks > 0 else found

    def _grow(self, request: ExtentRequest, end: i64) -> bool:
        """Gives a request slots up to token `end`; False, changing nothing, when they do not fit."""
        holding = request.holding
        num_blocks = blocks_for(end, self._block_size)
        if num_blocks - holding.num_blocks > self._pool.num_free:
            return False
        self._pool.grow(holding, num_blocks, end // self._block_size)
        return True

    def _is_too_large(self, num_tokens: i64) -> bool:
        return blocks_for(min(num_tokens, self._max_model_len), self._block_size) > self._pool.num_usable

    def _add(self, step: ExtentStep, request: ExtentRequest, num_new: i64) -> None:
        step.requests.append(request)
        step.request_ids.append(request.request_id)
        step.total_num_computed_tokens += int(request.num_computed_tokens)
        request.num_computed_tokens += num_new
        request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens

    def _fail(self, step: ExtentStep, request: ExtentRequest) -> None:
        self._finish(request)
        step.outgrown_ids.append(request.request_id)

    def _finish(self, request: ExtentRequest) -> None:
        self._is_settled = False
        self._num_recomputed += request.num_recomputed
        request.is_finished = True
        self._pool.release(request.holding)

    # Many steps

    def quiet(self, clock: StepClock, now: float, until: float, most: i64) -> QuietSteps | None:
        """Takes the steps, at most so many, in which everybody who runs decodes, nobody ends, nobody who waits can
        start and no block lacks, up to the first one that ends at or behind `until`. None when the next is none.
        """
        running = self._running
        num_running: i64 = len(running)
        if num_running == 0 or num_running > self._max_tokens or (self._waiting and not self._is_settled):
            return None
        num_context: i64 = 0
        for request in running:
            num_computed = request.num_computed_tokens
            if request.num_tokens - num_computed != 1 or request.is_prefill_chunk:
                return None
            if self._waiting and request.holding.names_more:
                # What it fills may be what somebody who waits needs.
                return None
            num_left = min(
                request.max_tokens - (request.num_tokens - request.num_prompt_tokens),
                self._max_model_len - request.num_tokens,
            )
            most = min(most, num_left - 1)
            num_context += num_computed
        block_size = self._block_size
        starts = self._starts
        for request in running:
            starts[request.holding.num_blocks * block_size - request.num_computed_tokens] += 1
        seconds: list[float] = []
        usages: list[float] = []
        num_free = self._pool.num_free
        num_usable = self._pool.num_usable
        num_steps: i64 = 0
        place: i64 = 0
        while num_steps < most and now < until:
            num_taken = starts[place]
            if num_taken > num_free:
                break
            num_free -= num_taken
            num_context += num_running
            taken = clock.decode(num_running, num_context)
            now += taken
            seconds.append(taken)
            usages.append(1.0 - float(num_free) / float(num_usable))
            num_steps += 1
            place += 1
            if place == block_size:
                place = 0
        for request in running:
            starts[request.holding.num_blocks * block_size - request.num_computed_tokens] = 0
        if num_steps == 0:
            return None
        for request in running:
            request.num_tokens += num_steps
            request.num_computed_tokens += num_steps
            end = request.num_computed_tokens
            self._pool.grow(request.holding, blocks_for(end, block_size), end // block_size)
        self._num_steps += int(num_steps)
        return QuietSteps(seconds, usages, now)

    def check(self) -> None:
        """Proves that requests hold the blocks of what they have computed, and the pool."""
        for request in self._running:
            num_blocks = blocks_for(request.num_computed_tokens, self._block_size)
            require(request.holding.num_blocks == num_blocks, f"{request.request_id!r} holds what it does not need")
            require(request.num_computed_tokens < request.num_tokens, f"{request.request_id!r} is behind nothing")
        for request in self._waiting:
            require(request.holding.num_blocks == 0, f"{request.request_id!r} waits and holds blocks")
        self._pool.check([request.holding for request in self._running])
