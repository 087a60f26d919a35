"""FlightBook: every request under way, as the replay needs to know it between steps.

Two questions are answered for each step, at a cost that does not grow with the number of decoding requests when they
simply go on: what has every scheduled request sampled, and how long did every token take to come?

    fed --new_requests--> prefilling --first token--> decoding --> finished
                              ^                          |
                              +-------- preempted -------+

A decoding request yields one token in a step, so nearly all gaps are the step's length. The exceptions are few and kept
by name: a preempted request remembers when its last token came, and `_late` knows the decoding requests that a step
passed over (as one does that preempts the request it is at: it schedules nobody behind that one).
"""

import math
from typing import Final

from kvledger.replay.records import RequestRecord
from kvledger.replay.serving import ServedRequest, ServedStep, Serving
from kvledger.replay.step_time import LocalReach, num_pairs
from kvledger.replay.tally import Tally
from kvledger.scheduler import SchedulerOutput
from kvledger.traces.prompts import output_token
from kvledger.traces.trace_request import TraceRequest

# In place of a token: the prompt is not through.
_NOTHING: Final = -1


class Flight:
    """One request from its arrival to its end."""

    __slots__ = (
        "admitted",
        "arrival",
        "away",
        "first_token",
        "last_token_time",
        "num_computed",
        "num_hit",
        "recorded",
        "request",
        "serial",
        "token",
    )

    def __init__(self, recorded: TraceRequest, request: ServedRequest, serial: int, arrival: float) -> None:
        self.recorded: Final = recorded
        self.request: Final = request
        self.serial: Final = serial
        self.arrival: Final = arrival
        # What it samples in every step.
        self.token: Final = output_token(serial)
        # While it prefills: tokens computed so far.
        self.num_computed: int = 0
        # None before its first token; kept up to date only when the request is preempted.
        self.last_token_time: float | None = None
        # When it was admitted first, and what was found cached of its prompt; when its first token came.
        self.admitted: float | None = None
        self.num_hit: int = 0
        self.first_token: float | None = None
        # From when to when it was preempted, each time; without an end while it is.
        self.away: list[tuple[float, float]] = []

    def record(self, outcome: str, end: float) -> RequestRecord:
        """What became of it."""
        recorded = self.recorded
        return RequestRecord(
            self.serial,
            recorded.session,
            recorded.priority,
            self.arrival,
            end,
            recorded.num_prompt_tokens,
            self.request.num_output_tokens,
            outcome,
            self.admitted,
            self.first_token,
            self.num_hit,
            [(start, min(back, end)) for start, back in self.away],
        )


