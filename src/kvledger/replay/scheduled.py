"""Scheduled replay: the scheduler drives the ledger step by step, on a simulated clock.

    arrivals --due--> backlog --a few ahead--> scheduler --step--> the clock moves by the step time --> tokens return

The loop is interpreted and the layers under it are compiled, so a step makes few, coarse calls. What arrived and is far
from its turn stays in the backlog as recorded, because made requests are large; as the scheduler looks at its waiting
requests in order, this changes no decision. Under the priority policy everything that arrived is handed over at once.
"""

import math
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Final

from kvledger.errors import InvariantError
from kvledger.replay.config import ReplayConfig
from kvledger.replay.flights import Flight, FlightBook
from kvledger.replay.ledger import BlockLedger
from kvledger.replay.log import ReplayLog
from kvledger.replay.records import CUT_SHORT, FINISHED, ReplayListener, RequestRecord, StepRecord
from kvledger.replay.result import ReplayResult
from kvledger.replay.step_time import StepTimeModel
from kvledger.replay.tally import OUTGREW_POOL, Progress, Tally, refused
from kvledger.scheduler import RequestAccounting, RequestOutput, Scheduler, SchedulerOutput, SchedulingPolicy
from kvledger.traces.arrivals import Arrivals
from kvledger.traces.prompts import PromptMaker
from kvledger.traces.trace_request import TraceRequest

_PROGRESS_STEPS: Final = 256
_TIMELINE_INTERVAL_SECONDS: Final = 0.25


class ScheduledReplay:
    """One replay. run() may be called once."""

    def __init__(
        self,
        arrivals: Arrivals,
        maker: PromptMaker,
        config: ReplayConfig,
        step_time: StepTimeModel,
        log: ReplayLog | None = None,
        listeners: Sequence[ReplayListener] = (),
    ) -> None:
        ledger = BlockLedger(config, maker)
        manager = ledger.manager
        self._arrivals: Final = arrivals
        self._counts_steps: Final = arrivals.counts_steps
        self._maker: Final = maker
        self._step_time: Final = step_time
        self._check: Final = config.check
        self._events: Final = config.events
        self._manager: Final = manager
        self._accounting: Final = RequestAccounting(manager)
        self._scheduler: Final = Scheduler(manager, config.scheduler, accounting=self._accounting)
        self._tally: Final = Tally(config, ledger, _TIMELINE_INTERVAL_SECONDS)
        self._book: Final = FlightBook(self._scheduler, self._tally, step_time.reaches)
        by_priority = config.scheduler.policy is SchedulingPolicy.PRIORITY
        self._num_ahead: Final = math.inf if by_priority else config.scheduler.max_num_seqs
        # Arrived and not handed to the scheduler yet, with the times of arrival.
        self._backlog: Final[deque[tuple[TraceRequest, float]]] = deque()
        self._next_arrival: float = arrivals.next_time()
        self._now: float = 0.0
        self._log: Final = log
        self._listeners: Final = [self._tally, *listeners]
        self._step_listeners: Final = [listener for listener in listeners if listener.hears_steps]
        if log is not None:
            log.open(self._scheduler, lambda: self._now)

    def run(self, progress: Progress) -> ReplayResult:
        """Replays everything, until the last request is done."""
        started = perf_counter()
        scheduler = self._scheduler
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
            self._step()
            if tally.num_steps % _PROGRESS_STEPS == 0:
                progress(tally.num_done, tally.num_requests + len(self._backlog))
        if self._log is not None:
            self._log.close()
        tally.num_preemptions = scheduler.num_preemptions
        tally.num_recomputed_tokens = self._accounting.totals().num_recomputed_tokens
        tally.simulated_seconds = self._now
        tally.timeline.end(self._manager.occupancy())
        return tally.result("scheduled", perf_counter() - started)

    def _step(self) -> None:
        scheduler = self._scheduler
        book = self._book
        tally = self._tally
        output = scheduler.schedule()
        tally.num_steps += 1
        if output.errors:
            self._drop_outgrown(output)
        book.open_step(output)
        started, seconds = self._now, 0.0
        if book.num_tokens > 0:
            seconds = self._step_time.seconds(
                book.num_tokens, book.num_context, book.num_pairs, book.num_scheduled, book.local
            )
        elif not output.preempted_request_ids and not output.errors:
            raise InvariantError(f"step {output.step} schedules nothing although requests wait or run")
        self._now += seconds
        num_yielded = book.close_step(self._now)
        tally.log_step(seconds, self._manager.usage, num_yielded)
        if self._backlog or scheduler.num_waiting > 0 or book.num_scheduled < scheduler.num_running:
            tally.waits.add(scheduler.wait_counts(len(self._backlog)), seconds)
        if self._log is not None:
            self._log.step(book, len(self._backlog))
        self._note_timeline(scheduler.num_running)
        if self._step_listeners:
            self._tell_of_step(output, started, seconds)
        self._take_finished(scheduler.update_from_tokens(output, book.sampled).finished)
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
        while self._backlog and self._scheduler.num_waiting < self._num_ahead:
            recorded, arrival = self._backlog.popleft()
            tally = self._tally
            serial = tally.num_requests
            tally.num_requests += 1
            refusal = tally.refusal(recorded.num_prompt_tokens)
            if refusal is not None:
                self._tell(refused(recorded, serial, arrival, self._now, refusal))
                self._end(recorded)
                continue
            request = self._maker.make(recorded, serial)
            self._scheduler.add_request(request)
            tally.accept(recorded.num_prompt_tokens)
            self._book.add(Flight(recorded, request, serial, arrival), self._maker.answer(recorded, serial))

    def _drop_outgrown(self, output: SchedulerOutput) -> None:
        for request_id in output.errors:
            flight = self._book.remove(request_id)
            self._tell(flight.record(OUTGREW_POOL, self._now))
            self._end(flight.recorded)

    def _take_finished(self, finished: list[RequestOutput]) -> None:
        for output in finished:
            flight = self._book.remove(output.request_id)
            is_cut = flight.request.num_output_tokens < flight.recorded.num_output_tokens
            self._tell(flight.record(CUT_SHORT if is_cut else FINISHED, self._now))
            self._end(flight.recorded)

    def _tell(self, record: RequestRecord) -> None:
        for listener in self._listeners:
            listener.ended(record)

    def _tell_of_step(self, output: SchedulerOutput, started: float, seconds: float) -> None:
        book, occupancy = self._book, self._manager.occupancy()
        record = StepRecord(
            output.step,
            started,
            seconds,
            book.num_scheduled,
            book.num_tokens,
            book.num_prefill_tokens,
            self._scheduler.num_running,
            self._scheduler.num_waiting + len(self._backlog),
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
        num_waiting = self._scheduler.num_waiting + len(self._backlog)
        if num_running > timeline.peak_running:
            timeline.peak_running = num_running
        if num_waiting > timeline.peak_waiting:
            timeline.peak_waiting = num_waiting
        if self._now >= timeline.next_time:
            timeline.close_intervals(self._now, self._manager.occupancy())
        if self._now >= self._tally.group_meter.next_time:
            self._tally.group_meter.sample(self._now)
