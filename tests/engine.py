"""A worker without a GPU, and an engine around the real scheduler.

The worker keeps what a real one keeps (a row of block ids a request, and slots), and into every slot it writes the name
of the content that belongs there: a chain over all tokens up to that position. Before it computes a position it reads
all earlier ones through the row, as attention does, so a block that was shared wrongly, handed out twice, reused too
early or left out of the step's output is found at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from kvledger import Request
from kvledger.core.groups.decisions import LATEST_RELEASE
from kvledger.core.tables import BlockTables
from kvledger.scheduler import (
    AccountTotals,
    ExternalHit,
    ExternalKVSource,
    RequestAccount,
    RequestAccounting,
    RequestOutput,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StallDetector,
)
from tests.account_checker import AccountChecker
from tests.helpers import BLOCK_SIZE, Journal, ledger
from tests.wait_checker import WaitChecker

DRAFT = 700_000  # the token value of every draft; the accepted ones come back as they are


class Row:
    """What the worker knows of one request."""

    def __init__(self, salt: str, block_ids: list[int], token_ids: list[int], num_computed: int) -> None:
        self.salt = salt
        self.block_ids = block_ids
        self.token_ids = token_ids
        self.num_computed = num_computed

    def names(self, token_ids: list[int]) -> list[int]:
        """The content that belongs into the slot of each token."""
        name = hash(self.salt)
        chain: list[int] = []
        for token_id in token_ids:
            name = hash((name, token_id))
            chain.append(name)
        return chain


def flat_update(scheduler: Scheduler, output: SchedulerOutput, sampled: list[list[int]]) -> list[RequestOutput]:
    """update_from_output by way of update_from_tokens, for a step in which nobody samples more than one token."""
    token_ids = [tokens[0] if tokens else -1 for tokens in sampled]
    end = scheduler.update_from_tokens(output, token_ids)
    finish = {ended.request_id: ended.finish for ended in end.finished}
    return [
        RequestOutput(request_id, [token_id], finish.get(request_id))
        for row, (request_id, token_id) in enumerate(zip(output.request_ids, token_ids, strict=True))
        if token_id >= 0 and row not in end.dropped_rows
    ]


class SlotWorker:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.rows: dict[str, Row] = {}
        self.slots: dict[tuple[int, int], int] = {}
        # Whether loads have failed that the scheduler does not know of. What is computed on them is garbage then.
        self.may_be_wrong = False
        self.num_garbage = 0

    def execute(self, output: SchedulerOutput, accept: Callable[[str, int], int]) -> tuple[list[list[int]], set[str]]:
        """Runs a step. accept(request id, number of drafts): how many of the drafts turn out right. Returns what was
        sampled, and who computed on what is not its own content."""
        for request_id in output.preempted_request_ids + output.finished_request_ids:
            self.rows.pop(request_id, None)
        salts = {request.request_id: request.cache_salt for request in output.requests}
        for data in output.new_requests:
            assert data.request_id not in self.rows, "new, but never dropped"
            self.rows[data.request_id] = Row(
                salts[data.request_id], data.block_ids[0].copy(), data.token_ids, data.num_computed_tokens
            )
        new = output.new_blocks
        for row, group, position, block_id in zip(new.rows, new.groups, new.positions, new.block_ids, strict=True):
            block_ids = self.rows[output.request_ids[row]].block_ids
            assert (group, position) == (0, len(block_ids)), "a new block is not behind all others"
            block_ids.append(block_id)
        for copy in output.block_copies:
            for offset in range(self.block_size):
                if (copy.source_block_id, offset) in self.slots:
                    self.slots[copy.target_block_id, offset] = self.slots[copy.source_block_id, offset]
        plans = [self._plan(output, index) for index in range(len(output.request_ids))]
        wrong: set[str] = set()
        for request_id, start, token_ids in plans:  # a layer writes the values of all rows, then attention reads
            row = self.rows[request_id]
            if self.may_be_wrong and not self._is_right(row, token_ids[:start]):
                wrong.add(request_id)
                self.spoil(row, start, len(token_ids))
            else:
                self.write(row, token_ids, start, len(token_ids))
        sampled: list[list[int]] = []
        for request_id, _, token_ids in plans:
            if request_id not in wrong:
                self.read(request_id, token_ids)
            sampled.append(self._sample(request_id, len(token_ids), accept))
        return sampled, wrong

    def spoil(self, row: Row, start: int, end: int) -> None:
        for position in range(start, end):
            self.num_garbage -= 1
            self.slots[self._slot(row, position)] = self.num_garbage

    def _is_right(self, row: Row, token_ids: list[int]) -> bool:
        return all(self.slots.get(self._slot(row, at)) == name for at, name in enumerate(row.names(token_ids)))

    def write(self, row: Row, token_ids: list[int], start: int, end: int) -> None:
        names = row.names(token_ids)
        for position in range(start, end):
            self.slots[self._slot(row, position)] = names[position]

    def read(self, request_id: str, token_ids: list[int]) -> None:
        row = self.rows[request_id]
        for position, name in enumerate(row.names(token_ids)):
            found = self.slots.get(self._slot(row, position))
            assert found == name, f"{request_id} reads foreign content at position {position}"

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.block_ids[position // self.block_size], position % self.block_size

    def _plan(self, output: SchedulerOutput, index: int) -> tuple[str, int, list[int]]:
        """(request id, first position computed, tokens up to the last one computed)."""
        request_id = output.request_ids[index]
        row = self.rows[request_id]
        num_scheduled = output.num_scheduled_tokens[index]
        num_drafts = len(output.draft_token_ids.get(request_id, []))
        end = row.num_computed + num_scheduled - num_drafts
        assert num_scheduled - num_drafts > 0
        assert end <= len(row.token_ids), f"{request_id} is to compute tokens that nobody knows"
        return request_id, row.num_computed, row.token_ids[:end] + [DRAFT] * num_drafts

    def _sample(self, request_id: str, num_read: int, accept: Callable[[str, int], int]) -> list[int]:
        row = self.rows[request_id]
        num_drafts = max(0, num_read - len(row.token_ids))
        if num_read < len(row.token_ids):
            row.num_computed = num_read
            return []
        num_accepted = accept(request_id, num_drafts)
        row.num_computed = num_read - num_drafts + num_accepted
        sampled = [DRAFT] * num_accepted + [800_000 + row.num_computed]
        row.token_ids = row.token_ids + sampled
        return sampled


class Source(ExternalKVSource):
    """An external store that offers what a test tells it to; None in `offers`: it does not know yet."""

    def __init__(self) -> None:
        self.offers: dict[str, ExternalHit | None] = {}
        self.lookups: list[str] = []
        self.taken: dict[str, int] = {}
        self.block_ids: dict[str, list[int]] = {}
        # Synchronous loads that will fail: how many of the request's tokens have values.
        self.failing: dict[str, int] = {}

    def lookup(self, request: Request, num_local_tokens: int) -> ExternalHit | None:
        self.lookups.append(request.request_id)
        return self.offers.get(request.request_id, ExternalHit(0))

    def allocated(self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int) -> None:
        self.taken[request.request_id] = num_external_tokens
        self.block_ids[request.request_id] = block_ids[0]


class Engine:
    """The scheduler, one worker, and an external store, with every check() after every step."""

    def __init__(
        self,
        usable: int,
        block_size: int = BLOCK_SIZE,
        *,
        max_model_len: int = 256,
        caching: bool = True,
        watermark: float = 0.0,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        with_source: bool = True,
        decisions: str = LATEST_RELEASE,
        **options: Any,
    ) -> None:
        self.journal = Journal()
        self.manager = ledger(
            usable,
            block_size,
            max_model_len,
            enable_caching=caching,
            watermark=watermark,
            observer=self.journal,
            decisions=decisions,
        )
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **options
        )
        self.source = Source()
        self.accounts: dict[str, RequestAccount] = {}
        self.ended: list[RequestAccount] = []
        self.accounting = RequestAccounting(self.manager, self.clock, self.take_account)
        self.scheduler = Scheduler(self.manager, self.config, self.source if with_source else None, self.accounting)
        self.stall_detector = StallDetector(self.scheduler, max_steps=30)
        self.wait_checker = WaitChecker(self.scheduler)
        self.account_checker = AccountChecker(self.scheduler, self.accounting)
        self.worker = SlotWorker(block_size)
        self.tables = BlockTables(self.manager.config.groups, max_num_seqs, max_model_len)
        self.usable = usable
        self.finished: dict[str, str] = {}
        # Who started over when loads failed the last time.
        self.restarted: list[str] = []
        self.tokens: dict[str, list[int]] = {}
        self.preemptions: dict[str, int] = {}
        self.in_flight: list[tuple[SchedulerOutput, list[list[int]]]] = []
        # Of steps in flight: synchronous loads that failed, and who computed on what is not there.
        self.failed_loads: dict[int, dict[str, int]] = {}
        self.wrong_rows: dict[int, set[str]] = {}

    def clock(self) -> float:
        """Ten seconds a step, from 0 before the first one."""
        return 10.0 * self.scheduler.num_steps

    def take_account(self, account: RequestAccount) -> None:
        self.accounts[account.request_id] = account
        self.ended.append(account)
        costs = self.account_checker.costs.get(account.request_id)
        if costs is not None:
            self.account_checker.compare_one(costs, account)

    def add(self, request_id: str, prompt: int | list[int], **options: Any) -> Request:
        added = Request(request_id, list(range(prompt)) if isinstance(prompt, int) else prompt, **options)
        self.scheduler.add_request(added)
        self.account_checker.add(added)
        self.tokens[request_id] = []
        return added

    def schedule(self, accept: Callable[[str, int], int] = lambda request_id, num_drafts: 0) -> SchedulerOutput:
        """Puts a step together and lets the worker run it; the result stays with the worker."""
        output = self.scheduler.schedule()
        for request_id in output.preempted_request_ids:
            self.preemptions[request_id] = self.preemptions.get(request_id, 0) + 1
        for request_id in output.errors:
            self.finished[request_id] = "error"
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens)
        assert output.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
        self.tables.apply(output)
        self._load_synchronous(output)
        self.wait_checker.check(output)
        self.account_checker.scheduled(output)
        self.stall_detector.watch(output)
        self.worker.may_be_wrong = any(self.failed_loads.values())
        sampled, self.wrong_rows[output.step] = self.worker.execute(output, accept)
        self.in_flight.append((output, sampled))
        self.check()
        return output

    def deliver(self) -> list[RequestOutput]:
        """The oldest step comes back."""
        output, sampled = self.in_flight.pop(0)
        # Both doors in turns, which must not differ.
        is_flat = output.step % 2 == 0 and all(len(tokens) <= 1 for tokens in sampled)
        update = partial(flat_update, self.scheduler) if is_flat else self.scheduler.update_from_output
        failed = self.failed_loads.pop(output.step)
        if failed:
            self.restarted = self.scheduler.fail_loads(output, failed)
            self.check()
        wrong = self.wrong_rows.pop(output.step)
        self.account_checker.returned(output, sampled)
        gains = update(output, sampled)
        assert wrong.isdisjoint(gained.request_id for gained in gains), "tokens that were computed on nothing"
        for gained in gains:
            self.tokens[gained.request_id] += gained.new_token_ids
            if gained.finish is not None:
                self.finished[gained.request_id] = gained.finish.name
        self.check()
        return gains

    def step(self, accept: Callable[[str, int], int] = lambda request_id, num_drafts: 0) -> SchedulerOutput:
        output = self.schedule(accept)
        self.deliver()
        return output

    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def run(self, max_steps: int = 500) -> int:
        """Steps until nothing is left to do. Fails after max_steps; returns how many it took."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_unfinished_requests:
                return num_steps
            self.step()
        raise AssertionError(f"no end after {max_steps} steps: {self.describe()}")

    def load(self, request_id: str, num_valid: int | None = None) -> None:
        """The external store has delivered num_valid tokens of the request (all that were asked for, if None)."""
        waiting = self.scheduler.get_request(request_id)
        num_local = waiting.num_computed_tokens - self.source.taken.pop(request_id)
        num_valid = waiting.num_computed_tokens if num_valid is None else num_valid
        self._write(waiting, self.source.block_ids[request_id], num_valid, max(0, num_valid - num_local))
        self.scheduler.external_load_finished(request_id, num_valid)

    def ids(self, request_id: str) -> list[int]:
        return self.manager.get_block_ids(request_id)[0]

    def check(self) -> None:
        self.scheduler.check()
        occupancy = self.manager.occupancy()
        assert occupancy.live + occupancy.cached + occupancy.unused == self.usable
        assert 0.0 <= self.manager.usage <= 1.0
        self.tables.check()
        totals = AccountTotals()
        for account in self.ended + [self.accounting.get(request_id) for request_id in self.scheduler._state.requests]:
            totals.add(account)
        assert self.accounting.totals() == totals
        # Every block handed out was in exactly one step's output: the worker's rows are the ledger's tables.
        for running in self.scheduler.running_requests():
            row = self.worker.rows.get(running.request_id)
            if row is not None:  # else forked, and not sent yet
                assert row.block_ids == self.ids(running.request_id), running.request_id
                assert row.block_ids == self.tables.block_ids(running.request_id)[0], running.request_id

    def describe(self) -> str:
        return (
            f"{self.scheduler.num_running} running, {self.scheduler.num_waiting} waiting, "
            f"{self.manager.num_free_blocks} of {self.usable} blocks free"
        )

    def _load_synchronous(self, output: SchedulerOutput) -> None:
        """What the store promised to deliver within the step."""
        failed = self.failed_loads[output.step] = {}
        for data in output.new_requests:
            num_external = self.source.taken.pop(data.request_id, 0)
            if num_external > 0:
                loaded = next(r for r in output.requests if r.request_id == data.request_id)
                end, num_local = data.num_computed_tokens, data.num_computed_tokens - num_external
                num_valid = min(self.source.failing.pop(data.request_id, end), end)
                self._write(loaded, data.block_ids[0], num_valid, max(0, num_valid - num_local))
                if num_valid < end:
                    failed[data.request_id] = num_valid
                    self.worker.spoil(Row("", data.block_ids[0], [], 0), max(num_valid, num_local), end)

    def _write(self, request: Request, block_ids: list[int], end: int, num_external: int) -> None:
        row = Row(request.cache_salt, block_ids, [], 0)
        self.worker.write(row, request.tokens.token_ids(0, end), end - num_external, end)
