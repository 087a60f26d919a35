"""BlockTables: all rows of a worker, in step with the scheduler by its outputs alone."""

from collections.abc import Callable

import pytest
from librt.vecs import append

from kvledger import KVCacheSpec, pack_tokens
from kvledger.core.requests.tokens import TokenBuffer
from kvledger.core.tables import NO_SLOT, BlockTables
from kvledger.errors import BlockError, ConfigError, RequestError, UnknownRequestError
from kvledger.scheduler import NewRequestData, SchedulerOutput
from tests.groups import chunked, cross, full, groups_of, ring, state, window
from tests.helpers import other
from tests.tables import Stack

# A block that a running request got: its group, its place in the row, its id.
Grown = tuple[int, int, int]


def tables_of(*specs: KVCacheSpec, max_num_reqs: int = 2, max_model_len: int = 16) -> BlockTables:
    return BlockTables(groups_of(*specs), max_num_reqs, max_model_len)


def step(
    *,
    new: dict[str, tuple[list[int], ...]] | None = None,
    running: dict[str, list[Grown]] | None = None,
    preempted: tuple[str, ...] = (),
    finished: tuple[str, ...] = (),
) -> SchedulerOutput:
    """A step as the scheduler would send it. `new`: {request id: block ids per group}."""
    output = SchedulerOutput(1, 1)
    for request_id, grown in (running or {}).items():
        for group_id, position, block_id in grown:
            add_entry(output, len(output.request_ids), group_id, position, block_id)
        output.request_ids.append(request_id)
    for request_id, block_ids in (new or {}).items():
        output.request_ids.append(request_id)
        tokens = TokenBuffer(pack_tokens([0, 1, 2, 3]))
        output.new_requests.append(NewRequestData(request_id, block_ids, 0, tokens, 4, 4))
    output.preempted_request_ids = list(preempted)
    output.finished_request_ids = list(finished)
    return output


def add_entry(output: SchedulerOutput, row: int, group_id: int, position: int, block_id: int) -> None:
    grown = output.new_blocks
    grown.rows = append(grown.rows, row)
    grown.groups = append(grown.groups, group_id)
    grown.positions = append(grown.positions, position)
    grown.block_ids = append(grown.block_ids, block_id)


# What the scheduler says reaches the rows


def test_a_request_keeps_its_row_while_it_grows() -> None:
    stack = Stack(8, full())
    stack.add("a", 6, max_tokens=9)
    stack.step()
    assert stack.row("a") == [1, 2]
    stack.steps(8)
    assert stack.row("a") == [1, 2, 3, 4]
    assert stack.tables.row("a") == 0


def test_rows_come_in_the_order_of_the_step() -> None:
    stack = Stack(12, full())
    for name in "abc":
        stack.add(name, 4, max_tokens=2 if name == "b" else 8)
    stack.steps(2)
    stack.add("d", 4)
    output = stack.step()
    # b is done, and d has taken its row.
    assert output.request_ids == ["a", "c", "d"]
    assert [stack.tables.row(name) for name in output.request_ids] == [0, 2, 1]


def test_a_preempted_request_leaves_and_comes_back_as_new() -> None:
    stack = Stack(4, full())
    stack.add("a", 7)
    stack.add("b", other(7))
    stack.steps(2)
    assert (stack.row("a"), stack.row("b")) == ([1, 2], [3, 4])
    output = stack.step()
    assert output.preempted_request_ids == ["b"]
    assert stack.tables.request_ids() == ["a"]
    stack.scheduler.abort("a")
    output = stack.step()
    assert [data.request_id for data in output.new_requests] == ["b"]
    assert stack.row("b") == stack.ids("b")


def test_a_request_may_leave_and_come_back_within_one_step() -> None:
    stack = Stack(8, full())
    stack.add("a", 5)
    stack.step()
    stack.scheduler.reset_prefix_cache(preempt_running=True)
    output = stack.step()
    assert output.preempted_request_ids == output.request_ids == ["a"]
    assert stack.row("a") == stack.ids("a")


