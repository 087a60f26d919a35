"""The workloads are what their questions say, and the same for every contestant."""

from itertools import islice
from pathlib import Path

from benchmarks.peers.operation import num_runs
from benchmarks.peers.workload import (
    BLOCK_SIZE,
    FILLER_TOKENS,
    blocks_for_decoding,
    decoding_prompts,
    fillers,
    read_prompts,
    slot_batch,
    traffic,
    write_prompts,
)


def test_decoding_requests_stand_at_all_phases_of_a_block() -> None:
    lengths = [len(prompt) for prompt in decoding_prompts(64)]
    assert sorted({length % BLOCK_SIZE for length in lengths}) == list(range(BLOCK_SIZE))
    assert decoding_prompts(64) == decoding_prompts(64)


def test_half_of_a_prompt_is_shared_and_the_rest_is_not() -> None:
    first, second = islice(traffic(512, 50), 2)
    assert first[:256] == second[:256]
    assert first[256] != second[256]


def test_fillers_fill_so_many_blocks_and_share_nothing() -> None:
    lengths = [len(tokens) for tokens in fillers(5000)]
    assert lengths == [FILLER_TOKENS, FILLER_TOKENS, 5000 * BLOCK_SIZE - 2 * FILLER_TOKENS]
    assert len({tokens[0] for tokens in fillers(5000)}) == 3


def test_blocks_for_the_longest_prompt_and_a_token_in_every_run() -> None:
    case = {"num_running": 16, "num_groups": 1, "repeats": 16}
    assert num_runs(16) == 16 + 2 * 2
    assert blocks_for_decoding(case) == 16 * (256 + 20 + 48) // 16 + 1


def test_prompts_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    write_prompts(path, [[1, 2, 3], [], [4_000_000_000]])
    assert read_prompts(str(path)) == [[1, 2, 3], [], [4_000_000_000]]


def test_a_batch_for_slots() -> None:
    assert slot_batch({"num_running": 3, "num_tokens": 2}) == ([0, 1, 2], [0, 5, 10], [2, 2, 2])