class FlightBook:
    """All flights of one replay."""

    def __init__(self, serving: Serving, tally: Tally, reaches: list[LocalReach]) -> None:
        self._serving: Final = serving
        self._reaches: Final = reaches
        self._tally: Final = tally
        self._flights: Final[dict[str, Flight]] = {}
        self._prefilling: Final[dict[str, Flight]] = {}
        # Decoding requests that were passed over -> when their last token came.
        self._late: Final[dict[str, float]] = {}
        # Request id -> what it samples when it is scheduled.
        self._samples: Final[dict[str, int]] = {}
        # Those whose answers are known token by token.
        self._answers: Final[dict[str, tuple[ServedRequest, list[int]]]] = {}
        self._is_stale: bool = True
        self._previous_end: float = 0.0
        # Of the step that is open.
        self.sampled: list[int] = []
        self.num_tokens: int = 0
        self.num_context: int = 0
        self.num_pairs: float = 0.0
        # Those of its tokens that belong to prompts, computed for the first time or again.
        self.num_prefill_tokens: int = 0
        # Context and pairs of layers that read a part of it, for each of the reaches.
        self.local: list[tuple[int, float]] = []
        self._num_silent: int = 0
        self._first: list[Flight] = []
        self._ids: list[str] = []

    def add(self, flight: Flight, answer: list[int] | None) -> None:
        """A request that the scheduler has accepted. `answer`: what it generates, if not one token over and over."""
        request_id = flight.request.request_id
        self._flights[request_id] = flight
        if answer is not None:
            self._answers[request_id] = (flight.request, answer)

    def remove(self, request_id: str) -> Flight:
        """A request that is finished or was ended."""
        self._is_stale = True
        self._prefilling.pop(request_id, None)
        self._late.pop(request_id, None)
        self._samples.pop(request_id, None)
        self._answers.pop(request_id, None)
        return self._flights.pop(request_id)

    def open_step(self, output: ServedStep) -> None:
        """Works out what the step computes and samples: `sampled` and the numbers for the step-time model."""
        if output.preempted_request_ids:
            for request_id in output.preempted_request_ids:
                self._preempt(request_id)
        if output.new_requests:
            for data in output.new_requests:
                self._start(data.request_id, data.num_computed_tokens)
        ids = output.request_ids
        num_computed = output.total_num_computed_tokens
        self._ids = ids
        self.num_tokens = output.total_num_scheduled_tokens
        self.num_context = num_computed + self.num_tokens
        # As if everybody computed one token, which is right for decodes.
        self.num_pairs = num_computed + len(ids)
        self.num_prefill_tokens = 0
        self._num_silent = 0
        if self._reaches:
            self._measure_local(output)
        if self._prefilling:
            self._advance_prefills()
            self._is_stale = True
        # A step of decodes only has budget for all of them, unless it preempts.
        if self._is_stale and self._serving.num_running > len(ids):
            self._note_passed_over()
        if self._is_stale:
            samples = self._samples
            self.sampled = [samples[request_id] for request_id in ids]
            self._is_stale = len(self._prefilling) > 0 or len(self._late) > 0
        if self._answers:
            self._speak(ids)

    def _speak(self, ids: list[str]) -> None:
        for row, request_id in enumerate(ids):
            known = self._answers.get(request_id)
            if known is not None and self.sampled[row] >= 0:
                request, answer = known
                self.sampled[row] = answer[request.num_output_tokens]

    def close_step(self, end: float) -> int:
        """The step ends then. Times its first tokens and returns the number of the others, whose gap is the step."""
        self._previous_end = end
        num_yielded = len(self._ids) - self._num_silent
        if self._late:
            for request_id in self._late.keys() & set(self._ids):
                self._tally.gaps.add(end - self._late.pop(request_id))
                num_yielded -= 1
        if not self._first:
            return num_yielded
        for flight in self._first:
            if flight.last_token_time is None:
                self._tally.ttft.add(end - flight.arrival)
                flight.last_token_time = flight.first_token = end
            else:
                self._tally.gaps.add(end - flight.last_token_time)
        num_yielded -= len(self._first)
        self._first = []
        return num_yielded

    @property
    def is_quiet(self) -> bool:
        """Whether everybody under way either waits or had a token in the last step."""
        return not self._prefilling and not self._late

    def skip_to(self, now: float) -> None:
        """Nothing ran until then."""
        self._previous_end = now

    def _start(self, request_id: str, num_hit: int) -> None:
        flight = self._flights[request_id]
        flight.num_computed = num_hit
        if flight.admitted is None:
            flight.admitted, flight.num_hit = self._previous_end, num_hit
        elif flight.away:
            flight.away[-1] = (flight.away[-1][0], self._previous_end)
        self._prefilling[request_id] = flight
        self._samples[request_id] = _NOTHING

    def _preempt(self, request_id: str) -> None:
        flight = self._flights.get(request_id)
        if flight is None:
            return
        self._is_stale = True
        flight.away.append((self._previous_end, math.inf))
        if self._prefilling.pop(request_id, None) is None:
            flight.last_token_time = self._late.pop(request_id, self._previous_end)

    def _measure_local(self, output: ServedStep) -> None:
        assert isinstance(output, SchedulerOutput), "extents are for layers that read everything"
        scheduled, computed = memoryview(output.num_scheduled_tokens), memoryview(output.num_computed_tokens)
        steps = list(zip(scheduled.tolist(), computed.tolist(), strict=True))
        self.local = [
            (
                sum([reach.context(num_new, num_computed) for num_new, num_computed in steps]),
                sum([reach.pairs(num_new, num_computed) for num_new, num_computed in steps]),
            )
            for reach in self._reaches
        ]

    @property
    def num_scheduled(self) -> int:
        """Requests of the step."""
        return len(self._ids)

    def _advance_prefills(self) -> None:
        for request_id, flight in list(self._prefilling.items()):
            request = flight.request
            start = flight.num_computed
            end = request.num_computed_tokens
            if end == start:
                continue
            num_new = end - start
            self.num_prefill_tokens += num_new
            self.num_pairs += num_pairs(num_new, start) - (start + 1)
            flight.num_computed = end
            if request.is_prefill_chunk:
                self._num_silent += 1
            else:
                del self._prefilling[request_id]
                self._samples[request_id] = flight.token
                self._first.append(flight)

    def _note_passed_over(self) -> None:
        scheduled = set(self._ids)
        for request in self._serving.running_requests():
            request_id = request.request_id
            if request_id not in scheduled and request_id not in self._prefilling:
                self._late.setdefault(request_id, self._previous_end)