def test_an_id_that_was_aborted_can_be_used_again_at_once() -> None:
    stack = Stack(8, full())
    stack.add("a", 9)
    stack.step()
    stack.scheduler.abort("a")
    stack.add("a", other(3))
    output = stack.step()
    assert output.finished_request_ids == output.request_ids == ["a"]
    assert len(stack.row("a")) == 1


def test_a_request_that_never_ran_may_be_dropped() -> None:
    stack = Stack(8, full(), max_num_seqs=1)
    stack.add("a", 4)
    stack.add("waits", 4)
    stack.step()
    stack.scheduler.abort("waits")
    assert stack.step().finished_request_ids == ["waits"]
    assert stack.tables.request_ids() == ["a"]


def test_a_fork_has_a_row_of_its_own_that_shares_full_blocks() -> None:
    stack = Stack(8, full())
    stack.add("a", 6)
    stack.step()
    assert stack.scheduler.fork("a", ["a2"])
    output = stack.step()
    (copy,) = output.block_copies
    assert (copy.source_block_id, copy.target_block_id) == (2, 3)
    assert (stack.row("a"), stack.row("a2")) == ([1, 2], [1, 3])


def test_every_group_has_its_own_block_size_and_ids() -> None:
    stack = Stack(12, full(8), full(4))
    stack.add("a", 9, max_tokens=6)
    stack.step()
    assert [table.block_size for table in stack.tables.tables] == [8, 4]
    assert stack.tables.block_ids("a") == ([1, 2], [3, 4, 5])
    # Token 9 is the second of block 2, and of block 5.
    assert stack.tables.slots(0, [0], [9], [1]).tolist() == [17]
    assert stack.tables.slots(1, [0], [9], [1]).tolist() == [21]


def test_what_a_window_leaves_stays_in_the_row_of_a_running_request() -> None:
    stack = Stack(12, window(4))
    stack.add("a", 12, max_tokens=8)
    stack.steps(2)
    # Tokens 9 .. 12 are read from now on: blocks 1 and 2 went back to the pool, and the worker was told nothing.
    assert stack.ids("a") == [0, 0, 3, 4]
    assert stack.row("a") == [1, 2, 3, 4]


def test_a_new_request_behind_a_window_starts_with_null_blocks() -> None:
    stack = Stack(12, full(), window(4))
    stack.add("a", 17, max_tokens=1)
    stack.step()
    stack.add("b", 17)
    output = stack.step()
    assert output.ranges_by_request() == {"b": (16, 17)}
    full_row, window_row = stack.tables.block_ids("b")
    assert 0 not in full_row
    assert [block_id == 0 for block_id in window_row] == [True, True, True, False, False]
    # Its own token has a slot; none of those before it is to be written.
    assert stack.tables.slots(1, [stack.tables.row("b")], [10], [2]).tolist() == [NO_SLOT, NO_SLOT]
    assert stack.tables.slots(1, [stack.tables.row("b")], [16], [1]).tolist() == [window_row[4] * 4]


def test_states_of_earlier_steps_stay_in_the_row_too() -> None:
    stack = Stack(12, full(), state(4))
    stack.add("a", 12, max_tokens=8)
    for _ in range(6):
        stack.step()
    states = stack.tables.block_ids("a")[1]
    assert stack.ids("a", 1).count(0) > 0
    assert states[-1] == stack.ids("a", 1)[-1]
    assert 0 not in states[-2:]


@pytest.mark.parametrize(
    ("spec", "num_entries"),
    [
        (full(4), 4),
        (full(16), 1),
        (window(4, 4), 4),
        (chunked(8, 4), 4),
        (cross(10, 4), 3),
        (ring(4), 1),
        (state(16, "none"), 1),
        (state(4, "align", drafts=2), 6),
    ],
)
def test_a_row_has_room_for_the_longest_request(spec: KVCacheSpec, num_entries: int) -> None:
    assert tables_of(spec, max_model_len=16).tables[0].max_num_blocks == num_entries


