"""Scheduled replay: a scheduler on its ledger step by step, on a simulated clock. Serving says which of two it is.

    arrivals --due--> backlog --a few ahead--> scheduler --step--> the clock moves by the step time --> tokens return

The loop is interpreted and the layers under it are compiled, so a step makes few, coarse calls. What arrived and is far
from its turn stays in the backlog as recorded, because made requests are large; as the scheduler looks at its waiting
requests in order, this changes no decision. Under the priority policy everything that arrived is handed over at once.
Where extents serve, steps in which nothing happens come together, unless somebody hears of single ones.
"""

import math
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Final

from kvledger.errors import InvariantError
from kvledger.replay.config import ReplayConfig
from kvledger.replay.flights import Flight, FlightBook
from kvledger.replay.log import ReplayLog
from kvledger.replay.records import CUT_SHORT, FINISHED, ReplayListener, RequestRecord, StepRecord
from kvledger.replay.result import ReplayResult
from kvledger.replay.serving import ServedStep, Serving, ServingByBlocks
from kvledger.replay.step_time import StepTimeModel
from kvledger.replay.tally import OUTGREW_POOL, Progress, Tally, refused
from kvledger.scheduler import SchedulingPolicy
from kvledger.traces.arrivals import Arrivals
from kvledger.traces.trace_request import TraceRequest

_PROGRESS_STEPS: Final = 256
_TIMELINE_INTERVAL_SECONDS: Final = 0.25


