"""BlockTables: all tables of one worker, one for each KV cache group, kept in step with the scheduler by its outputs.

A request has one row, the same in all tables, from the step that brings it as new to the one that says it was preempted
or is finished. A preempted request leaves like a finished one and comes back as new. Rows are reused.

What the ledger takes back from a request that runs on (blocks behind a sliding window, states of earlier steps), it
does not say: the row keeps their ids, and somebody else may own them by now. That is safe, because attention never
reads there and no token is ever written there again, and it saves a message for every block. A new row has null blocks
in those places. vLLM does the same; from 0.33 on a step's own copy has null blocks below windows in any row.
"""

from typing import Final

from kvledger.core.blocks.new_blocks import NewBlocks
from kvledger.core.groups.decisions import LATEST_RELEASE, Decisions, decisions_of
from kvledger.core.groups.spec import (
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvledger.core.scheduler.output import SchedulerOutput
from kvledger.core.tables.block_table import BlockTable
from kvledger.core.tables.slots import slot_mapping
from kvledger.core.tables.step_table import step_table
from kvledger.core.units import MAX_COUNT, require_positive
from kvledger.errors import RequestError, UnknownRequestError, require, wrong_value


def num_table_entries(spec: KVCacheSpec, max_model_len: int) -> int:
    """Most entries that the table of one request of max_model_len tokens has, null blocks included."""
    num_entries = spec.max_blocks_per_request(max_model_len)
    # Drafts have states of their own, behind the running one.
    return num_entries + spec.num_speculative_blocks if isinstance(spec, MambaSpec) else num_entries


def num_readable_tokens(spec: KVCacheSpec) -> int:
    """Tokens before the first one of a step that its attention can read; -1 where that is all of them, or no window."""
    if isinstance(spec, (SlidingWindowSpec, SlidingWindowMLASpec)):
        return spec.sliding_window - 1 + spec.extra_retained_tokens
    return -1


class BlockTables:
    """The block tables of one worker: `tables[group_id]`, and which row is whose.

    `groups`: as the ledger has them. `max_num_reqs`: requests that run at a time (the scheduler's max_num_seqs).
    `decisions`: the release of vLLM whose workers' tables step_table() makes. One owner thread.
    """

    def __init__(
        self,
        groups: tuple[KVCacheGroupSpec, ...],
        max_num_reqs: int,
        max_model_len: int,
        decisions: str | Decisions = LATEST_RELEASE,
    ) -> None:
        require_positive("max_num_reqs", max_num_reqs, MAX_COUNT)
        require_positive("max_model_len", max_model_len, MAX_COUNT)
        if not groups:
            raise wrong_value("groups", groups, "no layer keeps a KV cache", "give at least one group")
        self.max_num_reqs: Final = max_num_reqs
        self.tables: Final[list[BlockTable]] = [
            BlockTable(max_num_reqs, num_table_entries(group.spec, max_model_len), group.spec.block_size)
            for group in groups
        ]
        nulls = decisions_of(decisions).nulls_below_windows
        self._num_readable: Final[list[int]] = [num_readable_tokens(group.spec) if nulls else -1 for group in groups]
        self._rows: Final[dict[str, int]] = {}
        # The last one is the next to be used, so that few rows stay busy.
        self._free_rows: Final[list[int]] = list(range(max_num_reqs - 1, -1, -1))

    @property
    def num_requests(self) -> int:
        """Requests that have a row."""
        return len(self._rows)

    def request_ids(self) -> list[str]:
        """Requests that have a row, in the order in which they came, in a fresh list."""
        return list(self._rows)

    def row(self, request_id: str) -> int:
        """UnknownRequestError for a request without one."""
        row = self._rows.get(request_id)
        if row is None:
            raise _unknown(request_id)
        return row

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Block ids of a request per group, in fresh lists; of blocks taken back meanwhile too (see the module)."""
        row = self.row(request_id)
        return tuple([table.block_ids(row) for table in self.tables])

    def slots(
        self, group_id: int, rows: list[int], starts: list[int], num_tokens: list[int], num_slots: int = 0
    ) -> memoryview:
        """slot_mapping in that group's table."""
        return slot_mapping(self.tables[group_id], rows, starts, num_tokens, num_slots)

    def step_table(self, group_id: int, rows: list[int], starts: list[int], num_rows: int = 0) -> memoryview:
        """That group's table for one step: the rows that apply() returned, `starts` the output's num_computed_tokens,
        padded to num_rows rows. Below a sliding window it has null blocks, or old ids as 0.32 (see `decisions`)."""
        return step_table(self.tables[group_id], rows, starts, self._num_readable[group_id], num_rows)

    def apply(self, output: SchedulerOutput) -> list[int]:
        """Brings the tables up to a step, in the order of steps, and returns the row of each of its requests, in order.

        UnknownRequestError for a running request without a row, RequestError for a new one that has a row, for a wrong
        number of groups or when a step before this one is missing, ConfigError for tables that are too small,
        BlockError for a wrong id; all change nothing.
        """
        dropped = self._rows_to_drop(output)
        new_ids = self._require_sound_new(output, dropped)
        rows = self._rows_of_step(output, dropped, new_ids)
        self._require_sound_growth(output.new_blocks, rows)
        for request_id in dropped:
            row = self._rows.pop(request_id)
            self._free_rows.append(row)
            for table in self.tables:
                table.clear_row(row)
        for data in output.new_requests:
            row = self._free_rows.pop()
            self._rows[data.request_id] = row
            for group_id, block_ids in enumerate(data.block_ids):
                self.tables[group_id].set_row(row, block_ids)
        grown = output.new_blocks
        for index in range(len(grown)):
            self.tables[grown.groups[index]].append_row(rows[grown.rows[index]], [int(grown.block_ids[index])])
        if new_ids:
            for index, request_id in enumerate(output.request_ids):
                if rows[index] < 0:
                    rows[index] = self._rows[request_id]
        return rows

    def check(self) -> None:
        """Proves that every row belongs to one request or is free, that free rows are empty, and every table."""
        require(
            sorted([*self._rows.values(), *self._free_rows]) == list(range(self.max_num_reqs)),
            "a row belongs to two requests, or to none and is not free",
        )
        for table in self.tables:
            table.check()
            for row in self._free_rows:
                require(table.num_blocks(row) == 0, f"free row {row} holds blocks")

    def _rows_to_drop(self, output: SchedulerOutput) -> dict[str, None]:
        """Requests that lose their rows. Others of the lists were never sent: aborted while they waited, or forked and
        preempted before their first step. A request may be in both lists, and come back as new in the same step."""
        gone = output.preempted_request_ids + output.finished_request_ids
        return {request_id: None for request_id in gone if request_id in self._rows}

    def _require_sound_new(self, output: SchedulerOutput, dropped: dict[str, None]) -> set[str]:
        """The ids of new requests. Raises unless each is new indeed and fits."""
        new_ids: set[str] = set()
        for data in output.new_requests:
            request_id = data.request_id
            if request_id in new_ids or (request_id in self._rows and request_id not in dropped):
                raise RequestError(
                    f"new_requests: {request_id!r} has a row already; it must be in preempted_request_ids or "
                    "finished_request_ids before it comes as new, and steps be applied once; nothing was changed"
                )
            new_ids.add(request_id)
            if len(data.block_ids) != len(self.tables):
                raise RequestError(
                    f"block_ids of {request_id!r}: {len(data.block_ids)} groups, the worker has {len(self.tables)}; "
                    "give both the same KVCacheConfig; nothing was changed"
                )
            for group_id, block_ids in enumerate(data.block_ids):
                self.tables[group_id].require_fits(0, block_ids)
        num_rows = len(self._rows) - len(dropped) + len(new_ids)
        if num_rows > self.max_num_reqs:
            fix = "give at least the scheduler's max_num_seqs; nothing was changed"
            raise wrong_value("max_num_reqs", self.max_num_reqs, f"the step needs {num_rows} rows", fix)
        return new_ids

    def _rows_of_step(self, output: SchedulerOutput, dropped: dict[str, None], new_ids: set[str]) -> list[int]:
        """The row of each request of the step, -1 for new ones. Raises unless running ones have rows."""
        rows: list[int] = []
        get = self._rows.get
        for request_id in output.request_ids:
            row = get(request_id, -1)
            if row < 0 or (dropped and request_id in dropped):
                if request_id not in new_ids:
                    raise _unknown(request_id)
                row = -1
            rows.append(row)
        return rows

    def _require_sound_growth(self, grown: NewBlocks, rows: list[int]) -> None:
        """Raises unless each entry goes right behind what its row has, or behind the entry before it, and fits."""
        last_row, last_group, last_position = -1, -1, -1
        for index in range(len(grown)):
            row, group, position = rows[grown.rows[index]], int(grown.groups[index]), int(grown.positions[index])
            if row < 0:
                raise RequestError(
                    "new_blocks has entries for a request that is new in this step, whose blocks are all in "
                    "new_requests; nothing was changed"
                )
            if not 0 <= group < len(self.tables):
                raise RequestError(
                    f"new_blocks: group {group}, the worker has {len(self.tables)} groups; give both the same "
                    "KVCacheConfig; nothing was changed"
                )
            table = self.tables[group]
            continues = row == last_row and group == last_group
            num_before = last_position + 1 if continues else table.num_blocks(row)
            if position != num_before:
                raise RequestError(
                    f"new_blocks: entry {position} of row {row} in group {group} comes after {num_before} entries; "
                    "apply every step once, in order; nothing was changed"
                )
            table.require_fits(num_before, [int(grown.block_ids[index])])
            last_row, last_group, last_position = row, group, position


def _unknown(request_id: str) -> UnknownRequestError:
    return UnknownRequestError(
        f"request_id={request_id!r}: it has no row; it never came as a new request, or was dropped since; nothing was "
        "changed"
    )
