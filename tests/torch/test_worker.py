"""The worker as such: what it keeps of requests, new blocks, and a random life."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger import Request
from kvledger.errors import ConfigError
from tests.conftest import LONG
from tests.torch.models import continuation, prompt
from tests.torch.rig import NOT_A_NUMBER, Rig


def test_a_step_without_tokens_still_drops_rows() -> None:
    rig = Rig("llama")
    rig.add("a", prompt(5), 3)
    rig.step()
    assert rig.worker.tables.request_ids() == ["a"]
    rig.scheduler.abort("a")
    output = rig.step()
    assert output.total_num_scheduled_tokens == 0
    assert rig.worker.tables.request_ids() == []


def test_a_prompt_that_is_not_through_yields_no_token() -> None:
    rig = Rig("llama", chunk=4)
    rig.add("a", prompt(10), 3)
    yields = []
    while rig.scheduler.has_unfinished_requests:
        output = rig.schedule()
        sampled = rig.worker.execute(output)
        rig.deliver(output, sampled)
        yields.append([len(tokens) for tokens in sampled])
    assert yields == [[0], [0], [1], [1], [1]]


def test_sampling_params_must_be_such() -> None:
    rig = Rig("llama")
    rig.scheduler.add_request(Request("a", prompt(5), sampling_params={"temperature": 1.0}))
    with pytest.raises(
        ConfigError, match=r"sampling_params=\{'temperature': 1.0\}: request 'a': not what a worker can"
    ):
        rig.step()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_new_blocks_are_zeroed_and_copies_are_not(family: str) -> None:
    rig = Rig(family, block_size=4, zero_new_blocks=True)
    rig.worker.tensors.fill_blocks(range(65), NOT_A_NUMBER)
    rig.add("a", prompt(9, seed=5), 8)
    rig.step()
    rig.step()
    rig.fork("a", "b")
    rig.step()
    for request_id in "ab":
        for group_id, block_ids in enumerate(rig.manager.get_block_ids(request_id)):
            for name in rig.config.groups[group_id].layer_names:
                last = rig.worker.tensors.layers[name].pages[block_ids[2]]
                # Tokens 8, 9 and 10 are there, the slot for token 11 is still empty.
                assert last.flatten(1).any(dim=1).tolist() == [True, True, True, False]
    rig.run()
    rig.expect_reference()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_that_raises_costs_its_step_and_nothing_behind_it(family: str) -> None:
    """When the model raises, the worker has the rows of the lost step, and the ledger has cached the blocks of "b"."""
    rig = Rig(family, block_size=4)
    rig.add("a", prompt(9, seed=1), 5)
    rig.step()
    broken = Request("b", [*prompt(9, seed=1), 10**6])  # no such token: the embedding raises
    rig.scheduler.add_request(broken)
    output = rig.scheduler.schedule()
    with pytest.raises(IndexError):
        rig.worker.execute(output)
    assert rig.scheduler.fail_step(output) == ["a", "b"]
    del rig.requests["a"]
    rig.add("c", prompt(9, seed=1), 8)
    rig.step()
    assert rig.worker.tables.request_ids() == ["c"]
    rig.run()
    rig.expect_reference()


def test_blocks_of_a_prefix_hit_are_not_zeroed() -> None:
    rig = Rig("gemma3", block_size=4, zero_new_blocks=True)
    rig.add("a", prompt(21, seed=3), 3)
    rig.run()
    rig.add("b", prompt(21, seed=3), 8)
    assert list(rig.step().num_computed_tokens) == [20]
    rig.run()
    rig.expect_reference()


@dataclass(frozen=True)
class Life:
    """One choice for each step: what comes or goes before it. `pick` chooses among those that are there."""

    family: str
    usable: int
    chunk: int
    hits: bool
    events: list[tuple[str, int]]


LIVES = st.builds(
    Life,
    family=st.sampled_from(["llama", "gemma3"]),
    usable=st.integers(24, 60),
    chunk=st.sampled_from([5, 16, 64]),
    hits=st.booleans(),
    events=st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "add", "abort", "fork", "draft", "reset", "go on"]), st.integers(0, 99)
        ),
        min_size=5,
        max_size=30,
    ),
)


@settings(max_examples=20 * LONG)
@given(LIVES)
def test_a_random_life_changes_no_token(life: Life) -> None:
    """Requests come, share prefixes, fork, are aborted, preempted and drafted for; who ends has the right tokens."""
    rig = Rig(life.family, life.usable, block_size=4, chunk=life.chunk, hits=life.hits, num_speculative_tokens=2)
    for number, (event, pick) in enumerate(life.events):
        running = [request for request in rig.scheduler.running_requests() if request.num_processed_tokens > 0]
        request = running[pick % len(running)] if running else None
        if event == "add":
            # Few prompts, some of which begin alike; 24 blocks hold each of them.
            rig.add(f"{number}", prompt((3, 8, 13, 18)[pick % 4], seed=pick // 50), 2 + pick % 7)
        elif event == "abort" and request is not None:
            rig.scheduler.abort(request.request_id)
            del rig.requests[request.request_id]
        elif event == "fork" and request is not None and rig.scheduler.fork(request.request_id, [f"{number}"]):
            rig.requests[f"{number}"] = rig.scheduler.get_request(f"{number}")
        elif event == "draft" and request is not None:
            right = continuation(rig.family, prompt_of(request), 16)[request.num_output_tokens :]
            rig.scheduler.update_draft_tokens(request.request_id, [right[0], 1 + right[1] % 90][: 1 + pick % 2])
        elif event == "reset":
            assert rig.scheduler.reset_prefix_cache(preempt_running=True) or not life.hits
        rig.step()
    rig.run()
    rig.expect_reference()


def prompt_of(request: Request) -> list[int]:
    return request.tokens.token_ids(0, request.num_prompt_tokens)