class ScheduledReplay:
    """One replay. run() may be called once."""

    def __init__(
        self,
        arrivals: Arrivals,
        serving: Serving,
        config: ReplayConfig,
        step_time: StepTimeModel,
        log: ReplayLog | None = None,
        listeners: Sequence[ReplayListener] = (),
    ) -> None:
        self._arrivals: Final = arrivals
        self._counts_steps: Final = arrivals.counts_steps
        self._step_time: Final = step_time
        self._check: Final = config.check
        self._events: Final = config.events
        self._serving: Final = serving
        self._ledger: Final = serving.ledger
        self._tally: Final = Tally(config, serving.ledger, _TIMELINE_INTERVAL_SECONDS)
        self._book: Final = FlightBook(serving, self._tally, step_time.reaches)
        by_priority = config.scheduler.policy is SchedulingPolicy.PRIORITY
        self._num_ahead: Final = math.inf if by_priority else config.scheduler.max_num_seqs
        # Arrived and not handed to the scheduler yet, with the times of arrival.
        self._backlog: Final[deque[tuple[TraceRequest, float]]] = deque()
        self._next_arrival: float = arrivals.next_time()
        self._now: float = 0.0
        self._log: Final = log
        self._listeners: Final = [self._tally, *listeners]
        self._step_listeners: Final = [listener for listener in listeners if listener.hears_steps]
        # Whoever hears of single steps gets them.
        self._takes_quiet: Final = not self._step_listeners and not self._counts_steps and log is None
        self._next_progress: int = _PROGRESS_STEPS
        if log is not None:
            if not isinstance(serving, ServingByBlocks):
                raise InvariantError("an engine's log lines are those of its scheduler")
            log.open(serving.scheduler, lambda: self._now)

    def run(self, progress: Progress) -> ReplayResult:
        """Replays everything, until the last request is done."""
        started = perf_counter()
        scheduler = self._serving
        tally = self._tally
        while True:
            if self._counts_steps:
                self._arrivals.reach(tally.num_steps + 1, self._now, not scheduler.has_unfinished_requests)
                self._next_arrival = self._arrivals.next_time()
            if self._next_arrival <= self._now:
                self._collect_arrivals()
            if self._backlog:
                self._feed()
            if not scheduler.has_unfinished_requests:
                if self._backlog or self._next_arrival <= self._now:
                    continue
                if self._next_arrival == math.inf:
                    break
                self._now = self._next_arrival
                self._note_timeline(0)
                self._book.skip_to(self._now)
                continue
            if not (self._takes_quiet and self._take_quiet_steps()):
                self._step()
            if tally.num_steps >= self._next_progress:
                self._next_progress = tally.num_steps + _PROGRESS_STEPS
                progress(tally.num_done, tally.num_requests + len(self._backlog))
        if self._log is not None:
            self._log.close()
        tally.num_preemptions = scheduler.num_preemptions
        tally.num_recomputed_tokens = scheduler.num_recomputed_tokens
        tally.simulated_seconds = self._now
        tally.timeline.end(self._ledger.occupancy())
        return tally.result("scheduled", perf_counter() - started)

    def _take_quiet_steps(self) -> bool:
        """Takes together what comes before the next arrival, end or measurement, where all that happens is that those
        who run go on. False when the next step is none of these."""
        tally = self._tally
        if not self._book.is_quiet:
            return False
        until = min(self._next_arrival, tally.timeline.next_time, tally.group_meter.next_time)
        quiet = self._serving.quiet(self._step_time.clock, self._now, until)
        if quiet is None:
            return False
        num_running = self._serving.num_running
        self._now = quiet.end
        self._book.skip_to(quiet.end)
        tally.log_steps(quiet.seconds, quiet.usages, num_running)
        if self._backlog or self._serving.num_waiting > 0:
            tally.waits.add_all(self._serving.wait_counts(len(self._backlog)), quiet.seconds)
        self._note_timeline(num_running)
        return True

    def _step(self) -> None:
        scheduler = self._serving
        book = self._book
        tally = self._tally
        output = scheduler.schedule()
        tally.num_steps += 1
        outgrown = scheduler.outgrown()
        if outgrown:
            self._drop_outgrown(outgrown)
        book.open_step(output)
        started, seconds = self._now, 0.0
        if book.num_tokens > 0:
            seconds = self._step_time.seconds(
                book.num_tokens, book.num_context, book.num_pairs, book.num_scheduled, book.local
            )
        elif not output.preempted_request_ids and not outgrown:
            raise InvariantError(f"step {output.step} schedules nothing although requests wait or run")
        self._now += seconds
        num_yielded = book.close_step(self._now)
        tally.log_step(seconds, self._ledger.usage, num_yielded)
        if self._backlog or scheduler.num_waiting > 0 or book.num_scheduled < scheduler.num_running:
            tally.waits.add(scheduler.wait_counts(len(self._backlog)), seconds)
        if self._log is not None:
            self._log.step(book, len(self._backlog))
        self._note_timeline(scheduler.num_running)
        if self._step_listeners:
            self._tell_of_step(output, started, seconds)
        self._take_finished(scheduler.update(book.sampled))
        if self._events is not None:
            self._events.end_step(self._now)
        if self._check:
            scheduler.check()

    def _collect_arrivals(self) -> None:
        arrivals = self._arrivals
        while self._next_arrival <= self._now:
            self._backlog.append((arrivals.take(), self._next_arrival))
            self._next_arrival = arrivals.next_time()

    def _feed(self) -> None:
        """Hands as much of the backlog to the scheduler as its next step may want to look at."""
        while self._backlog and self._serving.num_waiting < self._num_ahead:
            recorded, arrival = self._backlog.popleft()
            tally = self._tally
            serial = tally.num_requests
            tally.num_requests += 1
            refusal = tally.refusal(recorded.num_prompt_tokens)
            if refusal is not None:
                self._tell(refused(recorded, serial, arrival, self._now, refusal))
                self._end(recorded)
                continue
            request, answer = self._serving.add(recorded, serial)
            tally.accept(recorded.num_prompt_tokens)
            self._book.add(Flight(recorded, request, serial, arrival), answer)

    def _drop_outgrown(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            flight = self._book.remove(request_id)
            self._tell(flight.record(OUTGREW_POOL, self._now))
            self._end(flight.recorded)

    def _take_finished(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            flight = self._book.remove(request_id)
            is_cut = flight.request.num_output_tokens < flight.recorded.num_output_tokens
            self._tell(flight.record(CUT_SHORT if is_cut else FINISHED, self._now))
            self._end(flight.recorded)

    def _tell(self, record: RequestRecord) -> None:
        for listener in self._listeners:
            listener.ended(record)

    def _tell_of_step(self, output: ServedStep, started: float, seconds: float) -> None:
        book, occupancy = self._book, self._ledger.occupancy()
        record = StepRecord(
            output.step,
            started,
            seconds,
            book.num_scheduled,
            book.num_tokens,
            book.num_prefill_tokens,
            self._serving.num_running,
            self._serving.num_waiting + len(self._backlog),
            occupancy.live,
            occupancy.cached,
            len(output.preempted_request_ids),
        )
        for listener in self._step_listeners:
            listener.stepped(record)

    def _end(self, recorded: TraceRequest) -> None:
        """Tells the arrivals, of which a closed loop may now know its next one."""
        self._arrivals.finished(recorded, self._now)
        self._next_arrival = self._arrivals.next_time()

    def _note_timeline(self, num_running: int) -> None:
        timeline = self._tally.timeline
        num_waiting = self._serving.num_waiting + len(self._backlog)
        if num_running > timeline.peak_running:
            timeline.peak_running = num_running
        if num_waiting > timeline.peak_waiting:
            timeline.peak_waiting = num_waiting
        if self._now >= timeline.next_time:
            timeline.close_intervals(self._now, self._ledger.occupancy())
        if self._now >= self._tally.group_meter.next_time:
            self._tally.group_meter.sample(self._now)
