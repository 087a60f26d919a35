"""RequestAccounting: what every request has cost so far. A scheduler without one pays nothing for it.

    accounting = RequestAccounting(manager, on_finish=bills.append)
    scheduler = Scheduler(manager, config, accounting=accounting)
    accounting.get("a").num_recomputed_tokens      # while it lives; afterwards on_finish has got the same object

A request lives in one or more lives, each from an admission to a preemption or the end:

    | cached | external | computed ............. |      life 1, lost by a preemption
    | cached       | recomputed ... | computed ....... |      life 2: what it computes again, then what is new

so cached + external + computed is what it has now and what it lost. Between those moves nothing is counted: a step's
tokens are the difference of two of the request's own counters.
"""

from collections.abc import Callable
from copy import copy
from typing import Final

from kvledger.core.ledger.kv_cache_manager import KVCacheManager
from kvledger.core.record import Record
from kvledger.core.requests.request import Request, RequestStatus
from kvledger.core.scheduler.output import SchedulerOutput
from kvledger.errors import UnknownRequestError, require


class RequestAccount:
    """One request's costs up to now. Steps in flight count as computed, rejected drafts that are back do not."""

    def __init__(self, request: Request) -> None:
        self.request: Final = request
        # Tokens that it need not compute: found in the prefix cache (or taken over by a fork), and loaded or loading.
        self.num_cached_tokens: int = 0
        self.num_external_tokens: int = 0
        # Tokens that it had when it was preempted, over all preemptions.
        self.num_lost_tokens: int = 0
        # Most blocks that it held at a time over all groups, shared ones included.
        self.num_blocks_peak: int = 0
        # Steps, and seconds of the clock, in which it waited to start, at first and after each preemption.
        self.num_steps_waited: int = 0
        self.seconds_waited: float = 0.0
        self.num_drafts_accepted: int = 0
        self.num_drafts_rejected: int = 0
        # Of the lives that are over.
        self._num_computed: int = 0
        self._num_recomputed: int = 0
        # Where the present life began to compute.
        self._start: int = 0
        self._num_local: int = 0
        # While it waits: up to where the waiting is counted.
        self._is_waiting: bool = False
        self._waiting_since_step: int = 0
        self._waiting_since: float = 0.0

    def __reduce__(self) -> tuple[object, ...]:
        state = {
            "num_cached_tokens": self.num_cached_tokens,
            "num_external_tokens": self.num_external_tokens,
            "num_lost_tokens": self.num_lost_tokens,
            "num_blocks_peak": self.num_blocks_peak,
            "num_steps_waited": self.num_steps_waited,
            "seconds_waited": self.seconds_waited,
            "num_drafts_accepted": self.num_drafts_accepted,
            "num_drafts_rejected": self.num_drafts_rejected,
            "_num_computed": self._num_computed,
            "_num_recomputed": self._num_recomputed,
            "_start": self._start,
            "_num_local": self._num_local,
            "_is_waiting": self._is_waiting,
            "_waiting_since_step": self._waiting_since_step,
            "_waiting_since": self._waiting_since,
        }
        return RequestAccount, (self.request,), state

    def __eq__(self, other: object) -> bool:
        """The same figures of a request of the same id, wherever the account is."""
        return isinstance(other, RequestAccount) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash(self.request_id)

    def __repr__(self) -> str:
        texts = [f"{name}={value!r}" for name, value in self.as_dict().items()]
        return f"RequestAccount({', '.join(texts)})"

    def as_dict(self) -> dict[str, object]:
        """Every figure under its name."""
        return {
            "request_id": self.request_id,
            "finish": self.finish,
            "num_cached_tokens": self.num_cached_tokens,
            "num_external_tokens": self.num_external_tokens,
            "num_computed_tokens": self.num_computed_tokens,
            "num_recomputed_tokens": self.num_recomputed_tokens,
            "num_lost_tokens": self.num_lost_tokens,
            "num_preemptions": self.num_preemptions,
            "num_blocks_peak": self.num_blocks_peak,
            "num_steps_waited": self.num_steps_waited,
            "seconds_waited": self.seconds_waited,
            "num_drafts_accepted": self.num_drafts_accepted,
            "num_drafts_rejected": self.num_drafts_rejected,
        }

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_preemptions(self) -> int:
        return self.request.num_preemptions

    @property
    def finish(self) -> RequestStatus | None:
        """How it ended; None while it lives."""
        return self.request.status if self.request.is_finished else None

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that steps computed, those that had to be computed again included."""
        return self._num_computed + self.request.num_computed_tokens - self._start

    @property
    def num_recomputed_tokens(self) -> int:
        """Those of them that it had before a preemption."""
        again = min(self.request.num_computed_tokens, self.request.num_computed_before)
        return self._num_recomputed + max(0, again - self._start)

    def start(self, num_local: int, num_external: int) -> None:
        """It is admitted: a life begins behind so many tokens."""
        self._start = num_local + num_external
        self._num_local = num_local
        self.num_cached_tokens += num_local
        self.num_external_tokens += num_external

    def correct_start(self, num_valid: int) -> None:
        """Its load is over, and of all tokens that it began with only these are to be used."""
        num_local = min(self._num_local, num_valid)
        self.num_cached_tokens -= self._num_local - num_local
        self.num_external_tokens -= self._start - self._num_local - (num_valid - num_local)
        self._start = num_valid
        self._num_local = num_local

    def close_life(self) -> None:
        """It is about to lose what it has."""
        request = self.request
        self._num_recomputed = self.num_recomputed_tokens
        self._num_computed = self.num_computed_tokens
        self.num_lost_tokens += request.num_computed_tokens
        self._start = 0
        self._num_local = 0

    def wait(self, step: int, seconds: float) -> None:
        """It waits, from that step on."""
        self._is_waiting = True
        self._waiting_since_step = step
        self._waiting_since = seconds

    def count_waiting(self, step: int, seconds: float) -> None:
        """Counts the waiting up to that step, which is not one of it."""
        if self._is_waiting:
            self.num_steps_waited += step - self._waiting_since_step
            self.seconds_waited += seconds - self._waiting_since
            self._waiting_since_step = step
            self._waiting_since = seconds

    def run(self, step: int, seconds: float) -> None:
        """It waits no longer: that step computes it."""
        self.count_waiting(step, seconds)
        self._is_waiting = False

    def check(self) -> None:
        """Proves that nothing is lost between the counters."""
        has = self.num_cached_tokens + self.num_external_tokens + self.num_computed_tokens
        now = self.request.num_computed_tokens
        name = f"account of {self.request_id!r}"
        require(has == now + self.num_lost_tokens, f"{name}: {has} tokens had, {now} now, {self.num_lost_tokens} lost")
        require(0 <= self.num_recomputed_tokens <= self.num_computed_tokens, f"{name}: recomputed more than computed")
        require(self.num_recomputed_tokens <= self.num_lost_tokens, f"{name}: recomputed more than it lost")
        require(min(self.num_cached_tokens, self.num_external_tokens) >= 0, f"{name}: a negative count")


class AccountTotals(Record):
    """Sums over accounts, under their names."""

    def __init__(self) -> None:
        self.num_requests: int = 0
        self.num_cached_tokens: int = 0
        self.num_external_tokens: int = 0
        self.num_computed_tokens: int = 0
        self.num_recomputed_tokens: int = 0
        self.num_lost_tokens: int = 0
        self.num_preemptions: int = 0
        self.num_drafts_accepted: int = 0
        self.num_drafts_rejected: int = 0

    def add(self, account: RequestAccount) -> None:
        self.num_requests += 1
        self.num_cached_tokens += account.num_cached_tokens
        self.num_external_tokens += account.num_external_tokens
        self.num_computed_tokens += account.num_computed_tokens
        self.num_recomputed_tokens += account.num_recomputed_tokens
        self.num_lost_tokens += account.num_lost_tokens
        self.num_preemptions += account.num_preemptions
        self.num_drafts_accepted += account.num_drafts_accepted
        self.num_drafts_rejected += account.num_drafts_rejected


class RequestAccounting:
    """The accounts of one scheduler's requests.

    `clock`: seconds, for the times; without one they stay 0; it must not raise. `on_finish` gets the account of every
    request that ends, however it ends, once the scheduler's call is complete; what it raises surfaces from that call.
    Accounts of requests that are gone are not kept, but for their sums.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        clock: Callable[[], float] | None = None,
        on_finish: Callable[[RequestAccount], None] | None = None,
    ) -> None:
        self.manager: Final = manager
        self._clock: Final = clock
        self._on_finish: Final = on_finish
        self._accounts: Final[dict[str, RequestAccount]] = {}
        # Of requests that ended: their sums, and those that on_finish has not got yet.
        self._gone: AccountTotals = AccountTotals()
        self._ended: list[RequestAccount] = []

        # The step that is being put together, or the next one.
        self._next_step: int = 1

    def __len__(self) -> int:
        return len(self._accounts)

    def get(self, request_id: str) -> RequestAccount:
        """The account of a live request, brought up to date. UnknownRequestError when it is gone."""
        account = self._accounts.get(request_id)
        if account is None:
            raise UnknownRequestError(f"request_id={request_id!r}: not here, or finished already; see on_finish")
        self._bring_up_to_date(account)
        return account

    def totals(self) -> AccountTotals:
        """Sums over all requests so far, ended and live, in a fresh object. O(live requests)."""
        totals: AccountTotals = copy(self._gone)
        for account in self._accounts.values():
            totals.add(account)
        return totals

    def check(self) -> None:
        """Proves that nothing is lost between the counters of any account."""
        for account in self._accounts.values():
            account.check()

    # For the scheduler

    def start_step(self, step: int) -> None:
        self._next_step = step

    def close_step(self, output: SchedulerOutput) -> None:
        """The step is put together: who has got blocks may hold more than ever. Where nothing is given back before the
        end, that is seen at the end."""
        self._next_step = output.step + 1
        if self.manager.holds_all_blocks:
            return
        last_row = -1
        for entry in range(len(output.new_blocks)):
            row = int(output.new_blocks.rows[entry])
            if row != last_row:
                self._measure(self._accounts[output.request_ids[row]])
            last_row = row

    def add(self, request: Request) -> None:
        """A request came and waits."""
        account = RequestAccount(request)
        account.wait(self._next_step, self._now())
        self._accounts[request.request_id] = account

    def add_fork(self, child: Request) -> None:
        """A request runs with tokens that another one had computed."""
        account = RequestAccount(child)
        account.start(child.num_computed_tokens, 0)
        self._accounts[child.request_id] = account

    def admit(self, request: Request, num_local: int, num_external: int) -> None:
        """It has got its blocks, so many tokens of which are there already, or being loaded."""
        account = self._accounts[request.request_id]
        account.start(num_local, num_external)
        self._measure(account)

    def load(self, request: Request) -> None:
        """Its load is over; num_computed_tokens tells what is valid."""
        self._accounts[request.request_id].correct_start(request.num_computed_tokens)

    def run(self, request: Request) -> None:
        """It waits no longer."""
        self._accounts[request.request_id].run(self._next_step, self._now())

    def preempt(self, request: Request) -> None:
        """It is about to lose its blocks and tokens, and waits again."""
        account = self._accounts[request.request_id]
        self._measure(account)
        account.close_life()
        account.wait(self._next_step, self._now())

    def finish(self, request: Request) -> None:
        """It has its final status, and its blocks still."""
        account = self._accounts.pop(request.request_id)
        self._bring_up_to_date(account)
        self._gone.add(account)
        if self._on_finish is not None:
            self._ended.append(account)

    def tell(self, raised: list[BaseException]) -> None:
        """A call of the scheduler is complete: on_finish gets who ended. What it raises joins `raised`."""
        on_finish = self._on_finish
        if on_finish is None:
            return
        while self._ended:
            account = self._ended.pop(0)
            try:
                on_finish(account)
            except BaseException as error:
                raised.append(error)

    def verify_drafts(self, request: Request, draft_token_ids: list[int] | None, num_sampled: int) -> None:
        """A step of that request is back. Of the tokens sampled all but the last are accepted drafts."""
        if draft_token_ids is not None:
            account = self._accounts[request.request_id]
            account.num_drafts_accepted += num_sampled - 1
            account.num_drafts_rejected += len(draft_token_ids) - (num_sampled - 1)

    def _bring_up_to_date(self, account: RequestAccount) -> None:
        self._measure(account)
        account.count_waiting(self._next_step, self._now())

    def _measure(self, account: RequestAccount) -> None:
        num_blocks = self.manager.num_blocks_held(account.request)
        if num_blocks > account.num_blocks_peak:
            account.num_blocks_peak = num_blocks

    def _now(self) -> float:
        return 0.0 if self._clock is None else self._clock()
