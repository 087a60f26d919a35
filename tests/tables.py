"""A real scheduler and a worker's block tables behind it, over any groups.

Stack(20, full(), window(8))   20 usable blocks and those groups (tests/groups.py)
stack.add("a", 10)             a request with the prompt 0 .. 9
stack.step()                   a step: put together, applied, proved to be in step, and its tokens sent back
"""

from collections.abc import Callable
from typing import Any

from kvledger import KVCacheSpec, Request
from kvledger.core.groups.spec import MambaSpec, SlidingWindowMLASpec, SlidingWindowSpec
from kvledger.core.tables import BlockTables
from kvledger.scheduler import RequestOutput, Scheduler, SchedulerConfig, SchedulerOutput
from tests.groups import hybrid
from tests.property.worker import first_read


class Known:
    """How far the worker is with a request."""

    def __init__(self, num_tokens: int, num_computed: int) -> None:
        self.num_tokens, self.num_computed = num_tokens, num_computed


class Stack:
    def __init__(
        self,
        usable: int,
        *specs: KVCacheSpec,
        max_model_len: int = 64,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 32,
        steps_in_flight: int = 1,
        caching: bool = True,
        decisions: str = "0.33",
        **options: Any,
    ) -> None:
        self.specs = specs
        self.manager = hybrid(usable, *specs, max_model_len=max_model_len, enable_caching=caching, decisions=decisions)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_steps_in_flight=steps_in_flight,
            **options,
        )
        self.scheduler = Scheduler(self.manager, config)
        self.tables = BlockTables(self.manager.config.groups, max_num_seqs, max_model_len, decisions)
        self.known: dict[str, Known] = {}
        self.in_flight: list[tuple[SchedulerOutput, list[list[int]]]] = []
        self.num_preempted = 0

    def add(self, request_id: str, prompt: int | list[int], **options: Any) -> Request:
        added = Request(request_id, list(range(prompt)) if isinstance(prompt, int) else prompt, **options)
        self.scheduler.add_request(added)
        return added

    def row(self, request_id: str, group_id: int = 0) -> list[int]:
        return self.tables.block_ids(request_id)[group_id]

    def ids(self, request_id: str, group_id: int = 0) -> list[int]:
        """What the ledger says."""
        return self.manager.get_block_ids(request_id)[group_id]

    # Steps

    def schedule(self, accept: Callable[[int], int] = lambda num_drafts: 0) -> SchedulerOutput:
        """A step reaches the worker; its result stays there. accept(drafts of a request): how many turn out right."""
        output = self.scheduler.schedule()
        self.num_preempted += len(output.preempted_request_ids)
        rows = self.tables.apply(output)
        self.in_flight.append((output, self._execute(output, accept)))
        self.require_in_step(output, rows)
        return output

    def deliver(self) -> list[RequestOutput]:
        """The oldest step comes back."""
        return self.scheduler.update_from_output(*self.in_flight.pop(0))

    def step(self, accept: Callable[[int], int] = lambda num_drafts: 0) -> SchedulerOutput:
        output = self.schedule(accept)
        self.deliver()
        return output

    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def _execute(self, output: SchedulerOutput, accept: Callable[[int], int]) -> list[list[int]]:
        for data in output.new_requests:
            self.known[data.request_id] = Known(data.num_tokens, data.num_computed_tokens)
        sampled: list[list[int]] = []
        for request_id, num_scheduled in zip(output.request_ids, output.num_scheduled_tokens, strict=True):
            known = self.known[request_id]
            num_drafts = len(output.draft_token_ids.get(request_id, []))
            known.num_computed += num_scheduled - num_drafts
            if known.num_computed < known.num_tokens:
                sampled.append([])
                continue
            num_accepted = accept(num_drafts)
            known.num_computed += num_accepted
            known.num_tokens = known.num_computed + 1
            sampled.append([7] * num_accepted + [800_000 + known.num_computed])
        return sampled

    # What must hold after every step

    def require_in_step(self, output: SchedulerOutput, rows: list[int]) -> None:
        tables = self.tables
        tables.check()
        assert rows == [tables.row(request_id) for request_id in output.request_ids]
        assert len(set(rows)) == len(rows)
        running = {request.request_id for request in self.scheduler.running_requests()}
        assert set(output.request_ids) <= set(tables.request_ids()) <= running
        new = {data.request_id for data in output.new_requests}
        for index, request_id in enumerate(output.request_ids):
            for group_id, spec in enumerate(self.specs):
                row, truth = self.row(request_id, group_id), self.ids(request_id, group_id)
                assert len(row) == len(truth), f"{request_id}, group {group_id}: {row} is not {truth}"
                stale = [entry for entry in range(len(row)) if row[entry] != truth[entry]]
                assert not (stale and request_id in new), f"{request_id} is new, and its row {row} is not {truth}"
                end = self.num_unread_entries(spec, len(row), output.num_computed_tokens[index])
                for entry in stale:
                    assert truth[entry] == 0, f"{request_id}, group {group_id}: {row} is not {truth}"
                    assert entry < end, f"{request_id}, group {group_id}: entry {entry} is read, and null by now"

        if self.counts_are_true and self.manager.decisions.nulls_below_windows:
            self.require_own_or_null(output, rows)

    @property
    def counts_are_true(self) -> bool:
        """Whether a step starts where it says, whatever becomes of the drafts of the step before."""
        config = self.scheduler.config
        return config.max_steps_in_flight == 1 or config.num_speculative_tokens == 0

    def require_own_or_null(self, output: SchedulerOutput, rows: list[int]) -> None:
        """A step's copy of a window's table has the request's own blocks where they are read, and nobody else's."""
        starts = list(output.num_computed_tokens)
        for group_id, spec in enumerate(self.specs):
            if not rows or not isinstance(spec, (SlidingWindowSpec, SlidingWindowMLASpec)):
                continue
            copied = self.tables.step_table(group_id, rows, starts).tolist()
            for index, request_id in enumerate(output.request_ids):
                truth = self.ids(request_id, group_id)
                first = first_read(spec, starts[index]) // spec.block_size
                entries = copied[index][: len(truth)]
                assert entries[first:] == truth[first:], f"{request_id}, group {group_id}: {entries} is not {truth}"
                assert not any(entries[:first]), f"{request_id}, group {group_id}: {entries} below {first}"

    def num_unread_entries(self, spec: KVCacheSpec, num_entries: int, num_computed: int) -> int:
        """Entries at the start of a row that nobody reads once so many tokens are computed."""
        if isinstance(spec, MambaSpec):
            return num_entries - 1 - spec.num_speculative_blocks
        return first_read(spec, num_computed) // spec.block_size