# Misuse is an error that changes nothing


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (step(running={"b": []}), UnknownRequestError, "request_id='b': it has no row"),
        (step(running={"b": [(0, 0, 5)]}), UnknownRequestError, "request_id='b'"),
        (step(running={"a": []}, finished=("a",)), UnknownRequestError, "request_id='a'"),
        (step(new={"a": ([5],)}), RequestError, "new_requests: 'a' has a row already"),
        (step(new={"b": ([5], [6])}), RequestError, "block_ids of 'b': 2 groups, the worker has 1"),
        (step(running={"a": [(1, 0, 5)]}), RequestError, "new_blocks: group 1, the worker has 1 groups"),
        (step(running={"a": [(0, 3, 5)]}), RequestError, "entry 3 of row 0 in group 0 comes after 2 entries"),
        (step(running={"a": [(0, 1, 5)]}), RequestError, "apply every step once, in order"),
        (step(running={"a": [(0, 2, 5), (0, 2, 6)]}), RequestError, "entry 2 of row 0 in group 0 comes after 3"),
        (step(new={"b": ([5],), "c": ([6],)}), ConfigError, "max_num_reqs=2: the step needs 3 rows"),
        (step(new={"b": ([5, 6, 7, 8, 9],)}), ConfigError, "max_num_blocks=4: a row needs 5 blocks"),
        (step(running={"a": [(0, 2, 5), (0, 3, 6), (0, 4, 7)]}), ConfigError, "max_num_blocks=4: a row needs 5 blocks"),
        (step(running={"a": [(0, 2, 5), (0, 3, -5)]}), BlockError, "-5 is no block id"),
        (step(new={"b": ([2**31],)}), BlockError, "2147483648 is no block id"),
    ],
)
def test_a_step_that_cannot_be_is_refused_whole(output: SchedulerOutput, error: type[Exception], message: str) -> None:
    tables = tables_of(full(4))
    tables.apply(step(new={"a": ([1, 2],)}))
    with pytest.raises(error, match=message):
        tables.apply(output)
    assert tables.request_ids() == ["a"]
    assert tables.block_ids("a") == ([1, 2],)
    tables.check()


def test_a_step_that_is_applied_twice_is_found() -> None:
    tables = tables_of(full(4))
    first = step(new={"a": ([1],)})
    tables.apply(first)
    with pytest.raises(RequestError, match="steps be applied once"):
        tables.apply(first)


def test_a_new_request_listed_twice_is_found() -> None:
    tables = tables_of(full(4))
    output = step(new={"a": ([1],)})
    output.new_requests *= 2
    with pytest.raises(RequestError, match="'a' has a row already"):
        tables.apply(output)
    assert tables.num_requests == 0


def test_a_new_request_that_grows_at_once_is_found() -> None:
    tables = tables_of(full(4))
    output = step(new={"a": ([1],)})
    add_entry(output, row=0, group_id=0, position=1, block_id=2)
    with pytest.raises(RequestError, match="new_blocks has entries for a request that is new in this step"):
        tables.apply(output)
    assert tables.num_requests == 0


@pytest.mark.parametrize("question", [BlockTables.row, BlockTables.block_ids])
def test_who_asks_for_an_unknown_request_is_told(question: Callable[[BlockTables, str], object]) -> None:
    with pytest.raises(UnknownRequestError, match="request_id='x': it has no row"):
        question(tables_of(full()), "x")


def test_a_full_table_takes_a_new_request_in_the_step_that_drops_another() -> None:
    tables = tables_of(full(4))
    tables.apply(step(new={"a": ([1],), "b": ([2],)}))
    assert tables.apply(step(new={"c": ([3, 4],)}, finished=("a",), running={"b": [(0, 1, 5)]})) == [1, 0]
    assert tables.tables[0].view().tolist() == [[3, 4, 0, 0], [2, 5, 0, 0]]
    tables.check()


@pytest.mark.parametrize(
    ("groups", "sizes", "message"),
    [
        (groups_of(full()), (0, 16), "max_num_reqs=0"),
        (groups_of(full()), (2, 0), "max_model_len=0"),
        ((), (2, 16), "give at least one group"),
    ],
)
def test_tables_of_nothing_are_refused(groups: tuple[()], sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlockTables(groups, *sizes)
