"""Engine: the loop around scheduler, worker and drafter, told with a worker whose every word depends on its blocks."""

import re
from typing import Any

import pytest

from kvledger.engine import NewTokens, SamplingParams
from kvledger.engine.ngram_drafter import NgramDrafter
from kvledger.errors import RequestError, RequestTooLargeError, StallError, UnknownRequestError
from kvledger.scheduler import SchedulerOutput
from tests.unit.engine.storyteller import Stage, chanting, rambling


def test_a_request_gets_its_tokens_one_step_at_a_time() -> None:
    stage = Stage()
    stage.add("a", [1, 2, 3], max_tokens=3)
    first, second, third = (stage.step() for _ in range(3))
    told = stage.told([1, 2, 3], 3)
    assert [list(news[0].token_ids) for news in (first, second, third)] == [[told[0]], [told[1]], [told[2]]]
    assert (stage.heard["a"], stage.ends["a"]) == (told, "FINISHED_LENGTH")
    assert not stage.engine.has_unfinished_requests


@pytest.mark.parametrize("budget", [8, 9, 64])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_batches_of_chunks_and_decodes_tell_what_each_request_tells_alone(budget: int, block_size: int) -> None:
    stage = Stage(block_size=block_size, max_num_batched_tokens=budget)
    prompts = {"short": [5], "middle": list(range(13)), "long": list(range(40, 77))}
    for request_id, prompt in prompts.items():
        stage.add(request_id, prompt)
    stage.run()
    assert stage.heard == {request_id: stage.told(prompt, 8) for request_id, prompt in prompts.items()}


def test_a_shared_prefix_is_not_computed_again() -> None:
    stage = Stage(block_size=4)
    stage.add("a", list(range(20)), max_tokens=1)
    stage.run()
    assert stage.worker.num_written == 20
    stage.add("b", [*range(20), 99], max_tokens=1)
    stage.run()
    assert stage.worker.num_written == 20 + 1
    assert stage.heard["b"] == stage.told([*range(20), 99], 1)
    stats = stage.engine.stats
    assert (stats.num_prompt_tokens, stats.num_prompt_tokens_computed, stats.num_hit_tokens) == (41, 21, 20)
    assert stats.hit_rate == 20 / 41


def test_a_fully_cached_prompt_computes_its_last_block_again() -> None:
    """Case B57: the last token's logits are needed, so of 16 cached tokens in blocks of 4 the hit is 12."""
    stage = Stage(block_size=4)
    for request_id in ("a", "b"):
        stage.add(request_id, 16, max_tokens=2)
        stage.run()
    assert stage.heard["a"] == stage.heard["b"] == stage.told(16, 2)
    assert stage.engine.stats.num_hit_tokens == 12


def test_preempted_requests_come_back_and_tell_the_same() -> None:
    stage = Stage(usable=9, block_size=4, max_model_len=36)
    for number in range(3):
        stage.add(f"{number}", [100 * number, *range(10)], max_tokens=18)
    stage.run()
    stats = stage.engine.stats
    assert stats.num_preemptions > 0
    assert stats.num_recomputed_tokens > 0
    assert stats.peak_blocks == stats.num_blocks == 9
    for number in range(3):
        assert stage.heard[f"{number}"] == stage.told([100 * number, *range(10)], 18)


def test_recomputed_tokens_are_those_of_the_accounts() -> None:
    stage = Stage(usable=4, block_size=4, max_model_len=16)
    stage.add("a", [*range(100, 108)], max_tokens=3)
    stage.add("b", [*range(200, 205)], max_tokens=3)
    stage.run()
    # b computed its prompt of 5 and lost it to a's ninth token. It came back with one token more, found its first block
    # and computed the fifth token again; the sixth was computed for the first time.
    stats = stage.engine.stats
    assert (stats.num_preemptions, stats.num_lost_tokens) == (1, 5)
    assert (stats.num_resumed_hit_tokens, stats.num_recomputed_tokens) == (4, 1)


def test_without_accounts_what_they_know_is_none() -> None:
    stage = Stage(accounts=False)
    stage.add("a", 5)
    stage.run()
    told = stage.engine.stats.as_dict()
    assert {name for name, value in told.items() if value is None} == {
        *("num_lost_tokens", "num_recomputed_tokens", "num_drafts", "num_accepted_drafts", "acceptance_rate")
    }
    assert (told["num_requests"], told["num_generated_tokens"]) == (1, 8)


def test_stop_tokens_and_the_models_end_end_a_request() -> None:
    stage = Stage(chanting, eos_token_ids=[14])
    stage.add("model", [1], max_tokens=9)
    stage.add("own", [2], max_tokens=9, stop_token_ids=(12,))
    stage.add("neither", [3], max_tokens=9, ignore_eos=True)
    stage.run()
    assert stage.heard == {
        "model": [10, 11, 12, 13, 14],
        "own": [10, 11, 12],
        "neither": [10, 11, 12, 13, 14, 10, 11, 12, 13],
    }
    assert stage.ends == {"model": "FINISHED_STOPPED", "own": "FINISHED_STOPPED", "neither": "FINISHED_LENGTH"}


