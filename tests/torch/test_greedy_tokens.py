"""Token by token what transformers' own generate gives, whatever the ledger does with the blocks meanwhile."""

import pytest

from kvledger import Request
from tests.torch.models import FAMILIES, WINDOW, continuation, prompt
from tests.torch.rig import Rig

every_family = pytest.mark.parametrize("family", FAMILIES)
every_block_size = pytest.mark.parametrize("block_size", [1, 16, 32])
# Everything at once, one kind of layer, two kinds with a buffer for both.
some_families = pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])


@every_family
@every_block_size
def test_a_batch_of_different_lengths(family: str, block_size: int) -> None:
    rig = Rig(family, usable=256, block_size=block_size)
    for num_tokens in (1, 4, 16, 17, 40):
        rig.add(f"{num_tokens} tokens", prompt(num_tokens, seed=num_tokens), 12)
    rig.run()
    rig.expect_reference()
    assert rig.num_poisoned > 0


@every_family
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_prompts_in_chunks_beside_decodes(family: str, chunk: int) -> None:
    """A chunk of 7 tokens is a decode of one request and 6 tokens of another's prompt."""
    rig = Rig(family, usable=64, block_size=4, chunk=chunk)
    rig.add("short", prompt(3, seed=1), 10)
    rig.add("long", prompt(37, seed=2), 6)
    outputs = rig.run()
    rig.expect_reference()
    assert max(output.total_num_scheduled_tokens for output in outputs) == chunk
    mixed = [output for output in outputs if list(output.num_scheduled_tokens) == [1, 6]]
    assert bool(mixed) == (chunk == 7)


@every_family
@every_block_size
def test_a_shared_prefix_is_computed_once(family: str, block_size: int) -> None:
    rig = Rig(family, usable=256, block_size=block_size)
    shared = prompt(40, seed=3)
    rig.add("first", [*shared, 5, 6, 7], 4)
    rig.run()
    second = rig.add("second", [*shared, 7, 6, 5], 12)
    third = rig.add("third", shared, 12)
    output = rig.step()
    # Whole blocks of the 40 shared tokens; the last token of a prompt is always computed.
    assert list(output.num_computed_tokens) == {1: [40, 39], 16: [32, 32], 32: [32, 32]}[block_size]
    assert (second.num_tokens, third.num_tokens) == (43 + 1, 40 + 1)
    rig.run()
    rig.expect_reference()


@pytest.mark.parametrize(
    ("family", "usable", "num_prompt_tokens", "chunk"),
    [("llama", 12, 16, 64), ("mistral", 6, 4, 7), ("gemma3", 26, 16, 64)],
)
@pytest.mark.parametrize("hits", [True, False])
def test_preempted_requests_come_back(family: str, usable: int, num_prompt_tokens: int, chunk: int, hits: bool) -> None:
    """Three requests start side by side, and there is no room for all of them to grow."""
    rig = Rig(family, usable, block_size=4, chunk=chunk, hits=hits)
    for seed in (1, 2, 3):
        rig.add(f"request {seed}", prompt(num_prompt_tokens, seed=seed), 24)
    outputs = rig.run()
    rig.expect_reference()
    preempted = [request_id for output in outputs for request_id in output.preempted_request_ids]
    assert preempted
    for request_id in preempted:
        assert [data.request_id for output in outputs for data in output.new_requests].count(request_id) > 1


@some_families
def test_one_step_is_scheduled_before_the_last_is_back(family: str) -> None:
    """The worker knows the tokens of a step before the scheduler does."""
    rig = Rig(family, max_steps_in_flight=2)
    for seed in (1, 2):
        rig.add(f"request {seed}", prompt(10 * seed, seed=seed), 9)
    waiting = rig.schedule()
    sampled = rig.worker.execute(waiting)
    num_early = 0
    while rig.scheduler.has_unfinished_requests:
        output = rig.schedule()
        num_early += bool(output.request_ids)
        later = rig.worker.execute(output)
        rig.deliver(waiting, sampled)
        waiting, sampled = output, later
    rig.expect_reference()
    assert num_early >= 8


@every_family
def test_drafts_change_nothing_but_the_number_of_steps(family: str) -> None:
    """Two right drafts and a wrong one each time: two are accepted, and the token for the third is the right one."""
    rig = Rig(family, num_speculative_tokens=3)
    prompts = {f"request {seed}": prompt(6 * seed, seed=seed) for seed in (1, 2)}
    for request_id, prompt_ids in prompts.items():
        rig.add(request_id, prompt_ids, 13)

    def draft(request: Request) -> list[int]:
        known = request.num_output_tokens
        right = continuation(family, prompts[request.request_id], 16)[known : known + 3]
        return [*right[:2], 1 + right[2] % 90] if len(right) == 3 else []

    outputs = rig.run(draft)
    rig.expect_reference()
    # One token from the prompt, then three a step.
    assert len(outputs) == 1 + 12 // 3
    assert list(outputs[1].num_scheduled_tokens) == [4, 4]


@some_families
def test_wrong_and_unknown_drafts_are_all_rejected(family: str) -> None:
    rig = Rig(family, num_speculative_tokens=2)
    request = rig.add("a", prompt(9, seed=4), 6)
    right = continuation(family, prompt(9, seed=4), 6)
    rig.step()
    for wrong in ([1 + right[1] % 90, right[2]], [-1, -1]):
        known = request.num_output_tokens
        rig.scheduler.update_draft_tokens("a", wrong)
        output = rig.step()
        assert output.draft_token_ids == {"a": wrong}
        assert rig.tokens("a") == right[: known + 1]
    rig.run()
    rig.expect_reference()


@some_families
def test_a_fork_goes_on_like_its_parent(family: str) -> None:
    rig = Rig(family, block_size=4)
    rig.add("parent", prompt(9, seed=5), 12)
    rig.step()
    rig.step()
    rig.fork("parent", "child", "other child")
    output = rig.step()
    # Ten computed tokens: two full blocks are shared, the tail is copied for each child in every group.
    assert len(output.block_copies) == 2 * len(rig.config.groups)
    rig.run()
    rig.expect_reference()
    assert rig.tokens("child") == rig.tokens("other child") == rig.tokens("parent")


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("block_size", [2, 16])
def test_nothing_behind_a_window_is_read(family: str, block_size: int) -> None:
    """Blocks behind the window are gone or poisoned; so are the slots behind it in blocks that still reach into it."""
    rig = Rig(family, block_size=block_size, chunk=11, hits=False)
    rig.add("a", prompt(30, seed=6), 12)
    rig.add("b", prompt(5, seed=7), 12)
    while rig.scheduler.has_unfinished_requests:
        rig.poison_behind_windows()
        rig.step()
    rig.expect_reference()


def test_a_window_gives_its_blocks_back_while_its_request_runs() -> None:
    rig = Rig("mistral", block_size=2)
    rig.add("a", prompt(30, seed=6), 4)
    rig.step()
    rig.step()
    [block_ids] = rig.manager.get_block_ids("a")
    # The next token, 31, reads from 31 - 9 + 1 = 23 on: the blocks of tokens 0 to 21 are gone.
    assert WINDOW == 9
    assert block_ids[:11] == [0] * 11
    assert 0 not in block_ids[11:]


def test_windows_kept_like_full_layers_give_the_same_tokens() -> None:
    """With the hybrid manager off there is one group that keeps all tokens; windowed layers read no more for that."""
    rig = Rig("gemma3", hybrid_manager=False)
    assert len(rig.config.groups) == 1
    rig.add("a", prompt(30, seed=6), 12)
    rig.run()
    rig.expect_reference()
