"""A worker raises: the step's requests end with that, and everything after it is as if they had never been."""

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvledger.engine
from kvledger import Request
from kvledger.engine import NewTokens
from kvledger.errors import RequestError
from kvledger.scheduler import ExternalHit, SchedulerOutput
from tests.engine import Engine
from tests.unit.engine.storyteller import Stage


@pytest.mark.parametrize("after", [None, 0, 1])
def test_requests_of_the_step_end_with_the_error_and_later_ones_work(after: int | None) -> None:
    stage = Stage()
    stage.add("a", 10)
    stage.step()
    stage.add("b", [50, *range(10)])
    stage.die(after)
    assert stage.ends == {"a": "FINISHED_ERROR", "b": "FINISHED_ERROR"}
    assert stage.heard == {"a": stage.told(10, 1), "b": []}
    assert not stage.engine.has_unfinished_requests
    assert stage.manager.num_free_blocks == 64
    stage.add("c", 10)
    stage.add("a", [50, *range(10)])  # the id is free again
    stage.run()
    assert stage.heard["c"] == stage.told(10, 8)
    assert stage.heard["a"] == stage.told(10, 1) + stage.told([50, *range(10)], 8)
    assert stage.worker.rows.keys() == {"a", "c"}


def test_whoever_listens_gets_what_the_worker_raised() -> None:
    stage, news = Stage(), list[NewTokens]()
    stage.engine.add_request("a", [1, 2], on_tokens=news.append)
    stage.die()
    assert [(new.request_id, new.token_ids, str(new.error)) for new in news] == [
        ("a", (), "the worker is out of memory")
    ]


@pytest.mark.parametrize("after", [None, 0])
def test_what_the_step_should_have_written_is_no_hit(after: int | None) -> None:
    """Blocks are cached when they are scheduled: the prompt of 16 was in the cache before the worker raised."""
    stage = Stage(block_size=4)
    stage.add("a", 16, max_tokens=1)
    stage.die(after)
    stage.add("b", 16, max_tokens=3)
    stage.run()
    assert stage.heard["b"] == stage.told(16, 3)
    assert stage.engine.stats.num_hit_tokens == 0


def test_a_request_that_was_not_in_the_step_starts_over_and_tells_the_same() -> None:
    """16 tokens a step: "a" is through its prompt, then "b" takes what is left of two budgets; "c" has to wait."""
    stage = Stage(max_num_batched_tokens=16, usable=20, block_size=4)
    stage.add("a", 6, max_tokens=30)
    stage.step()
    stage.add("b", [70, *range(29)], max_tokens=3)
    stage.add("c", 5, max_tokens=3)
    stage.step()
    stage.die()
    assert stage.ends == {"a": "FINISHED_ERROR", "b": "FINISHED_ERROR"}
    stage.run()
    assert stage.heard["c"] == stage.told(5, 3)


def test_rows_that_the_lost_step_took_back_are_taken_back_by_the_next_one() -> None:
    """ "a" is done when "b" comes; the step that says so never reaches the worker."""
    stage = Stage()
    stage.add("a", 6, max_tokens=1)
    stage.step()
    stage.add("b", 7)
    stage.die()
    assert stage.worker.rows.keys() == {"a"}
    stage.add("c", 8, max_tokens=2)
    stage.step()
    assert stage.worker.rows.keys() == {"c"}


def test_forks_whose_copies_were_lost_start_over() -> None:
    """The copies for both children go with the next step, in which a long prompt leaves them no budget."""
    stage = Stage(block_size=4, max_num_batched_tokens=8)
    stage.add("parent", 2, max_tokens=9)
    stage.step()
    stage.add("long", [70, *range(29)])
    stage.step()
    assert stage.engine.fork("parent", ["left", "right"], on_tokens=stage.hear)
    stage.die()
    assert stage.ends == {"parent": "FINISHED_ERROR", "long": "FINISHED_ERROR"}
    stage.run()
    assert stage.heard["left"] == stage.heard["right"] == stage.told(2, 9)[2:]
    assert stage.engine.stats.num_preemptions == 2


def test_an_interrupt_leaves_an_engine_that_works() -> None:
    stage = Stage()
    stage.add("a", 5)
    stage.worker.dies_of = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        stage.step()
    stage.add("b", 5, max_tokens=2)
    stage.run()
    assert (stage.ends["a"], stage.heard["b"]) == ("FINISHED_ERROR", stage.told(5, 2))


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        ([], "sampled tokens for 0 requests, but 1 were scheduled"),
        ([[7, 8]], "2 tokens for request 'a', which verified 0 drafts"),
        ([[numpy.int64(7)]], r"worker.execute: int64 among the sampled tokens; give whole numbers, as tolist\(\)"),
    ],
)
def test_a_worker_that_answers_wrongly_is_told_and_the_step_is_over(sampled: list[list[int]], message: str) -> None:
    class Confused:
        def execute(self, output: SchedulerOutput) -> list[list[int]]:
            return sampled

    scheduler = Stage().engine.scheduler
    engine = kvledger.engine.Engine(scheduler, Confused())
    engine.add_request("a", [1])
    with pytest.raises(RequestError, match=message):
        engine.step()
    engine.check()
    assert not engine.has_unfinished_requests