def test_good_drafts_save_steps_and_change_nothing() -> None:
    plain, drafting = Stage(chanting), Stage(chanting, drafter=NgramDrafter(4, 1, 3), num_speculative_tokens=4)
    steps = []
    for stage in (plain, drafting):
        stage.add("a", [1, 2], max_tokens=30)
        steps.append(stage.run())
    assert plain.heard == drafting.heard == {"a": plain.told([1, 2], 30)}
    # The first six tokens come one by one until one repeats; then 5 a step: 4 drafts and the token behind them.
    assert steps == [30, 11]
    stats = drafting.engine.stats
    assert (stats.num_drafts, stats.num_accepted_drafts) == (19, 19)
    assert stats.acceptance_rate == 1.0


def test_wrong_drafts_are_taken_back() -> None:
    class Liar:
        def propose(self, tokens: list[int] | bytes, max_drafts: int | None = None) -> list[int]:
            return [600, 601, 602][:max_drafts]

    stage = Stage(rambling, drafter=Liar(), num_speculative_tokens=3, block_size=4)
    for number in range(3):
        stage.add(f"{number}", [number, 7, 8], max_tokens=12)
    stage.run()
    for number in range(3):
        assert stage.heard[f"{number}"] == stage.told([number, 7, 8], 12)
    stats = stage.engine.stats
    # 11 tokens after the first one; the last of them cannot be followed by a draft.
    assert (stats.num_drafts, stats.num_accepted_drafts) == (3 * (3 * 8 + 2 + 1), 0)


def test_drafts_in_a_full_pool_are_never_cached() -> None:
    """Case B59: 7 drafts a step in blocks of 4, none accepted, all blocks in use; only certain tokens get a hash."""

    class Liar:
        def propose(self, tokens: list[int] | bytes, max_drafts: int | None = None) -> list[int]:
            return [600 + position for position in range(7)][:max_drafts]

    stage = Stage(rambling, drafter=Liar(), num_speculative_tokens=7, usable=8, block_size=4, max_model_len=32)
    for number in range(2):
        stage.add(f"{number}", [number, 1, 2, 3, 4, 5], max_tokens=20)
    stage.run()
    assert stage.engine.stats.peak_usage == 1.0
    for number in range(2):
        assert stage.heard[f"{number}"] == stage.told([number, 1, 2, 3, 4, 5], 20)


def test_forks_go_on_over_the_same_blocks() -> None:
    stage = Stage(block_size=4)
    stage.add("parent", 10, max_tokens=9)
    stage.step()
    stage.step()
    assert stage.engine.fork("parent", ["left", "right"], on_tokens=stage.hear)
    stage.run()
    told = stage.told(10, 9)
    assert stage.heard == {"parent": told, "left": told[2:], "right": told[2:]}
    assert stage.worker.num_written == 11 + 3 * 7


def test_a_fork_without_a_seat_changes_nothing() -> None:
    stage = Stage()
    stage.add("parent", 10, max_tokens=3)
    stage.step()
    assert not stage.engine.fork("parent", [f"{number}" for number in range(8)])
    stage.run()
    assert stage.heard == {"parent": stage.told(10, 3)}


def test_an_aborted_request_is_heard_of_no_more() -> None:
    stage = Stage()
    stage.add("a", 10)
    stage.add("b", 11)
    stage.step()
    stage.engine.abort("a")
    stage.run()
    assert stage.heard == {"a": stage.told(10, 1), "b": stage.told(11, 8)}
    assert stage.ends == {"b": "FINISHED_LENGTH"}
    with pytest.raises(UnknownRequestError):
        stage.engine.abort("a")


def test_a_listener_may_abort_its_own_request_and_others_and_add_more() -> None:
    stage = Stage()

    def on_tokens(new: NewTokens) -> None:
        stage.hear(new)
        stage.engine.abort("a")
        stage.engine.abort("b")
        stage.add("c", 5, max_tokens=2)

    stage.engine.add_request("a", [1, 2], on_tokens=on_tokens)
    stage.add("b", 7)
    stage.run()
    # Both had their first token in the same step; b was gone before its listener's turn.
    assert stage.heard == {"a": stage.told([1, 2], 1), "c": stage.told(5, 2)}
    assert stage.ends == {"c": "FINISHED_LENGTH"}


