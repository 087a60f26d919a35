"""Engine: requests in, tokens out, one step at a time.

    schedule    who computes what in this step, and in which blocks       Scheduler, over the ledger
    execute     compute it, and choose the next tokens                    the worker, which owns the KV values
    update      the tokens reach their requests; who is done leaves       Scheduler
    draft       guess what comes next, for the next step to verify        the drafter, if there is one

Everything else of an engine is around these four lines of step(): this file is where to start writing your own
(docs/engine.md). One owner thread.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from reprlib import repr as short_repr
from typing import Final, Protocol

from kvledger.core.requests.request import Adapter, Request, RequestStatus
from kvledger.engine.sampling_params import GREEDY, SamplingParams
from kvledger.engine.stats import EngineStats
from kvledger.errors import RequestError
from kvledger.scheduler import Scheduler, SchedulerOutput


@dataclass(frozen=True)
class NewTokens:
    """What one step added to a request. `finish`: its final status, or None while it goes on; `error`: why it ended
    without being done: the step found that it can never fit, or that is what the worker raised."""

    request_id: str
    token_ids: Sequence[int]
    finish: RequestStatus | None = None
    error: BaseException | None = None


OnTokens = Callable[[NewTokens], None]
OnStep = Callable[[SchedulerOutput, list[NewTokens]], None]


class Worker(Protocol):
    """Keeps the KV values. It is told nothing but the steps."""

    def execute(self, output: SchedulerOutput) -> list[list[int]]:
        """Computes one step. For each of output.request_ids its new tokens, accepted drafts first; [] within a prompt.

        A step without tokens (output.total_num_scheduled_tokens == 0) still says whose rows to drop.
        """


class Drafter(Protocol):
    """Guesses how a text goes on."""

    def propose(self, tokens: list[int] | bytes, max_drafts: int | None = None) -> list[int]:
        """At most max_drafts guesses, the next token first; [] for none."""


class Engine:
    """`eos_token_ids` end every request that does not ignore them, besides its own stop tokens.

    `on_step` is told of every step that was computed, at its end: the step as it was scheduled, and what the requests
    gained by it. Metrics, events, the log line and a stall detector hang there (docs/engine.md).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        *,
        drafter: Drafter | None = None,
        eos_token_ids: Iterable[int] = (),
        on_step: OnStep | None = None,
    ) -> None:
        self.scheduler: Final = scheduler
        self.worker: Final = worker
        self.stats: Final = EngineStats(scheduler)
        self._drafter: Final = drafter
        self._on_step: Final = on_step
        self._eos_token_ids: Final = tuple(eos_token_ids)
        self._listeners: Final[dict[str, OnTokens]] = {}

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams = GREEDY,
        *,
        on_tokens: OnTokens | None = None,
        priority: int = 0,
        arrival_time: float = 0.0,
        adapter: Adapter | None = None,
        cache_salt: str = "",
    ) -> Request:
        """Queues a request; `on_tokens` hears of each step's tokens as they come.

        RequestError for a prompt that is no list of token ids or params of another kind, and as Scheduler.add_request.
        """
        _require_prompt(prompt_token_ids)
        _require_params(params)
        stop_token_ids = (*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids))
        request = Request(
            request_id,
            prompt_token_ids,
            max_tokens=params.max_tokens,
            stop_token_ids=stop_token_ids,
            priority=priority,
            arrival_time=arrival_time,
            adapter=adapter,
            cache_salt=cache_salt,
            sampling_params=params,
        )
        self.scheduler.add_request(request)
        self.stats.count_request(request)
        if on_tokens is not None:
            self._listeners[request_id] = on_tokens
        return request

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is; nobody hears of it again. UnknownRequestError when it is not here."""
        self.scheduler.abort(request_id)
        self._listeners.pop(request_id, None)

    def fork(self, request_id: str, child_ids: list[str], on_tokens: OnTokens | None = None) -> bool:
        """Lets children go on from a running request, over the same blocks. False, changing nothing, without room.

        They share its sampling parameters: children of a sampled request differ if it has no seed of its own.
        """
        if not self.scheduler.fork(request_id, child_ids):
            return False
        if on_tokens is not None:
            self._listeners.update(dict.fromkeys(child_ids, on_tokens))
        return True

    def step(self) -> list[NewTokens]:
        """Computes one step and returns what each request gained by it, in the order of scheduling.

        What the worker raises comes out of here, and the requests of that step end with it (FINISHED_ERROR): one of
        them may be the cause. All others start over, nothing that was cached is used again, and the next step works.
        """
        output = self.scheduler.schedule()
        self.stats.count_step(output)
        try:
            sampled = self.worker.execute(output)
            _require_whole_numbers(sampled)
            gained = self.scheduler.update_from_output(output, sampled)
        except BaseException as error:  # Also an interrupt: the step is in flight, and nobody would bring it back.
            self._end_failed(output, error)
            raise
        self.stats.count_tokens(gained)

        news = _errors(output) + [NewTokens(one.request_id, one.new_token_ids, one.finish) for one in gained]
        if self._drafter is not None:
            for new in news:
                if new.finish is None:
                    self._draft(self._drafter, self.scheduler.get_request(new.request_id))
        for new in news:
            self._tell(new)
        if self._on_step is not None:
            self._on_step(output, news)
        return news

    def run(self, max_steps: int | None = None) -> dict[str, list[int]]:
        """Steps until no request is left, or max_steps are done. Returns {request id: tokens gained meanwhile}."""
        tokens: dict[str, list[int]] = {}
        num_steps = 0
        while self.has_unfinished_requests and num_steps != max_steps:
            for new in self.step():
                tokens.setdefault(new.request_id, []).extend(new.token_ids)
            num_steps += 1
        return tokens

    def check(self) -> None:
        """Proves the invariants of the scheduler and of the ledger below it. For tests."""
        self.scheduler.check()

    def _draft(self, drafter: Drafter, request: Request) -> None:
        # The token that follows the drafts is sampled too, and must not be beyond the end of the request.
        end = min(self.scheduler.manager.max_model_len, request.num_prompt_tokens + request.max_tokens)
        max_drafts = end - request.num_tokens - 1
        if max_drafts > 0:
            text = request.tokens.pack(0, request.num_tokens)
            self.scheduler.update_draft_tokens(request.request_id, drafter.propose(text, max_drafts))

    def _end_failed(self, output: SchedulerOutput, error: BaseException) -> None:
        ended = self.scheduler.fail_step(output)
        failed = [NewTokens(request_id, (), RequestStatus.FINISHED_ERROR, error) for request_id in ended]
        for new in _errors(output) + failed:
            self._tell(new)

    def _tell(self, new: NewTokens) -> None:
        # Looked up at the last moment: a listener may abort another request.
        listener = self._listeners.get(new.request_id)
        if new.finish is not None:
            self._listeners.pop(new.request_id, None)
        if listener is not None:
            listener(new)


def _errors(output: SchedulerOutput) -> list[NewTokens]:
    """Requests that scheduling the step ended."""
    return [NewTokens(request_id, (), RequestStatus.FINISHED_ERROR, why) for request_id, why in output.errors.items()]


def _require_prompt(token_ids: object) -> None:
    """RequestError for anything but a list of whole numbers; which numbers are token ids, the request says itself."""
    fix = "give a list of token ids, as a tokenizer makes them"
    if not isinstance(token_ids, list):
        raise RequestError(f"prompt_token_ids={short_repr(token_ids)}: not a list; {fix}")
    # Kinds before tokens: a set of a long prompt's types is made faster than each token is asked.
    if not all(issubclass(kind, int) for kind in set(map(type, token_ids))):
        wrong = next(position for position, token_id in enumerate(token_ids) if not isinstance(token_id, int))
        raise RequestError(f"prompt_token_ids[{wrong}]={short_repr(token_ids[wrong])}: not a whole number; {fix}")


def _require_params(params: object) -> None:
    if not isinstance(params, SamplingParams):
        fix = "give SamplingParams(...), or leave it out for greedy"
        raise RequestError(f"params={short_repr(params)}: not sampling parameters; {fix}")


def _require_whole_numbers(sampled: list[list[int]]) -> None:
    """RequestError for tensors and numpy's numbers: the compiled scheduler would stop at one, in mid-step."""
    for kind in set(map(type, chain.from_iterable(sampled))):
        if not issubclass(kind, int):
            fix = "give whole numbers, as tolist() makes them"
            raise RequestError(f"worker.execute: {kind.__name__} among the sampled tokens; {fix}")