def test_a_preemption_of_the_lost_step_is_told_again() -> None:
    """Blocks run out in the step that is lost: the worker still has the row of "b", which comes back as new."""
    engine = Engine(usable=4)
    engine.add("a", 8, max_tokens=9)
    engine.add("b", [50, 51, 52, 53, 54], max_tokens=2)
    engine.step()
    output = engine.scheduler.schedule()
    assert (output.request_ids, output.preempted_request_ids) == (["a"], ["b"])
    assert engine.scheduler.fail_step(output) == ["a"]
    engine.scheduler.check()
    assert engine.step().new_requests[0].request_id == "b"
    engine.run()
    assert engine.finished == {"b": "FINISHED_LENGTH"}


def test_a_load_that_the_lost_step_began_ends_and_keeps_its_blocks_until_it_reports() -> None:
    engine = Engine(usable=20)
    engine.source.offers["a"] = ExternalHit(8, asynchronous=True)
    engine.add("a", 12)
    engine.add("b", [50, 51, 52])
    output = engine.scheduler.schedule()
    assert sorted(engine.scheduler.fail_step(output)) == ["a", "b"]
    assert engine.scheduler.num_blocks_held_by_orphans == 2
    assert engine.scheduler.external_load_finished("a", 8)
    assert engine.manager.num_free_blocks == 20
    engine.add("c", [50, 51, 52, 53, 54], max_tokens=2)
    engine.run()
    assert engine.tokens["c"] == [800_005, 800_006]


def test_a_step_on_top_of_the_lost_one_is_lost_too() -> None:
    engine = Engine(usable=20, max_steps_in_flight=2)
    engine.add("a", 8, max_tokens=9)
    first = engine.scheduler.schedule()
    engine.add("b", [50, 51, 52], max_tokens=2)
    second = engine.scheduler.schedule()
    with pytest.raises(RequestError, match="step 2 is not the oldest step in flight"):
        engine.scheduler.fail_step(second)
    assert engine.scheduler.fail_step(first) == ["a"]
    assert engine.scheduler.fail_step(second) == []  # "b" was preempted with the first one: it can start over
    engine.run()
    assert engine.finished == {"b": "FINISHED_LENGTH"}
    assert engine.manager.num_free_blocks == 20


def test_an_aborted_request_of_the_lost_step_leaves_no_hit() -> None:
    engine = Engine(usable=20)
    engine.add("a", 8)
    output = engine.scheduler.schedule()
    engine.scheduler.abort("a")
    assert engine.scheduler.fail_step(output) == []
    request = Request("b", list(range(8)))
    assert engine.manager.get_computed_blocks(request).num_tokens == 0


@settings(max_examples=60, deadline=None)
@given(
    deaths=st.lists(st.sampled_from(["lives", "lives", "lives", "deaf", "halfway"]), max_size=40),
    prompts=st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=9),
    usable=st.sampled_from([12, 64]),
)
def test_whatever_was_lost_is_told_when_it_is_asked_for_again(
    deaths: list[str], prompts: list[tuple[int, bool]], usable: int
) -> None:
    """Prompts share beginnings, the small pool preempts, and who ended with an error comes again under a new name."""
    stage = Stage(usable=usable, max_num_batched_tokens=8, max_model_len=48)
    asked = {
        f"{number}": [*range(length)] if shares else [number + 50] * length
        for number, (length, shares) in enumerate(prompts)
    }
    for request_id, prompt in asked.items():
        stage.add(request_id, prompt)
    for death in deaths:
        if not stage.engine.has_unfinished_requests:
            break
        if death == "lives":
            stage.step()
        else:
            stage.die(None if death == "deaf" else 0)
    lost = [request_id for request_id, end in stage.ends.items() if end == "FINISHED_ERROR"]
    for request_id in lost:
        asked[f"{request_id} again"] = asked[request_id]
        stage.add(f"{request_id} again", asked[request_id])
    stage.run()
    for request_id, prompt in asked.items():
        told = stage.told(prompt, 8)
        heard = stage.heard[request_id]
        assert heard == told[: len(heard)]
        assert request_id in lost or len(heard) == 8
    assert stage.manager.num_free_blocks == usable