def test_a_request_that_outgrows_the_pool_ends_with_the_reason() -> None:
    stage = Stage(usable=3, block_size=4, max_model_len=64)
    stage.add("a", 10, max_tokens=30)
    news: list[NewTokens] = []
    while stage.engine.has_unfinished_requests:
        news += stage.step()
    assert stage.heard["a"] == stage.told(10, 3)
    assert stage.ends["a"] == "FINISHED_ERROR"
    assert str(news[-1].error).startswith("request 'a': 13 tokens need 4 blocks, the pool has 3")


def test_a_prompt_that_can_never_fit_is_refused_at_the_door() -> None:
    stage = Stage(usable=2, block_size=4)
    with pytest.raises(RequestTooLargeError, match="the pool has 2"):
        stage.add("a", 10)
    assert stage.engine.stats.num_requests == 0


def test_every_block_handed_out_is_in_one_steps_output() -> None:
    """Case B61: over three boundaries of decoding, the worker's rows are the ledger's tables (Stage.check)."""
    stage = Stage(block_size=4, usable=16)
    stage.add("a", 3, max_tokens=12)
    stage.step()
    lengths = []
    while stage.engine.has_unfinished_requests:
        lengths.append(len(stage.worker.rows["a"]))
        stage.step()
    assert lengths == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]


def test_run_returns_what_everybody_gained() -> None:
    stage = Stage()
    stage.engine.add_request("a", [1])
    assert stage.engine.run(max_steps=2) == {"a": stage.told([1], 2)}
    assert stage.engine.run() == {"a": stage.told([1], 16)[2:]}


def test_stop_tokens_may_be_a_list() -> None:
    stage = Stage()
    stop = stage.told([1], 3)[-1]
    stage.engine.add_request("a", [1], SamplingParams(stop_token_ids=[stop]))  # type: ignore[arg-type]
    assert stage.engine.run() == {"a": stage.told([1], 3)}


def test_whoever_watches_sees_each_step_and_what_came_of_it() -> None:
    seen: list[tuple[int, dict[str, int], int]] = []

    def on_step(output: SchedulerOutput, news: list[NewTokens]) -> None:
        seen.append((output.step, output.num_tokens_by_request(), sum(len(new.token_ids) for new in news)))
        ended = [new.request_id for new in news if new.finish is not None]
        assert ended == list(stage.ends)  # its listener heard of it before

    stage = Stage(max_num_batched_tokens=8, on_step=on_step)
    stage.add("a", 10, max_tokens=2)
    stage.run()
    assert seen == [(1, {"a": 8}, 0), (2, {"a": 2}, 1), (3, {"a": 1}, 1)]


def test_a_watcher_that_raises_loses_nothing() -> None:
    def on_step(output: SchedulerOutput, news: list[NewTokens]) -> None:
        raise StallError("enough")

    stage = Stage(on_step=on_step)
    stage.add("a", 10, max_tokens=2)
    for num_tokens in (1, 2):
        with pytest.raises(StallError):
            stage.step()
        assert stage.heard["a"] == stage.told(10, 2)[:num_tokens]
    assert stage.ends == {"a": "FINISHED_LENGTH"}


def test_statistics_that_the_user_takes_are_all_there() -> None:
    stage = Stage(block_size=4)
    for request_id in ("a", "b"):
        stage.add(request_id, 9, max_tokens=1)
        stage.run()
    taken = stage.manager.take_prefix_cache_stats()
    assert (taken.requests, taken.queries, taken.hits) == (2, 18, 8)
    stage.add("c", 9, max_tokens=1)
    stage.run()
    stats = stage.engine.stats
    assert (stats.num_lookups, stats.num_hit_tokens) == (3, 16)
    assert stage.manager.take_prefix_cache_stats().hits == 8


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("the first", "prompt_token_ids='the first': not a list; give a list of token ids, as a tokenizer makes them"),
        (1.5, "prompt_token_ids=1.5: not a list; "),
        (None, "prompt_token_ids=None: not a list; "),
        ([1, 2, 3.0], "prompt_token_ids[2]=3.0: not a whole number; give a list of token ids"),
        (["a", 2], "prompt_token_ids[0]='a': not a whole number; "),
    ],
)
def test_a_prompt_that_is_no_list_of_token_ids_is_refused(prompt: Any, message: str) -> None:
    stage = Stage()
    with pytest.raises(RequestError, match="^" + re.escape(message)):
        stage.engine.add_request("a", prompt)
    assert not stage.engine.has_unfinished_requests


@pytest.mark.parametrize("params", [None, {"max_tokens": 3}])
def test_params_of_another_kind_are_refused(params: Any) -> None:
    stage = Stage()
    message = f"params={params!r}: not sampling parameters; give SamplingParams(...), or leave it out for greedy"
    with pytest.raises(RequestError, match=re.escape(message)):
        stage.engine.add_request("a", [1], params)
    assert not stage.engine.has_unfinished_requests
