"""A random life of the scheduler with an external source, over groups of all kinds, and workers that know contents.

A step runs when it comes back, as late as it can; a load writes as soon as it is asked for, or when it reports. So
whatever both could write is found. Loads arrive whole, in part, or not at all. A token that counts was computed from
blocks that hold what it reads: those are the rows that must be right. The others must gain nothing.
"""

import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvledger import Request, RequestStatus
from kvledger.core.groups.aligned_mamba import StateBlocks
from kvledger.core.groups.spec import CircularBufferSpec, CrossAttentionSpec, MambaSpec
from kvledger.errors import RequestTooLargeError
from kvledger.scheduler import (
    ExternalHit,
    ExternalKVSource,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SchedulingPolicy,
)
from tests.conftest import LONG
from tests.groups import managers_of, tables
from tests.property.test_hybrid_machine import draw_layout
from tests.property.worker import Sequence, Table, Worker, first_read

STOP = 7


class Store(ExternalKVSource):
    """Has the first `has[request]` tokens of a request; None: it does not know. `later`: it delivers later."""

    def __init__(self) -> None:
        self.has: dict[str, int | None] = {}
        self.later: set[str] = set()
        self.calls: list[tuple[Request, list[Table], int]] = []

    def lookup(self, request: Request, num_local_tokens: int) -> ExternalHit | None:
        num_tokens = self.has.get(request.request_id, 0)
        if num_tokens is None:
            return None
        return ExternalHit(max(0, num_tokens - num_local_tokens), request.request_id in self.later)

    def allocated(self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self.calls.append((request, list(block_ids), num_external_tokens))


@dataclass
class Load:
    """Tokens [start, end) on their way into these tables."""

    request: Request
    tables: list[Table]
    start: int
    end: int
    is_written: bool = False


@dataclass
class Row:
    """What a step computes for one request."""

    seq: Sequence
    start: int
    num_new: int
    tables: list[Table]
    checkpoints: dict[int, tuple[int, int]]
    load: Load | None


@dataclass
class Sent:
    output: SchedulerOutput
    rows: list[Row] = field(default_factory=list)


class Life:
    """One ledger, scheduler, store and worker; everything that happens is drawn from `rng`."""

    def __init__(self, rng: random.Random) -> None:
        layout = draw_layout(rng)
        while layout.num_state_drafts:
            layout = draw_layout(rng)
        # What steps in flight may hold is bounded by the model's length.
        layout.num_in_flight = None
        self.rng, self.specs = rng, layout.specs
        self.manager = layout.build(rng.randint(30, 90))
        self.worker = Worker(self.specs, [manager.block_size for manager in managers_of(self.manager)])
        self.store = Store()
        config = SchedulerConfig(
            max_num_seqs=rng.randint(2, 6),
            max_num_batched_tokens=rng.randint(16, 40),
            policy=rng.choice(list(SchedulingPolicy)),
            reserve_full_sequence=rng.random() < 0.5,
            max_steps_in_flight=rng.randint(1, 2),
        )
        self.scheduler = Scheduler(self.manager, config, self.store)
        self.steps = config.max_steps_in_flight
        self.seqs: dict[str, Sequence] = {}
        self.loads: dict[str, Load] = {}
        self.in_flight: list[Sent] = []
        self.has_failed = False
        self.added: set[str] = set()

    def live(self, num_moves: int) -> None:
        moves = [self.add] * 4 + [self.go_on] * 6 + [self.report] * 4
        moves += [self.source_changes, self.abort, self.come_back, self.reset, self.evict]
        for _ in range(num_moves):
            self.rng.choice(moves)()
            self.scheduler.check()

    def pick(self, *statuses: RequestStatus) -> Request | None:
        live = self.scheduler.running_requests() + self.scheduler.waiting_requests()
        found = [each for each in live if not statuses or each.status in statuses]
        return self.rng.choice(found) if found else None

    # Requests come and go

    def add(self) -> None:
        rng, name = self.rng, str(len(self.added))
        self.offer(name)
        shared, family = rng.randint(0, 24), rng.randint(1, 2)
        request = Request(
            name,
            list(range(shared)) + [1000 * family + n for n in range(rng.randint(1, 9))],
            max_tokens=rng.randint(1, 9),
            priority=rng.randint(0, 2),
            arrival_time=len(self.added),
            stop_token_ids=(STOP,) if rng.random() < 0.5 else (),
            num_encoder_tokens=5,
        )
        self.added.add(name)
        with suppress(RequestTooLargeError):
            self.scheduler.add_request(request)

    def offer(self, name: str) -> None:
        self.store.has[name] = self.rng.choice([0, None, 3, 4, 6, 8, 12, 16, 24, 99])
        (self.store.later.add if self.rng.random() < 0.6 else self.store.later.discard)(name)

    def source_changes(self) -> None:
        request = self.pick(RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if request is not None:
            self.offer(request.request_id)

    def abort(self) -> None:
        request = self.pick()
        if request is not None:
            self.scheduler.abort(request.request_id)

    # Steps

    def go_on(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            if len(self.in_flight) == self.steps:
                self.come_back()
            self.send()

    def send(self) -> None:
        output = self.scheduler.schedule()
        sync_loads = self.note_loads()
        new = {data.request_id: data for data in output.new_requests}
        sent = Sent(output)
        for index, request in enumerate(output.requests):
            name, start = request.request_id, int(output.num_computed_tokens[index])
            if name in new:
                self.seqs[name] = Sequence(name, new[name].token_ids, request.num_encoder_tokens)
                self.seqs[name].num_done = start
            records = self.manager._coordinator.require_held(name).groups
            checkpoints = {
                group: (record.checkpoint, record.checkpoint_index)
                for group, record in enumerate(records)
                if isinstance(record, StateBlocks) and record.checkpoint > 0
            }
            held = [list(table) for table in tables(self.manager, request)]
            num_new = int(output.num_scheduled_tokens[index])
            sent.rows.append(Row(self.seqs[name], start, num_new, held, checkpoints, sync_loads.get(name)))
        self.in_flight.append(sent)

    def note_loads(self) -> dict[str, Load]:
        """What the step asked the store for: returns what it waits for, and starts the rest."""
        within: dict[str, Load] = {}
        for request, block_ids, num_external in self.store.calls:
            name, end = request.request_id, int(request.num_computed_tokens)
            if request.status is RequestStatus.WAITING_FOR_EXTERNAL_KV:
                self.loads[name] = Load(request, block_ids, end - num_external, end)
                if self.rng.random() < 0.5:
                    self.write_load(self.loads[name], end)
            else:
                start = next(data.num_computed_tokens for data in self.sent_now if data.request_id == name)
                within[name] = Load(request, block_ids, start - num_external, start)
        self.store.calls.clear()
        return within

    @property
    def sent_now(self) -> list[Any]:
        return self.scheduler._state.in_flight[-1].new_requests

    def write_load(self, load: Load, num_valid: int) -> None:
        """Tokens up to num_valid arrive. What should have come behind them is garbage."""
        load.is_written = True
        token_ids = load.request.tokens.token_ids(0, load.end)
        seq = Sequence(load.request.request_id, token_ids, 0)
        if num_valid >= load.end:
            self.worker.load(seq, load.tables, load.start, load.end)
            return
        names = self.worker.names(token_ids)
        # Nothing is loaded into a group in host memory that has it: its blocks may be others' hits.
        for group, spec in enumerate(self.specs):
            size, table = self.worker.block_sizes[group], load.tables[group]
            if isinstance(spec, MambaSpec):
                self.worker.write(group, table[(load.end - 1) // size], 0, self.worker.garbage())
            if isinstance(spec, (CrossAttentionSpec, CircularBufferSpec, MambaSpec)):
                continue
            for position in range(load.start, load.end):
                block = table[position // size] if position // size < len(table) else 0
                has_it = self.worker.slots[group].get((block, position % size)) == names[position]
                if block != 0 and not (has_it and self.worker.has_own_pool(group)):
                    content = names[position] if position < num_valid else self.worker.garbage()
                    self.worker.write(group, block, position % size, content)

    def come_back(self) -> None:
        if not self.in_flight:
            return
        sent = self.in_flight.pop(0)
        output = sent.output
        failed, wrong, sampled = self.execute(sent)
        assert not wrong or failed or self.has_failed, f"{wrong} computed on what is not theirs"
        if failed:
            self.scheduler.fail_loads(output, failed)
            self.scheduler.check()
        # A step that was out already when they failed may still run on what they were to fill.
        self.has_failed = bool(failed)
        for gained in self.scheduler.update_from_output(output, sampled):
            assert gained.request_id not in wrong, f"{gained.request_id} gained what it computed on nothing"

    def execute(self, sent: Sent) -> tuple[dict[str, int], set[str], list[list[int]]]:
        """Runs a step. Returns the loads that failed in it, who computed on foreign content, and what was sampled."""
        self.worker.copy(sent.output.block_copies)
        failed: dict[str, int] = {}
        for row in sent.rows:
            load = row.load
            if load is not None:
                num_valid = load.end if self.rng.random() < 0.7 else self.rng.randint(0, load.end)
                self.write_load(load, num_valid)
                if num_valid < load.end:
                    failed[load.request.request_id] = num_valid
        wrong: set[str] = set()
        # States are read before the step writes any.
        for row in sent.rows:
            row.seq.num_done = row.start
            try:
                self.worker.recur_read(row.seq, row.tables)
            except AssertionError:
                wrong.add(row.seq.key)
        for row in sent.rows:
            if row.seq.key in wrong or not self.holds_all_it_reads(row):
                wrong.add(row.seq.key)
            known = row.start if row.seq.key in wrong else row.start + row.num_new
            self.worker.attend(row.seq, row.tables, row.num_new, 0, known)
        sampled: list[list[int]] = []
        for row in sent.rows:
            end = row.start + row.num_new
            if row.seq.key in wrong:
                self.spoil_states(row)
            else:
                self.worker.read(row.seq, row.tables, row.num_new, end)
                self.worker.recur_write(row.seq, row.tables, row.num_new, end, row.checkpoints)
            row.seq.num_done = end
            is_through = end >= len(row.seq.tokens)
            token = STOP if self.rng.random() < 0.1 else 5000 + end
            sampled.append([token] if is_through else [])
            row.seq.tokens += sampled[-1]
        return failed, wrong, sampled

    def holds_all_it_reads(self, row: Row) -> bool:
        """Whether all tokens before the step's own that it reads are there; rows before it have written by now."""
        names = self.worker.names(row.seq.tokens[: row.start])
        for group, spec in enumerate(self.specs):
            if isinstance(spec, (CrossAttentionSpec, CircularBufferSpec, MambaSpec)):
                continue
            size, table = self.worker.block_sizes[group], row.tables[group]
            for position in range(first_read(spec, row.start), row.start):
                block = table[position // size]
                if block == 0 or self.worker.slots[group].get((block, position % size)) != names[position]:
                    return False
        return True

    def spoil_states(self, row: Row) -> None:
        for group, spec in enumerate(self.specs):
            if isinstance(spec, MambaSpec):
                table = row.tables[group]
                self.worker.write(group, table[-1], 0, self.worker.garbage())
                if group in row.checkpoints:
                    self.worker.write(group, table[row.checkpoints[group][1]], 0, self.worker.garbage())

    # The store

    def report(self) -> None:
        if not self.loads:
            return
        name = self.rng.choice(list(self.loads))
        load = self.loads.pop(name)
        num_valid = self.rng.choice([load.end, load.end, self.rng.randint(load.start, load.end), 0])
        if not load.is_written or num_valid < load.end:
            self.write_load(load, num_valid)
        assert self.scheduler.external_load_finished(name, num_valid)
        self.offer(name)

    # The cache as a whole

    def reset(self) -> None:
        if self.rng.random() < 0.3:
            self.scheduler.reset_prefix_cache(preempt_running=self.rng.random() < 0.5)

    def evict(self) -> None:
        self.manager.evict_blocks([self.rng.randint(1, self.manager.num_usable_blocks) for _ in range(3)])

    def end(self) -> None:
        """Everything that was accepted ends, and every block comes back."""
        for _ in range(400 + 40 * len(self.added)):
            if not (self.scheduler.has_unfinished_requests or self.in_flight or self.loads):
                break
            self.store.has.clear()
            for name in list(self.loads):
                load = self.loads.pop(name)
                self.write_load(load, load.end)
                self.scheduler.external_load_finished(name, load.end)
            if self.in_flight and (len(self.in_flight) == self.steps or not self.scheduler.has_unfinished_requests):
                self.come_back()
            else:
                self.send()
        waits = [str(each) for each in self.scheduler.explain_all()]
        assert not self.scheduler.has_unfinished_requests, f"no end: {waits}"
        self.scheduler.check()
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks


@pytest.mark.parametrize("seed", range(150 * LONG))
def test_no_token_is_computed_from_foreign_content(seed: int) -> None:
    life = Life(random.Random(seed))
    life.live(80)
    life.end()
