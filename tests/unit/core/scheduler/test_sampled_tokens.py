"""Tokens on their way back: each row is looked at before any request is changed. A wrong row is named, the step stays
in flight, and what follows is as if the wrong call had never been."""

from random import Random
from typing import Any

import numpy as np
import pytest

from kvledger import Request
from kvledger.errors import RequestError
from kvledger.scheduler import Scheduler, SchedulerConfig, SchedulerOutput, SchedulingPolicy
from tests.helpers import cached_ids, ledger, other


def scheduler_of(*lengths: int, budget: int = 100, max_tokens: int = 3, **options: Any) -> Scheduler:
    """One request a length, named a, b, c, ..."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, **options)
    scheduler = Scheduler(ledger(usable=40), config)
    for index, length in enumerate(lengths):
        request = Request("abcdef"[index], other(length, family=index), max_tokens=max_tokens, stop_token_ids=(99,))
        scheduler.add_request(request)
    return scheduler


def state_of(scheduler: Scheduler) -> list[tuple[object, ...]]:
    return [
        (
            request.request_id,
            request.status,
            request.tokens.token_ids(0, request.num_tokens),
            len(request.tokens),
            request.num_computed_tokens,
            request.num_in_flight_tokens,
            request.num_output_placeholders,
            request.num_stale_tokens,
            request.draft_token_ids,
            scheduler.manager.get_block_ids(request.request_id),
        )
        for request in scheduler.running_requests()
    ]


def update(scheduler: Scheduler, output: SchedulerOutput, rows: list[Any], is_flat: bool) -> None:
    """Brings back one token a row; None for none."""
    if is_flat:
        scheduler.update_from_tokens(output, [-1 if token is None else token for token in rows])
    else:
        scheduler.update_from_output(output, [[] if token is None else [token] for token in rows])


@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("wrong", [-2, 2**32, 2**64, -(2**63), 1.5, "7", np.int64(7), [7], None])
def test_a_wrong_token_is_named_and_nothing_is_changed(wrong: Any, position: int, is_flat: bool):
    scheduler = scheduler_of(5, 6, 7)
    output = scheduler.schedule()
    before = state_of(scheduler)
    rows: list[Any] = [99, 11, 12]  # the first one ends
    rows[position] = wrong

    with pytest.raises(RequestError, match=rf"token_ids\[{position}\].*'{'abc'[position]}'.*still in flight"):
        update(scheduler, output, rows, is_flat)

    assert state_of(scheduler) == before
    scheduler.check()
    update(scheduler, output, [99, 11, 12], is_flat)
    assert [request.output_token_ids() for request in scheduler.running_requests()] == [[11], [12]]
    scheduler.check()


@pytest.mark.parametrize("is_flat", [True, False])
def test_a_prompt_that_is_not_through_has_no_token(is_flat: bool):
    scheduler = scheduler_of(5, 20, budget=16)
    output = scheduler.schedule()  # a whole, 11 of b
    before = state_of(scheduler)
    with pytest.raises(RequestError, match=r"\[1\]: a token for request 'b', whose prompt is computed up to 11 of 20"):
        update(scheduler, output, [7, 8], is_flat)
    assert state_of(scheduler) == before
    update(scheduler, output, [7, None], is_flat)
    scheduler.check()


@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_request_that_is_through_has_one(is_flat: bool, steps: int):
    scheduler = scheduler_of(5, 6, max_steps_in_flight=steps)
    output = scheduler.schedule()
    with pytest.raises(RequestError, match=r"\[1\]: no token for request 'b', which is through"):
        update(scheduler, output, [7, None], is_flat)
    update(scheduler, output, [7, 8], is_flat)
    scheduler.check()


@pytest.mark.parametrize("is_flat", [True, False])
def test_who_has_ended_or_was_preempted_may_have_any_token_or_none(is_flat: bool):
    for rows in ([7, 8, 9], [None, None, 9]):
        scheduler = scheduler_of(5, 6, 7)
        output = scheduler.schedule()
        scheduler.abort("a")
        scheduler._state.preempt(scheduler.get_request("b"), drop_stale_output=True)
        update(scheduler, output, rows, is_flat)
        scheduler.check()
        with pytest.raises(RequestError, match="not the oldest"):
            update(scheduler, output, rows, is_flat)


def test_rows_are_lists():
    scheduler = scheduler_of(5, 6)
    output = scheduler.schedule()
    for rows in ([[7], (8,)], [[7], 8], [[7], None], [[7], np.array([8])]):
        with pytest.raises((RequestError, TypeError)):
            scheduler.update_from_output(output, rows)
    scheduler.update_from_output(output, [[7], [8]])
    scheduler.check()


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapping": {"max_steps_in_flight": 2},
    "drafts": {"num_speculative_tokens": 2},
    "overlapping drafts": {"num_speculative_tokens": 2, "max_steps_in_flight": 2},
    "priority": {"policy": SchedulingPolicy.PRIORITY},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_wrong_calls_leave_no_trace(name: str):
    """The same random life twice, once with a wrong call before each right one: every step is the same."""
    num_refused = 0
    for seed in range(25):
        quiet, refused = _random_life(seed, CONFIGS[name], disturbed=False)
        assert refused == 0
        disturbed, refused = _random_life(seed, CONFIGS[name], disturbed=True)
        assert disturbed == quiet
        num_refused += refused
    assert num_refused > 200


@pytest.mark.parametrize("decisions", ["0.33", "0.32"])
@pytest.mark.parametrize("name", ["plain", "overlapping", "priority"])
def test_one_token_a_row_is_the_same_as_a_list_a_row(name: str, decisions: str):
    """The same random life twice, with tokens brought back in either form: states, tables and cached blocks are equal
    after every step."""
    for seed in range(25):
        flat, _ = _random_life(seed, CONFIGS[name], False, share_flat=1.0, decisions=decisions)
        listed, _ = _random_life(seed, CONFIGS[name], False, share_flat=0.0, decisions=decisions)
        assert flat == listed


def _random_life(
    seed: int, options: dict[str, Any], disturbed: bool, share_flat: float = 0.5, decisions: str = "0.33"
) -> tuple[list[object], int]:
    random, mischief = Random(seed), Random(seed)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, **options)
    scheduler = Scheduler(ledger(usable=14, decisions=decisions), config)
    steps: list[SchedulerOutput] = []
    log: list[object] = []
    num_refused = 0
    for number in range(60):
        if random.random() < 0.3 and number < 40:
            request = Request(
                str(number),
                other(random.randrange(1, 24), number % 2),
                max_tokens=random.randrange(1, 9),
                stop_token_ids=(3,),
                priority=random.randrange(3),
            )
            scheduler.add_request(request)
        if not steps or (len(steps) < scheduler.config.max_steps_in_flight and random.random() < 0.7):
            steps.append(scheduler.schedule())
            log.append((steps[-1].ranges_by_request(), steps[-1].new_block_ids_by_request()))
            if random.random() < 0.7:
                continue
        output = steps.pop(0)
        rows = [_sample(random, output, row) for row in range(len(output.requests))]
        if disturbed:
            num_refused += _disturb(mischief, scheduler, output, rows)
        if output.draft_token_ids or random.random() >= share_flat:
            gained = scheduler.update_from_output(output, rows)
            finished = [each for each in gained if each.finish is not None]
        else:
            finished = scheduler.update_from_tokens(output, [row[0] if row else -1 for row in rows]).finished
        log.append([(each.request_id, each.new_token_ids, each.finish) for each in finished])
        log.append(state_of(scheduler))
        log.append(cached_ids(scheduler.manager))
        if scheduler.config.num_speculative_tokens and scheduler.config.max_steps_in_flight == 1:
            for request in scheduler.running_requests():
                scheduler.update_draft_tokens(request.request_id, [5, 6])
        scheduler.check()
    return log, num_refused


def _sample(random: Random, output: SchedulerOutput, row: int) -> list[int]:
    request = output.requests[row]
    end = output.num_computed_tokens[row] + output.num_scheduled_tokens[row]
    if end < request.num_tokens:
        return []
    num_drafts = len(output.draft_token_ids.get(request.request_id, []))
    return [random.randrange(20) for _ in range(1 + random.randrange(num_drafts + 1))]


def _disturb(mischief: Random, scheduler: Scheduler, output: SchedulerOutput, rows: list[list[int]]) -> int:
    """Tries to bring back the step with something wrong in it; how often that was refused."""
    if not rows:
        return 0
    row = mischief.randrange(len(rows))
    request = output.requests[row]
    wrong: list[Any] = [list(each) for each in rows]
    if request.is_finished or request.num_stale_tokens > 0 or mischief.random() < 0.5:
        wrong[row] = [mischief.choice([-1, -2, 2**32, 2**70, 1.5, None])]
    else:
        wrong[row] = [] if rows[row] else [7]
    with pytest.raises(RequestError):
        scheduler.update_from_output(output, wrong)
    if all(len(each) < 2 for each in wrong) and wrong[row] != [-1]:
        with pytest.raises(RequestError):
            scheduler.update_from_tokens(output, [each[0] if each else -1 for each in wrong])
    return 1
